"""Exact Shapley values over sets of substitutions."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from math import factorial

import numpy as np
from numpy.typing import NDArray

Subset = frozenset[int]
Floats = NDArray[np.float64]


def all_subsets(players: int) -> list[Subset]:
    """All subsets of ``range(players)``, the empty one first and the whole one last."""
    return [frozenset(chosen) for size in range(players + 1) for chosen in combinations(range(players), size)]


def shapley_values(players: int, value: Mapping[Subset, Floats]) -> Floats:
    """float64[players, ...]: each player's share of ``value[all] - value[none]``; the shares sum to it exactly.

    ``value``: of every subset, arrays of one shape.  A share is the mean, over all orders in which the
    players can join, of what the value changes when this one does (Shapley 1953):
    the sum over S without i of |S|! (n - |S| - 1)! / n! * (value[S + i] - value[S]).
    """
    shares = np.zeros((players, *value[frozenset()].shape))
    for player in range(players):
        for subset in all_subsets(players):
            if player not in subset:
                weight = factorial(len(subset)) * factorial(players - len(subset) - 1) / factorial(players)
                shares[player] += weight * (value[subset | {player}] - value[subset])
    return shares
