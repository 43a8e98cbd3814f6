"""Studies of recordings: not judged where they are not there, and what their runs measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recordings import make_recording

from blis_replay.ingest.recording import Recording, Stage
from blis_replay.ingest.store import open_store
from blis_replay_labs.studies import mixed_batches as sweep
from blis_replay_labs.studies.read import load_study
from blis_replay_labs.studies.study import run_studies
from blis_replay_labs.studies.text import studies_answer

NAMES = ("mixed-batches",)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("there", [False, True])
def test_without_its_recordings_a_study_is_not_judged(name: str, there: bool, tmp_path: Path) -> None:
    """Neither without a store nor with an empty one; that is no failure, and the table says so."""
    store = tmp_path / "store.duckdb"
    if there:
        with open_store(store):
            pass
    (result,) = run_studies([load_study(name)], store, executor="serial")
    assert (result.passed, result.systems) == (True, ())
    assert ("the store has no recording" if there else "there is no store") in result.absent
    assert f"{name} is not judged: " in str(studies_answer([result], summary=True))
    assert "not judged: " in str(studies_answer([result], summary=False))
    (document,) = studies_answer([result], summary=True).document["studies"]
    assert (document["not_judged"], document["systems"]) == (result.absent, [])


def recorded_sweep() -> Recording:
    """Llama-2-7B: 12 requests one after the other, 12 at once and 12 at 4/s, 0.4 s each."""
    arrivals = [np.arange(12) * 500_000, 10_000_000 + np.arange(12) * 1_000, 20_000_000 + np.arange(12) * 250_000]
    columns = {
        "prompt_tokens": [600] * 36,
        "output_tokens": [30] * 36,
        "ttft_us": [40_000] * 36,
        "e2e_us": [400_000] * 36,
    }
    recording = make_recording(
        {"arrival_us": np.concatenate(arrivals), "stage": np.repeat(np.arange(3), 12), **columns},
        stages=tuple(Stage(i, 1.0, 8_000_000) for i in range(3)),
    )
    return replace(recording, model="meta-llama/Llama-2-7b-hf", hardware=None)


def test_a_sweep_is_measured_by_kind_of_load() -> None:
    """Alone, a mode changes nothing; levelled, E2E of that point is right but for its TTFT, which is a tenth of it."""
    weighted, additive = (
        sweep.run(sweep.SweepRun(mixed, "H100-SXM", False), [recorded_sweep()], 0) for mixed in ("weighted", "additive")
    )
    assert set(weighted) == set(sweep.MEASURES)
    assert weighted["synchronous_error_percent"] == additive["synchronous_error_percent"]
    assert weighted["throughput_error_percent"] != additive["throughput_error_percent"]
    assert weighted["per_layer_us"] == 100
    levelled = sweep.run(sweep.SweepRun("weighted", "H100-SXM", True), [recorded_sweep()], 0)
    assert abs(levelled["synchronous_signed_percent"]) < 10 < abs(weighted["synchronous_signed_percent"])
