"""Whether the engine scheduled the next step while one ran, and which journey events tell it."""

from __future__ import annotations

from itertools import chain

import polars as pl

from blis_replay.ingest.recording import Recording
from blis_replay.ingest.row_parts import RowParts

_COLUMNS = ("event", "time_us", "step_id", "finish_status")


def is_asynchronous(recording: Recording) -> bool:
    """Whether scheduling was asynchronous, by the engine arguments, which journeys are a source of."""
    setting = recording.engine.get("async_scheduling")
    return setting is not None and bool(setting.value)


def detected_async(steps: RowParts, journey_events: RowParts) -> bool | None:
    """Whether the output of most steps was processed only after the next one had begun; ``None`` if nothing tells.

    ``steps``: ``STEP_SCHEMA``; ``journey_events``: ``JOURNEY_EVENT_SCHEMA``.
    """
    begun, ended = [], []
    for part in journey_events.frames(_COLUMNS):
        events = part.drop_nulls(["step_id", "time_us"])
        begun.append(events.filter(inside_schedule()).select("step_id", pl.col("time_us").alias("start_us")))
        ended.append(events.filter(of_output()).select("time_us", (pl.col("step_id") + 1).alias("step_id")))
    outputs = pl.concat(ended)
    next_steps = outputs.select("step_id").unique()
    sampled = (part.drop_nulls() for part in steps.frames(["step_id", "start_us"]))
    starts = pl.concat(frame.join(next_steps, on="step_id", how="semi") for frame in chain(sampled, begun))
    first = starts.group_by("step_id").agg(pl.col("start_us").min())
    late = outputs.join(first, on="step_id").select(pl.col("time_us") > pl.col("start_us")).to_series()
    return None if late.is_empty() else 2 * int(late.sum()) > len(late)


def inside_schedule() -> pl.Expr:
    """Journey events that are stamped inside ``schedule()`` of the step they carry."""
    return pl.col("event").is_in(["journey.SCHEDULED", "journey.PREEMPTED"])


def of_output() -> pl.Expr:
    """Journey events that are stamped when the output of the step they carry is processed."""
    ended = (pl.col("event") == "journey.FINISHED") & pl.col("finish_status").ne_missing("aborted")
    return ended | (pl.col("event") == "journey.FIRST_TOKEN")
