"""Distributions of token counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.trace import Int64s

MOST_TOKENS = 10_000_000


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    value: int


@dataclass(frozen=True)
class Uniform:
    """Every whole number between two, these included, with the same probability."""

    min: int
    max: int


@dataclass(frozen=True)
class Normal:
    """Normal, clipped to ``min`` and ``max`` and rounded (``gaussian`` of blis-semantics, section 5)."""

    mean: float
    deviation: float
    min: int = 1
    max: int = MOST_TOKENS


@dataclass(frozen=True)
class Lognormal:
    """Lognormal of this mean and standard deviation, clipped to ``min`` and ``max`` and rounded."""

    mean: float
    deviation: float
    min: int = 1
    max: int = MOST_TOKENS


@dataclass(frozen=True)
class Exponential:
    """Exponential of this mean, clipped to ``min`` and ``max`` and rounded."""

    mean: float
    min: int = 1
    max: int = MOST_TOKENS


@dataclass(frozen=True)
class Empirical:
    """One of ``values`` each, with probabilities in proportion to ``weights``."""

    values: tuple[int, ...]
    weights: tuple[float, ...]


LengthDistribution = Fixed | Uniform | Normal | Lognormal | Exponential | Empirical


def draw_lengths(distribution: LengthDistribution, count: int, random: np.random.Generator) -> Int64s:
    """int64[count]: tokens, 1 at least; the first k of them are the same whatever ``count`` is."""
    if isinstance(distribution, Fixed):
        return np.full(count, distribution.value, np.int64)
    if isinstance(distribution, Uniform):
        # From one real number each, so that a longer draw begins like a shorter one.
        span = distribution.max - distribution.min + 1
        return distribution.min + np.floor(random.random(count) * span).astype(np.int64)
    if isinstance(distribution, Empirical):
        edges = np.cumsum(distribution.weights)
        places = np.searchsorted(edges, random.random(count) * edges[-1], side="right")
        chosen: Int64s = np.array(distribution.values, np.int64)[np.minimum(places, len(edges) - 1)]
        return chosen
    if isinstance(distribution, Normal):
        drawn = random.normal(distribution.mean, distribution.deviation, count)
    elif isinstance(distribution, Lognormal):
        variance = np.log1p((distribution.deviation / distribution.mean) ** 2)
        drawn = random.lognormal(np.log(distribution.mean) - variance / 2, np.sqrt(variance), count)
    else:
        drawn = random.exponential(distribution.mean, count)
    tokens: Int64s = np.rint(np.clip(drawn, distribution.min, distribution.max)).astype(np.int64)
    return tokens
