"""Step records in the order of their ids."""

from __future__ import annotations

import polars as pl


def one_a_step(steps: pl.DataFrame) -> pl.DataFrame:
    """The first record of each ``step_id``, by it; sorted, not hashed: there can be millions, mostly in order."""
    ids = steps["step_id"]
    if not ids.null_count() and _ascending(ids):
        return steps
    ordered = steps.sort("step_id", maintain_order=True)
    step = pl.col("step_id")
    return ordered.filter(step.ne_missing(step.shift()) | (pl.int_range(pl.len()) == 0))


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
