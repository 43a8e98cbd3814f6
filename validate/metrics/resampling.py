"""Draws of neighbouring rows of a fit: what the intervals of coefficients are made of.

Rows that are near in time share a slow second, so drawn one by one they look like many independent measurements, and
an interval comes out several times too narrow.  So whole blocks are drawn, longer than what rows share.  Intervals of
errors are those of ``uncertainty``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.validate.metrics.uncertainty import CONFIDENCE, student_t

RESAMPLES = 200
SEED = 42

# Blocks are made twice as long as long as that widens the mean by this factor, and this many are left.
_STILL_WIDER, _ENOUGH = 1.05, 8
# The largest correlation of neighbouring blocks that is believed.
_MOST_ALIKE = 0.9
# Of fewer blocks than this no interval is made: nothing shows how runs differ.
FEWEST_BLOCKS = 4


@dataclass(frozen=True)
class Blocks:
    """Blocks of rows: ``number``, int64[rows], counts from 0, those of one stratum in a row.

    ``stratum``: int64[blocks]; blocks are drawn from their own stratum, because the strata are not random.
    ``memory``: by what factor the variance of a mean is larger because neighbouring blocks are alike: a slow second
    makes a queue that outlasts it.
    """

    number: Int64s
    stratum: Int64s
    memory: float = 1.0

    @property
    def widening(self) -> float:
        """What intervals have to be widened by: Student's t of as many blocks as are independent; nan of too few."""
        degrees = len(self.stratum) - len(np.unique(self.stratum))
        if degrees < FEWEST_BLOCKS - 1:
            return float("nan")
        from scipy.special import ndtri  # heavy, and only intervals need it

        independent = max((degrees + 1) / self.memory - 1, 2.0)
        # A draw of b blocks scatters by (b - 1) / b of the variance.
        fewer = (degrees + 1) / degrees * self.memory
        return float(student_t(independent) / ndtri((1 + CONFIDENCE) / 2) * np.sqrt(fewer))


def row_blocks(stratum: Int64s, series: Sequence[Floats]) -> Blocks:
    """Blocks of rows in order of time: from single ones on they grow until the mean of no series scatters more.

    ``stratum``: int64[rows]; ``series``: float64[rows] each.
    """
    if len(stratum) == 0:
        return Blocks(np.zeros(0, np.int64), np.zeros(0, np.int64))
    length = 1
    blocks = _cut(stratum, length)
    while len(blocks.stratum) >= 2 * _ENOUGH:
        length *= 2
        longer = _cut(stratum, length)
        if len(longer.stratum) < _ENOUGH or all(
            _scatter(values, longer) <= _STILL_WIDER * _scatter(values, blocks) for values in series
        ):
            break
        blocks = longer
    return replace(blocks, memory=max((_memory(values, blocks) for values in series), default=1.0))


def _cut(stratum: Int64s, length: int) -> Blocks:
    """Blocks of about equal length in each stratum; a last piece is shared among the others."""
    number = np.zeros(len(stratum), np.int64)
    strata: list[int] = []
    for one in np.unique(stratum):
        rows = np.flatnonzero(stratum == one)
        since = rows - rows[0]
        pieces = max((int(since[-1]) + 1) // length, 1)
        of_stratum = np.unique(since * pieces // (int(since[-1]) + 1), return_inverse=True)[1]
        number[rows] = len(strata) + of_stratum
        strata += [int(one)] * (int(of_stratum.max()) + 1)
    return Blocks(number, np.array(strata, np.int64))


def _sums(values: Floats, blocks: Blocks) -> Floats:
    """float64[blocks]: sums of the values' deviations, around the mean of their stratum."""
    sums = np.bincount(blocks.number, values - values.mean())
    stratum = np.unique(blocks.stratum, return_inverse=True)[1]
    return np.asarray(sums - (np.bincount(stratum, sums) / np.bincount(stratum))[stratum], np.float64)


def _scatter(values: Floats, blocks: Blocks) -> float:
    """Standard error of the mean of the values, by how the sums of their blocks scatter."""
    sums, strata = _sums(values, blocks), len(np.unique(blocks.stratum))
    return float(np.sqrt((sums**2).sum() * len(sums) / max(len(sums) - strata, 1))) / len(values)


def _memory(values: Floats, blocks: Blocks) -> float:
    """(1 + r) / (1 - r), at least 1: r is the correlation of neighbouring blocks, without its bias (Kendall 1954)."""
    sums = _sums(values, blocks)
    square = float((sums**2).sum())
    if square == 0 or len(sums) < FEWEST_BLOCKS:
        return 1.0
    seen = float(sums[1:] @ sums[:-1]) / square
    alike = min(max(seen + (1 + 3 * seen) / len(sums), 0.0), _MOST_ALIKE)
    return (1 + alike) / (1 - alike)


def resampled(blocks: Blocks, resamples: int = RESAMPLES, seed: int = SEED) -> Iterator[Int64s]:
    """Rows of blocks drawn with replacement, each stratum as many as it has; about int64[rows] each.

    What is paired uses the same draw on both sides.
    """
    rng = np.random.default_rng(seed)
    order = np.argsort(blocks.number, kind="stable")
    size = np.bincount(blocks.number, minlength=len(blocks.stratum))
    first = np.cumsum(size) - size
    of_stratum = [np.flatnonzero(blocks.stratum == stratum) for stratum in np.unique(blocks.stratum)]
    for _ in range(resamples):
        drawn = np.concatenate([rows[rng.integers(0, len(rows), len(rows))] for rows in of_stratum])
        lengths = size[drawn]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        yield order[np.repeat(first[drawn], lengths) + within]


def drawn(statistic: Callable[[Int64s], float], blocks: Blocks, seed: int = SEED) -> Floats:
    """float64[RESAMPLES]: a statistic of drawn rows, as ``spread``."""
    return spread(np.array([statistic(rows) for rows in resampled(blocks, seed=seed)]), blocks)


def spread(values: Floats, blocks: Blocks) -> Floats:
    """float64[resamples, ...]: drawn values spread around their mean as far as few blocks ask for.

    Of too few, as far as two of them would ask for.
    """
    middle, widening = values.mean(axis=0), blocks.widening
    return np.asarray(middle + (_OF_TWO if np.isnan(widening) else widening) * (values - middle), np.float64)


# Student's t of one degree of freedom over the normal, at 97.5 %.
_OF_TWO = 12.71 / 1.96


def interval(values: Floats) -> tuple[float, float]:
    """The 95 % percentile interval of drawn values (float64[resamples]), nans left out; (nan, nan) of none."""
    finite = values[~np.isnan(values)]
    if len(finite) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(finite, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
