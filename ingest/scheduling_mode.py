"""Whether the engine scheduled the next step while one ran, and which journey events tell it."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from blis_replay.ingest.recording import Recording
from blis_replay.ingest.row_parts import PART_ROWS, RowParts, by_ranges

_BEGUN_SCHEMA = {"step_id": pl.Int64, "start_us": pl.Int64, "begins": pl.Boolean}


def is_asynchronous(recording: Recording) -> bool:
    """Whether scheduling was asynchronous, by the engine arguments, which journeys are a source of."""
    setting = recording.engine.get("async_scheduling")
    return setting is not None and bool(setting.value)


def detected_async(steps: RowParts, journey_events: RowParts) -> bool | None:
    """Whether the output of most steps was processed only after the next one had begun; ``None`` if nothing tells.

    ``steps``: ``STEP_SCHEMA``; ``journey_events``: ``JOURNEY_EVENT_SCHEMA``.
    """
    late = outputs = 0
    records = _begun(steps, journey_events)
    for part in by_ranges(records, step_with_time, ["step_id", "start_us"], PART_ROWS):
        began = part.filter("begins").group_by("step_id").agg(pl.col("start_us").min().alias("began_us"))
        output = part.filter(~pl.col("begins")).join(began, on="step_id")
        late, outputs = late + int((output["start_us"] > output["began_us"]).sum()), outputs + output.height
    return 2 * late > outputs if outputs else None


def _begun(steps: RowParts, journey_events: RowParts) -> tuple[RowParts, RowParts]:
    """``step_id``, ``start_us``: when a step began (``begins``), or the output of the step before was processed."""
    events = {
        "step_id": pl.when(inside_schedule()).then("step_id").when(of_output()).then(pl.col("step_id") + 1),
        "start_us": pl.col("time_us"),
        "begins": inside_schedule(),
    }
    return (
        replace(steps, schema=_BEGUN_SCHEMA, made={**steps.made, "begins": pl.lit(True)}),
        replace(journey_events, schema=_BEGUN_SCHEMA, made=events),
    )


def step_with_time(records: pl.DataFrame) -> pl.Series:
    """The step of each record that has a time."""
    return records.select(pl.when(pl.col("start_us").is_not_null()).then("step_id")).to_series()


def inside_schedule() -> pl.Expr:
    """Journey events that are stamped inside ``schedule()`` of the step they carry."""
    return pl.col("event").is_in(["journey.SCHEDULED", "journey.PREEMPTED"])


def of_output() -> pl.Expr:
    """Journey events that are stamped when the output of the step they carry is processed."""
    ended = (pl.col("event") == "journey.FINISHED") & pl.col("finish_status").ne_missing("aborted")
    return ended | (pl.col("event") == "journey.FIRST_TOKEN")
