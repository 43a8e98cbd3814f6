"""The step clock: sampled steps, what journey events say of the start of a step, and the steps between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from builders import in_database, recording, steps
from engine_journeys import journeys, settings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.base.errors import ReconstructionError
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.steps import records as step_records
from blis_replay.ingest.steps import timeline as step_timelines
from blis_replay.ingest.steps.records import detected_async
from blis_replay.ingest.steps.timeline import SAMPLED, step_anchors, timeline_of


def event(name: str, time_us: int, step_id: int, journey: int = 0, **values: Any) -> dict[str, Any]:
    return {"journey": journey, "event": f"journey.{name}", "time_us": time_us, "step_id": step_id} | values


def test_steps_between_two_samples_lie_evenly_and_show_no_cycle() -> None:
    timeline = timeline_of(step_anchors(recording(steps=steps([1000, 1900, 2000], [3, 6, 7]))))
    assert timeline["step_id"].to_list() == [3, 4, 5, 6, 7]
    assert timeline["start_us"].to_list() == [1000, 1300, 1600, 1900, 2000]
    assert timeline["source"].to_list() == ["sampled", "interpolated", "interpolated", "sampled", "sampled"]
    # Only step 6 has a recorded start and a recorded end.
    assert timeline["cycle_us"].to_list() == [None, None, None, 100, None]


@pytest.mark.parametrize(("asynchronous", "after_output"), [(False, 4), (True, 5)])
def test_every_event_with_a_step_tells_a_start(asynchronous: bool, after_output: int) -> None:
    """QUEUED after step 1, just before step 2; admitted in step 2; the output of step 3 is in at 5000 us; given up by
    its client after step 8, before step 9."""
    rows = [
        event("QUEUED", 1990, 1),
        event("SCHEDULED", 2010, 2),
        event("FIRST_TOKEN", 5000, 3),
        event("PREEMPTED", 7000, 7),
        event("FINISHED", 8900, 8, finish_status="aborted"),
        event("QUEUED", 8950, 8, journey=1),
        event("SCHEDULED", 9020, 9, journey=1),
    ]
    made = journeys(rows, lifecycles=[], engine=settings_of(async_scheduling=asynchronous))
    recorded = timeline_of(step_anchors(made)).filter(pl.col("source") != "interpolated")
    assert recorded.select("step_id", "start_us", "source").rows() == [
        (2, 2010, "scheduled event"),
        (after_output, 5000, "output event"),
        (7, 7000, "scheduled event"),
        (9, 9020, "scheduled event"),
    ]


def test_an_event_is_moved_by_its_median_distance_from_sampled_steps() -> None:
    """Outputs of steps 1 to 6 are processed 240 us before the next step begins; the seventh step was not sampled."""
    starts = [0, 1000, 2000, 3000, 4000, 5000]
    rows = [event("FIRST_TOKEN", (step * 1000) - 240, step, journey=step) for step in range(1, 7)]
    rows.append(event("SCHEDULED", 6900, 8))
    made = journeys(rows, lifecycles=[], steps=steps(starts), engine={})
    anchors = step_anchors(made)
    assert anchors.lags.rows() == [("output event", 5, 240, 240, 240)]
    assert anchors.frame.filter(pl.col("step_id") == 7)["start_us"].to_list() == [6000]


def test_time_does_not_run_backwards() -> None:
    """Sampled steps are believed: an event after the start of the next sampled step is left out, and counted."""
    rows = [event("SCHEDULED", 2500, 2), event("SCHEDULED", 3500, 4)]
    made = journeys(rows, lifecycles=[], steps=steps([1000, 2000], [1, 3]))
    anchors = step_anchors(made)
    assert anchors.out_of_order == 1
    assert anchors.frame["step_id"].to_list() == [1, 3, 4]


def test_an_output_after_which_nothing_is_left_says_nothing_of_later_steps() -> None:
    """Asynchronous: the output of step 1 is in at 2000 us; the next request comes at 90 ms, and is admitted in step 2.
    Were the event taken for the start of step 3, as it is while requests overlap, time would run backwards."""
    rows = [event("SCHEDULED", 1000, 1), event("FINISHED", 2000, 1), event("SCHEDULED", 90_000, 2, journey=1)]
    rows.append(event("SCHEDULED", 91_000, 3, journey=2))
    for tail in (rows[:3], rows):  # step 3 known by nothing else, and known
        made = journeys(tail, lifecycles=[], engine=settings_of(async_scheduling=True))
        anchors = step_anchors(made)
        assert anchors.out_of_order == 0
        assert anchors.frame["start_us"].to_list() == [
            row["time_us"] for row in tail if row["event"] != "journey.FINISHED"
        ]


@pytest.mark.parametrize("wrong_us", [-(10**12), 10**15])
def test_one_mistaken_stamp_costs_one_step(wrong_us: int) -> None:
    made = recording(steps=steps([0, 1000, wrong_us, 3000, 4000]))
    assert step_anchors(made).frame["step_id"].to_list() == [1, 2, 4, 5]


def test_nothing_recorded_is_no_timeline_and_far_apart_ids_take_no_room() -> None:
    assert timeline_of(step_anchors(recording())).is_empty()
    far = recording(steps=steps([0, 1000], [1, 2**50]))
    assert (step_anchors(far).steps, step_anchors(far).frame.height) == (2**50, 2)
    with pytest.raises(ReconstructionError, match="more than 20000000: their ids are mistaken"):
        timeline_of(step_anchors(far))


@pytest.mark.slow
@settings(max_examples=50)
@given(st.sets(st.integers(1, 3000), min_size=2, max_size=200), st.integers(1, 50_000))
def test_a_steady_engine_is_timed_right_whichever_steps_were_sampled(ids: set[int], cycle_us: int) -> None:
    sampled = sorted(ids)
    timeline = timeline_of(step_anchors(recording(steps=steps([i * cycle_us for i in sampled], sampled))))
    assert timeline["start_us"].to_list() == [i * cycle_us for i in range(sampled[0], sampled[-1] + 1)]
    assert timeline.filter(pl.col("source") == SAMPLED)["step_id"].to_list() == sampled


@pytest.mark.parametrize("at_once", [1_000, 1])
def test_outputs_processed_after_the_next_step_began_are_asynchronous_scheduling(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps begin every ms.  Synchronous: the output of step 1 is in before step 2; asynchronous: after.

    Looked up at once, or in five parts, one for each record.
    """
    monkeypatch.setattr(step_records, "LOOKED_UP_ROWS", at_once)
    records = steps([1000, 2000, 3000])
    for time_us, asynchronous in ((1900, False), (2900, True)):
        made = journeys([event("FIRST_TOKEN", time_us, 1)], lifecycles=[])
        assert detected_async(rows_of(records), made.journey_events) is asynchronous
    # What became of a cancelled request is not processed as output.
    cancelled = journeys([event("FINISHED", 2900, 1, finish_status="aborted")], lifecycles=[])
    assert detected_async(rows_of(records), cancelled.journey_events) is None


