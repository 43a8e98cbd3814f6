"""Studies of recordings: not judged where they are not there, and what their runs measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from recordings import make_recording

from blis_replay.ingest.recording import STEP_SCHEMA, Recording, Stage
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.store import open_store
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.fit import trees as left_out
from blis_replay_labs.studies import mixed_batches as sweep
from blis_replay_labs.studies import study
from blis_replay_labs.studies.read import load_study
from blis_replay_labs.studies.study import run_studies
from blis_replay_labs.studies.text import studies_answer

NAMES = ("mixed-batches", "trees")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("there", [False, True])
def test_without_its_recordings_a_study_is_not_judged(name: str, there: bool, tmp_path: Path) -> None:
    """Neither without a store nor with an empty one; that is no failure, and the table says so."""
    pytest.importorskip("lightgbm")
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


def test_without_its_library_a_study_is_not_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    (result,) = run_studies([load_study("trees")], tmp_path / "store.duckdb", executor="serial")
    assert result.absent == "it takes lightgbm; install the optional extra that has it"


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


def stepped(model: str, cycle_us: int) -> Recording:
    """200 consecutive steps of 8 to 107 decodes in turn: ``cycle_us`` each."""
    decodes = 8 + np.arange(200) % 100
    known = {"step_id": np.arange(200), "start_us": np.arange(200) * cycle_us, "duration_us": decodes}
    known |= {"running_depth": decodes, "decode_requests": decodes, "decode_tokens": decodes}
    columns = {name: pl.Series(known.get(name, [None] * 200), dtype=kind) for name, kind in STEP_SCHEMA.items()}
    requests = {"arrival_us": [0, 1], "prompt_tokens": [9, 9], "output_tokens": [2, 2]}
    return replace(make_recording(requests), slug=model, model=model, steps=rows_of(pl.DataFrame(columns)))


@pytest.mark.parametrize("method", ["trees", "line", "linear"])
def test_steps_are_those_of_the_recording_left_out(method: str) -> None:
    """Steps of 10 ms where 20 ms were learned are missed by 100 %, the other way round by half."""
    pytest.importorskip("lightgbm")
    recordings = [stepped("fast", 10_000), stepped("slow", 20_000)]
    described = left_out.LeftOutRun("model", "cycle", method)  # type: ignore[arg-type]
    found = [left_out.run(described, recordings, place) for place in (0, 1)]
    assert [set(measures) for measures in found] == [set(left_out.MEASURES)] * 2
    assert [measures["mape_percent"] for measures in found] == pytest.approx([100, 50], abs=0.1)
    assert [measures["steps"] for measures in found] == [199, 199]
    with pytest.raises(NothingToJudgeError, match="all recordings are of one workload"):
        left_out.run(replace(described, left_out="workload"), recordings, 0)
