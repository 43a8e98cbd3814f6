"""Step records in the order of their ids."""

from __future__ import annotations

import polars as pl


def one_a_step(steps: pl.DataFrame) -> pl.DataFrame:
    """The first record of each ``step_id``, by it; sorted, not hashed: there can be millions, mostly in order."""
    ids = steps["step_id"]
    if not ids.null_count() and (ids.diff().slice(1) > 0).all():
        return steps
    ordered = steps.sort("step_id", maintain_order=True)
    step = pl.col("step_id")
    return ordered.filter(step.ne_missing(step.shift()) | (pl.int_range(pl.len()) == 0))
