"""A trial: the first requests of a recording replayed with a change, and the error that is left, request by request.

Step time and delays can be fitted beside any change.  Few causes explain most errors, so one cost after the other is
fitted, each time the one that leaves the least error.  A simulated time jumps where a request just misses a step; the
mean over all requests moves far more evenly.  So each cost is solved for the mean, and judged request by request.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from blis_replay.base.arrays import Bools, Floats
from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import CorrectedModel, ObservedCycles
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.result import SimResult
from blis_replay.blis.setup import queueing_times
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.ingest.recording import FIRST_TOKEN, WAY, Recording
from blis_replay.replay.engine import replayed_engine
from blis_replay.replay.observed import server_stamps
from blis_replay.replay.plan import plan_replay
from blis_replay.validate.explain.hypothesis import Hypothesis, Replayed
from blis_replay.validate.explain.rule import MIN_ERROR, tie_limit
from blis_replay.validate.metrics.observed import Selection, observed_requests

MIN_REQUESTS, MAX_REQUESTS = 20, 1_000  # enough to decide, few enough to be simulated some thousand times
MAX_COSTS = 3  # costs fitted at once
MAX_LEFT_OF_COST = 0.9  # a further cost must leave at most this share of the error
MAX_CALLS = 8  # replays to solve for one cost
NOT_SIMULATED = 10.0  # the error of a replay that the engine cannot run, relative to the latencies

# A point of a fit, float64[8], is what is added to the costs: ns per step, prefill, decode and context token; then us
# before the queue, per token, per request, and of the stamp of the first token.  Each is moved so far at first.
_MOVES = np.array([300_000.0, 2_000.0, 20_000.0, 20.0, 1_500.0, 60.0, 1_500.0, 1_500.0])
STEP_COSTS, PRE_QUEUE_COST, OUTPUT_COSTS = range(4), range(4, 5), range(5, 8)
PREFILL_COST = 1

# Arguments that change how requests are served, and no request: one plan serves for all of their values.  Prompts are
# planned as blocks, and whether they are cached; scheduling goes by the mode.
_OF_THE_ENGINE = {one.name for one in fields(EngineConfig)} - {
    *("block_size", "enable_prefix_caching", "async_scheduling"),
}


@dataclass(frozen=True)
class Target:
    """What was observed of the requests ``chosen`` (bool[n]): float64[marks, m] us, nan where not recorded.

    Rows: TTFT, E2E, and where the server stamped requests queue, prefill and decode time.  ``scale_us``:
    float64[marks], the mean latency by which differences of each row are divided.
    """

    chosen: Bools
    observed_us: Floats
    scale_us: Floats


def _target(recording: Recording, window: tuple[float, float]) -> Target | None:
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
    engine_us = [us[places] for us in (stamps.scheduled_us, stamps.first_token_us, stamps.finished_us)]
    if "segments" not in forbidden and not np.isnan(engine_us[0]).all():
        rows += [*np.diff([sent_us, *engine_us], axis=0)]
    first, whole = max(float(np.mean(ttft_us)), 1.0), max(float(np.mean(e2e_us)), 1.0)
    scale_us = np.array([first, whole, first, first, whole][: len(rows)])
    return Target(chosen, np.stack(rows), scale_us)


def with_costs(entry: ModelEntry, at: Floats) -> ModelEntry:
    """The coefficients with the additions of a point of a fit."""
    if not at.any():
        return entry
    pre, token, request, stamp = map(float, at[4:])
    cycle, latency = entry.lifecycle, entry.latency
    if at[:4].any():
        corrected = CorrectedModel.of(latency)
        a, b, c, d = (own + more for own, more in zip(corrected.line_ns, _line_ns(at), strict=True))
        latency = replace(corrected, line_ns=(a, b, c, d))
    lifecycle = replace(
        cycle,
        pre_queue_us=max(cycle.pre_queue_us + pre, 0.0),
        post_token_us=max(cycle.post_token_us + token, 0.0),
        post_request_us=max(cycle.post_request_us + request, 0.0),
        stamp_us=cycle.stamp_us + stamp,
    )
    return replace(entry, latency=latency, lifecycle=lifecycle)


def _line_ns(at: Floats) -> tuple[int, ...]:
    return tuple(round(float(value)) for value in at[:4])


@dataclass(frozen=True)
class Fit:
    """Costs fitted through the simulator: ``at``, float64[8], what is added to each, and the ``difference`` with them.

    ``equal``: each cost that was fitted, by place, with those that alone leave as little.
    """

    at: Floats
    difference: Floats
    equal: tuple[tuple[int, frozenset[int]], ...] = ()

    @cached_property
    def left(self) -> float:
        """The error with them."""
        return misfit(self.difference)

    def mean(self, row: int) -> float:
        """Mean difference of a row of the target."""
        return float(np.nanmean(self.difference[row]))


def misfit(difference: Floats) -> float:
    """Mean absolute difference, relative to the latencies."""
    return float(np.nanmean(np.abs(difference)))


class Trial:
    """A replay of the requests of a target: ``left`` is its error as it is, ``fit`` the costs that explain it best."""

    def __init__(self, replayed: Replayed, target: Target) -> None:
        """Raises what planning the replay raises."""
        self.replayed, self.target, self._entry = replayed, target, replayed.entry_with_stalls
        self._plan = plan_replay(replayed.recording, replayed.mode, self._entry)
        self._trace: RequestTrace = self._plan.trace.part(slice(0, len(target.chosen)))
        self._begin()

    def put_right(self, hypothesis: Hypothesis) -> Trial | None:
        """The same requests with the change of a hypothesis; None if no engine has its arguments.

        Raises ``ValueError`` for another schedule, which a trial cannot replay, and what planning the replay raises.
        """
        if hypothesis.schedule is not None:
            raise ValueError(f"{hypothesis.name}: only the schedule check can replay another schedule")
        changed = self.replayed.put_right([hypothesis])
        try:
            if not (hypothesis.is_engine_only and hypothesis.engine.keys() <= _OF_THE_ENGINE):
                return Trial(changed, self.target)
            other, engine = copy(self), replayed_engine(changed.recording, changed.mode, changed.entry).config
            other.replayed, other._plan = changed, replace(self._plan, engine=engine)
            other._begin()
        except TraceError:
            return None
        return other

    def _begin(self) -> None:
        self._served: dict[tuple[int, ...], SimResult] = {}
        self.difference_as_is: Floats = self.difference(np.zeros(len(_MOVES)))

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
        result, chosen = self._simulated(self._entry), self.target.chosen
        sent_us = self._trace.arrival_us[chosen].astype(np.float64)
        observed, simulated = self.target.observed_us[:2], (result.ttft_us[chosen], result.e2e_us[chosen])
        one, other = (np.stack([sent_us, sent_us + ttft, sent_us + e2e]) for ttft, e2e in (observed, simulated))
        return one, other

    def difference(self, at: Floats) -> Floats:
        """float64[marks, m]: simulated less observed with these additions, in units of the scale; nan: not recorded."""
        target = self.target
        try:
            result = self._result(at)
        except TraceError:
            return np.where(np.isnan(target.observed_us), np.nan, NOT_SIMULATED)
        parts = [result.ttft_us, result.e2e_us]
        if len(target.observed_us) > len(parts):
            stamps_us = (result.arrival_us, result.scheduled_us, result.first_token_us, result.finished_us)
            parts += [*np.diff(stamps_us, axis=0)]
        simulated_us = np.stack(parts)[:, target.chosen].astype(np.float64)
        return np.asarray((simulated_us - target.observed_us) / target.scale_us[:, None], np.float64)

    def _simulated(self, entry: ModelEntry) -> SimResult:
        return simulate(self._trace, self._plan.engine, self._plan.latency(entry.latency), entry.lifecycle)

    def _result(self, at: Floats) -> SimResult:
        """The run with these additions; an earlier one if the engine serves the requests as then."""
        entry, steps = with_costs(self._entry, at), _line_ns(at)
        before = self._served.get(steps)
        if before is not None and np.array_equal(queueing_times(self._trace, entry.lifecycle), before.queued_us):
            return replace(before, lifecycle=entry.lifecycle)
        # Steps are not kept: a run that finds the memory of an earlier one takes a fifth of the time.
        result = self._served[steps] = self._simulated(entry).of_requests()
        return result

    def fit(self) -> Fit:
        """Fit one cost after the other, while each leaves clearly less than before."""
        best = Fit(np.zeros(len(_MOVES)), self.difference_as_is)
        chosen: list[tuple[int, frozenset[int]]] = []
        while best.left >= MIN_ERROR and len(chosen) < MAX_COSTS:
            points = {cost: self._solved(best, cost) for cost in range(len(_MOVES))}
            cost = min(points, key=lambda cost: points[cost].left)
            if points[cost].left > MAX_LEFT_OF_COST * best.left:
                break
            as_well = tie_limit(points[cost].left)
            chosen.append((cost, frozenset(other for other, point in points.items() if point.left <= as_well)))
            best = self._together(points[cost]) if len(chosen) > 1 else points[cost]
        self._served.clear()
        return replace(best, equal=tuple(chosen))

    def _solved(self, start: Fit, cost: int) -> Fit:
        """Change one cost until the mean of a latency is right (secant method); the best point on the way."""
        best, direction = start, np.eye(len(_MOVES))[cost] * _MOVES
        for row in (1,) if np.isnan(start.difference[0]).all() else (1, 0):
            last, here = 0.0, start.mean(row)
            moved = -float(np.sign(here)) or 1.0
            for _ in range(MAX_CALLS):
                point = self._point(start.at + moved * direction)
                best, there = min(best, point, key=lambda point: point.left), point.mean(row)
                if abs(there) < MIN_ERROR / 10 or abs(there - here) < 1e-9:
                    break
                furthest = 4 * max(abs(moved - last), 1.0)
                further = float(np.clip(-there * (moved - last) / (there - here), -furthest, furthest))
                last, here, moved = moved, there, moved + further
        return best

    def _together(self, point: Fit) -> Fit:
        """Move all costs that are not 0 at once by Gauss-Newton steps, while that leaves less."""
        costs = np.flatnonzero(point.at)
        moves = np.diag(_MOVES)[costs]
        for _ in range(4):
            if point.left < MIN_ERROR:
                break
            known = ~np.isnan(point.difference)
            here = point.difference[known]
            slopes = np.column_stack([(self.difference(point.at + move) - point.difference)[known] for move in moves])
            weight = 1 / np.maximum(np.abs(here), np.median(np.abs(here)) + 1e-4)
            normal = slopes.T @ (slopes * weight[:, None])
            damped = normal + 1e-3 * np.diag(np.diag(normal) + 1e-12)
            move = -np.linalg.solve(damped, slopes.T @ (weight * here)) @ moves
            best = min((self._point(point.at + part * move) for part in (1.0, 0.4)), key=lambda one: one.left)
            if best.left >= point.left:
                break
            point = best
        return point

    def _point(self, at: Floats) -> Fit:
        return Fit(at, self.difference(at))


def trial_of(replayed: Replayed) -> Trial | None:
    """A replay to fit; None with observed step times or too few requests.  Raises what planning it raises."""
    target = None
    if not isinstance(replayed.entry.latency, ObservedCycles):
        target = _target(replayed.recording, replayed.window)
    return None if target is None else Trial(replayed, target)
