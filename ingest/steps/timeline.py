"""A start time for every engine step: as it was recorded, or between two that were."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import ReconstructionError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import Rows, no_rows
from blis_replay.ingest.scratch import Scratch
from blis_replay.ingest.steps.records import steps_by_id

MOST_STEPS = 20_000_000  # more steps would take over 1 GB: their ids are taken for mistaken
_MISPLACED = 0.01  # share of records; fewer that are out of order are mistakes of the clock
SAMPLED, INTERPOLATED = "sampled", "interpolated"
_ANCHOR_SCHEMA: dict[str, type[pl.DataType]] = {"step_id": pl.Int64, "start_us": pl.Int64}
TIMELINE_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "step_id": pl.Int64,
    "start_us": pl.Int64,  # start of schedule(), from the experiment's zero
    "source": pl.Enum((SAMPLED, INTERPOLATED)),
    "cycle_us": pl.Int64,  # to the start of the next step; null if either of the two was interpolated
}


def in_order(start_us: Int64s) -> Bools:
    """bool[anchors]: all but those before an earlier one, or but those after a later one: whichever keeps more."""
    early: Bools = start_us == np.maximum.accumulate(start_us)
    late: Bools = start_us == np.minimum.accumulate(start_us[::-1])[::-1]
    return early if early.sum() >= late.sum() else late


@dataclass(frozen=True)
class StepAnchors:
    """Steps with a recorded start.

    ``rows``: ``step_id`` and ``start_us``, both ascending.  ``out_of_order``: records left out because time would run
    backwards.
    """

    rows: Rows
    out_of_order: int = 0

    @property
    def frame(self) -> pl.DataFrame:
        """``rows`` as one frame."""
        return self.rows.frame()

    @property
    def mixed(self) -> bool:
        """Whether the records are those of several engines or starts: then many are out of order."""
        return self.out_of_order > _MISPLACED * (self.rows.height + self.out_of_order)

    @cached_property
    def steps(self) -> int:
        """Steps from the first anchor to the last, both included."""
        return int(self.rows.aggregate(steps="coalesce(max(step_id) - min(step_id) + 1, 0)")["steps"])


def step_anchors(recording: Recording) -> StepAnchors:
    """The anchors of a recording's step clock, one per step with a record."""
    if recording.steps.is_empty():
        return StepAnchors(no_rows(_ANCHOR_SCHEMA))
    scratch = Scratch(share=3)  # beside that of the recording
    anchors = scratch.kept(steps_by_id(recording.steps, "start_us").where("step_id > 0"))
    stays = pl.Series(in_order(anchors["start_us"].to_numpy()))
    if stays.all():
        return StepAnchors(anchors)
    kept = scratch.hold(anchors.frame().filter(stays))
    return StepAnchors(kept, anchors.height - kept.height)


def timeline_of(anchors: StepAnchors) -> pl.DataFrame:
    """Every step from the first anchor to the last, ``TIMELINE_SCHEMA``; empty without an anchor.

    Steps between two anchors lie evenly between them.  Raises ``ReconstructionError`` for more than MOST_STEPS steps.
    """
    at = anchors.frame
    if at.is_empty():
        return pl.DataFrame(schema=TIMELINE_SCHEMA)
    if anchors.steps > MOST_STEPS:
        raise ReconstructionError(f"{anchors.steps} steps are more than {MOST_STEPS}: their ids are mistaken")
    ids, start_us = at["step_id"].to_numpy(), at["start_us"].to_numpy()
    every = np.arange(ids[0], ids[-1] + 1)
    starts = np.rint(np.interp(every, ids, start_us)).astype(np.int64)
    recorded = np.zeros(len(every), np.bool_)
    recorded[ids - ids[0]] = True
    known = pl.Series(recorded)
    source = pl.select(pl.when(known).then(pl.lit(SAMPLED)).otherwise(pl.lit(INTERPOLATED))).to_series()
    cycle_us = pl.when(known & known.shift(-1)).then(pl.col("start_us").shift(-1) - pl.col("start_us"))
    frame = pl.DataFrame({"step_id": every, "start_us": starts, "source": source})
    return frame.with_columns(cycle_us=cycle_us).select(pl.col(n).cast(kind) for n, kind in TIMELINE_SCHEMA.items())
