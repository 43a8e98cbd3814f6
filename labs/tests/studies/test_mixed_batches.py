"""The modes of mixed steps on load sweeps: points of a sweep, no effect without mixed batches, intervals over runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from recordings import make_recording

from blis_replay.blis.latency.datasheets import Architecture, bundled_architectures
from blis_replay.ingest.recording import Recording, Stage
from blis_replay.ingest.store import Store, read_stored
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.experiment import find_experiment
from blis_replay_labs.studies.mixed_batches import mixed_batches, mode_differences, one_at_a_time, sweep_points

SECOND = 1_000_000
TINY = {"some/Model": Architecture(4, 512, 8, 8, 64, 1024, 1000)}


def sweep(*, staged: bool = True, lost: tuple[int, ...] = ()) -> Recording:
    """12 requests one after the other (2 s each, 10 ms between), 12 at once, 12 at 1/s and 12 at 2/s; 3 s between.

    Each is 2 s long for the server; of ``lost`` requests no span was kept.
    """
    one_by_one = np.arange(12) * 2_010_000
    at_once = one_by_one[-1] + 5 * SECOND + np.arange(12) * 1_000
    slow = at_once[-1] + 5 * SECOND + np.arange(12) * SECOND
    fast = slow[-1] + 5 * SECOND + np.arange(12) * SECOND // 2
    kept = np.setdiff1d(np.arange(48), lost)
    stage = np.repeat(np.arange(4), 12)[kept]
    return make_recording(
        {
            "arrival_us": np.concatenate([one_by_one, at_once, slow, fast])[kept],
            "stage": stage if staged else [None] * len(kept),
            "prompt_tokens": [300] * len(kept),
            "output_tokens": [20] * len(kept),
            "ttft_us": [100_000] * len(kept),
            "e2e_us": [2 * SECOND] * len(kept),
        },
        stages=tuple(Stage(i, 1.0, 20 * SECOND) for i in range(4)) if staged else (),
    )


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("lost", [(), (30,), (12, 40)])
def test_the_points_of_a_sweep(staged: bool, lost: tuple[int, ...]) -> None:
    """The same from the load stages and from the arrivals, and a span that was lost makes no point."""
    points = sweep_points(sweep(staged=staged, lost=lost))
    assert [point.kind for point in points] == ["synchronous", "throughput", "constant", "constant"]
    assert [round(point.rate_per_s, 3) for point in points[2:]] == [1, 2]
    assert sum(len(point.requests) for point in points) == 48 - len(lost)


def test_the_rest_of_a_point_is_none() -> None:
    assert len(sweep_points(sweep(lost=tuple(range(3, 12))))) == 3


def test_a_client_that_waits_is_never_overtaken() -> None:
    """Requests of the synchronous point, and points, are 600 s further apart; within the others nothing moves."""
    recording = sweep()
    later = one_at_a_time(recording, sweep_points(recording)).requests["arrival_us"].diff().drop_nulls()
    added = (later - recording.requests["arrival_us"].diff().drop_nulls()).to_list()
    expected = [600 * SECOND * (i < 12 or i % 12 == 0) for i in range(1, 48)]
    assert added == expected


def test_modes_differ_only_where_batches_are_mixed() -> None:
    result = mixed_batches([replace(sweep(), hardware=None)], TINY, gpu="H100-SXM", executor="serial")
    assert result.points.height == 4 * 3
    alone = result.points.filter(pl.col("kind") == "synchronous")
    assert alone["mixed_share"].to_list() == [0, 0, 0]
    assert alone["e2e"].n_unique() == alone["ttft"].n_unique() == alone["itl"].n_unique() == 1
    assert [d.difference for d in result.differences if d.kind == "synchronous"] == [0, 0]


def test_levelled_the_synchronous_point_has_the_recorded_itl() -> None:
    """1.9 s over 19 gaps are 100 ms; the roofline of 4 small layers is far below, so 25 ms a layer make it."""
    points = mixed_batches(
        [replace(sweep(), hardware="H100-SXM")], TINY, levelled=True, executor="serial"
    ).points.filter(pl.col("kind") == "synchronous")
    assert points["itl"].to_list() == pytest.approx([0, 0, 0], abs=1e-4)
    assert 24_000 < points["per_layer_us"][0] < 25_100


def frame(errors: dict[str, dict[str, list[float]]]) -> pl.DataFrame:
    """Rows by mode and run: errors of E2E of constant points."""
    return pl.DataFrame(
        [
            {"experiment": run, "point": i, "kind": "constant", "mode": mode, "e2e": error}
            for mode, runs in errors.items()
            for run, values in runs.items()
            for i, error in enumerate(values)
        ]
    )


def test_a_difference_is_a_mean_over_runs() -> None:
    """Additive is worse by 0.1 and 0.3 in run a (mean 0.2), 0.1 in b and 0.3 in c: 0.2, and Student's interval of 3
    runs, 4.303 * 0.1 / sqrt(3) = 0.248 on either side.  Signs do not matter.  Token-proportional is the same by run.
    """
    reference = {"a": [0.1, -0.1], "b": [-0.5], "c": [0.0]}
    additive = {"a": [-0.2, 0.4], "b": [0.6], "c": [-0.3]}
    proportional = {"a": [0.2, -0.2], "b": [-0.6], "c": [0.1]}
    points = frame({"weighted": reference, "additive": additive, "token_proportional": proportional})
    found = {d.mode: d for d in mode_differences(points) if d.kind == "all"}
    assert (found["additive"].runs, found["additive"].points) == (3, 4)
    assert found["additive"].difference == pytest.approx(0.2)
    assert found["additive"].high == pytest.approx(0.2 + 0.2484, abs=1e-4)
    assert found["additive"].verdict == "inconclusive"
    assert found["token_proportional"].low == pytest.approx(0.1)
    assert found["token_proportional"].verdict == "worse"


def test_one_run_tells_nothing() -> None:
    points = frame({mode: {"a": [0.1 * i]} for i, mode in enumerate(("weighted", "additive", "token_proportional"))})
    difference = mode_differences(points)[0]
    assert (difference.low, difference.high, difference.verdict) == (-np.inf, np.inf, "inconclusive")


def test_a_recording_without_a_sweep_is_nothing_to_judge() -> None:
    short = make_recording({"arrival_us": [0, 1], "prompt_tokens": [9, 9], "output_tokens": [2, 2]})
    with pytest.raises(NothingToJudgeError, match="none of the recordings has a point of a load sweep"):
        mixed_batches([replace(short, hardware="H100-SXM")], TINY, executor="serial")


SWEEPS = ("34b-prefillheavy", "34b-train", "7b-train")


def test_the_recorded_sweeps(real_store: Store) -> None:
    """GuideLLM ran 5 points of 40 requests, and 12 of 25 twice; published over 149 points of 13 runs: 31.5, 31.5 and
    32.3 % (weighted, token-proportional, additive).  29 points of 3 runs do not tell the modes apart, and which one is
    ahead turns where the overhead of a layer is levelled: the roofline is slow, and the weighted mean short.
    """
    recordings = [read_stored(real_store, find_experiment(real_store, name)) for name in SWEEPS]
    assert [len(sweep_points(recording)) for recording in recordings] == [5, 12, 12]
    mean = {}
    for levelled in (False, True):
        result = mixed_batches(
            recordings, bundled_architectures(), gpu="H100-SXM", levelled=levelled, executor="serial"
        )
        by_mode = result.points.group_by("mode").agg(pl.col("e2e").abs().mean())
        mean[levelled] = {mode: 100 * error for mode, error in by_mode.iter_rows()}
        verdicts = {(d.mode, d.kind): d.verdict for d in result.differences}
        assert verdicts["additive", "all"] == "inconclusive"
        assert [d.difference for d in result.differences if d.kind == "synchronous"] == [0, 0]
    expected = {"weighted": 18.79, "token_proportional": 21.25, "additive": 21.89}
    assert mean[False] == pytest.approx(expected, abs=0.05)
    assert mean[True] == pytest.approx({"weighted": 4.55, "token_proportional": 1.73, "additive": 2.13}, abs=0.05)
