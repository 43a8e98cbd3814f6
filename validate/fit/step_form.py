"""Forms of the step time that a search fits: a line in the tokens of a batch, and lines that bend with its decodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.blis.latency.models import Latency, LatencyModel, Lifecycle, Regime, RegimeModel

# Places in the vector of a form, in us: costs of a step and its tokens, and delays around the engine.
INTERCEPT, PREFILL, CONTEXT, PRE_QUEUE, FIRST_TOKEN, DECODE = range(6)
_LINE = (
    *("intercept", "per_prefill_token", "per_context_token", "pre_queue", "first_token_per_decode"),
    *("per_decode_token",),
)

# Lengths of probes before ``minimise`` scales them: of costs, as shares of an empty step; of delays, in us.  Each is
# above the whole us to which a simulated run rounds, and small against what it changes.
_PROBE_SHARES = {
    "intercept": 1e-2,
    "per_prefill_token": 7e-4,
    "per_context_token": 6e-7,
    "per_decode_token": 4e-4,
}
_PROBES_US = {"pre_queue": 300.0, "first_token_per_decode": 5.0}


@dataclass(frozen=True)
class StepForm:
    """A step time linear in prefill, context and decode tokens, the last with bends.

    ``bends``: decode batch sizes, ascending, at which the cost of one more decode may change; none
    for a line.  A vector of coefficients is float64[6 + bends], us: ``names`` in their order.
    """

    bends: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """``line``, or ``bent at 32 and 64 decodes``."""
        return f"bent at {' and '.join(map(str, self.bends))} decodes" if self.bends else "line"

    @property
    def names(self) -> tuple[str, ...]:
        """The coefficients, in the order of the vector."""
        return (*_LINE, *(f"per_decode_token_above_{bend}" for bend in self.bends))

    def probe_us(self, intercept_us: float) -> Floats:
        """float64[coefficients]: a change of each that a simulated run can show."""
        costs = {name: intercept_us * share for name, share in _PROBE_SHARES.items()}
        return self.vector(np.array([(costs | _PROBES_US)[name] for name in _LINE]))

    def design(self, batch: Floats) -> Floats:
        """float64[rows, coefficients] for ``batch`` of float64[rows, 4]: 1, prefill, decode, context tokens."""
        none = np.zeros(len(batch))
        edges = (0.0, *map(float, self.bends), np.inf)
        decodes = [np.clip(batch[:, 2] - low, 0, high - low) for low, high in pairwise(edges)]
        return np.column_stack([batch[:, 0], batch[:, 1], batch[:, 3], none, none, *decodes])

    def vector(self, coefficients: Floats) -> Floats:
        """The vector of this form that a line's vector (or one of this form) stands for."""
        return np.array([*coefficients, *([coefficients[DECODE]] * (len(self.names) - len(coefficients)))])

    def latency(self, vector: Floats) -> Latency:
        """The latency model of a vector: ``blackbox`` for a line, else regimes by decode batch size."""
        if not self.bends:
            ns = [round(float(value) * 1000) for value in vector]
            return LatencyModel("blackbox", ns[INTERCEPT], ns[PREFILL], ns[DECODE], ns[CONTEXT])
        regimes, base_us, low = [], float(vector[INTERCEPT]), 0
        for i, slope_us in enumerate(map(float, vector[DECODE:])):
            bend = self.bends[i] if i < len(self.bends) else None
            regimes.append(_segment(base_us - slope_us * low, slope_us, vector, low, bend))
            if bend is not None:
                base_us, low = base_us + slope_us * (bend - low), bend
        return RegimeModel(tuple(regimes))

    def lifecycle(self, vector: Floats, measured: Lifecycle) -> Lifecycle:
        """``measured`` with the delays of the vector: pre-queue in whole us, first token in ns a decode."""
        return replace(
            measured,
            pre_queue_us=float(round(float(vector[PRE_QUEUE]))),
            first_token_per_decode_us=round(float(vector[FIRST_TOKEN]), 3),
        )


def _segment(intercept_us: float, slope_us: float, vector: Floats, low: int, bend: int | None) -> Regime:
    context_us = float(vector[CONTEXT])
    # kv_sum counts the tokens before the step, the context of a decode its own as well.
    coefficients = (
        ("prefill_tokens", round(float(vector[PREFILL]), 6)),
        ("decode_tokens", round(slope_us + context_us, 6)),
        ("kv_sum", round(context_us, 9)),
    )
    name = f"above {low} decodes" if bend is None else f"{low} to {bend} decodes"
    condition = None if bend is None else ("decode_tokens", "<=", float(bend))
    return Regime(name, round(intercept_us, 3), coefficients, condition=condition)
