"""A window of a run for a trace viewer: both sides tell the times of the truth, a window cuts, bounds hold."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from planted import PLANTED, Planted, planted_recording

from blis_replay.base.errors import ValidateError
from blis_replay.ingest.recording import (
    ITERATION_SCHEMA,
    NOT_KNOWN,
    Clock,
    Stage,
)
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.engine import with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.timeline import window as module
from blis_replay.validate.timeline.lanes import SIDES, simulated_lanes, simulated_preemptions, with_preemptions
from blis_replay.validate.timeline.steps import (
    ERROR,
    KV_USE,
    RUNNING,
    WAITING,
    observed_counters,
    simulated_counters,
    simulated_steps,
)
from blis_replay.validate.timeline.viewer_files import trace_events
from blis_replay.validate.timeline.window import Timeline, request_named, timeline, window_named
from blis_replay_labs.planted.faults import to_depth

# 160 requests in 20 s, up to some 20 at a time; journeys of all of them and every step are recorded.
SPEC = replace(PLANTED, stages=(Stage(0, 8.0, 20_000_000),))
ALL_US = 600_000_000


@pytest.fixture(scope="module")
def planted() -> Planted:
    return planted_recording(seed=7, spec=SPEC)


@pytest.fixture(scope="module")
def run(planted: Planted) -> ReplayRun:
    """A perfect simulator: the recorded run again, to the microsecond."""
    return replay(planted.recording, planted.release)


def of_side(frame: pl.DataFrame, side: str) -> pl.DataFrame:
    return frame.filter(pl.col("side") == side).drop("side")


def test_the_lanes_of_both_sides_have_the_times_of_the_truth(planted: Planted, run: ReplayRun) -> None:
    """Send, taken in, scheduled, first and last token, client's end: those of the engine that made the recording."""
    truth, shown = planted.truth, timeline(run, 0, ALL_US)
    spans = ("request_index", "segment", "start_us", "end_us")
    observed, simulated = (of_side(shown.lanes, side).select(spans) for side in SIDES)
    assert observed.equals(simulated)
    expected = {
        "send to queue": (truth.trace.arrival_us, truth.taken_in_us),
        "prefill": (truth.result.scheduled_us, truth.result.first_token_us),
        "decode": (truth.result.first_token_us, truth.result.finished_us),
        "delivery": (truth.result.finished_us, truth.client_end_us),
    }
    for segment, (start_us, end_us) in expected.items():
        drawn = simulated.filter(pl.col("segment") == segment)
        assert drawn["start_us"].to_list() == start_us.tolist(), segment
        assert drawn["end_us"].to_list() == end_us.tolist(), segment


def test_the_steps_of_the_replay_are_those_of_the_engine(planted: Planted, run: ReplayRun) -> None:
    steps, drawn = planted.truth.result.steps, of_side(timeline(run, 0, ALL_US).steps, "simulated")
    for name in ("start_us", "end_us", "scheduled_us", "prefill_tokens", "prefill_requests", "decode_tokens"):
        assert drawn[name].to_list() == steps[name].tolist(), name
    assert drawn["running"].to_list() == steps["running_depth"].tolist()
    assert drawn["waiting"].to_list() == steps["waiting_depth"].tolist()


def test_recorded_steps_run_when_they_did_though_only_their_calls_were_recorded(
    planted: Planted, run: ReplayRun
) -> None:
    """Scheduled ahead: a batch runs from the call after its own to the one after that.

    Where the server falls idle there is no such call; its last batches of a busy period are told by the last token.
    """
    steps, drawn = planted.truth.result.steps, of_side(timeline(run, 0, ALL_US).steps, "observed")
    assert drawn["scheduled_us"].to_list() == steps["scheduled_us"].tolist()
    right = (drawn["start_us"].to_numpy() == steps["start_us"]) & (drawn["end_us"].to_numpy() == steps["end_us"])
    assert right.mean() > 0.98
    assert (drawn["end_us"][:-1] <= drawn["start_us"][1:]).all()
    for name, column in {"running": "running_depth", "prefill_tokens": "", "decode_tokens": ""}.items():
        assert drawn[name].to_list() == steps[column or name].tolist(), name


