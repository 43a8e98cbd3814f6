"""Confidence intervals by resampling requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 200
CONFIDENCE = 0.95
SEED = 42


def resampled(requests: int, resamples: int = RESAMPLES, seed: int = SEED) -> Iterator[NDArray[np.int64]]:
    """Draws with replacement, int64[requests] each; what is paired uses the same draw on both sides."""
    rng = np.random.default_rng(seed)
    for _ in range(resamples):
        yield rng.integers(0, requests, requests)


def interval(values: NDArray[np.float64], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The percentile interval of resampled values (float64[resamples]), nans left out; (nan, nan) of none."""
    finite = values[~np.isnan(values)]
    if len(finite) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(finite, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
