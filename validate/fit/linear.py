"""The linear engine: costs of a batch, none negative, by weighted robust least squares over rows of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from blis_replay.base.arrays import Floats

# Most rounds of new weights; soft-l1 weights of 10,000 cycles settle in some ten.
_ROUNDS = 50
# Largest change of a weight, as a share of the largest weight, after which they have settled.
_SETTLED = 1e-4


class Prior(NamedTuple):
    """What a coefficient is believed to be before any recording, its standard deviation, and why."""

    value: float
    spread: float
    why: str


def fit_costs(
    rows: Floats, target: Floats, weights: Callable[[Floats | None], Floats], priors: Sequence[Prior] = ()
) -> tuple[Floats, Floats]:
    """The costs that make the least weighted squares of ``rows`` (float64[rows, columns]) less ``target``.

    With them float64[<= columns, columns], a few rows that have the same weighted squares.

    ``weights``: float64[rows], the weight of each square, by what the costs so far make of the rows (None at first);
    asked until they settle.
    """
    from scipy.optimize import nnls  # heavy, and only calibration needs it

    scale = np.maximum(np.abs(rows).max(axis=0, initial=0), 1e-12)  # columns of one size, for the solver
    believed = np.array([(prior.value / prior.spread, 1 / prior.spread) for prior in priors]).reshape(-1, 2)
    weight, costs, system = weights(None), np.zeros(len(scale)), np.zeros((0, len(scale)))
    for _ in range(_ROUNDS):
        root = np.sqrt(weight)[:, None]
        # As few rows as there are columns, with the same squares.
        triangle: Floats = np.asarray(np.linalg.qr(np.column_stack([rows / scale, target]) * root, mode="r"))
        system = triangle[:, :-1]
        stacked = np.vstack([system, np.diag(believed[:, 1]) / scale]) if len(believed) else system
        costs = nnls(stacked, np.concatenate([triangle[:, -1], believed[:, 0]]))[0] / scale
        before, weight = weight, weights(rows @ costs)
        if np.abs(weight - before).max() <= _SETTLED * before.max():
            break
    return np.asarray(costs, np.float64), system * scale