def test_counters_of_both_sides_are_those_of_the_engine(planted: Planted, run: ReplayRun) -> None:
    steps = planted.truth.result.steps
    expected = {
        RUNNING: steps["running_depth"],
        WAITING: steps["waiting_depth"],
        KV_USE: 100 * (1 - steps["free_blocks"] / 1_300),  # of 1,301 blocks one is reserved
    }
    counters = timeline(run, 0, ALL_US).counters
    for side in SIDES:
        for counter, values in expected.items():
            drawn = counters.filter(pl.col("side") == side, pl.col("counter") == counter)
            assert np.allclose(drawn["value"].to_numpy(), values), (side, counter)


def test_a_window_cuts_slices_off_and_keeps_their_whole_time(run: ReplayRun) -> None:
    """10 s to 10.5 s: what reaches in is drawn within, each track without overlaps, and says how long it was."""
    shown = timeline(run, 10_000_000, 10_500_000)
    whole = timeline(run, 0, ALL_US)
    reaching = whole.lanes.filter(pl.col("start_us") < 10_500_000, pl.col("end_us") > 10_000_000)
    assert shown.lanes.equals(reaching)
    slices = [event for event in trace_events(shown) if event["ph"] == "X"]
    for event in slices:
        assert 10_000_000 <= event["ts"] < event["ts"] + event["dur"] <= 10_500_000
        assert event["dur"] < event["args"].get("whole_duration_us", ALL_US)
    for one, next_one in pairwise(slices):
        assert one["tid"] != next_one["tid"] or one["ts"] + one["dur"] <= next_one["ts"]
    assert len(slices) == shown.lanes.height + shown.steps.height
    assert all(10_000_000 <= event["ts"] < 10_500_000 for event in trace_events(shown) if event["ph"] == "C")


@pytest.mark.slow
def test_a_counter_begins_with_the_value_that_held_before_the_window(run: ReplayRun) -> None:
    whole = timeline(run, 0, ALL_US).counters
    for side in SIDES:
        running = whole.filter(pl.col("side") == side, pl.col("counter") == RUNNING)
        before = running.filter(pl.col("at_us") <= 10_000_000)["value"][-1]
        events = trace_events(timeline(run, 10_000_000, 10_500_000))
        first = next(event for event in events if event["name"] == f"{RUNNING} {side}")
        assert (first["ts"], first["args"]["value"]) == (10_000_000, before)


def test_only_steps_and_values_of_the_window_become_rows(planted: Planted, run: ReplayRun) -> None:
    """Rows of the whole run took 0.5 GB of a recording of 1 GB; besides its own, a window has one value before it.

    And the last step, which says when the run ends.
    """
    whole = timeline(run, 0, ALL_US)
    window = 5_000_000, 5_200_000
    counters = whole.counters.filter(pl.col("counter") != ERROR)
    inside = counters.filter(pl.col("at_us").is_between(*window)).group_by("side", "counter").len()
    made = pl.concat([observed_counters(planted.recording, window), simulated_counters(run, window)])
    assert made.height == int(inside["len"].sum()) + inside.height
    steps = simulated_steps(run, window)
    reach = of_side(whole.steps, "simulated").filter(pl.col("start_us") < window[1], pl.col("end_us") > window[0])
    assert steps.height == reach.height + 1 < len(run.result.steps) // 20
    assert steps["end_us"][-1] == run.result.steps["end_us"][-1]


def test_the_missing_cycle_can_be_seen(planted: Planted) -> None:
    """Recorded asynchronously, a prefill spans the rest of the step that runs and its own; replayed synchronously its
    own only, so it is shorter by about a step (10 to 12 ms of 160 decodes at most)."""
    run = replay(planted.recording, planted.release, ReplayMode(scheduling="synchronous"))
    prefills = timeline(run, 0, ALL_US).lanes.filter(pl.col("segment") == "prefill")
    lasts = prefills.with_columns(lasts=pl.col("end_us") - pl.col("start_us"))
    medians = dict(lasts.group_by("side").agg(pl.col("lasts").median()).iter_rows())
    assert 8_000 < medians["observed"] - medians["simulated"] < 14_000


