"""How long a batch takes by gradient-boosted trees, from two arrays.

``whole``: trees, then for each its root; then for each node its feature (-1: a leaf), left and right child.
``real``: for each node its threshold, of a leaf its value; then ``FEATURES`` places for the features.  The trees'
values add up to the logarithm of the time in us.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.state import LONGEST_STEP_US, Int64s

Floats = NDArray[np.float64]


@compiled
def trees_us(whole: Int64s, real: Floats, x: Floats) -> int:
    """Exponential of the sum of the trees at features x, in order; truncated, at least 1 us."""
    count = whole[0]
    nodes = (len(whole) - 1 - count) // 3
    feature = 1 + count
    left, right = feature + nodes, feature + 2 * nodes
    total = 0.0
    for tree in range(count):
        node = whole[1 + tree]
        while whole[feature + node] >= 0:
            below = x[whole[feature + node]] <= real[node]
            node = whole[left + node] if below else whole[right + node]
        total += real[node]
    return int(min(max(math.exp(total), 1.0), LONGEST_STEP_US))
