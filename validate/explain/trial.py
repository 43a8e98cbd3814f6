"""A trial: the first requests of a recording replayed with a change, and the error that is left, request by request.

Step time and delays can be fitted beside any change.  Few causes explain most errors, so one cost after the other is
fitted, each time the one that leaves the least error.  A simulated time jumps where a request just misses a step; the
mean over all requests moves far more evenly.  So each cost is solved for the mean, and judged request by request.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.latency.models import CorrectedModel, Latency, ObservedCycles
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.result import SimResult
from blis_replay.blis.setup import queueing_times
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.ingest.recording import FIRST_TOKEN, WAY, Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.observed import server_stamps
from blis_replay.replay.plan import plan_replay
from blis_replay.validate.explain.rule import MIN_ERROR, tie_limit
from blis_replay.validate.metrics.observed import Selection, observed_requests

MIN_REQUESTS, MAX_REQUESTS = 20, 1_000  # enough to decide, few enough to be simulated some thousand times
MAX_COSTS = 3  # costs fitted at once
MAX_LEFT_OF_COST = 0.9  # a further cost must leave at most this share of the error
MAX_CALLS = 8  # replays to solve for one cost
HOPELESS = 4.0  # a fit ends if its first cost leaves this many times the error that would be enough
MAX_SLOWER = 2.0  # a run that takes this many times as long as the recording explains nothing
NOT_SIMULATED = 10.0  # the error of a replay that the engine cannot run, relative to the latencies

# How far each cost is moved to see its effect: ns per step, prefill, decode and context token; then us before the
# queue, per token, per request, and of the stamp of the first token.
_MOVES = np.array([300_000.0, 2_000.0, 20_000.0, 20.0, 1_500.0, 60.0, 1_500.0, 1_500.0])
STEP_COSTS, PRE_QUEUE_COST, OUTPUT_COSTS = range(4), range(4, 5), range(5, 8)
PREFILL_COST = 1


@dataclass(frozen=True)
class Target:
    """What was observed of the requests ``chosen`` (bool[n]): float64[marks, m] us, nan where not recorded.

    Rows: TTFT, E2E, and where the server stamped requests (``stamped``) queue, prefill and decode time.  ``scale_us``:
    float64[marks], the mean latency by which differences of each row are divided.
    """

    chosen: Bools
    observed_us: Floats
    scale_us: Floats
    stamped: bool


def target_of(recording: Recording, window: tuple[float, float] = (0.0, 1.0)) -> Target | None:
    """What was observed of the first requests of a window; None if they are too few, or only aggregates are known."""
    chosen = observed_requests(recording) & Selection(window=window).of(recording.requests)
    places = np.flatnonzero(chosen)[:MAX_REQUESTS]
    if len(places) < MIN_REQUESTS:
        return None
    chosen = chosen[: places[-1] + 1]
    forbidden = {finding.metric for finding in recording.findings if finding.severity == "unusable"}
    requests = recording.requests.frame(["arrival_us", "ttft_us", "e2e_us"])[: len(chosen)].filter(chosen)
    sent_us, ttft_us, e2e_us = (requests[name].to_numpy().astype(np.float64) for name in requests.columns)
    rows = [np.full(len(ttft_us), np.nan) if forbidden & {"ttft", WAY, FIRST_TOKEN} else ttft_us, e2e_us]
    stamps = server_stamps(recording)
    scheduled_us, first_us, finished_us = (
        values[: len(chosen)][chosen] for values in (stamps.scheduled_us, stamps.first_token_us, stamps.finished_us)
    )
    stamped = "segments" not in forbidden and not np.isnan(scheduled_us).all()
    if stamped:
        rows += [scheduled_us - sent_us, first_us - scheduled_us, finished_us - first_us]
    first, whole = max(float(np.mean(ttft_us)), 1.0), max(float(np.mean(e2e_us)), 1.0)
    scale_us = np.array([first, whole, first, first, whole][: len(rows)])
    return Target(chosen, np.stack(rows), scale_us, stamped)


@dataclass(frozen=True)
class Costs:
    """Additions to the coefficients: ``line_ns`` per step and per prefill, decode and context token; ``delays_us``
    before the queue, per token, per request, and of the stamp of the first token."""

    line_ns: tuple[int, int, int, int]
    delays_us: tuple[float, float, float, float]

    @classmethod
    def at(cls, point: Floats) -> Costs:
        """The costs of a point of a fit, float64[8]."""
        a, b, c, d = (round(float(value)) for value in point[:4])
        pre, token, request, stamp = (float(value) for value in point[4:])
        return cls((a, b, c, d), (pre, token, request, stamp))

    def entry(self, entry: ModelEntry) -> ModelEntry:
        """The coefficients with these additions."""
        pre, token, request, stamp = self.delays_us
        cycle = entry.lifecycle
        lifecycle = replace(
            cycle,
            pre_queue_us=max(cycle.pre_queue_us + pre, 0.0),
            post_token_us=max(cycle.post_token_us + token, 0.0),
            post_request_us=max(cycle.post_request_us + request, 0.0),
            stamp_us=cycle.stamp_us + stamp,
        )
        return replace(entry, latency=self._corrected(entry), lifecycle=lifecycle)

    def _corrected(self, entry: ModelEntry) -> CorrectedModel | ObservedCycles:
        if isinstance(entry.latency, ObservedCycles):
            if any(self.line_ns):
                raise TypeError("observed step times have nothing to fit")
            return entry.latency
        if isinstance(entry.latency, CorrectedModel):
            line_ns = [own + more for own, more in zip(entry.latency.line_ns, self.line_ns, strict=True)]
            return replace(entry.latency, line_ns=(line_ns[0], line_ns[1], line_ns[2], line_ns[3]))
        return CorrectedModel(entry.latency, self.line_ns, np.zeros(1, np.int64), np.zeros(1, np.int64))


@dataclass(frozen=True)
class Fit:
    """Costs fitted through the simulator.

    ``before``, ``left``: error without and with them, relative to the latencies.  ``equal``: each cost that was fitted,
    by place, with those that alone leave as little.
    """

    costs: Costs
    before: float
    left: float
    equal: tuple[tuple[int, frozenset[int]], ...] = ()


class Trial:
    """A replay of the requests of a target: ``left`` is its error as it is, ``fit`` the costs that explain it best."""

    def __init__(self, recording: Recording, mode: ReplayMode, entry: ModelEntry, target: Target) -> None:
        """Raises what planning a replay of the recording raises."""
        self._plan = plan_replay(recording, mode, entry)
        self.recording, self.mode, self.entry, self.target = recording, mode, entry, target
        self._trace: RequestTrace = self._plan.trace.part(slice(0, len(target.chosen)))
        self._begin(self._plan.engine)

    def on(self, engine: EngineConfig) -> Trial:
        """The same requests on an engine with other arguments that change no request.

        An engine that takes ``MAX_SLOWER`` times as long as the recording is not waited for: its error is
        ``NOT_SIMULATED``.
        """
        other = copy(self)
        other._begin(engine, may_end=True)
        return other

    def _begin(self, engine: EngineConfig, *, may_end: bool = False) -> None:
        self._engine = engine
        self._points: dict[bytes, _Point] = {}
        self._served: dict[tuple[int, ...], SimResult] = {}
        self._fit: Fit | None = None
        slow = may_end and engine.data_parallel_size == 1 and self._is_slow()
        self.difference_as_is: Floats = self._far_off() if slow else self.difference(np.zeros(len(_MOVES)))

    def _is_slow(self) -> bool:
        """Whether requests are open after ``MAX_SLOWER`` times the length of the recording, or cannot be served."""
        chosen = self.target.chosen
        running = Engine(self._trace, self._engine, self.entry.lifecycle)
        ends_us = self._trace.arrival_us[chosen] + self.target.observed_us[1]
        try:
            running.advance(self._latency(self.entry), int(MAX_SLOWER * np.nanmax(ends_us)))
        except TraceError:
            return True
        is_open = np.zeros(len(self._trace), np.bool_)
        is_open[running.order] = running.state.outcomes["last_step"] < 0
        return bool(is_open[chosen].any())

    @property
    def left(self) -> float:
        """The error with nothing fitted."""
        return misfit(self.difference_as_is)

    @property
    def has_first_tokens(self) -> bool:
        """Whether the time of the first token was observed of all requests."""
        return not np.isnan(self.target.observed_us[0]).any()

    def streams_us(self) -> tuple[Floats, Floats]:
        """Sent, first token and end of each request at the client, float64[3, m]: observed, and as it is simulated.

        Raises what simulating it raises.
        """
        result = simulate(self._trace, self._engine, self._latency(self.entry), self.entry.lifecycle)
        chosen = self.target.chosen
        sent_us = self._trace.arrival_us[chosen].astype(np.float64)
        observed, simulated = self.target.observed_us[:2], (result.ttft_us[chosen], result.e2e_us[chosen])
        one, other = (np.stack([sent_us, sent_us + ttft, sent_us + e2e]) for ttft, e2e in (observed, simulated))
        return one, other

    def difference(self, at: Floats) -> Floats:
        """float64[marks, m]: simulated less observed, relative to the scale; nan where not recorded.

        ``at``: float64[8], additions to the costs in the order of ``_MOVES``.
        """
        target = self.target
        try:
            result = self._result(Costs.at(at))
        except TraceError:
            return self._far_off()
        parts: list[Int64s] = [result.ttft_us, result.e2e_us]
        if target.stamped:
            parts += [
                result.scheduled_us - result.arrival_us,
                result.first_token_us - result.scheduled_us,
                result.finished_us - result.first_token_us,
            ]
        simulated_us = np.stack(parts)[:, target.chosen].astype(np.float64)
        return np.asarray((simulated_us - target.observed_us) / target.scale_us[:, None], np.float64)

    def _latency(self, entry: ModelEntry) -> Latency:
        return replace(self._plan, engine=self._engine).latency(entry.latency)

    def _far_off(self) -> Floats:
        return np.where(np.isnan(self.target.observed_us), np.nan, NOT_SIMULATED)

    def _result(self, costs: Costs) -> SimResult:
        """The run with these costs; an earlier one if the engine serves the requests as then."""
        entry = costs.entry(self.entry)
        before = self._served.get(costs.line_ns)
        if before is not None and np.array_equal(queueing_times(self._trace, entry.lifecycle), before.queued_us):
            return replace(before, lifecycle=entry.lifecycle)
        # Steps are not kept: a run that finds the memory of an earlier one takes a fifth of the time.
        result = simulate(self._trace, self._engine, self._latency(entry), entry.lifecycle).of_requests()
        self._served[costs.line_ns] = result
        return result

    def fit(self, enough: float = np.inf) -> Fit:
        """Fit one cost after the other, while each leaves clearly less than before.

        Ends early where the first leaves over ``HOPELESS`` times ``enough``, which others will not make up for.
        """
        if self._fit is not None:
            return self._fit
        best = _Point(np.zeros(len(_MOVES)), self.difference_as_is)
        chosen: list[tuple[int, frozenset[int]]] = []
        while best.left >= MIN_ERROR and len(chosen) < MAX_COSTS:
            points = {cost: self._solved(best, cost) for cost in range(len(_MOVES))}
            cost = min(points, key=lambda cost: points[cost].left)
            if points[cost].left > MAX_LEFT_OF_COST * best.left:
                break
            as_well = tie_limit(points[cost].left)
            chosen.append((cost, frozenset(other for other, point in points.items() if point.left <= as_well)))
            best = self._together(points[cost]) if len(chosen) > 1 else points[cost]
            if best.left > HOPELESS * enough:
                break
        self._points.clear()
        self._served.clear()
        fit = Fit(Costs.at(best.at), self.left, best.left, tuple(chosen))
        self._fit = None if enough < np.inf else fit
        return fit

    def _solved(self, start: _Point, cost: int) -> _Point:
        """Change one cost until the mean of a latency is right (secant method); the best point on the way."""
        best = start
        means: list[Callable[[Floats], float]] = [partial(_mean, row=1)]
        if not np.isnan(start.difference[0]).all():
            means.append(partial(_mean, row=0))
        for mean in means:
            last, here, moved = 0.0, mean(start.difference), -np.sign(mean(start.difference)) or 1.0
            for _ in range(MAX_CALLS):
                point = self._at(start.at + moved * np.eye(len(_MOVES))[cost] * _MOVES)
                best = min(best, point, key=lambda point: point.left)
                there = mean(point.difference)
                if abs(there) < MIN_ERROR / 10 or abs(there - here) < 1e-9:
                    break
                furthest = 4 * max(abs(moved - last), 1.0)
                further = float(np.clip(-there * (moved - last) / (there - here), -furthest, furthest))
                last, here, moved = moved, there, moved + further
        return best

    def _together(self, point: _Point) -> _Point:
        """Move all costs that are not 0 at once by Gauss-Newton steps, while that leaves less."""
        costs = np.flatnonzero(point.at)
        for _ in range(4):
            if point.left < MIN_ERROR:
                break
            known = ~np.isnan(point.difference)
            here = point.difference[known]
            moves = np.diag(_MOVES)[costs]
            slopes = np.column_stack(
                [(self.difference(point.at + move) - point.difference)[known] for move in moves],
            )
            weight = 1 / np.maximum(np.abs(here), np.median(np.abs(here)) + 1e-4)
            normal = slopes.T @ (slopes * weight[:, None])
            damped = normal + 1e-3 * np.diag(np.diag(normal) + 1e-12)
            move = np.zeros(len(_MOVES))
            move[costs] = -np.linalg.solve(damped, slopes.T @ (weight * here)) * _MOVES[costs]
            best = min((self._at(point.at + part * move) for part in (1.0, 0.4)), key=lambda one: one.left)
            if best.left >= point.left:
                break
            point = best
        return point

    def _at(self, at: Floats) -> _Point:
        """A point of this fit; one in ten is asked for twice."""
        key = at.tobytes()
        if key not in self._points:
            self._points[key] = _Point(at, self.difference(at))
        return self._points[key]


def trial_of(
    recording: Recording, mode: ReplayMode, entry: ModelEntry, window: tuple[float, float] = (0.0, 1.0)
) -> Trial | None:
    """A replay to fit; None with observed step times or too few requests.  Raises what planning it raises."""
    target = None if isinstance(entry.latency, ObservedCycles) else target_of(recording, window)
    return None if target is None else Trial(recording, mode, entry, target)


@dataclass(frozen=True)
class _Point:
    at: Floats
    difference: Floats

    @cached_property
    def left(self) -> float:
        return misfit(self.difference)


def _mean(difference: Floats, row: int) -> float:
    return float(np.nanmean(difference[row]))


def misfit(difference: Floats) -> float:
    """Mean absolute difference, relative to the latencies."""
    return float(np.nanmean(np.abs(difference)))
