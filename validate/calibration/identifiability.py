"""Which coefficients a set of residuals determines, and how sure they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.trace import Int64s
from blis_replay.validate.bootstrap import RESAMPLES, interval, resampled
from blis_replay.validate.calibration.minimise import Floats, Minimum, weights

# Variance inflation of a coefficient from which the others can stand in for it: 100 is a column of
# which they explain 99 %.
ALIKE_FROM = 100.0


@dataclass(frozen=True)
class Confidence:
    """``low``, ``high``: float64[coefficients], bounds of 95 % by resampling windows; equal where held."""

    low: Floats
    high: Floats


def variance_inflation(design: Floats, free: NDArray[np.bool_]) -> Floats:
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


def confidence(minimum: Minimum, free: NDArray[np.bool_], group: Int64s, seed: int) -> Confidence:
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