def test_a_preempted_request_has_no_tokens_until_its_prefill_is_done_again(planted: Planted) -> None:
    """With 200 KV blocks: as many holes as the run counts preemptions, and every token lies outside of them."""
    run = replay(with_engine(planted.recording, {"num_gpu_blocks": 200}, "planted"), planted.release)
    result = run.result
    assert result.preemptions.sum() > 10
    holes = simulated_preemptions(run)
    counts = np.bincount(holes["request_index"].to_numpy(), minlength=len(result.preemptions))
    assert counts.tolist() == result.preemptions.tolist()
    for request, preempted_us, resumed_us, token_us in holes.iter_rows():
        times_us = result.token_times_us(request)
        # A batch in flight at the preemption still brings its token.
        in_flight = result.steps["end_us"][np.searchsorted(result.steps["scheduled_us"], preempted_us) - 1]
        inside = times_us[(times_us > in_flight) & (times_us < token_us)]
        assert preempted_us < resumed_us < token_us
        assert not len(inside)
        assert token_us in times_us
    lanes = with_preemptions(simulated_lanes(run), holes)
    lost = lanes.filter(pl.col("segment") == "preempted")
    assert (lost["end_us"] - lost["start_us"]).sum() == (holes["resumed_us"] - holes["preempted_us"]).sum()
    lasts = pl.col("end_us") - pl.col("start_us")
    e2e = lanes.group_by("request_index").agg(lasts.sum()).sort("request_index")["end_us"]
    assert e2e.to_list() == run.e2e_us.tolist()


def test_what_was_not_recorded_is_absent_and_named(planted: Planted) -> None:
    shown = timeline(replay(to_depth(planted.recording, "client"), planted.release), 0, ALL_US)
    assert of_side(shown.lanes, "observed")["segment"].unique().sort().to_list() == ["to first token", "to last token"]
    assert of_side(shown.steps, "observed").is_empty()
    assert shown.counters["side"].unique().to_list() == ["simulated"]
    assert shown.absent == (
        "observed queue wait and prefill of requests (no stamps of the server)",
        "the observed step track",
        f"observed {RUNNING}",
        f"observed {WAITING}",
        f"observed {KV_USE}",
    )


def test_iterations_of_a_log_stand_in_for_step_records(planted: Planted) -> None:
    """With the starts, batches and KV use of the step records; the log knows no queue."""
    names = ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens", "start_us", "kv_usage")
    steps = planted.recording.steps.frame().with_row_index("iteration")
    steps = steps.with_columns(pl.lit(0.25).alias("kv_usage"))
    others = (pl.lit(None, kind).alias(name) for name, kind in ITERATION_SCHEMA.items() if name not in steps.columns)
    logged = steps.with_columns(others).select(pl.col(name).cast(kind) for name, kind in ITERATION_SCHEMA.items())
    logged = logged.with_columns(uncertainty_us=pl.lit(2_000, pl.Int64))
    recording = replace(to_depth(planted.recording, "client"), iterations=rows_of(logged))
    shown = timeline(replay(recording, planted.release), 0, ALL_US)
    drawn, expected = of_side(shown.steps, "observed"), steps.sort("start_us")
    assert drawn["scheduled_us"].to_list() == expected["start_us"].to_list()
    assert all(drawn[name].to_list() == expected[name].to_list() for name in names[:4])
    kv_use = of_side(shown.counters, "observed").filter(pl.col("counter") == KV_USE)
    assert kv_use["value"].unique().to_list() == [25.0]
    assert shown.absent == (
        "observed queue wait and prefill of requests (no stamps of the server)",
        f"observed {WAITING}",
    )
    assert "known to 2.0 ms" in shown.remarks[0]


