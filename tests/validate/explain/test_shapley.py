"""Shapley values against hand calculations and their axioms."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.base.arrays import Floats
from blis_replay.validate.explain.attribute import Subset, all_subsets, shapley_weights


def shapley_values(players: int, value: Mapping[Subset, Floats]) -> Floats:
    return np.asarray(shapley_weights(players) @ np.stack([value[one] for one in all_subsets(players)]), np.float64)


def test_the_glove_game() -> None:
    """Two left gloves and a right one, a pair is worth 1: 1/6, 1/6 and 2/3 (the textbook example)."""
    value = {s: np.array([1.0 if 2 in s and len(s) > 1 else 0.0]) for s in all_subsets(3)}
    assert shapley_values(3, value)[:, 0] == pytest.approx([1 / 6, 1 / 6, 2 / 3])


def test_two_players_share_what_only_both_achieve() -> None:
    """v({0}) = 1, v({1}) = 2, v({0, 1}) = 5: the two that only both achieve are halved, 2 and 3."""
    value = {frozenset(): 0.0, frozenset({0}): 1.0, frozenset({1}): 2.0, frozenset({0, 1}): 5.0}
    assert shapley_values(2, {s: np.array([v]) for s, v in value.items()})[:, 0] == pytest.approx([2.0, 3.0])


@pytest.mark.slow
@given(st.integers(0, 4), st.randoms(use_true_random=False))
def test_shares_sum_to_the_whole_and_a_player_without_effect_has_none(players: int, random: object) -> None:
    """Efficiency and the null player: the last one changes nothing."""
    drawn = {s: np.array([random.uniform(-9, 9), random.uniform(-9, 9)]) for s in all_subsets(players)}  # type: ignore[attr-defined]
    value = {s: drawn[s - {players}] for s in all_subsets(players + 1)}
    shares = shapley_values(players + 1, value)
    assert shares.sum(axis=0) == pytest.approx(value[frozenset(range(players + 1))] - value[frozenset()])
    assert shares[players] == pytest.approx([0.0, 0.0])
