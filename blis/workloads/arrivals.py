"""Arrival processes: when a client sends.

Each gives gaps of one mean; they differ in how much these vary.  CV is standard deviation over mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Poisson:
    """Exponential gaps: CV 1."""


@dataclass(frozen=True)
class Constant:
    """Equal gaps: CV 0."""


@dataclass(frozen=True)
class Gamma:
    """Gamma gaps of shape ``1 / cv**2``: bursts for a CV above 1."""

    cv: float


@dataclass(frozen=True)
class Weibull:
    """Weibull gaps; the shape is the one that has this CV."""

    cv: float


@dataclass(frozen=True)
class OnOff:
    """Poisson while on, silent while off, in turn, beginning on; the rate while on makes up for the silence."""

    on_s: float
    off_s: float


ArrivalProcess = Poisson | Constant | Gamma | Weibull | OnOff


def arrival_times_us(process: ArrivalProcess, rate_per_s: float, count: int, random: np.random.Generator) -> Floats:
    """float64[count]: ascending times, us, at this rate on average; the first one a gap after 0.

    The first k of them are the same whatever ``count`` is.
    """
    mean_us = 1e6 / rate_per_s
    if isinstance(process, OnOff):
        share_on = process.on_s / (process.on_s + process.off_s)
        busy_us = np.cumsum(random.exponential(mean_us * share_on, count))
        return busy_us + np.floor(busy_us / (process.on_s * 1e6)) * (process.off_s * 1e6)
    return np.cumsum(_gaps_us(process, mean_us, count, random))


def weibull_shape(cv: float) -> float:
    """The shape k of a Weibull distribution of this CV: ``1 + cv**2 = G(1 + 2/k) / G(1 + 1/k)**2``, by bisection."""
    low, high = 0.05, 1_000.0
    for _ in range(200):
        middle = (low * high) ** 0.5
        if lgamma(1 + 2 / middle) - 2 * lgamma(1 + 1 / middle) > np.log1p(cv * cv):
            low = middle
        else:
            high = middle
    return low


def _gaps_us(process: ArrivalProcess, mean_us: float, count: int, random: np.random.Generator) -> Floats:
    if isinstance(process, Gamma):
        return random.gamma(process.cv**-2, mean_us * process.cv**2, count)
    if isinstance(process, Weibull):
        shape = weibull_shape(process.cv)
        return random.weibull(shape, count) * (mean_us / exp(lgamma(1 + 1 / shape)))
    if isinstance(process, Constant):
        return np.full(count, mean_us)
    return random.exponential(mean_us, count)
