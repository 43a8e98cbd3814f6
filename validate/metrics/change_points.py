"""Where the mean of a series changes: E-divisive, as performance histories use it.

A series is split where the energy distance between the values before and a stretch after is largest, if a permutation
test finds it significant.  Each part is then split again (Matteson and James 2014, JASA 109:334-345; for CI Daly et
al. 2020, ICPE, and Fleming et al. 2023, ICPE, "Hunter").  Values are assumed independent: autocorrelated noise yields
false changes.  `blis-replay verify --changes` measures power,
delay and false alarms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from blis_replay.base.arrays import Floats

# Permutations, and how many may split as clearly: a false alarm in 1 % of series without a change.
PERMUTATIONS, MAX_AS_CLEAR = 199, 1
SEED = 48
# Values on either side of a split, without which no order is rare enough.
FEWEST = 2
# A simulator counts as noiseless from this number of values on, if this share of them equals the one before.  Chosen: a
# simulator that gives one of two answers by chance passes in 2 % of series of ten.
_FEWEST_EXACT, _MOSTLY_EQUAL = 8, 0.8
_EQUAL_WITHIN = 1e-9  # of a relative error: below what a history keeps
# The gate's margin: a smaller change of a relative error is not reported.
MIN_CHANGE = 0.005
# -2 log of the likelihood ratio that the true place of a change in mean exceeds in 5 % (Eo and Morley 2015,
# Quantitative Economics 6:463-497: P(LR <= x) = (1 - exp(-x / 2))^2).
_PLACE = 7.35


@dataclass(frozen=True)
class Change:
    """A change of the mean; places count from 0.

    ``at``: the first value behind it; ``earliest``, ``latest``: where that may be, at 95 %.  ``before``, ``after``:
    means up to the neighbouring changes.
    """

    at: int
    earliest: int
    latest: int
    before: float
    after: float


def changes(values: Sequence[float] | Floats, least: float = MIN_CHANGE) -> list[Change]:
    """The changes of a series (float64[n], in order of time) by at least ``least``; the same for the same values."""
    series = np.asarray(values, np.float64)
    places = sorted(_splits(series, 0, np.random.default_rng(SEED)))
    while places:
        bounds = [0, *places, len(series)]
        means = [float(series[a:b].mean()) for a, b in pairwise(bounds)]
        sizes = [abs(after - before) for before, after in pairwise(means)]
        smallest = int(np.argmin(sizes))
        if sizes[smallest] >= least:
            return [
                Change(at, *_between(series, bounds[i], at, bounds[i + 2]), means[i], means[i + 1])
                for i, at in enumerate(places)
            ]
        del places[smallest]
    return []


def _splits(values: Floats, first: int, rng: np.random.Generator) -> Iterator[int]:
    """Places of splits, ``first`` being that of the first value."""
    other = np.abs(np.diff(values)) > _EQUAL_WITHIN
    if len(values) >= _FEWEST_EXACT and other.mean() <= 1 - _MOSTLY_EQUAL:
        yield from (first + 1 + int(at) for at in np.flatnonzero(other))
    elif at := _best_split(values, rng):
        yield first + at
        yield from _splits(values[:at], first, rng)
        yield from _splits(values[at:], first + at, rng)


def _best_split(values: Floats, rng: np.random.Generator) -> int:
    """Where a split is clearest, if it is clear enough; 0 if not."""
    if len(values) < 2 * FEWEST:
        return 0
    apart = np.abs(values[:, np.newaxis] - values)
    weights = _weights(len(values))
    energy = _energies(apart, weights)
    most, as_clear = float(energy.max()), 0
    if most <= 0:
        return 0
    for _ in range(PERMUTATIONS):
        order = rng.permutation(len(values))
        as_clear += bool(_energies(apart[np.ix_(order, order)], weights).max() >= most * (1 - 1e-12))
        if as_clear > MAX_AS_CLEAR:
            return 0
    return FEWEST + int(np.argmax(energy.max(axis=1)))


def _energies(apart: Floats, weights: tuple[Floats, Floats, Floats]) -> Floats:
    """float64[splits, ends]: energy distance of the values before a split and those from it to an end behind it.

    ``apart``: how far any two values are apart.  The end makes a fault visible that was fixed later.
    """
    sums = apart.cumsum(axis=0).cumsum(axis=1)
    own = np.diagonal(sums)
    of_sums, of_left, of_end = weights
    splits, ends = slice(FEWEST - 1, len(apart) - FEWEST), slice(2 * FEWEST - 1, None)
    energy = of_sums * sums[splits, ends] - of_left * own[splits, np.newaxis] - of_end * own[ends]
    return np.asarray(energy, np.float64)


def _weights(n: int) -> tuple[Floats, Floats, Floats]:
    """float64[splits, ends] each: of the sums of distances up to split and end, up to the split, and up to the end.

    With l values before the split and r behind it, the energy is l r / (l + r) times twice the mean distance across
    less the mean distances within either (Matteson and James 2014, equation 5).
    """
    left = np.arange(FEWEST, n - FEWEST + 1)[:, np.newaxis]
    right = np.arange(2 * FEWEST, n + 1) - left
    possible = right >= FEWEST
    right = np.where(possible, right, FEWEST)
    across, of_left, of_right = 2.0, 2 * right / (left - 1), 2 * left / (right - 1)
    weights = across + of_right, across + (of_left + of_right) / 2, of_right / 2
    first, second, third = (np.where(possible, one / (left + right), 0.0) for one in weights)
    return first, second, third


def _between(values: Floats, begin: int, at: int, end: int) -> tuple[int, int]:
    """The earliest and the latest place of a change at 95 %: splits of normal values that are nearly as likely."""
    part = values[begin:end]
    n, sums, squares = len(part), np.cumsum(part), float((part**2).sum())
    left = np.arange(1, n)
    left_over = squares - sums[:-1] ** 2 / left - (sums[-1] - sums[:-1]) ** 2 / (n - left)
    least = max(left_over[at - begin - 1], 0.0)
    likely = begin + 1 + np.flatnonzero(left_over <= least * np.exp(_PLACE / n) + 1e-12)
    return min(int(likely[0]), at), max(int(likely[-1]), at)