def test_steps_on_a_clock_of_their_own_are_not_drawn(planted: Planted) -> None:
    """A step clock that nothing ties to that of the requests would put them anywhere."""
    loose = replace(planted.recording, clocks=(Clock("step", "monotonic", 0, placed=NOT_KNOWN),))
    shown = timeline(replay(loose, planted.release), 0, ALL_US)
    assert of_side(shown.steps, "observed").is_empty()
    assert of_side(shown.counters, "observed").is_empty()


def test_a_window_with_too_much_is_refused_with_one_that_fits(run: ReplayRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_EVENTS", 3_000)
    with pytest.raises(
        ValidateError, match=r"more than the 3,000 that a viewer takes well; --for \d+m?s would fit"
    ) as no:
        timeline(run, 1_000_000, ALL_US)
    length, unit = re.findall(r"--for (\d+)(m?s)", str(no.value))[0]
    fits = timeline(run, 1_000_000, 1_000_000 + int(length) * {"ms": 1_000, "s": 1_000_000}[unit])
    # The last values before the window, one a counter, come on top; a second more would not have fitted.
    assert 2_000 < fits.events <= 3_000 + 6


def test_the_default_window_is_five_seconds(run: ReplayRun) -> None:
    shown: Timeline = timeline(run, 3_000_000)
    assert (shown.from_us, shown.until_us) == (3_000_000, 8_000_000)


def test_a_window_begins_with_the_send_of_the_worst_request(planted: Planted, run: ReplayRun) -> None:
    """One request of a perfect replay is recorded 900 ms longer; no other is off at all."""
    longer = pl.when(pl.col("request_index") == 57).then(pl.col("e2e_us") + 900_000).otherwise("e2e_us")
    requests = planted.recording.requests.frame().with_columns(longer.alias("e2e_us"))
    off = replace(run, recording=replace(planted.recording, requests=rows_of(requests)))
    chosen = window_named(off, None, 2_000_000, "worst", None)
    assert chosen.until_us - chosen.from_us == 2_000_000
    assert chosen.from_us == requests.row(57, named=True)["arrival_us"]
    assert chosen.worst == 57
    assert "request 57" in chosen.remark and "900.0 ms" in chosen.remark
    shown = replace(timeline(off, chosen.from_us, chosen.until_us), worst=57)
    names = [e["args"]["name"] for e in trace_events(shown) if e["name"] == "thread_name"]
    lanes = [name for name in names if name.startswith("request")]
    assert lanes[:2] == [f"request 57 {side}, largest error" for side in SIDES]
    assert not any("57" in name for name in lanes[2:])
    errors = shown.counters.filter(pl.col("counter") == ERROR)
    off_ms = dict(errors.select("at_us", "value").iter_rows())
    assert off_ms.pop(chosen.from_us) == -900, "the track of errors begins with it"
    assert len(off_ms) > 3 and set(off_ms.values()) == {0.0}


def test_the_window_of_a_request_holds_it_and_no_lane_of_another(run: ReplayRun) -> None:
    chosen = window_named(run, None, None, None, "57")
    shown = timeline(run, chosen.from_us, chosen.until_us, chosen.request_index)
    assert set(shown.lanes["request_index"]) == {57}
    assert set(shown.lanes["side"]) == set(SIDES)
    assert chosen.from_us < shown.lanes["start_us"].min() and shown.lanes["end_us"].max() < chosen.until_us  # type: ignore[operator]
    assert shown.steps.height


def test_a_request_has_one_name(planted: Planted) -> None:
    """An id comes before an index; an id of two requests names neither."""
    ids = pl.when(pl.col("request_index") < 2).then(pl.lit("twin")).otherwise(pl.format("cmpl-{}", "request_index"))
    named = replace(
        planted.recording,
        requests=rows_of(planted.recording.requests.frame().with_columns(ids.alias("request_id"))),
    )
    assert [request_named(named, name) for name in ("cmpl-17", "17")] == [17, 17]
    with pytest.raises(ValidateError, match=r"2 requests have the id 'twin'; name one by its index, such as 0"):
        request_named(named, "twin")
    for unknown in ("cmpl-x", "160", "9" * 40, "-1"):
        with pytest.raises(ValidateError, match=r"no request has the id .*; name one of its ids, or an index"):
            request_named(named, unknown)
