"""Distributions as quantile curves: a grid that is fine in the tail, so that p99 is read as well as p50."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.published_itl import published_itl
from blis_replay.ingest.recording import Recording
from blis_replay.validate.metrics import Values, weighted_quantiles

Floats = NDArray[np.float64]

# Even steps up to p90, then even steps of the logarithm of the share that is slower, to p99.9.
LEVELS: Floats = np.concatenate([np.linspace(0, 0.9, 46)[:-1], 1 - np.logspace(-1, -3, 41)])
_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class QuantileCurve:
    """``level`` float64[k], shares of the sample (0..1, ascending), and ``value_us`` float64[k] at each.

    ``published``: single quantiles that somebody published; nothing is known between them.
    """

    level: Floats
    value_us: Floats
    published: bool = False


def quantile_curve(values_us: Values, counts: NDArray[np.int64] | None = None) -> QuantileCurve | None:
    """The curve of a sample without its nans, in which ``values_us[i]`` occurs ``counts[i]`` times (once if None).

    Levels end at 1 - 1/n: a sample of n says nothing beyond.  None of an empty sample.
    """
    finite = ~np.isnan(np.asarray(values_us, np.float64))
    times = finite.astype(np.int64) if counts is None else np.where(finite, counts, 0)
    size = int(times.sum())
    if size == 0:
        return None
    told = max(1 - 1 / size, 0.0) + 1e-12
    level = LEVELS[told >= LEVELS]
    return QuantileCurve(level, weighted_quantiles(values_us[times > 0], times[times > 0], level))


def published_curve(recording: Recording, metric: str) -> QuantileCurve | None:
    """The quantiles that were published of ``e2e``, ``ttft`` or ``itl`` (its true gaps); None if there are none."""
    if metric == "itl":
        named = published_itl(recording.aggregates)
    else:
        of_run = recording.aggregates.filter((pl.col("stage") == -1) & (pl.col("metric") == metric))
        named = {name: value for name, value in of_run.select("statistic", "value").iter_rows() if value is not None}
    found = [(float(m[1]) / 100, value) for name, value in named.items() if (m := _PERCENTILE.fullmatch(name))]
    points = np.array(sorted(found), np.float64).reshape(-1, 2)
    return QuantileCurve(points[:, 0], points[:, 1], published=True) if len(points) else None
