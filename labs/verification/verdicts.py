"""What verdicts are worth: servers with noise, simulators whose true error is known, and how often each verdict comes.

A simulator is the server's own step time, scaled.  Its true error is known from many recordings: mean simulated over
mean observed latency, less one.  Each recording is then judged alone, as ``validate`` and ``gate`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.signal import lfilter
from scipy.special import ndtr, ndtri

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import CorrectedModel, Latency, LatencyModel
from blis_replay.blis.trace import RequestTrace
from blis_replay.replay.executors import Progress, map_jobs
from blis_replay.validate.comparison.changes import change_estimates
from blis_replay.validate.comparison.comparison import change_remarks
from blis_replay.validate.gating.policy import Regression
from blis_replay.validate.judgement import Verdict, worst
from blis_replay.validate.metrics.latency import THRESHOLDS, LatencySamples, MetricStatistic, number
from blis_replay.validate.metrics.uncertainty import Estimate, TimeOrder, error_estimates, error_trend, time_order
from blis_replay_labs.planted.servers import Server, any_server, load_of, residence_us, step_us
from blis_replay_labs.verification.workloads import VerificationRow

Kind = Literal["AR(1)", "drift", "two modes", "bursts", "stalls", "cold start"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SIZES = (120, 400, 1_200)
_SERVERS, _DRAWS, _TRUTH_DRAWS = 42, 24, 48
_QUICK_SERVERS, _QUICK_DRAWS = 12, 9
_CELL: MetricStatistic = ("e2e", "mean")
_LIMIT, _GATE = THRESHOLDS["e2e"], Regression()
# Signed errors of the simulators that are judged alone.
_TARGETS = (0.0, *(sign * size for size in (_LIMIT / 2, _LIMIT - 0.01, _LIMIT + 0.01) for sign in (1, -1)))
# A baseline and a candidate, by their true errors.
_WORSE = {by: ((0.0, by), (0.0, -by), (0.03, 0.03 + by), (-0.03, -0.03 - by)) for by in (0.02, 0.05, 0.10)}
_NO_WORSE = ((0.03, 0.03), (0.03, 0.01), (-0.05, -0.03), (0.05, -0.02), (0.10, 0.05))
# As large, with the other sign: the candidate that a test of "worse" at 5 % has most trouble with.
_MIRRORED = (0.05, -0.05)
# In a recording with a stall every simulator looks too fast, so a slower candidate looks better and a faster one worse.
_STALLED_WORSE = ((0.0, 0.02), (0.0, 0.05), (0.0, 0.10))
_STALLED_NO_WORSE = ((0.05, -0.02), (0.10, 0.05))
# Requests that come while a server stands still; and how many bins of disturbance one of the next steps begins in.
_STALLED, _BINS_OF_A_STEP = 12, 12
# Shares by which steps get longer over a run.
_DRIFTS = (0.0, 0.05, 0.10)
_FACTORS = np.linspace(0.80, 1.20, 11)


@dataclass(frozen=True)
class NoisyServer:
    """A server whose steps take longer or shorter than its model says, in a way that is drawn from ``seed``."""

    server: Server
    kind: Kind

    @property
    def stages(self) -> int:
        """Every second server has a second load stage, 30 % faster than the first."""
        return 1 + self.server.seed % 2


def noisy_servers(seed: int, count: int, requests: int) -> list[NoisyServer]:
    """Servers of all kinds in turn; other loads, lengths and noise for each ``seed``."""
    return [NoisyServer(any_server(1_000 * (50 + seed) + i, (), requests), KINDS[i % len(KINDS)]) for i in range(count)]


def _correlated(at_us: Int64s, memory_us: float, rng: np.random.Generator) -> Floats:
    """An Ornstein-Uhlenbeck process of variance 1."""
    keep = float(np.exp(-(at_us[1] - at_us[0]) / memory_us))
    shocks = rng.normal(size=len(at_us)) * np.sqrt(1 - keep**2)
    shocks[0] = rng.normal()
    return np.asarray(lfilter([1.0], [1.0, -keep], shocks), np.float64)


def _disturbance(noisy: NoisyServer, at_us: Int64s, rng: np.random.Generator) -> NDArray[Any]:
    """float[times]: how much longer steps take, as a share of a usual one.

    Memory is in residences of a request: from a few steps to one and a half of them.
    """
    server, kind = noisy.server, noisy.kind
    of_server = np.random.default_rng([server.seed, 99])
    residence, every_us = residence_us(server), float(at_us[1] - at_us[0])

    def uniform(low: float, high: float) -> float:
        return float(of_server.uniform(low, high))

    some_steps_us = min(step_us(server) * uniform(5, 60), residence / 2)
    if kind == "AR(1)":
        return uniform(0.01, 0.03) * _correlated(at_us, some_steps_us, rng)
    if kind == "drift":
        return uniform(0.005, 0.02) * _correlated(at_us, residence * uniform(0.3, 1.5), rng)
    if kind == "two modes":
        switches = rng.random(len(at_us)) < every_us / (residence * uniform(0.02, 0.8))
        return uniform(0.01, 0.04) * (2.0 * ((np.cumsum(switches) + rng.integers(2)) % 2) - 1)
    if kind == "bursts":
        length, share, size = residence * uniform(0.05, 0.3), uniform(0.05, 0.2), uniform(0.03, 0.1)
        begins = rng.random(len(at_us)) < share * every_us / length
        ends = np.flatnonzero(begins) + rng.exponential(length / every_us, int(begins.sum())).astype(np.int64) + 1
        change = begins.astype(np.int64)
        np.subtract.at(change, np.minimum(ends, len(change) - 1), 1)
        return size * (np.cumsum(change) > 0)
    if kind == "stalls":
        stalled = rng.random(len(at_us)) < every_us / (residence * uniform(0.2, 1.0))
        return uniform(0.005, 0.03) * residence / step_us(server) * stalled
    cold = uniform(0.2, 0.6) * np.exp(-at_us / (residence * uniform(0.3, 1.5)))
    return cold + 0.02 * _correlated(at_us, some_steps_us, rng)


class Draws:
    """Loads of a server, what it served of each, and what a scaled simulator says."""

    def __init__(self, noisy: NoisyServer, count: int) -> None:
        self.noisy = noisy
        self._simulated: dict[tuple[float, int], LatencySamples] = {}
        rngs = [np.random.default_rng([noisy.server.seed, draw, 7]) for draw in range(count)]
        self.traces = [self._load(rng) for rng in rngs]
        self.observed = [self.served(trace, rng) for trace, rng in zip(self.traces, rngs, strict=True)]

    def _load(self, rng: np.random.Generator) -> RequestTrace:
        trace = load_of(self.noisy.server, rng)
        gaps_us = np.diff(trace.arrival_us, prepend=0).astype(np.float64)
        gaps_us[self._stage(trace) == 1] /= 1.3
        return replace(trace, arrival_us=np.cumsum(gaps_us).astype(np.int64))

    def _stage(self, trace: RequestTrace) -> Int64s:
        return np.arange(len(trace)) * self.noisy.stages // len(trace)

    def served(
        self,
        trace: RequestTrace,
        rng: np.random.Generator,
        factor: float = 1.0,
        stalled: int | None = None,
        drift: float = 0.0,
    ) -> LatencySamples:
        """What the noisy server made of a load; ``factor``: how many times as long its steps take by the model.

        ``stalled``: the request at whose arrival the server stands still until ``_STALLED`` more have come.
        ``drift``: by what share of a usual step its steps get longer from the first arrival to the last.
        """
        server = self.noisy.server
        until_us = int(2 * trace.arrival_us[-1] + 40 * residence_us(server))
        at_us = np.arange(0, until_us, max(int(step_us(server) / 2), 1))
        longer = _disturbance(self.noisy, at_us, rng) + drift * at_us / trace.arrival_us[-1]
        extra_us = np.rint(step_us(server) * longer).astype(np.int64)
        if stalled is not None:
            begins_us, ends_us = trace.arrival_us[stalled], trace.arrival_us[stalled + _STALLED]
            first = int(np.searchsorted(at_us, begins_us))
            extra_us[first : first + _BINS_OF_A_STEP] = ends_us - begins_us
        return self._answered(trace, CorrectedModel(self._scaled(factor), (0, 0, 0, 0), at_us, extra_us))

    def _answered(self, trace: RequestTrace, latency: Latency) -> LatencySamples:
        result = simulate(trace, self.noisy.server.engine, latency, self.noisy.server.lifecycle)
        return LatencySamples(result.ttft_us, result.e2e_us, trace.output_tokens)

    def simulated(self, factor: float, draw: int) -> LatencySamples:
        """The answer to one load of a simulator whose steps take ``factor`` times as long as the model says."""
        if (factor, draw) not in self._simulated:
            self._simulated[factor, draw] = self._answered(self.traces[draw], self._scaled(factor))
        return self._simulated[factor, draw]

    def _scaled(self, factor: float) -> LatencyModel:
        line = self.noisy.server.latency
        if not isinstance(line, LatencyModel):
            raise TypeError("only lines are scaled")
        costs = ("intercept_ns", "per_prefill_token_ns", "per_decode_token_ns", "per_context_token_ns")
        return replace(line, **{cost: round(factor * getattr(line, cost)) for cost in costs})

    def true_error(self, factor: float, cell: MetricStatistic = _CELL) -> float:
        """Over all loads, with equal weight."""
        sides = [self.simulated(factor, draw) for draw in range(len(self.traces))]
        simulated, observed = (sum(number(one, cell) for one in side) for side in (sides, self.observed))
        return float(simulated / observed) - 1

    def factors_of(self, errors: Sequence[float]) -> dict[float, float]:
        """The factor of each true error, between those that were tried."""
        tried = [self.true_error(factor) for factor in _FACTORS]
        return dict(zip(errors, map(float, PchipInterpolator(tried, _FACTORS)(errors)), strict=True))

    def order(self, draw: int, observed: LatencySamples) -> TimeOrder:
        """The requests of one load in order of time, as they were observed."""
        trace = self.traces[draw]
        return time_order(trace.arrival_us, self._stage(trace), observed.e2e_us)


Measures = dict[str, list[float]]


def judged(noisy: NoisyServer, draws: int) -> Measures:
    """By name, a value for each recording: 1 where the verdict came, a width over the ideal one."""
    found, measures = Draws(noisy, _TRUTH_DRAWS), Measures()
    factors = found.factors_of(_errors())

    def note(name: str, value: float) -> None:
        measures.setdefault(name, []).append(value)

    ideal = {cell: _errors_of(found, factors[0.0], cell) for cell in _CELLS}
    truths = {error: {cell: found.true_error(f, cell) for cell in _GATE.numbers} for error, f in factors.items()}
    truth = truths[0.0]
    for draw in range(draws):
        observed = found.observed[draw]
        order = found.order(draw, observed)
        answers = {error: found.simulated(factor, draw) for error, factor in factors.items()}

        def estimates(
            simulated: LatencySamples,
            cells: Sequence[MetricStatistic],
            order: TimeOrder = order,
            observed: LatencySamples = observed,
        ) -> Mapping[MetricStatistic, Estimate]:
            errors = {cell: number(simulated, cell) / number(observed, cell) - 1 for cell in cells}
            return error_estimates(order, observed, simulated, errors)

        def gated(
            before: float,
            after: float,
            order: TimeOrder = order,
            observed: LatencySamples = observed,
            answers: Mapping[float, LatencySamples] = answers,
        ) -> Mapping[MetricStatistic, Verdict]:
            sides = answers[after], answers[before]
            known = estimates(sides[0], _GATE.numbers, order, observed)
            changes = change_estimates(order, *sides, observed, known, _GATE.confidence)
            return {cell: _GATE.verdict(change) for cell, change in changes.items()}

        def fails_no_worse(before: float, after: float, verdicts: Mapping[MetricStatistic, Verdict]) -> float:
            was, now = truths[before], truths[after]
            return float("FAIL" in [v for cell, v in verdicts.items() if abs(now[cell]) <= abs(was[cell])])

        for error in _TARGETS:
            estimate = estimates(answers[error], [_CELL])[_CELL]
            note(f"pass {abs(error):.2f}", float(estimate.low >= -_LIMIT and estimate.high <= _LIMIT))
            note(f"fail {abs(error):.2f}", float(estimate.low > _LIMIT or estimate.high < -_LIMIT))
        for cell, estimate in estimates(answers[0.0], _CELLS).items():
            spread, true = float(ideal[cell].std(ddof=1)), truth.get(cell, float(np.median(ideal[cell])))
            note(f"held {' '.join(cell)}", float(estimate.low <= true <= estimate.high))
            note(f"width {' '.join(cell)}", estimate.half / (1.96 * spread))
            note(f"noise {' '.join(cell)}", spread)
            if cell[1] == "p99":
                note(
                    f"alarm {' '.join(cell)}",
                    float(estimate.low > true + 6 * spread or estimate.high < true + 6 * spread),
                )

        rng = np.random.default_rng([noisy.server.seed, draw, 12])
        stalled = found.served(found.traces[draw], rng, stalled=int(rng.integers(len(found.traces[draw]) - _STALLED)))
        at_stall = found.order(draw, stalled), stalled
        limits = {cell: THRESHOLDS[cell[0]] for cell in _GATE.numbers}
        errors = estimates(answers[0.0], _GATE.numbers, *at_stall)
        note("fail stalled", float(any(e.low > limits[c] or e.high < -limits[c] for c, e in errors.items())))
        for pair in _STALLED_WORSE:
            note("missed stalled", float(worst(gated(*pair, *at_stall).values()) == "PASS"))
        for pair in _STALLED_NO_WORSE:
            note("no worse stalled", fails_no_worse(*pair, gated(*pair, *at_stall)))

        for drift in _DRIFTS:
            drifting = found.served(found.traces[draw], rng, drift=drift)
            trend = error_trend(order, found.traces[draw].arrival_us, drifting, answers[0.0])
            note(f"drift {drift:.2f}", float(bool(change_remarks("trend", trend))))

        for by, pairs in _WORSE.items():
            for pair in pairs:
                name, verdict = f"{by:.2f} {'true' if not pair[0] else 'off'}", worst(gated(*pair).values())
                note(f"worse {name}", float(verdict == "FAIL"))
                note(f"missed {name}", float(verdict == "PASS"))
                note(f"ideal worse {name}", _ideal_power(truths[pair[0]], truths[pair[1]], ideal))
        for pair in (*_NO_WORSE, _MIRRORED):
            note("mirrored" if pair == _MIRRORED else "no worse", fails_no_worse(*pair, gated(*pair)))
    return measures


_Errors = Mapping[MetricStatistic, float]


def _ideal_power(before: _Errors, after: _Errors, errors: Mapping[MetricStatistic, Floats]) -> float:
    """How often the best gate fails a worse candidate: the same test, with noise that is known and normal.

    ``before``, ``after``: true errors.  ``errors``: of many recordings.
    """
    middle = [abs(after[cell] + before[cell]) / 2 / float(errors[cell].std(ddof=1)) for cell in _GATE.numbers]
    return float(ndtr(max(middle) - ndtri((1 + _GATE.confidence) / 2)))


_CELLS: tuple[MetricStatistic, ...] = (*((m, "mean") for m in THRESHOLDS), ("e2e", "p99"), ("ttft", "p99"))


def _errors() -> list[float]:
    pairs = [pair for of in (*_WORSE.values(), _NO_WORSE, (_MIRRORED,)) for pair in of]
    return sorted({*_TARGETS, *(error for pair in pairs for error in pair)})


def _errors_of(found: Draws, factor: float, cell: MetricStatistic) -> Floats:
    """float64[draws]: the error of each recording, whose spread no interval can do without."""
    pairs = ((found.simulated(factor, draw), observed) for draw, observed in enumerate(found.observed))
    return np.array([number(simulated, cell) / number(observed, cell) - 1 for simulated, observed in pairs])


@dataclass(frozen=True)
class _Bar:
    """A bar of the table: the mean (or median) of a measure over all recordings of a size, and its bounds.

    ``ideal``: the measure of what no gate can do better, empty for none.
    """

    check: str
    measure: str
    low: float
    high: float
    sizes: tuple[int, ...] = SIZES
    of: Callable[[Floats], float] = lambda values: float(np.mean(values))
    ideal: str = ""


def _bars() -> list[_Bar]:
    bars = [
        _Bar("PASS at limit + 1 point", f"pass {_LIMIT + 0.01:.2f}", 0, 0.05),
        _Bar("FAIL at limit - 1 point", f"fail {_LIMIT - 0.01:.2f}", 0, 0.05),
        _Bar("PASS at half the limit", f"pass {_LIMIT / 2:.2f}", 0.8, 1.0, (400,)),
    ]
    bars.append(_Bar("true simulator, one stall while 12 requests come: FAIL", "fail stalled", 0, 0.01))
    bars.append(_Bar("server without drift: drift is named", "drift 0.00", 0, 0.02))
    bars += [
        _Bar(f"steps {drift:.0%} longer at the end: drift is named", f"drift {drift:.2f}", 0, 1)
        for drift in _DRIFTS[1:]
    ]
    least = {120: (0.8, 0.9, 0.95), 400: (0.8, 0.9, 0.95), 1_200: (0.9, 0.95, 0.99)}
    for size, shares in least.items():
        for by, share in zip(_WORSE, shares, strict=True):
            for kind, words in (("off", "a baseline 3 points off"), ("true", "a true baseline")):
                name = f"{100 * by:.0f} points worse than {words}: gate"
                measure = f"worse {by:.2f} {kind}"
                bars.append(_Bar(f"{name} FAIL", measure, share, 1.0, (size,), ideal=f"ideal {measure}"))
                bars.append(_Bar(f"{name} PASS", f"missed {by:.2f} {kind}", 0, 0.05, (size,)))
    bars.append(_Bar("equal or better candidate: gate FAIL", "no worse", 0, 0.02))
    bars.append(_Bar("one stall, worse candidate: gate PASS", "missed stalled", 0, 0.05))
    bars.append(_Bar("one stall, better candidate: gate FAIL", "no worse stalled", 0, 0.05))
    bars.append(_Bar("error as large, of the other sign: gate FAIL", "mirrored", 0, 0.10))
    for metric in ("e2e", "ttft"):
        name = f"{metric} p99 off by six standard deviations: seen"
        bars.append(_Bar(name, f"alarm {metric} p99", 0.9, 1.0, SIZES[1:]))
    for metric, statistic in _CELLS:
        name, sizes = f"{metric} {statistic}", SIZES if statistic == "mean" else SIZES[1:]
        bars.append(_Bar(f"coverage {name}", f"held {name}", 0.92 if statistic == "mean" else 0.85, 0.97, sizes))
        bars.append(
            _Bar(f"width over ideal {name}", f"width {name}", 0, 1.5 if statistic == "mean" else 2.0, sizes, _median)
        )
    return bars


def _median(values: Floats) -> float:
    return float(np.median(values))


def verdict_rows(seed: int, quick: bool, progress: Progress | None = None) -> list[VerificationRow]:
    """The bars of the judgement (docs/how-it-works.md), measured; ``quick``: a tenth of the recordings."""
    servers, draws = (_QUICK_SERVERS, _QUICK_DRAWS) if quick else (_SERVERS, _DRAWS)
    jobs = [(size, noisy) for size in SIZES for noisy in noisy_servers(seed, servers, size)]
    answers = map_jobs(partial(judged, draws=draws), [noisy for _, noisy in jobs], progress=progress)
    of_size: dict[int, Measures] = {size: {} for size in SIZES}
    of_kind: dict[Kind, Measures] = {kind: {} for kind in KINDS}
    for (size, noisy), measures in zip(jobs, answers, strict=True):
        for name, values in measures.items():
            of_size[size].setdefault(name, []).extend(values)
            of_kind[noisy.kind].setdefault(name, []).extend(values)
    rows = []
    for bar in _bars():
        for size in bar.sizes:
            of = of_size[size]
            ideal = f"; {np.mean(of[bar.ideal]):.0%} if the noise were known" if bar.ideal else ""
            rows.append(_row(bar, f"{size:,} requests", np.array(of[bar.measure]), ideal))
    for kind, measures in of_kind.items():
        for metric in THRESHOLDS:
            name = f"{metric} mean"
            bar = _Bar(f"coverage {name}", f"held {name}", 0.85, 1.0)
            noise = 100 * _median(np.array(measures[f"noise {name}"]))
            rows.append(_row(bar, f"{kind}, {noise:.2f} % noise of a mean", np.array(measures[bar.measure])))
    return rows


def _row(bar: _Bar, configuration: str, values: Floats, more: str = "") -> VerificationRow:
    measured = bar.of(values)
    bounds = f"{bar.low:g} to {bar.high:g}; {len(values):,} recordings{more}"
    nearest = min(max(measured, bar.low), bar.high)
    return VerificationRow(bar.check, configuration, measured, nearest, measured == nearest, bounds)
