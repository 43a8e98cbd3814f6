"""A robust, non-negative line through step cycles: what the search through the simulator starts from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blis_replay.validate.calibration.cycle_rows import CycleRows, Floats

# Cycles scatter by 1-3 % of 8 to 20 ms; beyond this residual a row counts linearly, not
# squared, so that stalls do not bend the line.
_ROBUST_US = 200.0

# Intercept, and per prefill, decode and context token.
COEFFICIENTS = 4

# Correlation of two columns from which a fit cannot share a cost between them.
_ALIKE_FROM = 0.99


def fit_line(parts: Sequence[CycleRows]) -> tuple[Floats, float]:
    """Non-negative coefficients (us: intercept, per prefill, decode, context token) and MAPE in %.

    Least squares with a soft-l1 loss.  The context column takes part only where every
    part observed it.  Where all requests are alike, decodes and context are one column
    under two names; the context keeps the cost then, because a step reads the KV cache of
    its context whatever the model, and that is what carries over to other lengths.
    """
    from scipy.optimize import least_squares  # heavy, and only calibration needs it

    batch = np.vstack([part.batch for part in parts])
    cycle_us = np.concatenate([part.cycle_us for part in parts])
    columns = [0, 1, 2, 3] if all(part.context_known for part in parts) else [0, 1, 2]
    if 3 in columns and _alike(batch[:, 2], batch[:, 3]):
        columns.remove(2)
    # Columns of like size: context runs to 100,000 tokens, prefill to single ones.
    scale = np.maximum(np.abs(batch[:, columns]).mean(axis=0), 1e-9)
    scaled = batch[:, columns] / scale
    start = np.maximum(np.linalg.lstsq(scaled, cycle_us, rcond=None)[0], 1e-6)
    fit = least_squares(
        lambda x: scaled @ x - cycle_us, start, bounds=(0, np.inf), loss="soft_l1", f_scale=_ROBUST_US, x_scale="jac"
    )
    coefficients_us = np.zeros(COEFFICIENTS)
    coefficients_us[columns] = fit.x / scale
    mape = 100 * float(np.abs(batch @ coefficients_us / cycle_us - 1).mean())
    return coefficients_us, mape


def _alike(decode: Floats, context: Floats) -> bool:
    """Whether the context of a batch tells no more than its number of decodes."""
    constant = np.ptp(decode) == 0 or np.ptp(context) == 0
    return bool(constant or np.corrcoef(decode, context)[0, 1] > _ALIKE_FROM)
