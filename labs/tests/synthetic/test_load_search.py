"""The most load within limits, by hand."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from blis_runs import release_of, small_recording

from blis_replay.base.errors import NothingToJudgeError
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.fit import CoefficientFit, FitRecord, PartScore
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.validate.metrics.objectives import parse_objectives
from blis_replay_labs.synthetic.load_search import find_most, highest, load_answer

# Every step takes 10 ms, and nothing is added.
RELEASE = release_of(LatencyModel("blackbox", 10_000_000, 0, 0), Lifecycle())


def one_a_second() -> Recording:
    """Two requests 1 s apart of 5 output tokens each: 50 ms."""
    recording = small_recording(2, num_gpu_blocks=21)
    frame = recording.requests.frame().with_columns(arrival_us=pl.Series([0, 1_000_000]))
    return type(recording)(**{**vars(recording), "requests": rows_of(frame)})


@pytest.mark.parametrize(
    ("limit", "expected"),
    # Missed by 1 as by 1/64; met by 64; between 1/64 and 64; whole clients.
    [(0.0, (None, 1 / 64)), (1e9, (64.0, None)), (3.7, (3.7, 3.73)), (0.1, (0.1, 0.101))],
)
def test_a_search_ends_within_two_percent(limit: float, expected: tuple[float | None, float | None]) -> None:
    most, beyond = highest(lambda load: load <= limit, "rate")
    if None in expected:
        assert (most, beyond) == expected
    else:
        assert most is not None
        assert beyond is not None
        assert most <= limit < beyond <= 1.02 * most


@pytest.mark.parametrize("clients", [1, 7, 8, 39])
def test_clients_are_whole(clients: int) -> None:
    assert highest(lambda load: load <= clients, "concurrency") == (clients, clients + 1)


def test_one_place_takes_a_request_whenever_it_is_free() -> None:
    """With one place the second of two requests g ms apart has a TTFT of 10 + (50 - g) ms.

    p99 of 10 and 60 - g is 10 + 0.99 (50 - g): at most 20 for g >= 39.9 ms, 25.06 times as fast.  With more places
    both have 10 ms at any rate.
    """
    objectives, changes = parse_objectives("ttft.p99=20ms"), [(("max_num_seqs", 1),)]
    recorded, one = find_most(one_a_second(), RELEASE, "rate", objectives, changes, workers=1)
    assert one.most is not None
    assert 25.06 / 1.02 <= dict(one.most.overrides)["rate"] <= 25.06  # type: ignore[operator]  # a number
    assert recorded.beyond is None
    page = load_answer(one_a_second(), RELEASE, "rate", objectives, [recorded, one])
    assert str(page).startswith("as recorded: within the limits at all that was tried\nmax_num_seqs=1: ")
    assert "more would miss TTFT p99 20." in " ".join(str(page).split())
    assert page.document["points"][1]["most"]["slo"]["goodput"] == 1


def test_the_most_load_is_as_sure_as_the_coefficients() -> None:
    """As above with steps of 10 ms, known to 10 % (95 %): p99 is T + 0.99 (5 T - g) <= 20 ms.

    Of 9 ms g >= 33.9 ms, 29.5 times as fast as recorded; of 11 ms g >= 45.9 ms, 21.8 times.
    """
    objectives, changes = parse_objectives("ttft.p99=20ms"), [(("max_num_seqs", 1),)]
    step = CoefficientFit("intercept", 10_000.0, 9_000.0, 11_000.0, "fitted", "-")
    # Two recordings were fitted on, so that how loads differ is no part of it.
    scores = tuple(PartScore(of, "test", 0.8, 1.0, 10, {"itl": 0.0}) for of in ("one", "another"))
    record = FitRecord("line", 0.6, 0.8, "synchronous", "synchronous", "-", (step,), scores)
    unsure = replace(RELEASE, models=(replace(RELEASE.models[0], fit=record),))
    _, one = find_most(one_a_second(), unsure, "rate", objectives, changes, workers=1)
    assert one.between == pytest.approx((21.8, 29.5), rel=0.08)
    _, certain = find_most(one_a_second(), RELEASE, "rate", objectives, changes, workers=1)
    assert certain.between is None


def test_what_no_load_keeps_is_said() -> None:
    """No first token comes within 5 ms of a step of 10 ms."""
    objectives = parse_objectives("ttft.mean=5ms")
    (found,) = find_most(one_a_second(), RELEASE, "concurrency", objectives, [], workers=1)
    assert (found.most, found.reason) == (None, "missed even with concurrency=1")
    assert [met for _, met in found.tried] == [False] * len(found.tried)


def test_an_engine_that_cannot_run_is_an_error() -> None:
    """The release has no coefficients for the model."""
    other = release_of(LatencyModel("blackbox", 10_000_000, 0, 0), Lifecycle(), model="other")
    with pytest.raises(NothingToJudgeError, match="nothing could be simulated"):
        find_most(one_a_second(), other, "rate", parse_objectives("ttft.mean=5ms"), [], workers=1)
