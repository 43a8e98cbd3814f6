"""Least robust squares without derivatives, for residuals that a simulator gives, and how sure the result is.

A simulated run is a step function of its coefficients, so slopes are taken over changes that a run
shows (``probe``), and what the slopes propose is accepted only if the true objective falls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.compiled.arrays import Bools, Floats, Int64s
from blis_replay.validate.metrics.resampling import RESAMPLES, interval, resampled

Residuals = Callable[[Floats], Floats]

# Residuals come in units of what is wanted of a window; beyond three of those something else is going on.
_TAIL = 3.0

_MOST_ROUNDS = 15
_LEAST_GAIN = 3e-4
_DAMPING = 1e-2
_TRIES = 5
# A pattern of single coefficients, in probes, coarse to fine.
_PATTERN = (8.0, 2.0, 0.5)


@dataclass(frozen=True)
class Minimum:
    """Where the search ended.

    ``vector``; ``residuals`` there, float64[rows]; ``slopes``: float64[rows, coefficients], change of a
    residual per unit of a coefficient; ``cost``: their robust cost; ``evaluations`` made.
    """

    vector: Floats
    residuals: Floats
    slopes: Floats
    cost: float
    evaluations: int


def losses(residuals: Floats) -> Floats:
    """float64[rows]: Cauchy's loss, squares up to ``_TAIL`` and then ever flatter.

    A one-second stall costs little more than one of half a second, so what happens once at start-up
    (kernels compiled, caches filled) does not distort the cost of every step.
    """
    return np.asarray(_TAIL**2 * np.log1p((residuals / _TAIL) ** 2), np.float64)


def robust_cost(residuals: Floats) -> float:
    """The sum of ``losses``."""
    return float(losses(residuals).sum())


def weights(residuals: Floats) -> Floats:
    """float64[rows]: the weight of each row in the squares that have the gradient of ``losses``."""
    return np.asarray(1 / (1 + (residuals / _TAIL) ** 2), np.float64)


def minimise(residuals: Residuals, start: Floats, probe: Floats, free: Bools) -> Minimum:
    """The least robust cost with non-negative coefficients near ``start``.

    ``probe``: float64[coefficients], a change of each that the residuals show.  ``free``: which may move.
    Damped Gauss-Newton on slopes over probes, then a pattern of single coefficients.
    Deterministic; the cost never rises.
    """
    search = _Search(residuals, probe, np.flatnonzero(free))
    x, r = start, search.at(start)
    for size in _PATTERN:
        x, r = search.newton(x, r)
        x, r = search.pattern(x, r, size)
    return Minimum(x, r, search.slopes(x, r), robust_cost(r), search.evaluations)


class _Search:
    """The residual function, how often it was evaluated, and the moves."""

    def __init__(self, residuals: Residuals, probe: Floats, free: NDArray[np.intp]) -> None:
        self.residuals, self.probe, self.free, self.evaluations = residuals, probe, free, 0

    def at(self, x: Floats) -> Floats:
        self.evaluations += 1
        return self.residuals(x)

    def moved(self, x: Floats, by: Floats) -> Floats:
        moved = x.copy()
        moved[self.free] = np.maximum(x[self.free] + by, 0)
        return moved

    def slopes(self, x: Floats, r: Floats) -> Floats:
        columns = np.zeros((len(r), len(x)))
        for i in self.free:
            beside = x.copy()
            beside[i] += self.probe[i]
            columns[:, i] = (self.at(beside) - r) / self.probe[i]
        return columns

    def newton(self, x: Floats, r: Floats) -> tuple[Floats, Floats]:
        damping = _DAMPING
        for _ in range(_MOST_ROUNDS if len(self.free) else 0):
            before = robust_cost(r)
            x, r, damping = self._damped_step(x, r, damping)
            if before - robust_cost(r) <= _LEAST_GAIN * before:
                break
        return x, r

    def _damped_step(self, x: Floats, r: Floats, damping: float) -> tuple[Floats, Floats, float]:
        columns, w, cost = self.slopes(x, r)[:, self.free] * self.probe[self.free], weights(r), robust_cost(r)
        square, gradient = columns.T @ (w[:, None] * columns), columns.T @ (w * r)
        for _ in range(_TRIES):
            by = _bounded_step(square, gradient, damping, x[self.free] / self.probe[self.free])
            near = self.moved(x, by * self.probe[self.free])
            r_near = self.at(near)
            if robust_cost(r_near) < cost:
                return near, r_near, max(damping / 10, 1e-6)
            damping *= 10
        return x, r, damping

    def pattern(self, x: Floats, r: Floats, size: float) -> tuple[Floats, Floats]:
        for i in range(len(self.free)):
            for sign in (1.0, -1.0):
                by = np.zeros(len(self.free))
                by[i] = sign * size * self.probe[self.free[i]]
                near = self.moved(x, by)
                r_near = self.at(near)
                if robust_cost(r_near) < robust_cost(r):
                    x, r = near, r_near
                    break
        return x, r


def _bounded_step(square: Floats, gradient: Floats, damping: float, room: Floats) -> Floats:
    """The damped step, with coefficients that it would push below 0 held there."""
    damped = square + damping * np.diag(np.maximum(np.diag(square), 1e-12))
    open_ = np.ones(len(gradient), bool)
    step = np.zeros(len(gradient))
    for _ in range(len(gradient)):
        step = np.where(open_, 0.0, -room)
        chosen = np.ix_(open_, open_)
        pushed = gradient[open_] + damped[np.ix_(open_, ~open_)] @ step[~open_]
        step[open_] = -np.linalg.solve(damped[chosen], pushed)
        out = open_ & (step < -room)
        if not out.any():
            break
        open_ &= ~out
    return np.maximum(step, -room)


@dataclass(frozen=True)
class Confidence:
    """``low``, ``high``: float64[coefficients], bounds of 95 % by resampling windows; equal where held."""

    low: Floats
    high: Floats


def variance_inflation(design: Floats, free: Bools) -> Floats:
    """float64[coefficients]: how much wider each is known because the others are not; inf if nothing shows it.

    1 / (1 - R squared) of its column of ``design`` (float64[rows, coefficients]) on the other free ones,
    1 for what is held.
    """
    inflation = np.ones(design.shape[1])
    for i in np.flatnonzero(free):
        others = design[:, free & (np.arange(len(free)) != i)]
        column = design[:, i]
        # Around its mean: that a column is not 0 is what an intercept shows, not what it shows itself.
        size = float(column @ column) if np.ptp(column) == 0 else float(((column - column.mean()) ** 2).sum())
        rest = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
        left = float(rest @ rest)
        inflation[i] = np.inf if size == 0 or left <= 1e-12 * size else size / left
    return inflation


def confidence(minimum: Minimum, free: Bools, group: Int64s, seed: int) -> Confidence:
    """Bounds of 95 % of each free coefficient, by drawing windows with replacement.

    ``group``: int64[rows], rows that are drawn together (the E2E and the TTFT of a window).  Each draw
    moves the coefficients by one Gauss-Newton step from the minimum, so no run is simulated again.
    """
    chosen = np.flatnonzero(free)
    columns, w = minimum.slopes[:, chosen], weights(minimum.residuals)
    groups = int(group.max()) + 1
    draws = np.empty((RESAMPLES, len(chosen)))
    for i, drawn in enumerate(resampled(groups, RESAMPLES, seed)):
        times = np.bincount(drawn, minlength=groups)[group] * w
        step = np.linalg.lstsq(
            columns.T @ (times[:, None] * columns), columns.T @ (times * minimum.residuals), rcond=None
        )[0]
        draws[i] = minimum.vector[chosen] - step
    low, high = minimum.vector.copy(), minimum.vector.copy()
    for place, i in enumerate(chosen.tolist()):
        # The search ends a little beside where the linear step would take it; the spread is what counts.
        off = minimum.vector[i] - float(draws[:, place].mean())
        low[i], high[i] = (max(bound + off, 0.0) for bound in interval(draws[:, place]))
    return Confidence(low, high)
