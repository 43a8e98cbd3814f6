"""The derivative-free search: on problems whose minimum is known."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.validate.fit.minimise import (
    FINE,
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
KIND = np.zeros(60, np.int64)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.1, 50), min_size=3, max_size=3), st.lists(st.floats(0, 50), min_size=3, max_size=3))
def test_a_line_is_found_from_anywhere(truth: list[float], start: list[float]) -> None:
    target = DESIGN @ np.array(truth)
    found = minimise(lambda x: 1e-2 * (DESIGN @ x - target), [np.array(start)], PROBE, ALL, KIND, FINE)
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
    found = minimise(lambda x: DESIGN @ x - target, [np.array([5.0, 5.0, 5.0])], PROBE, ALL, KIND, FINE)
    assert (found.vector >= 0).all()
    assert found.vector[1] == pytest.approx(0, abs=1e-6)


def test_what_no_residual_shows_stays_where_it_was() -> None:
    """The third coefficient is that of steps which never run; a longer and longer probe would end at 10^18."""
    x = np.arange(1.0, 9.0)

    def residuals(v: np.ndarray) -> np.ndarray:
        return v[0] + v[1] * x - (3 + 2 * x)

    found = minimise(residuals, [np.array([1.0, 1.0, 7.0])], np.ones(3), np.ones(3, bool), np.zeros(8, np.int64), 0.1)
    assert found.vector == pytest.approx([3, 2, 7], abs=1e-2)
    assert found.vector[2] == 7
    assert not found.slopes[:, :, 2].any()


def test_what_is_held_does_not_move_and_the_cost_never_rises() -> None:
    target = DESIGN @ np.array([3.0, 2.0, 1.0])
    start = np.array([1.0, 7.0, 1.0])
    found = minimise(lambda x: DESIGN @ x - target, [start], PROBE, np.array([True, False, True]), KIND, FINE)
    assert found.vector[1] == 7.0
    assert robust_cost(found.residuals / found.scales) <= robust_cost(DESIGN @ start - target)


def test_steps_of_a_simulator_do_not_stop_it() -> None:
    """Residuals rounded to 0.05 have no derivative; slopes over a probe of 0.5 see past that."""
    target = DESIGN @ np.array([3.0, 2.0, 1.0])
    found = minimise(
        lambda x: np.round((DESIGN @ x - target) / 0.05) * 0.05,
        [np.array([1.0, 1.0, 3.0])],
        *(np.full(3, 0.5), ALL, KIND, FINE),
    )
    assert found.vector == pytest.approx([3, 2, 1], abs=0.1)


def test_last_digits_of_linear_algebra_do_not_move_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor: solutions differ by 1e-13 of their size.  A run has other chance for any other bit of ``x``.

    Before trial points were rounded the releases of two processors differed by a fifth of their intervals.
    """
    target = DESIGN @ np.array([3.0, 2.0, 1.0])

    def residuals(x: np.ndarray) -> np.ndarray:
        chance = np.random.default_rng(zlib.crc32(x.tobytes())).normal(0, 0.2, len(target))
        return DESIGN @ x - target + chance

    def found() -> np.ndarray:
        return minimise(residuals, [np.array([1.0, 1.0, 3.0])], np.full(3, 0.5), ALL, KIND, FINE).vector

    here = found()
    assert here == pytest.approx([3, 2, 1], abs=0.1)
    solve, lstsq, digits = np.linalg.solve, np.linalg.lstsq, 1 + 1e-13
    monkeypatch.setattr(np.linalg, "solve", lambda a, b: solve(a, b) * digits)
    monkeypatch.setattr(np.linalg, "lstsq", lambda a, b, rcond: (lstsq(a, b, rcond)[0] * digits,))
    assert found().tolist() == here.tolist()


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
    found = minimise(lambda x: DESIGN @ x - target, [np.array([1.0, 1.0, 1.0])], PROBE, ALL, KIND, FINE)
    bounds = confidence(found, ALL, np.arange(60), np.zeros(60, np.int64), seed=1)
    standard_error = 0.1 * np.sqrt(np.diag(np.linalg.inv(DESIGN.T @ DESIGN)))
    assert (bounds.low <= found.vector).all()
    assert (found.vector <= bounds.high).all()
    assert bounds.high - bounds.low == pytest.approx(2 * 1.96 * standard_error, rel=0.35)


def test_what_is_held_has_no_bounds() -> None:
    """Of nothing that is free there is no square whose condition could be asked."""
    none, held = np.zeros(3, bool), np.array([1.0, 2.0, 3.0])
    found = minimise(lambda x: DESIGN @ x - 1.0, [held], PROBE, none, KIND, FINE)
    bounds = confidence(found, none, np.arange(60), np.zeros(60, np.int64), seed=1, cycles=KIND > 0)
    assert (bounds.low == held).all()
    assert (bounds.high == held).all()


def test_a_kind_that_is_known_better_counts_for_more() -> None:
    """E2E scatters by 0.1, TTFT by 1: weighed alike, the line through both would be as uncertain as the worse of them.

    Standard error of the slope from the good half alone: 0.1 / sqrt(sum of squares of its 30 values); 3 of those.
    """
    rng = np.random.default_rng(5)
    x = np.linspace(1, 10, 30)
    design, kinds = np.concatenate([x, x]), np.repeat([1, 2], 30)
    target = 2 * design + np.concatenate([0.1 * rng.normal(size=30), 1.0 * rng.normal(size=30)])
    start, probe, free = np.array([1.0]), np.array([0.1]), np.ones(1, bool)
    found = minimise(lambda at: design * at[0] - target, [start], probe, free, kinds, FINE)
    assert found.vector[0] == pytest.approx(2.0, abs=3 * 0.1 / np.sqrt((x**2).sum()))
    assert found.scales[0] == pytest.approx(0.1, rel=0.5)


def test_of_several_starts_the_lowest_end_is_taken() -> None:
    """Two valleys, at 2 and at 8, the second deeper: a search from 1 ends in the first, one from 9 in the second."""

    def residuals(at: np.ndarray) -> np.ndarray:
        return np.full(8, min(abs(at[0] - 2) + 0.5, abs(at[0] - 8)))

    for starts in ([1.0, 9.0], [9.0, 1.0]):
        begun = [np.array([start]) for start in starts]
        found = minimise(residuals, begun, np.array([0.1]), np.ones(1, bool), np.zeros(8, np.int64), FINE)
        assert found.vector[0] == pytest.approx(8.0, abs=0.1)
