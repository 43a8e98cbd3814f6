"""The step clock: sampled steps, and the steps between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from builders import in_database, recording, steps
from engine_journeys import journeys
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.base.errors import ReconstructionError
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.steps import records as step_records
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
    """Steps begin about every ms.  Synchronous: the output of step 1 is in before step 2; asynchronous: after.

    Looked up at once, or in five parts, one for each record.
    """
    monkeypatch.setattr(step_records, "LOOKED_UP_ROWS", at_once)
    records = steps([1000, 2001, 3003])
    for time_us, asynchronous in ((1900, False), (2900, True)):
        made = journeys([event("FIRST_TOKEN", time_us, 1)], lifecycles=[])
        assert detected_async(rows_of(records), made.journey_events) is asynchronous
    # What became of a cancelled request is not processed as output.
    cancelled = journeys([event("FINISHED", 2900, 1, finish_status="aborted")], lifecycles=[])
    assert detected_async(rows_of(records), cancelled.journey_events) is None


@pytest.mark.slow
@settings(max_examples=50)  # each makes two tables
@given(st.lists(st.tuples(st.none() | st.integers(-1, 12), st.none() | st.integers(0, 30)), max_size=30))
def test_anchors_are_the_same_wherever_the_records_are(records: list[tuple[int | None, int | None]]) -> None:
    """In a database, three rows at a time and in any order, steps twice and without id or time among them.

    Those stay against which time does not run backwards: all but those behind a later one, or but those before an
    earlier one.
    """
    columns = {"step_id": [step for step, _ in records], "start_us": [start for _, start in records]}
    sampled = steps([0] * len(records)).with_columns(pl.Series(name, of, pl.Int64) for name, of in columns.items())
    first = {step: start for step, start in reversed(records) if step is not None and step > 0 and start is not None}
    anchors = sorted(first.items())
    early = [one for i, one in enumerate(anchors) if all(before[1] <= one[1] for before in anchors[:i])]
    late = [one for i, one in enumerate(anchors) if all(after[1] >= one[1] for after in anchors[i:])]
    for rows in (rows_of(sampled), in_database(sampled, 3)):
        found = step_anchors(replace(recording(), steps=rows))
        assert found.frame.rows() == (early if len(early) >= len(late) else late)
        assert found.out_of_order == len(anchors) - found.rows.height
