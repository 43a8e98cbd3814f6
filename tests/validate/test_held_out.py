"""The release that ships, fitted on codegen and general, on a workload that it was not fitted on.

That workload is a development set: forms, priors and constants were chosen with it in view.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release
from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.store import Store, read_stored
from blis_replay.ingest.store.file import open_store
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.experiment import DEFAULT_RELEASE, find_experiment
from blis_replay.validate.fit.calibrate import Options, calibrate
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR

BARS = {("e2e", "mean"): 0.015, ("itl", "mean"): 0.015, ("ttft", "mean"): 0.04, ("e2e", "p99"): 0.05}

TRAINED_ON = {
    "7b": ("7b-codegen", "7b-general"),
    "34b": ("34b-codegen", "34b-general"),
    "70b": ("70b-hf-codegen", "70b-general"),
    "mixtral": ("mixtral-codegen", "mixtral-general"),
}


def on_roleplay(model: str) -> Comparison:
    return compare_replay(
        replay(bundled_recording(bundled_aliases()[f"{model}-roleplay"]), load_release(DEFAULT_RELEASE))
    )


@pytest.mark.parametrize("model", sorted(TRAINED_ON))
def test_roleplay_was_not_fitted(model: str) -> None:
    """Bars: mean E2E and ITL 1.5 %, mean TTFT 4 %, p99 of E2E 5 %; medians, where stalls do not count, 4 %."""
    comparison = on_roleplay(model)
    assert comparison.use == "held out"
    errors = {(m, s): cell.error for m, cells in comparison.metrics.items() for s, cell in cells.items()}
    for cell, bar in (BARS | {("ttft", "p50"): 0.04}).items():
        error = errors[cell]
        assert error is not None
        assert abs(error) <= bar, cell


def test_longer_prefills_than_any_fitted(tmp_path: Path) -> None:
    """Steps of 4,096 prefill tokens; the fit ends at 1,103.  TTFT was -13.8 % and its p99 -27.3 % by the fitted line.

    Bar: p99 of TTFT within 10 % where it is known exactly.
    """
    with open_store(tmp_path / "store.duckdb") as store:
        recording = read_stored(store, find_experiment(store, "7b-train"))
    comparison = compare_replay(replay(recording, load_release(DEFAULT_RELEASE)))
    assert comparison.use == "held out"
    ttft = comparison.metrics["ttft"]
    assert ttft["mean"].error == pytest.approx(0.029, abs=0.005)
    assert ttft["p99"].error == pytest.approx(-0.068, abs=0.005)


def text_and_numbers(release: CoefficientRelease, entry: ModelEntry) -> tuple[str, list[float]]:
    """A release of one entry as it is written, with # for every number, and these numbers."""
    text, number = format_release(replace(release, models=(entry,))), r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])"
    return re.sub(number, "#", text), [float(found) for found in re.findall(number, text)]


@pytest.mark.heavy
@pytest.mark.parametrize("model", sorted(TRAINED_ON))
def test_calibration_of_a_model_gives_what_ships(real_store: Store, model: str) -> None:
    """Codegen and general again: the entry that ships, word by word and number by number.

    Machines differ in the tenth digit of a sum, so the last digit written may differ.  In a coefficient that is 2.2e-4
    or less (1 us of a pre-queue delay of 4,609 us); in its record a hundredth of an interval, which is at most 23 %
    of the value; in a score 1e-4.
    """
    shipped = load_release(DEFAULT_RELEASE)
    recordings = [read_stored(real_store, find_experiment(real_store, name)) for name in TRAINED_ON[model]]
    again, _ = calibrate(recordings, shipped.name, Options(load_release(DEFAULT_PRIOR)))
    (made,) = again.models
    entry = next(entry for entry in shipped.models if entry.model == made.model)
    (words, numbers), (shipped_words, shipped_numbers) = (text_and_numbers(shipped, e) for e in (made, entry))
    assert words == shipped_words
    assert numbers == pytest.approx(shipped_numbers, rel=2.5e-3, abs=1.1e-4)
    made_only, entry_only = (text_and_numbers(shipped, replace(e, fit=None))[1] for e in (made, entry))
    assert made_only == pytest.approx(entry_only, rel=2.5e-4)
    hashes = {fit.experiment: fit.content_hash for fit in shipped.fitted_on}
    assert {r.slug: r.content_hash for r in recordings}.items() <= hashes.items()


def test_kernels_of_a_new_server_were_what_first_tokens_of_mixtral_lacked() -> None:
    """Published for roleplay: a mean TTFT of 60.5 ms and a median of 55.5, p99 85.3.

    Six stalls of 0.9 s in each of the two runs that were fitted; without any the mean is 9 to 10 % short, p99 19 %.
    """
    recording = bundled_recording(bundled_aliases()["mixtral-roleplay"])
    release = load_release(DEFAULT_RELEASE)
    without = compare_replay(replay(recording, release, ReplayMode(warm_up="none"))).metrics["ttft"]
    new = compare_replay(replay(recording, release)).metrics["ttft"]
    errors = {name: (without[name].error, new[name].error) for name in ("mean", "p50", "p99")}
    assert errors["mean"] == (pytest.approx(-0.095, abs=0.005), pytest.approx(-0.001, abs=0.02))
    assert errors["p50"] == (pytest.approx(-0.016, abs=0.005), pytest.approx(-0.016, abs=0.005))
    assert errors["p99"] == (pytest.approx(-0.19, abs=0.01), pytest.approx(0.027, abs=0.05))
