"""How sure the error of a simulator is: 95 % intervals of errors.

The error of a mean is a ratio of means, simulated over observed, less one.  To first order each request adds
``(s - (1 + e) o) / sum(o)`` to it, so what both sides share cancels before anything is widened.  Requests that are
served together share steps, and a slow second delays all that queue behind it.  Drawn one by one they would make an
interval several times too narrow.  So only the slow part of the additions over the run counts: their first few cosines
("equal-weighted cosines", Lazarus, Lewis, Stock and Watson 2018).  Student's t has one degree of freedom per
cosine.  Few cosines see the longest memory and pay with a large t; more see less; the widest answer counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, hypot, inf, isfinite, sqrt

import numpy as np

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.validate.metrics.latency import (
    LEVELS,
    LatencySamples,
    MetricStatistic,
    number,
    relative_error,
    terms,
    values_of,
)

CONFIDENCE = 0.95
# Residences per slowest cosine, and bounds of the number of these cosines; runs shorter than `_SHORT` have one.
_RESIDENCES, _FEWEST, _MOST, _SHORT = 4, 2, 6, 4
# Numbers of cosines, as multiples of the slowest ones.
_MULTIPLES = (1, 2, 4)
# Up to this ratio of the variance of a sum, by its slow part, to that of as many independent rows these are taken for
# independent.  Coverage of TTFT is 94 to 95 % with it, and width over the ideal 1.2 instead of 1.6 for 120 requests.
_ALIKE = 1.5
# Residences at the start of a run in which the server fills and warms up: a load stage of its own.
_RAMP = 1.5
# Minimum requests of a ramp, and of what follows it.
_RAMP_REQUESTS = 8
# Requests: fewer give no interval.  Of parts of noisy runs the interval of E2E holds the error in 88 to 92 % from 20
# requests on; with 9 to 16 requests and more than one degree of freedom in 72 to 86 %.
MIN_REQUESTS = 20
# Standard deviation of a number from run to run where each server was recorded once, as a share; assumed.  Where steps
# take 1 % longer in one run than in another (two runs of a CPU server on idle cores), numbers of 36 synthetic servers
# move by 1.2 to 1.6 % (medians) and 1.9 to 2.4 % (root mean square).  At +4 and +6 %, a bound of +5 % is then judged
# wrongly in at most 4 % of pairs of recordings for E2E, and 5 % for TTFT p99.
ASSUMED_RUN_NOISE = 0.016
# Runs count as alike if chance parts as many requests by as much in a third of cases.  A true error of 11 % then
# passes a limit of 10 % in 0 to 5 % of pairs of runs, and 86 to 97 % of intervals hold it, whether runs vary by 0 or
# 10 %.  With chance in 5 % of cases up to 8 % pass, and 77 % hold.
_ALIKE_RUNS = 0.68
# Half of the 95 % interval of the difference of two such runs, as a share.
RUNS_APART = 1.96 * sqrt(2) * ASSUMED_RUN_NOISE
# Stretches of the run; a quantile is tried without each.
_STRETCHES = 6
# Residences that one event may change: a stall delays what is in flight before it and what queues after it.  As shares
# of the requests of a run: the least and the most, and how far apart such stretches begin.  With two fifths for all
# runs, a stall made 1.4 % of true simulators fail at 120 requests and 0.6 % at 400; now 0.5 and 0.4 %.
_EVENT_RESIDENCES = 4
_LEAST_EVENT, _MOST_EVENT, _EVENT_STEP = 0.4, 0.6, 0.1
# An event counts in a change of errors only if the error moves by this multiple of half the interval without it.  A
# gate then loses 0 to 2 points of its power; without events it fails 10 to 32 % of better candidates after a stall.
_CLEAR_EVENT = 1.5
# Of the interval of a trend: it is looked for in every run, and most have none.
_TREND_CONFIDENCE = 0.998
# Requests around a quantile, as a multiple of those beyond it.
_TAIL = 3.0
# The interval of a quantile over the hypotenuse of its two half-widths.  The wider one alone leaves p99s that are six
# standard deviations off unseen in 12 to 15 % of recordings; with this in 3 to 9 %, at a coverage of 86 to 97 %.
_OF_BOTH = 0.81


@dataclass(frozen=True)
class Estimate:
    """A signed relative error with its 95 % interval, or the change of its absolute value.

    ``low``, ``high``: fractions, infinite where no interval can be made.  ``blocks``: how many independent stretches of
    time it rests on.  ``parts``: half-widths, as fractions, of what is in it: ``requests``, ``repeats``,
    ``assumed`` (run-to-run noise), ``one stretch`` (see ``with_single_events``), ``reconstructions``, ``beyond the
    fit``.
    """

    error: float
    low: float
    high: float
    blocks: float
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def half(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends; None where no interval can be made."""
        return (self.low, self.high) if isfinite(self.half) else None

    @property
    def possible(self) -> tuple[float, float] | None:
        """Both ends of the interval of an error; none is below -1, because no simulated time is below 0."""
        return (max(self.low, -1.0), self.high) if isfinite(self.half) else None

    @property
    def sampled(self) -> Estimate:
        """Without the margin of steps beyond the fit."""
        unsure = self.parts.get("beyond the fit", 0.0)
        low, high = (1 + self.low) / (1 - unsure) - 1, (1 + self.high) / (1 + unsure) - 1
        return replace(self, low=low, high=high, parts={k: v for k, v in self.parts.items() if k != "beyond the fit"})

    def beyond(self, unsure: float) -> Estimate:
        """Widened by steps beyond the fit: what is simulated may be off by this share."""
        if not unsure:
            return self
        low, high = (1 + self.low) * (1 - unsure) - 1, (1 + self.high) * (1 + unsure) - 1
        return replace(self, low=low, high=high, parts={**self.parts, "beyond the fit": unsure})

    def repeated(self, numbers: Sequence[float]) -> Estimate:
        """The mean error over all recordings of a load, by what each observed (``numbers``, this one first)."""
        unsure, once = self.parts.get("beyond the fit", 0.0), self.sampled
        errors = (1 + once.error) * numbers[0] / np.array(numbers) - 1
        runs, degrees = len(numbers), once.blocks - 1
        between = float(errors.var(ddof=1))
        within = (once.half / student_t(degrees)) ** 2 if isfinite(once.half) else inf
        variance, degrees = of_runs(within, 0 if "one stretch" in once.parts else degrees, between, runs - 1)
        middle, half = float(errors.mean()), student_t(degrees) * sqrt(variance / runs)
        return Estimate(middle, middle - half, middle + half, degrees + 1, {"repeats": half}).beyond(unsure)


