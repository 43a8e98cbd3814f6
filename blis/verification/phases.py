"""Phase linearity: with one request at a time, time is a straight line over tokens.

From the latency model (blis-semantics 1.7 and 3.1, blackbox): TTFT = (alpha0 + alpha1 P) +
(beta0 + beta1 P) + alpha2 for a prompt of P tokens in one step, and the time from the first
token to the last of N is (N - 1) (beta0 + beta2 + alpha2).  Each bracket and alpha2 are
truncated to whole us, so a sum of k of them is at most k us short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import EngineConfig
from blis_replay.blis.verification.workloads import VerificationRow, plain_trace
from blis_replay.compiled.arrays import Floats, Int64s

Values = Int64s | Floats

# Of 1 - R2 and of slopes, relative.  One us at one point would be 1e-10.
_FLOAT_ERROR = 1e-12
# Multiples of 100 tokens make every slope term a whole number of us, so truncation is a constant.
_PROMPTS = np.arange(100, 2001, 100, dtype=np.int64)
_OUTPUTS = np.arange(1, 402, 25, dtype=np.int64)
_ENGINE = EngineConfig(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=8192, async_scheduling=False)
_APART_US = 60_000_000


@dataclass(frozen=True)
class CoefficientSet:
    """Blackbox coefficients in us.

    ``alpha_us``: before the queue, the same per prompt token, per output token at the client.
    ``beta_us``: per step, per prefill token, per decode token.
    """

    name: str
    alpha_us: tuple[float, float, float]
    beta_us: tuple[float, float, float]

    @property
    def written_out(self) -> str:
        """The coefficients as text."""
        return f"alpha {_numbers(self.alpha_us)}, beta {_numbers(self.beta_us)}"

    @property
    def latency(self) -> LatencyModel:
        """Step times, each truncated to whole us as BLIS does."""
        intercept, prefill, decode = (round(value * 1000) for value in self.beta_us)
        return LatencyModel("blackbox", intercept, prefill, decode, rounding="truncate")

    @property
    def lifecycle(self) -> Lifecycle:
        """The delays, none of which blocks the server."""
        before, per_prompt_token, per_token = self.alpha_us
        return Lifecycle(pre_queue_us=before, pre_queue_per_prompt_token_us=per_prompt_token, post_token_us=per_token)


LLAMA_8B_TP2 = CoefficientSet("set A", (1601.35, 3.51, 1805.54), (6910.42, 17.67, 2.84))
SECOND_SET = CoefficientSet("set B", (4680.3, 0.0, 0.0), (7051.8, 19.54, 25.43))


@dataclass(frozen=True)
class Line:
    """A least-squares line: ``y = intercept + slope x``, and R2 = 1 - residual / total sum of squares."""

    intercept: float
    slope: float
    r2: float


def fit_line(x: Values, y: Values) -> Line:
    """The least-squares line through the points; x must vary."""
    dx, dy = x - x.mean(), y - y.mean()
    slope = float((dx * dy).sum() / (dx * dx).sum())
    residual = dy - slope * dx
    return Line(float(y.mean() - slope * x.mean()), slope, 1 - float((residual**2).sum() / (dy**2).sum()))


def line_rows(
    check: str, chosen: CoefficientSet, line: Line, slope_us: float, truncated_parts: int
) -> list[VerificationRow]:
    """R2 = 1 within float error; the slope at most 1 us a truncated part below the coefficients, never above."""
    straight = abs(1 - line.r2) <= _FLOAT_ERROR
    below_us = slope_us - line.slope
    sound = -_FLOAT_ERROR * slope_us <= below_us <= truncated_parts + _FLOAT_ERROR * slope_us
    allowed = f"at most {truncated_parts} us below, for parts truncated to whole us" if truncated_parts else "exact"
    return [
        VerificationRow(f"{check}, R2", chosen.name, line.r2, 1.0, straight, f"within 1e-12; {chosen.written_out}"),
        VerificationRow(f"{check}, us per token", chosen.name, line.slope, slope_us, sound, allowed),
    ]


def check_phases(chosen: CoefficientSet) -> list[VerificationRow]:
    """TTFT against prompt tokens, and decode time at the client against output tokens."""
    alpha, beta = chosen.alpha_us, chosen.beta_us
    prefills = _apart(chosen, _PROMPTS, np.ones_like(_PROMPTS))
    decodes = _apart(chosen, np.full_like(_OUTPUTS, 100), _OUTPUTS)
    ttft = fit_line(_PROMPTS, prefills.ttft_us)
    decode = fit_line(_OUTPUTS, decodes.e2e_us - decodes.ttft_us)
    parts = 2 if alpha[2] else 1
    return [
        *line_rows("TTFT over prompt tokens", chosen, ttft, alpha[1] + beta[1], 0),
        *line_rows("decode time over output tokens", chosen, decode, beta[0] + beta[2] + alpha[2], parts),
    ]


def _apart(chosen: CoefficientSet, prompt_tokens: Int64s, output_tokens: Int64s) -> SimResult:
    """One request a minute, so that none meets another."""
    arrival_us = np.arange(len(prompt_tokens), dtype=np.int64) * _APART_US
    trace = plain_trace(arrival_us, prompt_tokens, output_tokens)
    return simulate(trace, _ENGINE, chosen.latency, chosen.lifecycle)


def _numbers(values: tuple[float, float, float]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"
