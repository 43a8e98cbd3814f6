"""Means, variances and correlations of rows that come some at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """``count`` rows of k quantities: their ``means`` (float64[k]), and the sums of ``products`` of what they are off
    their means (float64[k, k])."""

    count: int
    means: Floats
    products: Floats

    def deviation(self, quantity: int) -> float:
        """The standard deviation of a quantity, 0 without rows."""
        return math.sqrt(float(self.products[quantity, quantity]) / max(self.count, 1))

    def correlation(self) -> float | None:
        """Pearson's of the first two quantities; None where one of them is the same in all rows."""
        scale = math.sqrt(float(self.products[0, 0])) * math.sqrt(float(self.products[1, 1]))
        return float(self.products[0, 1]) / scale if scale else None


def moments_of(parts: Iterable[Floats], quantities: int) -> Moments:
    """Of all columns of all parts (float64[quantities, n]).

    Chan, Golub and LeVeque 1979: the products of two parts add up, with those of the difference of their means.
    """
    count, means, products = 0, np.zeros(quantities), np.zeros((quantities, quantities))
    for part in parts:
        added = part.shape[1]
        if not added:
            continue
        off = part - part.mean(axis=1, keepdims=True)
        further = part.mean(axis=1) - means
        products = products + off @ off.T + np.outer(further, further) * (count * added / (count + added))
        means = means + further * (added / (count + added))
        count += added
    return Moments(count, means, products)
