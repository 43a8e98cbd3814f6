"""The derivative-free search: on problems whose minimum is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.validate.calibration.minimise import (
    confidence,
    losses,
    minimise,
    robust_cost,
    variance_inflation,
    weights,
)

DESIGN = np.column_stack([np.ones(60), np.tile(np.arange(6.0), 10), np.repeat(np.arange(10.0), 6) ** 2 / 10])
ALL = np.ones(3, bool)
PROBE = np.full(3, 0.01)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.1, 50), min_size=3, max_size=3), st.lists(st.floats(0, 50), min_size=3, max_size=3))
def test_a_line_is_found_from_anywhere(truth: list[float], start: list[float]) -> None:
    target = DESIGN @ np.array(truth)
    found = minimise(lambda x: 1e-2 * (DESIGN @ x - target), np.array(start), PROBE, ALL)
    assert found.vector == pytest.approx(truth, abs=0.05)


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20))
def test_the_loss_is_square_near_zero_and_flat_far_out(residuals: list[float]) -> None:
    """9 log(1 + r^2 / 9): about r^2 at 0.01, even, and 1000 costs less than 5 times 10."""
    r = np.array(residuals)
    assert (losses(r) == losses(-r)).all()
    assert (losses(r) <= r * r + 1e-9).all()
    assert ((weights(r) > 0) & (weights(r) <= 1)).all()
    assert losses(np.array([0.01]))[0] == pytest.approx(1e-4, rel=1e-4)
    assert losses(np.array([1000.0]))[0] < 5 * losses(np.array([10.0]))[0]


def test_a_coefficient_that_would_be_negative_stops_at_zero() -> None:
    target = 10 - DESIGN[:, 1]
    found = minimise(lambda x: DESIGN @ x - target, np.array([5.0, 5.0, 5.0]), PROBE, ALL)
    assert (found.vector >= 0).all()
    assert found.vector[1] == pytest.approx(0, abs=1e-6)


def test_what_is_held_does_not_move_and_the_cost_never_rises() -> None:
    target = DESIGN @ np.array([3.0, 2.0, 1.0])
    start = np.array([1.0, 7.0, 1.0])
    found = minimise(lambda x: DESIGN @ x - target, start, PROBE, np.array([True, False, True]))
    assert found.vector[1] == 7.0
    assert found.cost <= robust_cost(DESIGN @ start - target)


def test_steps_of_a_simulator_do_not_stop_it() -> None:
    """Residuals rounded to 0.05 have no derivative; slopes over a probe of 0.5 see past that."""
    target = DESIGN @ np.array([3.0, 2.0, 1.0])
    found = minimise(
        lambda x: np.round((DESIGN @ x - target) / 0.05) * 0.05, np.array([1.0, 1.0, 3.0]), np.full(3, 0.5), ALL
    )
    assert found.vector == pytest.approx([3, 2, 1], abs=0.1)


def test_variance_inflation_by_hand() -> None:
    """Columns at right angles: 1.  One that is twice another: without end.  y = x + e, r^2 = 0.8: 1 / 0.2 = 5."""
    x = np.array([-1.0, -1.0, 1.0, 1.0])
    e = np.array([-1.0, 1.0, -1.0, 1.0])
    free = np.ones(2, bool)
    assert variance_inflation(np.column_stack([x, e]), free) == pytest.approx([1, 1])
    assert np.isinf(variance_inflation(np.column_stack([x, 2 * x]), free)).all()
    assert variance_inflation(np.column_stack([x, x + 0.5 * e]), free) == pytest.approx([5, 5])
    assert variance_inflation(np.column_stack([x, 2 * x]), np.array([True, False])) == pytest.approx([1, 1])


def test_bounds_are_those_of_least_squares() -> None:
    """60 rows with noise of 0.1: 95 % bounds are 2 * 1.96 standard errors apart, give or take the draws."""
    target = DESIGN @ np.array([3.0, 2.0, 1.0]) + 0.1 * np.random.default_rng(3).normal(size=60)
    found = minimise(lambda x: DESIGN @ x - target, np.array([1.0, 1.0, 1.0]), PROBE, ALL)
    bounds = confidence(found, ALL, np.arange(60), seed=1)
    standard_error = 0.1 * np.sqrt(np.diag(np.linalg.inv(DESIGN.T @ DESIGN)))
    assert (bounds.low <= found.vector).all()
    assert (found.vector <= bounds.high).all()
    assert bounds.high - bounds.low == pytest.approx(2 * 1.96 * standard_error, rel=0.35)
