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

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl

from blis_replay.ingest.anchor_order import in_order
from blis_replay.ingest.errors import ReconstructionError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.row_parts import PART_ROWS, PartWriter, RowParts, by_ranges, in_files
from blis_replay.ingest.scheduling_mode import inside_schedule, is_asynchronous, of_output, step_with_time
from blis_replay.ingest.step_records import one_a_step

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
_RECORD_SCHEMA = {name: TIMELINE_SCHEMA[name] for name in ("step_id", "start_us", "source")}
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


def step_anchors(recording: Recording, part_rows: int = PART_ROWS) -> StepAnchors:
    """The anchors of a recording's step clock; as many as its records, whatever their step ids.

    Records are looked at by ranges of their steps, about ``part_rows`` at a time; many anchors stand in a file
    that has no name any more.
    """
    with TemporaryDirectory(prefix="blis-replay-", ignore_cleanup_errors=True) as folder:
        begun, lags = _begun(recording, Path(folder), part_rows)
        anchors = replace(begun, made={"start_us": _on_time(lags)})
        kept = in_order(anchors, pl.col("source") == SAMPLED)
        frames = (frame.filter(stays) for frame, stays in zip(anchors.frames(), kept, strict=True))
        frame = in_files(frames, _RECORD_SCHEMA, Path(folder), "anchors")
        return StepAnchors(frame, lags, anchors.height - frame.height)


def _begun(recording: Recording, folder: Path, part_rows: int) -> tuple[RowParts, pl.DataFrame]:
    """The best record of each step, as stamped (``_RECORD_SCHEMA``), and ``StepAnchors.lags``."""
    both = (recording.steps, recording.journey_events)
    ids = (part["step_id"] for rows in both for part in rows.frames(["step_id"]))
    last = max(int(part.max() or 0) for part in ids)  # type: ignore[arg-type]
    writer, distances = PartWriter(_RECORD_SCHEMA, folder, "begun", part_rows), []
    for records in by_ranges(_records(recording), step_with_time, ["step_id", "start_us"], part_rows):
        sampled, events = one_a_step(records.filter(pl.col("source") == SAMPLED)), _nearest(records)
        distances.append(_distances(sampled, events))
        best = one_a_step(pl.concat([sampled, events]).sort("source", maintain_order=True))
        writer.add(best.filter(pl.col("step_id").is_between(1, last)))
    return writer.done(), _lags(pl.concat(distances))


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


def _records(recording: Recording) -> tuple[RowParts, RowParts]:
    """``step_id``, ``start_us``, ``source`` of the sampled steps, and of the events that tell the start of a step."""
    begins, ends = pl.col("step_id"), pl.col("step_id") + (2 if is_asynchronous(recording) else 1)
    between = pl.col("event").is_in(["journey.QUEUED", "journey.FINISHED"])
    step_id = pl.when(inside_schedule()).then(begins).when(of_output()).then(ends).when(between).then(begins + 1)
    kind = pl.when(inside_schedule()).then(_kind(SCHEDULED)).when(of_output()).then(_kind(OUTPUT))
    events = {"step_id": step_id, "start_us": pl.col("time_us"), "source": kind.otherwise(_kind(QUEUED))}
    return (
        replace(recording.steps, schema=_RECORD_SCHEMA, made={**recording.steps.made, "source": _kind(SAMPLED)}),
        replace(recording.journey_events, schema=_RECORD_SCHEMA, made=events),
    )


def _kind(source: str) -> pl.Expr:
    return pl.lit(source, TIMELINE_SCHEMA["source"])


def _nearest(records: pl.DataFrame) -> pl.DataFrame:
    """The event of each kind that comes nearest to the start of a step."""
    start = pl.col("start_us")
    return pl.concat(
        records.filter(pl.col("source") == source).group_by("step_id", "source").agg(nearest).select(records.columns)
        for source, nearest in ((SCHEDULED, start.min()), (QUEUED, start.max()), (OUTPUT, start.max()))
    )


def _distances(sampled: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """``source``, ``lag_us``: from each event to the start of its step, where that was sampled."""
    both = events.join(sampled.select("step_id", pl.col("start_us").alias("began_us")), on="step_id")
    return both.select("source", (pl.col("began_us") - pl.col("start_us")).alias("lag_us"))


def _lags(distances: pl.DataFrame) -> pl.DataFrame:
    lag = pl.col("lag_us")
    return (
        distances.group_by("source")
        .agg(
            pl.len().cast(pl.Int64).alias("steps"),
            lag.median().round().cast(pl.Int64),
            *(
                lag.quantile(share, "lower").cast(pl.Int64).alias(name)
                for share, name in ((0.01, "low_us"), (0.99, "high_us"))
            ),
        )
        .sort("source")
    )


def _on_time(lags: pl.DataFrame) -> pl.Expr:
    """``start_us`` of records, events moved by the lag of their kind."""
    lag_us = {
        source: lag
        for source, steps, lag in lags.select("source", "steps", "lag_us").iter_rows()
        if steps >= _FEWEST_LAGS
    }
    moved = [pl.when(pl.col("source") == source).then(lag) for source, lag in lag_us.items()]
    return pl.col("start_us") + pl.coalesce(*moved, 0)