def of_runs(within: float, degrees: float, between: float, free: int) -> tuple[float, float]:
    """Variance of a number from run to run, with its degrees of freedom.

    ``within``: its variance by the requests of one run, with ``degrees`` of freedom (0: an event is in it, so it shows
    no other run); infinite where unknown.  ``between``: that of the recorded runs, with ``free`` degrees of freedom.
    Where runs differ by no more than requests explain, both count together.  Where by more, the assumed noise of runs
    is one more degree of freedom: alone, two recordings that are 10 % apart would leave 64 % either way, now 22 %.
    """
    from scipy.special import fdtri  # the ratio of two variances that chance exceeds (F distribution)

    if not isfinite(within):
        return between, free
    if degrees and between <= within * float(fdtri(free, degrees, _ALIKE_RUNS)):
        return (degrees * within + free * between) / (degrees + free), degrees + free
    return max(between, (within + ASSUMED_RUN_NOISE**2 + free * between) / (1 + free)), 1 + free


def student_t(degrees: float, confidence: float = CONFIDENCE) -> float:
    """What Student's t is within, either way, with that probability."""
    from scipy.special import stdtrit  # heavy, and only intervals need it

    return float(stdtrit(degrees, (1 + confidence) / 2))


def requests_needed(estimate: Estimate, margin: float, requests: int) -> int | None:
    """About how many requests of the same load make half the interval shorter than ``margin``; None: no number does."""
    fixed = sum(half for part, half in estimate.parts.items() if part != "requests")
    sampled = estimate.parts.get("requests", inf)
    if not isfinite(sampled) or margin <= fixed:
        return None
    needed = requests * (sampled / (margin - fixed)) ** 2
    digits = 10 ** max(len(str(ceil(needed))) - 2, 0)
    return int(ceil(needed / digits) * digits)


