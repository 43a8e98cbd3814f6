"""The recordings of a real vLLM 0.32.0 that ship: what the engine makes of them, and coefficients of two of them.

`scripts/live.py` made them on a virtual machine of two cores without a GPU, on 2026-11-23.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blis_replay.fixtures.catalogue import bundled_row
from blis_replay.ingest.store import Store, open_store, read_stored
from blis_replay.replay.engine import replayed_engine
from blis_replay.replay.mode import ReplayMode, parse_mode
from blis_replay.replay.observed import observed_cycles
from blis_replay.replay.release_file import load_release
from blis_replay.replay.schedule.checksum import check_schedule
from blis_replay.replay.schedule.recorded import recorded_schedule
from blis_replay.validate.comparison.repeats import repeats_of
from blis_replay.validate.comparison.validated import compare_experiment
from blis_replay.validate.experiment import release_that_ships
from blis_replay.validate.explain.attribute import QUANTITIES, attribute
from blis_replay.validate.explain.candidates import SCHEDULED
from blis_replay.validate.explain.cycles import Nature, recorded_nature
from blis_replay.validate.explain.hypothesis import PROVED_RIGHT, Replayed
from blis_replay.validate.fit.calibrate import Options, calibrate
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR

pytestmark = pytest.mark.slow

# Requests of the client; steps by the recorder's own count (its last line); those that served a request of the client.
RECORDED = {
    "a": (240, 4_667, 4_645),
    "a2": (240, 4_822, 4_796),
    "b": (208, 3_373, 3_356),
    "c": (50, 964, 938),
    "d": (150, 3_360, 3_356),
    "e": (240, 5_332, 5_305),
}
SHIPPED = "cpu-vllm-0.32.0"


@pytest.fixture(scope="module")
def store(bundled_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(shutil.copy(bundled_store, tmp_path_factory.mktemp("live"))) as opened:
        yield opened


def errors(store: Store, run: str, mode: str = "exact") -> dict[str, float]:
    """Signed errors of the means, in percent."""
    compared = compare_experiment(store, f"tiny-live-{run}", load_release(SHIPPED), parse_mode(mode))
    means = {metric: compared.metrics[metric]["mean"].error for metric in ("e2e", "ttft", "itl")}
    return {metric: 100 * error for metric, error in means.items() if error is not None}


@pytest.mark.parametrize("run", RECORDED)
def test_the_engine_schedules_every_step_as_the_server_did(store: Store, run: str) -> None:
    """Requests and tokens of 22,396 steps: prefix hits, chunks, preemptions, four requests at most at once."""
    recording = read_stored(store, f"tiny-live-{run}")
    requests, steps, served = RECORDED[run]
    assert (recording.requests.height, recording.steps.height) == (requests, steps)
    assert bundled_row(f"tiny-live-{run}", recording.slug).requests == requests
    check = check_schedule(recorded_schedule(recording), replayed_engine(recording, ReplayMode()).config)
    assert (check.steps, check.equal, check.kv_divergence) == (served, served, None)


@pytest.mark.parametrize("run", ["a", "a2", "b", "c", "d"])
def test_with_recorded_step_times_the_mean_is_that_of_the_client(store: Store, run: str) -> None:
    """What is left is the way to the engine and back: E2E within 1 %, ITL within 2 %."""
    left = errors(store, run, "step_time=recorded")
    assert abs(left["e2e"]) < 1 and abs(left["itl"]) < 2


AS_SERVED = "step_time=recorded,pre_queue=recorded,output_processing=recorded"


@pytest.mark.parametrize("run", ["a", "d"])
def test_what_explain_leaves_is_what_a_replay_with_recorded_parts_leaves(store: Store, run: str) -> None:
    """TTFT within 5 % and E2E within 2 %, and no scheduling decision to blame: the schedule is equal in every step."""
    left = errors(store, run, AS_SERVED)
    assert abs(left["ttft"]) < 5 and abs(left["e2e"]) < 2
    found = attribute(read_stored(store, f"tiny-live-{run}"), load_release(SHIPPED))
    for metric in ("ttft", "e2e"):
        i = QUANTITIES.index((metric, "mean"))
        residual = 100 * found.residual[i].value_us / found.observed_us[i]
        assert residual == pytest.approx(left[metric], abs=1e-6)
    proved = {one.name for one in found.standings if one.state == PROVED_RIGHT}
    assert proved.issuperset(SCHEDULED)


def test_what_two_equal_loads_differ_by_is_known(store: Store) -> None:
    """Means of E2E 1,155.5 and 1,101.1 ms, of ITL 17.67 and 16.80 ms, as the client of each run printed them."""
    repeats = repeats_of(store, ["tiny-live-a"], ["tiny-live-a2"])["tiny-live-a"]
    assert repeats.apart["e2e", "mean"] == pytest.approx(1 - 1101.1 / 1155.5, abs=1e-4)
    assert repeats.apart["itl", "mean"] == pytest.approx(1 - 16.80 / 17.67, abs=1e-3)


def test_a_run_short_of_memory_is_predicted_from_two_others(store: Store) -> None:
    """24 blocks, preemptions; fitted to random and long prompts.  Measured -0.2 and -1.7 %; equal runs differ by 5."""
    found = errors(store, "d")
    assert abs(found["e2e"]) < 5 and abs(found["itl"]) < 5


def test_coefficients_of_these_recordings_are_those_that_ship(store: Store) -> None:
    """`calibrate --train tiny-live-a --train tiny-live-c --split 1:1`: a line through 5,539 steps, delays by stamps."""
    recordings = [read_stored(store, f"tiny-live-{run}") for run in "ac"]
    made, _ = calibrate(recordings, SHIPPED, Options(load_release(DEFAULT_PRIOR), split=(1.0, 1.0)))
    shipped = load_release(SHIPPED)
    assert release_that_ships(["tiny-live-*"]) == SHIPPED
    assert {fit.content_hash for fit in made.fitted_on} == {fit.content_hash for fit in shipped.fitted_on}
    ((mine,), (theirs,)) = (made.models, shipped.models)
    assert mine.dtype == theirs.dtype == "bfloat16"
    # Rounded to a nanosecond; sums over 5,539 steps differ from machine to machine in the tenth digit.
    for part in ("latency", "lifecycle"):
        costs = {name: value for name, value in vars(getattr(theirs, part)).items() if isinstance(value, int | float)}
        again = {name: getattr(getattr(mine, part), name) for name in costs}
        assert again == pytest.approx(costs, rel=1e-4, abs=1)


SERVED = parse_mode("pre_queue=recorded,schedule=recorded,output_processing=recorded")
STEP_COSTS = ("intercept", "per_prefill_token", "per_decode_token", "per_context_token", "per_1000_attended")


def nature(store: Store, run: str, *costs: str, by: float) -> Nature:
    """What is said of a fit to the run's own steps whose costs are wrong by a factor."""
    recording = read_stored(store, f"tiny-live-{run}")
    fit, _ = calibrate([recording], "own", Options(load_release(DEFAULT_PRIOR), split=(1.0, 1.0)))
    (entry,) = fit.models
    wrong = {f"{cost}_ns": round(getattr(entry.latency, f"{cost}_ns") * by) for cost in costs}
    coefficients = replace(entry, latency=replace(entry.latency, **wrong))
    found = recorded_nature(Replayed(recording, SERVED, coefficients, fit), observed_cycles(recording)[0])
    assert found is not None
    return found


@pytest.mark.parametrize(("run", "by"), [("a", 1.1), ("a", 0.9), ("d", 1.1), ("e", 1.1)])
def test_steps_that_are_all_too_long_are_told_as_another_pace(store: Store, run: str, by: float) -> None:
    found = nature(store, run, *STEP_COSTS, by=by)
    assert found.is_pace
    assert found.low < 1 / by < found.high


@pytest.mark.parametrize(("run", "by"), [("a", 1.25), ("a", 0.8), ("e", 1.25), ("e", 0.8)])
def test_an_empty_step_that_is_too_long_is_not_taken_for_another_pace(store: Store, run: str, by: float) -> None:
    assert nature(store, run, "intercept", by=by).cost == "an empty step"
