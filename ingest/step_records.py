"""Step records in the order of their ids."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from blis_replay.ingest.row_parts import PART_ROWS, RowParts, by_ranges


def one_a_step(steps: pl.DataFrame) -> pl.DataFrame:
    """The first record of each ``step_id``, by it; sorted, not hashed: there can be millions, mostly in order."""
    ids = steps["step_id"]
    if not ids.null_count() and _ascending(ids):
        return steps
    ordered = steps.sort("step_id", maintain_order=True)
    step = pl.col("step_id")
    return ordered.filter(step.ne_missing(step.shift()) | (pl.int_range(pl.len()) == 0))


def steps_by_id(steps: RowParts, *columns: str) -> Iterator[pl.DataFrame]:
    """``step_id`` and ``columns`` of the records that have them all, one a step, by id, some at a time."""
    names = ["step_id", *columns]
    for part in by_ranges(steps.only(names), lambda frame: frame["step_id"], ["step_id"], PART_ROWS):
        yield one_a_step(part.drop_nulls())


def gaps_by_id(steps: RowParts, *columns: str) -> Iterator[pl.DataFrame]:
    """:func:`steps_by_id` with ``gap``, how many steps later the next one is; null of the last."""
    gap, last = (pl.col("step_id").shift(-1) - pl.col("step_id")).alias("gap"), None
    for part in steps_by_id(steps, *columns):
        ordered = part if last is None else pl.concat([last, part])
        last = ordered.tail(1)
        yield ordered.with_columns(gap).head(-1)
    if last is not None:
        yield last.with_columns(gap)


def _ascending(ids: pl.Series) -> bool:
    """Whether each is above the one before; chunk by chunk, because a difference of all is as large as they are."""
    before = None
    for chunk in ids.get_chunks():
        if not len(chunk):
            continue
        if (before is not None and chunk[0] <= before) or not (chunk.diff().slice(1) > 0).all():
            return False
        before = chunk[-1]
    return True
