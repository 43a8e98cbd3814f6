"""What theory says of simple loads: a straight line, and the waits of a queue.

*The time of a request alone is a straight line over its tokens.*  From the latency model (blis-semantics 1.7 and 3.1,
blackbox): TTFT = (alpha0 + alpha1 P) + (beta0 + beta1 P) + alpha2 for a prompt of P tokens in one step.  The time from
the first token to the last of N is (N - 1) (beta0 + beta2 + alpha2).  Each bracket and alpha2 are truncated to whole
us, so a sum of k of them is at most k us below.

*One sequence at a time is M/M/1.*  Poisson arrivals at rate l and exponential service of mean S wait
``W_q = rho / (1 - rho) S``, ``rho = l S`` (Kleinrock, Queueing Systems I, 1975, section 3.2).  Outputs of
``max(1, round(Exp(128)))`` tokens with a prompt of 1 make the service time exponential but for the rounding to tokens,
which moves W_q by less than 0.1 %.  A study that takes S to be the zero-load E2E latency, with the delays alpha,
offers ``l = rho / S`` and expects M/M/1 with S.  But the server is busy for the beta part S' only: the wait is
``M/M/1(l, S')``, which is less by a share that grows with alpha / beta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay_labs.verification.workloads import VerificationRow, plain_trace

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
        """The delays; they do not block the server."""
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


# -- Waits: one sequence at a time ------------------------------------------------------------

MEAN_OUTPUT_TOKENS = 128
RHOS = (0.3, 0.5, 0.7, 0.9)
# Zero-load E2E of 128 outputs, ms, with alpha and without, as the published study calibrated it.
PUBLISHED_CALIBRATION_MS = (1126.2, 891.8)
# How far the wait is below M/M/1 with alpha, by rho, as a share; to be met within two points.
SHORTFALLS = (0.43, 0.49, 0.59, 0.79)
_SHORTFALL_TOLERANCE = 0.02
# And with beta scaled down: nothing but alpha is left of the service time.
_SCALED_SHORTFALLS = (0.94, 1.0)
# 1 - confidence of every interval: some 16 of them shall not fail by chance.
_RISK = 0.001
_SINGLE = EngineConfig(
    max_num_seqs=1, max_num_batched_tokens=2048, max_model_len=8192, async_scheduling=False, enable_prefix_caching=False
)


@dataclass(frozen=True)
class Calibration:
    """Of 128 outputs at zero load, us: latency at the client, time on the server, and the last step with its delay."""

    e2e_us: int
    server_us: int
    surplus_us: int


@dataclass(frozen=True)
class Effort:
    """How much to simulate: independent replications for each rho of ``RHOS``, and the arrivals of each.

    ``precision``: a 99.9 % interval wider than this on either side proves nothing and fails;
    a share of the expected wait, or the share that the wait is short.
    """

    replications: tuple[int, int, int, int]
    arrivals: int
    precision: float


@dataclass(frozen=True)
class Waits:
    """Means of the replications of one rate, float64[replications], us."""

    wait_us: Floats
    server_us: Floats
    e2e_less_wait_us: Floats
    gap_us: Floats
    late_starts: int


@dataclass(frozen=True)
class Interval:
    """A mean and the half width of its 99.9 % interval."""

    mean: float
    half: float

    def holds(self, value: float) -> bool:
        """Whether the interval contains the value."""
        return abs(self.mean - value) <= self.half


def mm1_wait_us(rate_per_us: float, service_us: float) -> float:
    """Mean wait in an M/M/1 queue, ``W_q = rho / (1 - rho) S`` (Kleinrock 1975, 3.2); needs rho < 1."""
    rho = rate_per_us * service_us
    return rho / (1 - rho) * service_us


def calibrate(chosen: CoefficientSet) -> Calibration:
    """Simulate one request of 128 outputs alone."""
    result = simulate(_trace(np.zeros(1), np.array([MEAN_OUTPUT_TOKENS])), _SINGLE, chosen.latency, chosen.lifecycle)
    server_us = int(result.finished_us[0] - result.scheduled_us[0])
    return Calibration(int(result.e2e_us[0]), server_us, int(result.last_step_us[0]) + result.post_token_us)


def calibration_rows(chosen: CoefficientSet) -> list[VerificationRow]:
    """Zero-load E2E against the sum of the coefficients, and against the published figure.

    The published one bills one step more than there are (blis-semantics 1.7).
    """
    rows = []
    bare = CoefficientSet("alpha = 0", (0.0, 0.0, 0.0), chosen.beta_us)
    for coefficients, published_ms in zip((chosen, bare), PUBLISHED_CALIBRATION_MS, strict=True):
        rows += calibration_pair(coefficients, calibrate(coefficients), published_ms)
    return rows


def calibration_pair(coefficients: CoefficientSet, measured: Calibration, published_ms: float) -> list[VerificationRow]:
    """Two rows: the calibration against its coefficients, and with the surplus step against the published one."""
    n, (a0, a1, a2), (b0, b1, b2) = MEAN_OUTPUT_TOKENS, coefficients.alpha_us, coefficients.beta_us
    exact_ms = (a0 + a1 + b0 + b1 + (n - 1) * (b0 + b2) + n * a2) / 1000
    e2e_ms, surplus_ms = measured.e2e_us / 1000, measured.surplus_us / 1000
    # Queueing, n steps and n delays are truncated to whole us.
    sound = 0 <= exact_ms - e2e_ms <= (2 * n + 1) / 1000
    published = abs(e2e_ms + surplus_ms - published_ms) <= 0.1
    name = coefficients.name
    return [
        VerificationRow(
            "E2E of 128 outputs alone, ms",
            name,
            e2e_ms,
            exact_ms,
            sound,
            "sum of coefficients; below it by truncation only",
        ),
        VerificationRow(
            "the same and a surplus step, ms",
            name,
            e2e_ms + surplus_ms,
            published_ms,
            published,
            f"published; it bills the last step twice ({surplus_ms:.3f} ms); within 0.1",
        ),
    ]


def simulate_waits(
    chosen: CoefficientSet, rate_per_us: float, server_us: float, replications: int, arrivals: int, seed: Sequence[int]
) -> Waits:
    """Run independent replications that start in the steady state.

    The requests at time 0 are drawn from M/M/1's stationary law, ``P(k) = (1 - rho) rho^k``; the rest of the one in
    service is exponential again.  So no warm-up has to be discarded.  Requests at time 0 are not counted.
    """
    rows, late = [], 0
    for replication in range(replications):
        rng = np.random.default_rng([*seed, replication])
        there = int(rng.geometric(1 - rate_per_us * server_us)) - 1
        gaps_us = rng.exponential(1 / rate_per_us, arrivals)
        outputs = np.maximum(np.rint(rng.exponential(MEAN_OUTPUT_TOKENS, there + arrivals)), 1)
        trace = _trace(np.concatenate([np.zeros(there), np.cumsum(gaps_us)]), outputs)
        result = simulate(trace, _SINGLE, chosen.latency, chosen.lifecycle)
        wait_us = (result.scheduled_us - result.queued_us)[there:]
        service_us = (result.finished_us - result.scheduled_us)[there:]
        outside_us = result.e2e_us[there:] - wait_us
        rows.append([wait_us.mean(), service_us.mean(), outside_us.mean(), gaps_us.mean()])
        late += late_starts(result)
    wait, server, outside, gap = np.array(rows, np.float64).T
    return Waits(wait, server, outside, gap, late)


def late_starts(result: SimResult) -> int:
    """Requests that did not start the moment they had queued and the one before had left (Lindley's recursion)."""
    left_us = np.concatenate([[0], result.finished_us[:-1]])
    return int((result.scheduled_us != np.maximum(result.queued_us, left_us)).sum())


def wait_interval(waits: Waits, rate_per_us: float) -> Interval:
    """Mean wait with a Student interval over replications, for the pooled mean service time.

    Gaps and services that are longer or shorter than the mean move a replication's wait.  The first-order effect by
    M/M/1 is subtracted (control variates), which halves the variance and keeps the mean.  Student's interval
    misses too often for skewed waits: it is widened by the first term of the Edgeworth expansion,
    ``|skewness| (1 + 2 t^2) / (6 sqrt(n))`` standard errors (Hall, J. R. Stat. Soc. B 54, 1992).
    """
    from scipy.special import stdtrit  # lighter than scipy.stats

    service_us = float(waits.server_us.mean())
    rho = rate_per_us * service_us
    per_service_us = rho * (2 - rho) / (1 - rho) ** 2
    per_gap_us = -((rho / (1 - rho)) ** 2)
    controlled = (
        waits.wait_us - per_service_us * (waits.server_us - service_us) - per_gap_us * (waits.gap_us - 1 / rate_per_us)
    )
    n, deviation = len(controlled), controlled.std()
    skewness = abs(((controlled - controlled.mean()) ** 3).mean()) / max(deviation, 1e-9) ** 3
    quantile = float(stdtrit(n - 1, 1 - _RISK / 2))
    widened = quantile + skewness * (1 + 2 * quantile**2) / (6 * np.sqrt(n))
    half = float(widened * deviation / np.sqrt(n - 1))
    return Interval(float(controlled.mean()), half)


def check_waits(chosen: CoefficientSet, effort: Effort, seed: int) -> list[VerificationRow]:
    """With alpha = 0 the mean wait is that of M/M/1, from the mean of the sampled service times."""
    bare = CoefficientSet("alpha = 0", (0.0, 0.0, 0.0), chosen.beta_us)
    service_us = calibrate(bare).e2e_us
    rows, late, requests = [], 0, 0
    for i, rho in enumerate(RHOS):
        rate = rho / service_us
        waits = simulate_waits(bare, rate, service_us, effort.replications[i], effort.arrivals, [seed, 4, i])
        rows.append(wait_row(rho, waits, rate, effort))
        late += waits.late_starts
        requests += effort.replications[i] * effort.arrivals
    first = VerificationRow(
        "starts later than the server is idle",
        f"alpha = 0, rho {RHOS[0]:g} to {RHOS[-1]:g}",
        float(late),
        0.0,
        late == 0,
        f"Lindley's recursion, to the us, of {requests:,} requests",
    )
    return [first, *rows]


def wait_row(rho: float, waits: Waits, rate_per_us: float, effort: Effort) -> VerificationRow:
    """Mean wait against M/M/1 with the mean of the sampled service times; the interval must be narrow and hold it."""
    expected_us = mm1_wait_us(rate_per_us, float(waits.server_us.mean()))
    interval = wait_interval(waits, rate_per_us)
    passed = interval.holds(expected_us) and interval.half <= effort.precision * expected_us
    detail = f"+- {interval.half / 1000:.2f}; {_sample(waits, effort)}"
    return VerificationRow(
        "mean wait against M/M/1, ms",
        f"alpha = 0, rho {rho:g}",
        interval.mean / 1000,
        expected_us / 1000,
        passed,
        detail,
    )


def check_shortfalls(chosen: CoefficientSet, scale: float, effort: Effort, seed: int) -> list[VerificationRow]:
    """With alpha, offered rate and M/M/1 taken from zero-load E2E, the wait falls short; beta times ``scale``."""
    before, per_prefill, per_decode = (round(scale * value, 3) for value in chosen.beta_us)
    scaled = CoefficientSet(chosen.name, chosen.alpha_us, (before, per_prefill, per_decode))
    calibration = calibrate(scaled)
    rows = []
    for i, rho in enumerate(RHOS):
        rate = rho / calibration.e2e_us
        waits = simulate_waits(
            scaled,
            rate,
            calibration.server_us,
            effort.replications[i],
            effort.arrivals,
            [seed, 5, i, round(scale * 100)],
        )
        rows.append(shortfall_row(i, scale, waits, rate, calibration, effort))
    return rows


def shortfall_row(
    i: int, scale: float, waits: Waits, rate_per_us: float, calibration: Calibration, effort: Effort
) -> VerificationRow:
    """How far the wait is below M/M/1 with the mean E2E as service time, in %.

    Expected is what M/M/1 says of the server's part alone: the interval must contain it.  And
    with the calibrated times it must be near the effect that is to come out.
    """
    rho = RHOS[i]
    believed_us = mm1_wait_us(rate_per_us, float(waits.e2e_less_wait_us.mean()))
    interval = wait_interval(waits, rate_per_us)
    server_us = mm1_wait_us(rate_per_us, float(waits.server_us.mean()))
    measured, expected = 1 - interval.mean / believed_us, 1 - server_us / believed_us
    half = interval.half / believed_us
    nominal = 1 - mm1_wait_us(rate_per_us, calibration.server_us) / mm1_wait_us(rate_per_us, calibration.e2e_us)
    low, high = _SCALED_SHORTFALLS
    stated = f"published {100 * low:g} to 99.9"
    if scale == 1:
        low, high = SHORTFALLS[i] - _SHORTFALL_TOLERANCE, SHORTFALLS[i] + _SHORTFALL_TOLERANCE
        surplus = _with_surplus_step(rho, calibration)
        stated = f"with the surplus step {100 * surplus:.1f}, to be {100 * SHORTFALLS[i]:.0f} +- 2"
    agrees = abs(measured - expected) <= half <= effort.precision and waits.late_starts == 0
    passed = agrees and low <= nominal < high
    return VerificationRow(
        "mean wait below M/M/1 of E2E, %",
        f"alpha, beta x {scale:g}, rho {rho:g}",
        100 * measured,
        100 * expected,
        passed,
        f"+- {100 * half:.2g}; {stated}; {_sample(waits, effort)}",
    )


def _with_surplus_step(rho: float, calibration: Calibration) -> float:
    """The shortfall if the calibration bills one step more than there are, as the published one does."""
    believed_us = calibration.e2e_us + calibration.surplus_us
    rate = rho / believed_us
    return 1 - mm1_wait_us(rate, calibration.server_us) / mm1_wait_us(rate, believed_us)


def _sample(waits: Waits, effort: Effort) -> str:
    return f"{len(waits.wait_us)} x {effort.arrivals:,} requests"


def _trace(arrival_us: Floats, output_tokens: Floats | Int64s) -> RequestTrace:
    outputs = output_tokens.astype(np.int64)
    return plain_trace(arrival_us.astype(np.int64), np.ones_like(outputs), outputs)
