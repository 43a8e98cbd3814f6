"""A time for every engine step: from sampled steps, from journey events that carry a step, interpolated between.

What an event says of the start of a step (trace-formats, sections 2.2 and 2.5):

* ``SCHEDULED`` and ``PREEMPTED`` happen inside ``schedule()`` of their step, at or just after its start;
* ``QUEUED`` and the end of an aborted request carry the last step begun before: the engine takes them in
  between two steps, and begins the next one right after;
* ``FIRST_TOKEN`` and ``FINISHED`` carry the step that computed the token and are stamped when its output is
  processed.  The loop then goes on with ``schedule()``: of the next step, or of the one after it
  where scheduling is asynchronous, because the next one had begun before.

How far an event of each kind lies from the start of its step is measured on steps that have both and
taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.errors import ReconstructionError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.row_parts import RowParts
from blis_replay.ingest.scheduling_mode import inside_schedule, is_asynchronous, of_output
from blis_replay.ingest.step_records import one_a_step

Int64s = NDArray[np.int64]

SAMPLED, SCHEDULED, QUEUED, OUTPUT, INTERPOLATED = (
    *("sampled", "scheduled event", "queued event", "output event"),
    "interpolated",
)
# Best first.
SOURCES = (SAMPLED, SCHEDULED, QUEUED, OUTPUT, INTERPOLATED)
TIMELINE_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "step_id": pl.Int64,
    "start_us": pl.Int64,  # start of schedule(), from the experiment's zero
    "source": pl.Enum(SOURCES),
    "cycle_us": pl.Int64,  # to the start of the next step; null if either of the two was interpolated
}
# The lag of a kind of event is the median over steps that were sampled as well, if there are so many.
_FEWEST_LAGS = 5
# Steps beyond which ids are taken for mistaken: they would take more than 1 GB.
MOST_STEPS = 20_000_000


@dataclass(frozen=True)
class StepAnchors:
    """Steps whose start was recorded, one way or another.

    ``frame``: ``step_id``, ``start_us``, ``source``, ascending in both of the first.  ``lags``: ``source``,
    ``steps``, ``lag_us``, ``low_us``, ``high_us``: of steps that were sampled and have an event of a kind, how
    long after that event they began (median, and the band of the middle 98 %).  ``out_of_order``:
    records left out because time would run backwards.
    """

    frame: pl.DataFrame
    lags: pl.DataFrame
    out_of_order: int

    @property
    def steps(self) -> int:
        """Steps from the first anchor to the last, both included."""
        ids = self.frame["step_id"]
        return int(ids[-1] - ids[0] + 1) if len(ids) else 0


def step_anchors(recording: Recording) -> StepAnchors:
    """The anchors of a recording's step clock; as large as its records, whatever their step ids."""
    sampled = one_a_step(recording.steps.whole(["step_id", "start_us"]).drop_nulls())
    events = _event_anchors(recording.journey_events, is_asynchronous(recording))
    lags = _lags(sampled, events)
    taken_off = pl.when(pl.col("steps") >= _FEWEST_LAGS).then(pl.col("lag_us")).otherwise(0)
    placed = events.join(lags.select("source", taken_off.alias("lag")), on="source", how="left").with_columns(
        pl.col("start_us") + pl.col("lag").fill_null(0)
    )
    every = pl.concat(
        [sampled.with_columns(pl.lit(SAMPLED, TIMELINE_SCHEMA["source"]).alias("source")), placed.drop("lag")]
    )
    best = one_a_step(every.sort("source", maintain_order=True))
    both = (recording.steps, recording.journey_events)
    known = (part["step_id"] for rows in both for part in rows.frames(["step_id"]))
    last = max(int(ids.max() or 0) for ids in known)  # type: ignore[arg-type]
    begun = best.filter(pl.col("step_id").is_between(1, last))
    kept = _in_order(begun)
    return StepAnchors(kept, lags, len(begun) - len(kept))


def step_timeline(recording: Recording) -> pl.DataFrame:
    """Every step from the first anchor to the last, ``TIMELINE_SCHEMA``; empty without an anchor.

    Steps between two anchors lie evenly between them.  Raises ``ReconstructionError`` for more than MOST_STEPS steps.
    """
    return timeline_of(step_anchors(recording))


