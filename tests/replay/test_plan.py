"""From recording and mode to what the simulator is given."""

from __future__ import annotations

import pytest
from recordings import make_recording

from blis_replay.blis.trace import NEVER_US
from blis_replay.ingest.recording import Stage
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.mode import ReplayMode, parse_mode
from blis_replay.replay.plan import plan_replay

COLUMNS = {
    "arrival_us": [0, 10, 20],
    "prompt_tokens": [100, 100, 100],
    "output_tokens": [8, 8, 8],
    "output_tokens_reported": [6, 0, 7],
}


def test_exact_replay_takes_what_was_recorded() -> None:
    plan = plan_replay(make_recording(COLUMNS), ReplayMode())
    assert plan.trace.arrival_us.tolist() == [0, 10, 20]
    assert plan.trace.output_tokens.tolist() == [8, 8, 8]
    assert plan.basis["output tokens"] == "server usage"


def test_re_tokenised_lengths_are_at_least_one() -> None:
    """An empty reply counts 0 tokens when it is tokenised again."""
    plan = plan_replay(make_recording(COLUMNS), ReplayMode(lengths="re-tokenised"))
    assert plan.trace.output_tokens.tolist() == [6, 1, 7]


def test_failures_give_up_after_their_recorded_duration() -> None:
    """Request 1 failed 300 us after its send at 10."""
    recording = make_recording(COLUMNS | {"status": ["ok", "timeout", "ok"], "e2e_us": [5, 300, 5]})
    assert plan_replay(recording, ReplayMode()).trace.abort_us.tolist() == [NEVER_US, 310, NEVER_US]


def test_flat_arrivals_have_the_mean_rate_of_the_planned_run() -> None:
    """3000 requests over stages of 1 s and 2 s: a mean gap of 1000 us within 5 standard errors."""
    count = 3000
    columns = {"arrival_us": range(count), "prompt_tokens": [10] * count, "output_tokens": [1] * count}
    recording = make_recording(columns, stages=(Stage(0, 1000, 1_000_000), Stage(1, 1000, 2_000_000)))
    arrivals = plan_replay(recording, ReplayMode(arrivals="flat")).trace.arrival_us
    assert arrivals[-1] / count == pytest.approx(1000, rel=5 / count**0.5)
    assert arrivals.tolist() == plan_replay(recording, ReplayMode(arrivals="flat")).trace.arrival_us.tolist()


@pytest.mark.parametrize(
    ("scheduling", "expected"), [("recorded", True), ("synchronous", False), ("asynchronous", True)]
)
def test_scheduling_can_be_forced(scheduling: str, expected: bool) -> None:
    recording = make_recording(COLUMNS, engine={"async_scheduling": True})
    mode = parse_mode(f"scheduling={scheduling}")
    assert plan_replay(recording, mode).engine.async_scheduling is expected


def test_a_missing_decode_length_is_refused() -> None:
    recording = make_recording(COLUMNS | {"output_tokens": [8, None, 8]})
    with pytest.raises(ReplayError, match="the output length is unknown for 1 of 3 requests;"):
        plan_replay(recording, ReplayMode())


def test_a_recording_without_requests_is_refused() -> None:
    with pytest.raises(ReplayError, match="no requests to replay"):
        plan_replay(make_recording({"arrival_us": []}), ReplayMode())


def test_modes_have_one_name_each() -> None:
    assert parse_mode("exact") == ReplayMode()
    assert parse_mode("exact").name == "exact"
    assert parse_mode("arrivals=flat,scheduling=synchronous,arrivals=recorded").name == "scheduling=synchronous"
    assert parse_mode("spec").name == "arrivals=profile,lengths=profile,prefix=profile"
    assert parse_mode("spec,arrivals=recorded,scheduling=synchronous") == ReplayMode(
        lengths="profile", prefix="profile", scheduling="synchronous"
    )
    assert parse_mode("blis-spec").name == "arrivals=blis-spec,lengths=blis-spec,prefix=blis-spec"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fast", "'fast' is not a replay mode"),
        ("speed=2", "'speed' cannot be substituted; use arrivals, lengths"),
        ("arrivals=none", "use arrivals=recorded|flat"),
    ],
)
def test_what_is_no_mode_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ReplayError) as refused:
        parse_mode(text)
    assert complaint in str(refused.value)


def test_a_request_that_was_given_up_goes_on_as_long_as_it_was_asked_to() -> None:
    """One asked for 20 tokens; of the other nothing is known, so it takes the longest length there is, 8."""
    columns = COLUMNS | {
        "status": ["error", "ok", "error"],
        "output_tokens": [None, 8, None],
        "max_tokens": [20, None, None],
        "e2e_us": [500, 900, 700],
    }
    plan = plan_replay(make_recording(columns), ReplayMode())
    assert plan.trace.output_tokens.tolist() == [20, 8, 8]
    assert (plan.trace.abort_us < 2**40).tolist() == [True, False, True]
    assert plan.basis["output tokens"].endswith("; 2 that were given up: what they asked for, else the longest")