_NAMES = ("QUEUED", "SCHEDULED", "PREEMPTED", "FIRST_TOKEN", "FINISHED")
_events = st.lists(
    st.builds(
        event,
        st.sampled_from(_NAMES),
        st.none() | st.integers(0, 30),
        st.none() | st.integers(-1, 12),
        finish_status=st.sampled_from(["aborted", "stopped"]),
    ),
    max_size=30,
)
_steps = st.lists(st.tuples(st.none() | st.integers(-1, 12), st.none() | st.integers(0, 30)), max_size=30)


@pytest.mark.heavy
@settings(max_examples=50)  # each makes two tables
@given(_steps, _events, st.booleans(), st.sampled_from([4, 15, 1_000]))
def test_anchors_are_the_same_wherever_the_records_are(
    records: list[tuple[int | None, int | None]], rows: list[dict[str, Any]], asynchronous: bool, looked_up_rows: int
) -> None:
    """In a database, three rows at a time and in any order, steps twice and without id or time among them.

    All steps are looked up at once, or ranges of them one after the other.
    """
    ids, starts = [step for step, _ in records], [start for _, start in records]
    sampled = steps([0] * len(records)).with_columns(
        pl.Series("step_id", ids, pl.Int64), pl.Series("start_us", starts, pl.Int64)
    )
    engine = settings_of(async_scheduling=asynchronous)
    at_once = journeys(rows, lifecycles=[], steps=sampled, engine=engine)
    events = in_database(at_once.journey_events.frame(), 3)
    in_tables = replace(at_once, steps=in_database(sampled, 3), journey_events=events)
    expected = step_anchors(at_once)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_timelines, "LOOKED_UP_ROWS", looked_up_rows)
        found = step_anchors(in_tables)
    assert found.frame.equals(expected.frame)
    assert found.lags.equals(expected.lags)
    assert found.out_of_order == expected.out_of_order
