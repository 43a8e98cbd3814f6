"""What steps coefficients were fitted on, and how many steps of a run lie outside of that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from blis_replay.compiled.arrays import Floats
from blis_replay.strict.document import FieldError, Number

Bounds = tuple[Number, Number]


@dataclass(frozen=True)
class StepRange:
    """Smallest and largest of the steps that coefficients were fitted on.

    ``decodes``: decode tokens, of steps that have some; ``context_tokens``: KV tokens that a mean decode attends to;
    ``prefill_tokens``: of steps that have some.  (0, 0) where there were none.
    """

    decodes: Bounds
    context_tokens: Bounds
    prefill_tokens: Bounds

    def __post_init__(self) -> None:
        for name, (low, high) in vars(self).items():
            if not 0 <= low <= high:
                raise FieldError(name, "does not ascend from 0 on", "write the smallest and the largest")


# A share of steps that changes no mean.
_FEW = 0.01
_WORDS = {"decodes": "decodes", "context_tokens": "tokens of mean context", "prefill_tokens": "prefill tokens"}


def range_of(steps: Iterable[np.ndarray]) -> StepRange | None:
    """The range of step tables (``SimResult.steps``); None where they have no step."""
    quantities = [_quantities(table) for table in steps]
    if not any(len(values) for found in quantities for values in found.values()):
        return None
    bounds = {}
    for name in _WORDS:
        values = np.concatenate([found[name] for found in quantities])
        values = values[values > 0]
        bounds[name] = (float(np.floor(values.min())), float(np.ceil(values.max()))) if len(values) else (0.0, 0.0)
    return StepRange(**bounds)


def outside(steps: np.ndarray, fitted: StepRange) -> str:
    """How many steps of a run lie outside, in words and by what; empty if fewer than one in a hundred."""
    beyond, parts = np.zeros(len(steps), np.bool_), []
    for name, values in _quantities(steps).items():
        low, high = getattr(fitted, name)
        this = (values > 0) & ((values < low) | (values > high))
        beyond |= this
        if this.mean() >= _FEW:
            reached = f"{values[this].min():,.0f} to {values[this].max():,.0f}"
            share = f"{100 * this.mean():.0f} %"
            parts.append(f"{share} by {reached} {_WORDS[name]}, fitted on {low:,.0f} to {high:,.0f}")
    if not parts:
        return ""
    share = f"{100 * beyond.mean():.0f} %"
    return f"{share} of steps lie outside of what the coefficients were fitted on ({'; '.join(parts)})"


def _quantities(steps: np.ndarray) -> dict[str, Floats]:
    decodes, context = steps["decode_tokens"].astype(np.float64), steps["context_tokens"].astype(np.float64)
    mean_context = np.divide(context, decodes, out=np.zeros(len(steps)), where=decodes > 0)
    prefill = steps["prefill_tokens"].astype(np.float64)
    return {"decodes": decodes, "context_tokens": mean_context, "prefill_tokens": prefill}