def timeline_of(anchors: StepAnchors) -> pl.DataFrame:
    """``step_timeline`` of anchors that are known already."""
    at = anchors.frame
    if at.is_empty():
        return pl.DataFrame(schema=TIMELINE_SCHEMA)
    if anchors.steps > MOST_STEPS:
        raise ReconstructionError(f"{anchors.steps} steps are more than {MOST_STEPS}: their ids are mistaken")
    ids, start_us = at["step_id"].to_numpy(), at["start_us"].to_numpy()
    every = np.arange(ids[0], ids[-1] + 1)
    starts = np.rint(np.interp(every, ids, start_us)).astype(np.int64)
    frame = pl.DataFrame({"step_id": every, "start_us": starts})
    frame = frame.join(at.select("step_id", "source"), on="step_id", how="left", maintain_order="left")
    known = pl.col("source").is_not_null()
    cycle = pl.when(known & known.shift(-1)).then(pl.col("start_us").shift(-1) - pl.col("start_us"))
    return frame.with_columns(cycle.alias("cycle_us"), pl.col("source").fill_null(INTERPOLATED)).select(
        TIMELINE_SCHEMA.keys()
    )


def _event_anchors(journey_events: RowParts, asynchronous: bool) -> pl.DataFrame:
    """``step_id``, ``start_us``, ``source``: the event of each kind that comes nearest to the start of a step."""
    between = pl.col("event").is_in(["journey.QUEUED", "journey.FINISHED"]) & ~of_output()
    kinds = (
        (SCHEDULED, inside_schedule(), 0, pl.col("start_us").min()),
        (QUEUED, between, 1, pl.col("start_us").max()),
        (OUTPUT, of_output(), 2 if asynchronous else 1, pl.col("start_us").max()),
    )
    found: dict[str, list[pl.DataFrame]] = {source: [] for source, *_ in kinds}
    for part in journey_events.frames(["event", "time_us", "step_id", "finish_status"]):
        events = part.drop_nulls(["step_id", "time_us"]).rename({"time_us": "start_us"})
        for source, chosen, later, nearest in kinds:
            of_kind = events.filter(chosen).with_columns(pl.col("step_id") + later)
            found[source].append(of_kind.group_by("step_id").agg(nearest))
    return pl.concat(
        pl.concat(found[source])
        .group_by("step_id")
        .agg(nearest)
        .with_columns(pl.lit(source, TIMELINE_SCHEMA["source"]).alias("source"))
        for source, _chosen, _later, nearest in kinds
    )


def _lags(sampled: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    both = sampled.join(events, on="step_id", suffix="_event")
    lag = pl.col("start_us") - pl.col("start_us_event")
    return (
        both.group_by("source")
        .agg(
            pl.len().cast(pl.Int64).alias("steps"),
            lag.median().round().cast(pl.Int64).alias("lag_us"),
            *(
                lag.quantile(share, "lower").cast(pl.Int64).alias(name)
                for share, name in ((0.01, "low_us"), (0.99, "high_us"))
            ),
        )
        .sort("source")
    )


def _in_order(anchors: pl.DataFrame) -> pl.DataFrame:
    """Anchors by step id without those against which time would run backwards; sampled steps are believed first."""
    ordered, sampled = anchors.sort("step_id"), pl.col("source") == SAMPLED
    believed = _ascending(ordered.filter(sampled))
    near = believed.select("step_id", pl.col("start_us").alias("near_us"))
    others = ordered.filter(~sampled)
    start, near_us = pl.col("start_us"), pl.col("near_us")
    for strategy, fits in (("backward", start >= near_us), ("forward", start <= near_us)):
        others = others.join_asof(near, on="step_id", strategy=strategy)  # type: ignore[arg-type]
        others = others.filter(fits.fill_null(True)).drop("near_us")
    return _ascending(pl.concat([believed, others]).sort("step_id"))


def _ascending(anchors: pl.DataFrame) -> pl.DataFrame:
    """Without those that begin before an earlier one, or after a later one, whichever leaves more."""
    start = pl.col("start_us")
    early, late = anchors.filter(start == start.cum_max()), anchors.filter(start == start.cum_min(reverse=True))
    return early if len(early) >= len(late) else late
