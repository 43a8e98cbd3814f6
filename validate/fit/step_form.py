"""Forms of the step time that a search fits: a line in the tokens of a batch, lines that bend, and a roofline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.blis.latency.models import Latency, LatencyModel, Lifecycle, Regime, RegimeModel, Roofline

# Places in the vector of a form, in us: costs of a step and its tokens, and delays around the engine.
INTERCEPT, PREFILL, CONTEXT, PRE_QUEUE, FIRST_TOKEN, DECODE = range(6)
_LINE = (
    *("intercept", "per_prefill_token", "per_context_token", "pre_queue", "first_token_per_decode"),
    *("per_decode_token",),
)

# Lengths of probes before ``minimise`` scales them: shares of an empty step of these costs, and us of the delays.  Each
# is above the whole us to which a simulated run rounds, and small against what it changes.
_PROBE_SHARES = {INTERCEPT: 1e-2, PREFILL: 7e-4, CONTEXT: 6e-7, DECODE: 4e-4}
_PROBES_US = {PRE_QUEUE: 300.0, FIRST_TOKEN: 5.0}


# What is believed of a GPU before a fit.  Steps of one prompt of 1 to 2,048 tokens in operator times of
# aiconfigurator-core 0.12.0 (vLLM 0.24, bf16) have knees of 330 to 400 tokens and overlaps of 0.80 to 0.87, for 8B and
# 32B models on H100, L40S and B200, with errors of at most 10 %.
BELIEVED = Roofline(knee_tokens=350.0, overlap=0.8)
# Experts of a mixture that is not known, and those that a token chooses: gpt-oss-120b has 4 of 128, DeepSeek-V3 8 of
# 256.  Only the share matters, as the time for each is fitted.
SOME_EXPERTS = 128
SOME_PER_TOKEN = 4
# Most of an empty step that is reading weights: the rest is launching kernels, sampling and the host.
MOST_READING = 0.9
# Fewest tokens that any GPU computes while it reads the weights: datasheets of A30 to B300 have 150 to 300, in 16 bits.
FEWEST_KNEE_TOKENS = 50.0


@dataclass(frozen=True)
class StepForm:
    """A step time linear in prefill, context and decode tokens, with bends or a roofline.

    ``bends``: decode batch sizes, ascending, at which the cost of one more decode may change; none for a line.
    ``roofline``: as believed before the fit; without bends.  A vector of coefficients is float64[6 + bends], us, and
    one more for experts, in the order of ``names``.
    """

    bends: tuple[int, ...] = ()
    roofline: Roofline | None = None

    @property
    def name(self) -> str:
        """``line``, ``bent at 32 and 64 decodes``, ``roofline`` or ``roofline with 8 experts``."""
        if self.roofline is not None:
            return f"roofline with {self.roofline.experts} experts" if self.experts else "roofline"
        return f"bent at {' and '.join(map(str, self.bends))} decodes" if self.bends else "line"

    @property
    def experts(self) -> int:
        """Number of experts; each is read when a token touches it."""
        return 0 if self.roofline is None else self.roofline.experts

    @property
    def names(self) -> tuple[str, ...]:
        """The coefficients, in the order of the vector."""
        above = tuple(f"per_decode_token_above_{bend}" for bend in self.bends)
        return (*_LINE, *above, *(("per_expert",) if self.experts else ()))

    def probe_us(self, intercept_us: float) -> Floats:
        """float64[coefficients]: a change of each that shows in a simulated run."""
        probes = {place: intercept_us * share for place, share in _PROBE_SHARES.items()} | _PROBES_US
        probe = self.vector(np.array([probes[place] for place in range(len(_LINE))]))
        if self.experts:
            probe[-1] = probes[INTERCEPT] / self.experts
        return probe

    def cycle_us(self, batch: Floats, mixed_share: Floats, vector: Floats) -> Floats:
        """float64[rows]: mean cycles of mean batches; ``mixed_share`` of the steps have all of the prefill."""
        us = self.design(batch) @ vector
        if (roofline := self.fitted_roofline(vector)) is None:
            return np.asarray(us, np.float64)
        share, decodes = np.clip(mixed_share, 1e-9, 1.0), batch[:, 2]
        mixed_us, plain_us = (
            roofline.more_us(prefill, decodes, float(vector[PREFILL]))
            for prefill in (batch[:, 1] / share, np.zeros(len(batch)))
        )
        return np.asarray(us + share * mixed_us + (1 - share) * plain_us, np.float64)

    def fitted_roofline(self, vector: Floats) -> Roofline | None:
        """The believed roofline, with reading no longer than an empty step."""
        if self.roofline is None:
            return None
        per_expert_ns = round(1000 * float(vector[-1])) if self.experts else 0
        knee = MOST_READING * float(vector[INTERCEPT]) / max(float(vector[PREFILL]), 1e-9)
        return replace(
            self.roofline,
            knee_tokens=round(min(self.roofline.knee_tokens, knee), 1),
            per_expert_ns=per_expert_ns,
        )

    def design(self, batch: Floats) -> Floats:
        """float64[rows, coefficients] for ``batch`` of float64[rows, 4]: 1, prefill, decode, context tokens."""
        design = np.zeros((len(batch), len(self.names)))
        design[:, [INTERCEPT, PREFILL, CONTEXT]] = batch[:, [0, 1, 3]]
        for i, (low, high) in enumerate(pairwise((0.0, *map(float, self.bends), np.inf))):
            design[:, DECODE + i] = np.clip(batch[:, 2] - low, 0, high - low)
        return design

    def vector(self, coefficients: Floats) -> Floats:
        """The vector of this form for a line's vector (or one of this form)."""
        more = 0.0 if self.experts else float(coefficients[DECODE])
        return np.array([*coefficients, *([more] * (len(self.names) - len(coefficients)))])

    def latency(self, vector: Floats) -> Latency:
        """The latency model of a vector: a line or a roofline, else regimes by decode batch size."""
        if not self.bends:
            ns = [round(float(value) * 1000) for value in vector]
            costs = (ns[INTERCEPT], ns[PREFILL], ns[DECODE], ns[CONTEXT])
            if (roofline := self.fitted_roofline(vector)) is not None:
                return LatencyModel("roofline", *costs, roofline=roofline)
            return LatencyModel("blackbox", *costs)
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
