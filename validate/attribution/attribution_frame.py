"""An attribution as a frame."""

from __future__ import annotations

import polars as pl

from blis_replay.validate.attribution.attribute import Attribution, Estimate
from blis_replay.validate.attribution.resampled import QUANTITIES

_COLUMNS = {
    **dict.fromkeys(("metric", "statistic", "part"), pl.String),
    **dict.fromkeys(("share_us", "low_us", "high_us", "change_us"), pl.Float64),
}


def attribution_frame(found: Attribution) -> pl.DataFrame:
    """``metric, statistic, part, share_us, low_us, high_us, change_us``.

    ``part``: ``error``, each component, and ``no component``; ``share_us``: of a component its Shapley value with
    bounds of 95 %; ``change_us``: what it changes one after the other in this order.
    """
    rows = [row for i in range(len(QUANTITIES)) for row in _parts(found, i)]
    return pl.DataFrame(rows, orient="row", schema=_COLUMNS).with_columns(pl.col(pl.Float64).fill_nan(None))


def _parts(found: Attribution, i: int) -> list[tuple[str | float | None, ...]]:
    def row(part: str, share: Estimate, change_us: float | None) -> tuple[str | float | None, ...]:
        return *QUANTITIES[i], part, share.value_us, share.low_us, share.high_us, change_us

    causes = [row(c.component.name, c.shares[i], c.changes[i].value_us) for c in found.causes]
    return [row("error", found.error[i], None), *causes, row("no component", found.residual[i], None)]