@dataclass(frozen=True)
class TimeOrder:
    """Rows (requests, or parts of a run) in order of time, stage by stage.

    ``stage``: int64[rows], from 0, in order of time.  ``slowest``: int64[stages], how many cosines see the longest
    memory in each.  Each stage has a level of its own, because the stages are not random.  ``ramp``: the
    first stage is the start of the run; its variance counts, but gives no degree of freedom.  ``event``: the share of
    the rows that one event may change.
    """

    stage: Int64s
    slowest: Int64s
    ramp: bool = False
    event: float = _LEAST_EVENT

    @property
    def place(self) -> Floats:
        """float64[rows]: where in its stage a row stands, 0 to 1."""
        size = np.bincount(self.stage)
        first = np.cumsum(size) - size
        return np.asarray((np.arange(len(self.stage)) - first[self.stage] + 0.5) / size[self.stage], np.float64)

    def of(self, chosen: Bools) -> TimeOrder:
        """The chosen rows (bool[rows]), without stages that have none."""
        kept, stage = np.unique(self.stage[chosen], return_inverse=True)
        return TimeOrder(stage, self.slowest[kept], self.ramp and bool(kept[:1] == 0), self.event)

    def half_width(self, additions: Floats, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Half of the interval of the sum of additions (float64[rows]), and how many stretches it rests on."""
        if len(additions) < MIN_REQUESTS:
            return inf, 1.0
        if not additions.any():
            return 0.0, float(self.slowest.sum()) + 1
        squares, alone = [], 0.0
        for stage, slowest in enumerate(self.slowest):
            rows = self.stage == stage
            if (terms := min(max(_MULTIPLES) * int(slowest), int(rows.sum()) - 1)) > 0:
                waves = np.cos(np.pi * np.outer(np.arange(1, terms + 1), self.place[rows]))
                squares.append((int(slowest), 2 * (waves @ additions[rows]) ** 2))
                alone += float(additions[rows].var(ddof=1)) * int(rows.sum())
        halves = []
        for multiple in _MULTIPLES:
            cut = [of_stage[: multiple * slowest] for slowest, of_stage in squares]
            degrees, variance = sum(map(len, cut[self.ramp :])), sum(float(of_stage.mean()) for of_stage in cut)
            halves.append((student_t(degrees, confidence) * sqrt(variance), degrees + 1.0, variance))
        if max(variance for *_, variance in halves) <= _ALIKE * alone:
            surest = halves[-1][2]  # of most cosines
            return student_t(len(additions) - 1, confidence) * sqrt(max(surest, alone)), float(len(additions))
        return max(halves)[:2]


def in_order(rows: int) -> TimeOrder:
    """Parts of a run that each are longer than a residence."""
    return TimeOrder(np.zeros(rows, np.int64), np.array([max(_FEWEST, min(rows // _RESIDENCES, _MOST))]))


def request_order(recording: Recording, chosen: Bools, e2e_us: Floats | Int64s) -> TimeOrder:
    """The order of the chosen requests (bool[n]), which take ``e2e_us`` each."""
    rows = recording.requests
    return time_order(rows["arrival_us"].to_numpy()[chosen], rows["stage"].fill_null(-1).to_numpy()[chosen], e2e_us)


def time_order(arrival_us: Int64s, stage: Int64s, e2e_us: Floats | Int64s) -> TimeOrder:
    """The same of arrays: when each request came, in which load stage, and how long it took.

    Every recording begins with an empty server, and often with a cold one, so the start is a stage of its own if the
    rest is long enough for an interval.
    """
    stage = np.unique(stage, return_inverse=True)[1]
    if len(arrival_us) == 0:
        return TimeOrder(stage, np.zeros(0, np.int64))
    event = min(max(_EVENT_RESIDENCES / max(_residences(arrival_us, e2e_us), 1.0), _LEAST_EVENT), _MOST_EVENT)
    starts = arrival_us - arrival_us.min() < _RAMP * float(np.mean(e2e_us))
    if min(starts.sum(), (~starts).sum()) >= _RAMP_REQUESTS:
        rest = arrival_us[~starts], stage[~starts], e2e_us[~starts]
        if _residences(rest[0], rest[2]) >= _SHORT:
            order = _stage_order(*rest)
            stages = np.zeros(len(stage), np.int64)
            stages[~starts] = order.stage + 1
            return TimeOrder(stages, np.concatenate([[1], order.slowest]), ramp=True, event=event)
    return replace(_stage_order(arrival_us, stage, e2e_us), event=event)


def _residences(arrival_us: Int64s, e2e_us: Floats | Int64s) -> float:
    """How many mean residences of a request a run lasts."""
    return float((arrival_us + e2e_us).max() - arrival_us.min()) / max(float(np.mean(e2e_us)), 1.0)


def _stage_order(arrival_us: Int64s, stage: Int64s, e2e_us: Floats | Int64s) -> TimeOrder:
    stage = np.unique(stage, return_inverse=True)[1]
    residences = _residences(arrival_us, e2e_us)
    total = 1 if residences < _SHORT else min(max(int(residences / _RESIDENCES), _FEWEST), _MOST)
    spans = np.array([np.ptp(arrival_us[stage == one]) for one in range(int(stage.max()) + 1)], np.float64)
    share = spans / spans.sum() if spans.sum() else np.full(len(spans), 1 / len(spans))
    return TimeOrder(stage, np.maximum(np.rint(total * share).astype(np.int64), 1))


def error_estimates(
    order: TimeOrder, observed: LatencySamples, simulated: LatencySamples, errors: Mapping[MetricStatistic, float]
) -> dict[MetricStatistic, Estimate]:
    """The interval of each error, over requests with latencies on both sides.

    ``errors``: as the table has them, by metric and statistic.
    """
    estimates = {}
    for cell, error in errors.items():
        half, blocks = half_width(cell, _ratio(cell, observed, simulated), order)
        once = of_requests_alone(error, half, blocks)
        estimates[cell] = with_single_events(once, cell, (observed, simulated), order)
    return estimates


def with_single_events(
    once: Estimate,
    cell: MetricStatistic,
    sides: tuple[LatencySamples, LatencySamples],
    order: TimeOrder,
    *,
    confidence: float = CONFIDENCE,
    of_change: bool = False,
) -> Estimate:
    """With its end that is nearer to 0 moved to the interval without any one stretch of the run that makes the error.

    What happened once, such as a stall, says nothing about another recording, so it fails no simulator; the other end
    stays, because then a gate would see less.  A quantile of fewer requests is another one, so it counts only where
    both intervals are apart.  ``of_change``: the sign alone is asked for.  Then the event must be clear, and its
    after-effect on what is left may be as large as the event.
    """
    sign = 1.0 if once.error > 0 else -1.0
    whole, inner = sign * once.error, once.low if sign > 0 else -once.high
    moved, rows = inner, np.arange(len(order.stage)) / max(len(order.stage), 1)
    for begins in np.arange(0.0, 1.0 - order.event + _EVENT_STEP / 2, _EVENT_STEP):
        left = (rows < begins) | (rows >= begins + order.event)
        if left.sum() < MIN_REQUESTS:
            continue
        observed, simulated = (side.of(left) for side in sides)
        left_error = relative_error(number(observed, cell), number(simulated, cell))
        if left_error is None or not (error := sign * left_error) < inner:
            continue
        half, _ = half_width(cell, _ratio(cell, observed, simulated), order.of(left), confidence)
        if error + _CLEAR_EVENT * half * of_change < whole if cell[1] == "mean" else error + half < inner:
            moved = min(moved, error - half - (whole - error) * of_change)
    if moved == inner:
        return once
    end = {"low": max(moved, -1.0)} if sign > 0 else {"high": -moved}
    return replace(once, **end, parts={**once.parts, "one stretch": inner - moved})


def error_trend(
    order: TimeOrder, arrival_us: Int64s, observed: LatencySamples, simulated: LatencySamples
) -> Estimate | None:
    """By how much the error of the mean ITL (of E2E without token counts) grows over the run, with its 99.8 % interval.

    ``arrival_us``: int64[rows].  Within load stages, because a simulator may be off by more at a higher load.  None
    without a run to see it in.
    """
    metric = "itl" if isfinite(number(observed, ("itl", "mean"))) else "e2e"
    seen, said = (terms(side, metric)[0] for side in (observed, simulated))
    if not seen.sum() > 0:
        return None
    share = seen / float(seen.sum())
    ratio = number(simulated, (metric, "mean")) / number(observed, (metric, "mean"))
    place = (arrival_us - arrival_us.min()) / max(float(np.ptp(arrival_us)), 1.0)
    sizes = np.bincount(order.stage, share)
    if not sizes.all():
        return None
    error = (said - ratio * seen) / seen.sum()
    error -= share * (np.bincount(order.stage, error) / sizes)[order.stage]
    place -= (np.bincount(order.stage, share * place) / sizes)[order.stage]
    spread = float(share @ place**2)
    if not spread > 0:
        return None
    slope = float(error @ place) / spread
    half, blocks = order.half_width((error - slope * share * place) * place / spread, _TREND_CONFIDENCE)
    return of_requests_alone(slope, half, blocks) if isfinite(half) else None


def _ratio(cell: MetricStatistic, one: LatencySamples, other: LatencySamples) -> Weighted:
    """To first order, what changes a number of the other over that of the one."""
    under, over = number(one, cell), number(other, cell)
    return [(-over / under**2, one), (1 / under, other)]


def estimate(error: float, additions: Floats, order: TimeOrder) -> Estimate:
    """An error with the half-width of the sum of what each row adds to it."""
    return of_requests_alone(error, *order.half_width(additions))


def of_requests_alone(error: float, half: float, blocks: float) -> Estimate:
    """An error with half of its interval, by how requests differ."""
    low = max(error - half, -1.0) if isfinite(half) else -inf  # no latency is below 0
    return Estimate(error, low, error + half, blocks, {"requests": half})


Weighted = Sequence[tuple[float, LatencySamples]]


def half_width(
    cell: MetricStatistic, sides: Weighted, order: TimeOrder, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Half of the interval of a weighted sum of a number of each side, and how many stretches that rests on.

    Request i of all sides is the same one, so what they share cancels.
    """
    if cell[1] != "mean":
        return _of_quantile(cell, sides, order, confidence)
    return order.half_width(_additions([(weight, *terms(side, cell[0])) for weight, side in sides]), confidence)


def _additions(sides: Sequence[tuple[float, Floats, Floats]]) -> Floats:
    """float64[rows]: what each row adds to the weighted sum of ``sum(values) / sum(counts)``, to first order."""
    of_sides = [w * (values - values.sum() / counts.sum() * counts) / counts.sum() for w, values, counts in sides]
    return np.asarray(np.sum(of_sides, axis=0), np.float64)


def _of_quantile(cell: MetricStatistic, sides: Weighted, order: TimeOrder, confidence: float) -> tuple[float, float]:
    """``half_width`` of a quantile.

    From two: how it changes without each stretch of the run (a grouped jackknife), and the noise of the mean latency of
    the requests around it.
    """
    level = LEVELS[cell[1]]
    values = np.array([values_of(side, cell[0]) for _, side in sides], np.float64)
    weights = [weight for weight, _ in sides]
    known = ~np.isnan(values.sum(axis=0))
    values = values[:, known]
    if known.sum() < MIN_REQUESTS:
        return inf, 1.0
    stretch = np.floor(order.place[known] * _STRETCHES).astype(np.int64)
    without = [
        float(np.dot(weights, np.quantile(values[:, stretch != one], level, axis=1))) for one in range(_STRETCHES)
    ]
    jackknife = student_t(_STRETCHES - 1, confidence) * sqrt((_STRETCHES - 1) * float(np.var(without)))
    edges = np.quantile(values, max(1 - _TAIL * (1 - level), 0.0), axis=1)
    around = np.asarray((values >= edges[:, np.newaxis]).any(axis=0), np.float64)
    parts = [(weight, np.asarray(values[i] * around), around) for i, weight in enumerate(weights)]
    around_it, _ = order.of(known).half_width(_additions(parts), confidence)
    return _OF_BOTH * hypot(jackknife, around_it), float(_STRETCHES)
