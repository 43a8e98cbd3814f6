"""Costs of a step and delays, fitted to single requests through the simulator.

Few causes explain most errors, so one cost after the other is fitted, each time the one that leaves the least: of the
others nothing is said.  A simulated time jumps where a request just misses a step; the mean over all requests moves
far more evenly, so each cost is solved for that, and judged by what it leaves request by request.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.errors import TraceError
from blis_replay.blis.latency.models import CorrectedModel, EngineLatency, ObservedCycles
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.result import SimResult, check_conservation
from blis_replay.blis.setup import queueing_times
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace
from blis_replay.compiled.arrays import Bools, Floats, Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.observed import server_stamps
from blis_replay.replay.plan import plan_replay, with_kernels
from blis_replay.validate.metrics.observed import observed_requests

# A fit looks at so many requests: enough to tell, few enough to be simulated some thousand times.
_MOST_REQUESTS = 1_000
# Below this, relative to the latencies, nothing is left to be explained.
EXPLAINED = 0.0025
# Costs that are fitted at once, what one more must leave at most of what was left, and calls to solve for one.
_MOST_COSTS, _WORTH_A_COST, _CALLS = 3, 0.9, 8
# A first cost that leaves so many times what would be enough ends a fit.
_HOPELESS = 4.0
# Of a rough fit: a mean is right that is off by this share of what is left.
_ROUGHLY = 0.05
# Others that leave as little as the best, give or take so much, explain it equally well.
EQUAL_SHARE, EQUAL = 1.3, 0.004
# By how much each is moved to see what it does: ns for the line in the batch, us for delays.
_STEPS = np.array([300_000.0, 2_000.0, 20_000.0, 20.0, 1_500.0, 60.0, 1_500.0, 1_500.0])
_DELAYS = 4
# When a run of requests that may be far too late is looked at, as shares of the time that the recording took.
_LOOKS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
# What solves for nothing: nothing could be simulated.
_NOT_SIMULATED = 10.0


@dataclass(frozen=True)
class Target:
    """What was observed of the requests ``chosen`` (bool[n]): float64[marks, m] us, nan where not recorded.

    Each row is a part of the way of a request; ``scale_us``: what a difference in it is measured by.
    """

    chosen: Bools
    observed_us: Floats
    scale_us: Floats
    stamped: bool


def target_of(recording: Recording) -> Target | None:
    """What was observed of the first requests; None of too few, or where only aggregates are known."""
    chosen = observed_requests(recording)[:_MOST_REQUESTS]
    if int(chosen.sum()) < 20:
        return None
    forbidden = {finding.metric for finding in recording.findings if finding.severity == "unusable"}
    requests = recording.requests.frame(["arrival_us", "ttft_us", "e2e_us"])[: len(chosen)].filter(chosen)
    sent_us, ttft_us, e2e_us = (requests[name].to_numpy().astype(np.float64) for name in requests.columns)
    first_us = np.full(len(ttft_us), np.nan) if "ttft" in forbidden else ttft_us
    rows = [first_us, e2e_us]
    stamps = server_stamps(recording)
    marks = [
        values[: len(chosen)][chosen] for values in (stamps.scheduled_us, stamps.first_token_us, stamps.finished_us)
    ]
    stamped = "segments" not in forbidden and not np.isnan(marks[0]).all()
    if stamped:
        rows += [marks[0] - sent_us, marks[1] - marks[0], marks[2] - marks[1]]
    observed_us = np.stack(rows)
    first, whole = max(float(np.mean(ttft_us)), 1.0), max(float(np.mean(e2e_us)), 1.0)
    scale_us = np.array([first, whole, first, first, whole][: len(rows)])
    return Target(chosen, observed_us, scale_us, stamped)


@dataclass(frozen=True)
class Fitted:
    """Step time and delays fitted through the simulator.

    ``before``, ``left``: mean absolute difference without and with the fit, relative to the latencies.  ``line_ns``:
    added to each step, and per prefill, decode and context token.  ``delays_us``: added before the queue, per token,
    per request and to the stamp of the first token after it.  ``equal``: each of these eight that was fitted, with
    those that alone do it as well.
    """

    before: float
    left: float
    line_ns: tuple[int, int, int, int]
    delays_us: tuple[float, float, float, float]
    equal: tuple[tuple[int, frozenset[int]], ...] = ()

    def entry(self, entry: ModelEntry) -> ModelEntry:
        """The coefficients with what was fitted."""
        if isinstance(entry.latency, ObservedCycles | CorrectedModel):
            raise TypeError("observed step times have nothing to fit")
        at, none = np.zeros(1, np.int64), np.zeros(1, np.int64)
        pre, token, request, stamp = self.delays_us
        cycle = entry.lifecycle
        lifecycle = replace(
            cycle,
            pre_queue_us=max(cycle.pre_queue_us + pre, 0.0),
            post_token_us=max(cycle.post_token_us + token, 0.0),
            post_request_us=max(cycle.post_request_us + request, 0.0),
            stamp_us=cycle.stamp_us + stamp,
        )
        return replace(entry, latency=CorrectedModel(entry.latency, self.line_ns, at, none), lifecycle=lifecycle)


class Through:
    """A replay of the requests of a target whose costs can be changed: ``difference`` of any of them."""

    def __init__(self, recording: Recording, mode: ReplayMode, entry: ModelEntry, target: Target) -> None:
        """Raises what planning a replay of the recording raises."""
        self._plan = with_kernels(plan_replay(recording, mode), recording, mode, entry.first_use)
        self.recording, self.mode, self.entry, self.target = recording, mode, entry, target
        self._trace: RequestTrace = self._plan.trace.part(slice(0, len(target.chosen)))
        self._begin(self._plan.engine)

    def on(self, engine: EngineConfig, most: float = np.inf) -> Through:
        """The same requests on an engine with other arguments, of those that change no request.

        ``most``: if as it is it leaves more, that is all that is said of it, and its run is not waited for.
        """
        other = copy(self)
        other._begin(engine, most)
        return other

    def _begin(self, engine: EngineConfig, most: float = np.inf) -> None:
        self._engine = engine
        # One engine serves requests that all come later by the same time as before, only later, if none gives up.
        self._moves_as_one = engine.data_parallel_size == 1 and bool((self._trace.abort_us == NEVER_US).all())
        self._known: dict[bytes, _Point] = {}
        self._served: dict[tuple[int, ...], SimResult] = {}
        self._fit: Fitted | None = None
        self.as_it_is: Floats = self._far_off()
        if most < _NOT_SIMULATED and engine.data_parallel_size == 1:
            try:
                served = self._served_within(most)
            except TraceError:
                served = None
            if served is None:
                return
            self._served[0, 0, 0, 0] = served.of_requests()
        self.as_it_is = self.difference(np.zeros(len(_STEPS)))

    @property
    def has_first_tokens(self) -> bool:
        """Whether it was observed of all requests when their first token came."""
        return not np.isnan(self.target.observed_us[0]).any()

    def streams_us(self) -> tuple[Floats, Floats]:
        """Sent, first token and end of each request at the client, float64[3, m]: observed, and as it is simulated.

        Raises what simulating it raises.
        """
        result = simulate(self._trace, self._engine, self._latency(self.entry), self.entry.lifecycle)
        chosen = self.target.chosen
        sent_us = self._trace.arrival_us[chosen].astype(np.float64)
        first_us, end_us = self.target.observed_us[:2]
        simulated = (result.ttft_us[chosen], result.e2e_us[chosen])
        return tuple(np.stack([sent_us, sent_us + a, sent_us + b]) for a, b in ((first_us, end_us), simulated))  # type: ignore[return-value]

    def difference(self, at: Floats) -> Floats:
        """float64[marks, m]: simulated less observed, relative to the scale; nan where not recorded."""
        costs = _fitted(0.0, 0.0, at)
        target = self.target
        try:
            result = self._result(costs)
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

    def _latency(self, entry: ModelEntry) -> EngineLatency:
        return replace(self._plan, engine=self._engine).latency(entry.latency)

    def _far_off(self) -> Floats:
        return np.where(np.isnan(self.target.observed_us), np.nan, _NOT_SIMULATED)

    def _served_within(self, most: float) -> SimResult | None:
        """The run as it is; None as soon as so many are so late that more than ``most`` is left however it ends."""
        target, running = self.target, Engine(self._trace, self._engine, self.entry.lifecycle)
        ends_us = self._trace.arrival_us[target.chosen] + target.observed_us[1]
        enough = most * np.count_nonzero(~np.isnan(target.observed_us))
        latency = self._latency(self.entry)
        for until_us in float(np.nanmax(ends_us)) * np.array(_LOOKS):
            running.advance(latency, int(until_us))
            is_open = np.zeros(len(self._trace), np.bool_)
            is_open[running.order] = running.state.outcomes["last_step"] < 0
            late = (running.now_us - ends_us[is_open[target.chosen]]) / target.scale_us[1]
            if np.nansum(np.maximum(late, 0)) > enough:
                return None
        running.advance(latency)
        result = running.result()
        check_conservation(self._trace.abort_us, running.state, result)
        return result

    def _result(self, costs: Fitted) -> SimResult:
        """The requests of the run with these costs; of one before if the engine serves them as it did, or all later."""
        entry = costs.entry(self.entry)
        before = self._served.get(costs.line_ns)
        if before is not None:
            moved_us = queueing_times(self._trace, entry.lifecycle) - before.queued_us
            if not moved_us.any():
                return replace(before, lifecycle=entry.lifecycle)
            if self._moves_as_one and (moved_us == moved_us[0]).all():
                return replace(before.later(int(moved_us[0])), lifecycle=entry.lifecycle)
        # Steps are not kept: a run that finds the memory of one before takes a fifth of the time.
        result = simulate(self._trace, self._engine, self._latency(entry), entry.lifecycle).of_requests()
        self._served[costs.line_ns] = result
        return result

    def fit(self, enough: float = np.inf, *, roughly: bool = False) -> Fitted:
        """One cost after the other, while each leaves clearly less than before.

        Ends early where the first leaves so much more than ``enough`` that others will not make up for it.
        ``roughly``: means need not be right, only nearly so beside what is left: that takes half as many replays,
        which an exact fit has again before it; else ``forget`` them.
        """
        if self._fit is not None:
            return self._fit
        best = _Point(np.zeros(len(_STEPS)), self.as_it_is)
        chosen: list[tuple[int, frozenset[int]]] = []
        while best.left >= EXPLAINED and len(chosen) < _MOST_COSTS:
            right = max(EXPLAINED / 10, _ROUGHLY * best.left if roughly else 0.0)
            tried = {cost: self._solved(best, cost, right) for cost in range(len(_STEPS))}
            cost = min(tried, key=lambda cost: tried[cost].left)
            if tried[cost].left > _WORTH_A_COST * best.left:
                break
            as_well = EQUAL_SHARE * tried[cost].left + EQUAL
            chosen.append((cost, frozenset(other for other, point in tried.items() if point.left <= as_well)))
            best = self._together(tried[cost]) if len(chosen) > 1 else tried[cost]
            if best.left > _HOPELESS * enough:
                break
        if not roughly:
            self.forget()
        found = _fitted(misfit(self.as_it_is), best.left, best.at, tuple(chosen))
        self._fit = None if roughly or enough < np.inf else found
        return found

    def forget(self) -> None:
        """Drop the replays of a fit."""
        self._known.clear()
        self._served.clear()

    def _solved(self, start: _Point, cost: int, right: float) -> _Point:
        """The best point on the way on which changing one cost makes the mean of a latency right: the secant method.

        ``right``: it is if it differs by no more.
        """
        best = start
        means: list[Callable[[Floats], float]] = [partial(_mean, row=1)]
        if not np.isnan(start.difference[0]).all():
            means.append(partial(_mean, row=0))
        for mean in means:
            last, here, moved = 0.0, mean(start.difference), -np.sign(mean(start.difference)) or 1.0
            for _ in range(_CALLS):
                point = self._at(start.at + moved * np.eye(len(_STEPS))[cost] * _STEPS)
                best = min(best, point, key=lambda point: point.left)
                there = mean(point.difference)
                if abs(there) < right or abs(there - here) < 1e-9:
                    break
                furthest = 4 * max(abs(moved - last), 1.0)
                further = float(np.clip(-there * (moved - last) / (there - here), -furthest, furthest))
                last, here, moved = moved, there, moved + further
        return best

    def _together(self, point: _Point) -> _Point:
        """All costs that differ from the start, moved at once by steps of Gauss and Newton while that leaves less."""
        costs = np.flatnonzero(point.at)
        for _ in range(4):
            if point.left < EXPLAINED:
                break
            here = point.difference[~np.isnan(point.difference)]
            slopes = np.column_stack(
                [
                    (self.difference(point.at + move) - point.difference)[~np.isnan(point.difference)]
                    for move in np.diag(_STEPS)[costs]
                ]
            )
            weight = 1 / np.maximum(np.abs(here), np.median(np.abs(here)) + 1e-4)
            normal = slopes.T @ (slopes * weight[:, None])
            damped = normal + 1e-3 * np.diag(np.diag(normal) + 1e-12)
            move = np.zeros(len(_STEPS))
            move[costs] = -np.linalg.solve(damped, slopes.T @ (weight * here)) * _STEPS[costs]
            best = min((self._at(point.at + part * move) for part in (1.0, 0.4)), key=lambda tried: tried.left)
            if best.left >= point.left:
                break
            point = best
        return point

    def _at(self, at: Floats) -> _Point:
        """A point of this fit, of which one in ten is asked for again."""
        key = at.tobytes()
        if key not in self._known:
            self._known[key] = _Point(at, self.difference(at))
        return self._known[key]


def through_of(recording: Recording, mode: ReplayMode, entry: ModelEntry) -> Through | None:
    """A replay to fit; None of observed step times, and of too few requests.  Raises what planning it raises."""
    target = None if isinstance(entry.latency, ObservedCycles | CorrectedModel) else target_of(recording)
    return None if target is None else Through(recording, mode, entry, target)


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


def _fitted(before: float, left: float, at: Floats, equal: tuple[tuple[int, frozenset[int]], ...] = ()) -> Fitted:
    a, b, c, d = (round(float(value)) for value in at[:_DELAYS])
    pre, token, request, stamp = (float(value) for value in at[_DELAYS:])
    return Fitted(before, left, (a, b, c, d), (pre, token, request, stamp), equal)
