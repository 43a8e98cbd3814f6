"""Many points as a band: the middle and the 80 % around it, in bins along the x axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.trace import Int64s

Floats = NDArray[np.float64]

_MOST_BINS = 20
_SHARES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Band:
    """float64[k] each: median x of a bin, and p10, p50 and p90 of y in it; ``count`` int64[k] points."""

    x: Floats
    low: Floats
    middle: Floats
    high: Floats
    count: Int64s


def band(x: NDArray[np.int64], y: NDArray[np.int64] | Floats) -> Band:
    """Points (x[i], y[i]) in at most 20 bins that hold about as many points each; at least one point."""
    edges = np.unique(np.quantile(x, np.linspace(0, 1, _MOST_BINS + 1)))
    return _banded(x, y, np.searchsorted(edges[1:-1], x, side="right"))


def band_by(edges: Floats, x: NDArray[np.int64], y: NDArray[np.int64] | Floats) -> Band:
    """The same in bins between given edges (float64[k + 1]); bins without points are left out, as are points beyond."""
    place = np.searchsorted(edges, x, side="right") - 1
    inside = (place >= 0) & (place < len(edges) - 1)
    return _banded(x[inside], y[inside], place[inside])


def depth_edges(deepest: int) -> Floats:
    """Edges of bins of depths from 0 on: single ones up to 4, then two for each doubling."""
    edges = [0, 1, 2, 3, 4]
    while edges[-1] <= deepest:
        edges += [edges[-1] * 3 // 2, edges[-1] * 2]
    return np.array(edges, np.float64)


def _banded(x: NDArray[np.int64], y: NDArray[np.int64] | Floats, place: NDArray[np.intp]) -> Band:
    order = np.argsort(place, kind="stable")
    bins, first = np.unique(place[order], return_index=True)
    parts = np.split(order, first[1:]) if len(bins) else []
    quantiles = np.array([np.quantile(y[part], _SHARES) for part in parts]).reshape(-1, 3)
    middles = np.array([np.median(x[part]) for part in parts])
    low, middle, high = quantiles.T
    return Band(middles, low, middle, high, np.array([len(part) for part in parts], np.int64))


def waiting_at_arrival(arrival_us: Int64s, first_token_us: Int64s) -> Int64s:
    """int64[n]: how many requests sent before each (``arrival_us``, ascending) had no first token when it was sent."""
    done = np.searchsorted(np.sort(first_token_us), arrival_us, side="right")
    return (np.arange(len(arrival_us)) - done).astype(np.int64)
