"""Counterfactual attribution: which component of a replay an error comes from.

First every set of the wrong inputs is put right.  Then, with all inputs right, every set of the modelled parts is
replaced, and recorded step times at last: recorded times are those of what the server was given.  A component's share
of an error is its Shapley value over these replays.  The shares and what is left when everything is replaced sum to
the error exactly.  Intervals are those of ``validate``: of a sum of numbers over the same requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import factorial, isfinite, isnan, nan, sqrt
from typing import Unpack

import numpy as np

from blis_replay.base.arrays import Bools, Floats
from blis_replay.base.errors import NothingToJudgeError, ValidateError
from blis_replay.blis.latency.models import ObservedCycles, durations_us
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.checks import ledger
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.simulator import entry_of
from blis_replay.validate.explain.candidates import candidates
from blis_replay.validate.explain.hypothesis import OPEN, PROVED_RIGHT, PROVED_WRONG, Hypothesis, Replayed, Standing
from blis_replay.validate.fit.step_errors import step_cycles
from blis_replay.validate.metrics.latency import (
    THRESHOLDS,
    LatencySamples,
    MetricStatistic,
    latency_statistics,
    of_requests,
)
from blis_replay.validate.metrics.observed import (
    Gaps,
    Selection,
    numbers_from_aggregates,
    numbers_from_requests,
    observed_requests,
    overloaded,
    samples_of,
    simulated_samples,
    unusable_cells,
)
from blis_replay.validate.metrics.uncertainty import Estimate as RelativeEstimate
from blis_replay.validate.metrics.uncertainty import TimeOrder, half_width, request_order

# What is attributed, in the order of the columns of the arrays below.
QUANTITIES: tuple[MetricStatistic, ...] = (
    *(("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"), ("ttft", "p99")),
    *(("itl", "mean"), ("itl", "p99")),
)
MEANS = tuple(i for i, (_, statistic) in enumerate(QUANTITIES) if statistic == "mean")

Subset = frozenset[int]
UNEXPLAINED = "unexplained"  # the rest of an error


def all_subsets(players: int) -> list[Subset]:
    """All subsets of ``range(players)``, the empty one first and the whole one last."""
    return [frozenset(chosen) for size in range(players + 1) for chosen in combinations(range(players), size)]


def shapley_weights(players: int) -> Floats:
    """float64[players, subsets]: each player's Shapley value as a weighted sum over ``all_subsets``.

    It is the mean, over all orders in which the players can join, of what the value changes when this one does
    (Shapley 1953): the sum over S without i of |S|! (n - |S| - 1)! / n! * (value[S + i] - value[S]).
    """
    subsets = all_subsets(players)
    joined = [factorial(size) * factorial(players - size - 1) / factorial(players) for size in range(players)]
    weights = [[joined[len(s) - 1] if one in s else -joined[len(s)] for s in subsets] for one in range(players)]
    return np.array(weights).reshape(players, len(subsets))


MIN_CYCLES = 100  # recorded step cycles to compare with the model's
MIN_EXCESS = 0.05  # a median that is off by less may be that of what steps do beside their model
WORTH_NAMING = 0.01  # errors of a mean below this share of the observed value are not worth a cause
TAIL_WORTH_NAMING = 0.1  # and those of a p99 below this not a word
MIN_BESIDE = 0.25  # further causes are named from this share of the largest on
MIN_CANCELLING = 0.03  # two causes cancel if each adds this share: less is what a tenth of the steps leaves unknown


@dataclass(frozen=True)
class Estimate:
    """A number in us with its 95 % interval; nan where it is not known."""

    value_us: float
    low_us: float = nan
    high_us: float = nan

    @classmethod
    def between(cls, value_us: float, low_us: float, high_us: float) -> Estimate:
        """The number; without an interval where that is infinite."""
        return cls(value_us, low_us, high_us) if isfinite(low_us) and isfinite(high_us) else cls(value_us)

    @property
    def half_us(self) -> float:
        """Half of the interval."""
        return abs(self.high_us - self.low_us) / 2

    @property
    def may_be_nothing(self) -> bool:
        """Whether another recording of the same load may well not have it."""
        return self.low_us <= 0 <= self.high_us


@dataclass(frozen=True)
class Cause:
    """A component and what it adds to the simulated value, by place in QUANTITIES: ``shares``, its Shapley values."""

    component: Hypothesis
    shares: tuple[Estimate, ...]


@dataclass(frozen=True)
class Attribution:
    """Where the errors of a replay come from, by place in QUANTITIES.

    ``error``: simulated less observed; ``residual``: the same with every component replaced.  error = sum of the
    causes' shares + residual.  ``replays``: how many they rest on.  ``observed_us``: nan if not recorded, or if an
    instrument check (``unusable``) forbids it; the shares are known even then.  ``standings``: what the recording
    proves of each component, and of what else may be wrong.  ``lost``: why the recording is not the load that was
    served, so that nothing is blamed; ``steps_off``: modelled over recorded time of the recorded batches, less one:
    lost requests do not change it.  ``queue``: the recording is overloaded, so its latencies measure its queue.
    ``recordings``: of this load; with several the intervals of ``error`` are those of the mean error over all.
    """

    slug: str
    alias: str
    release: str
    mode: str
    requests: int
    replays: int
    observed_us: tuple[float, ...]
    simulated_us: tuple[float, ...]
    error: tuple[Estimate, ...]
    causes: tuple[Cause, ...]
    residual: tuple[Estimate, ...]
    standings: tuple[Standing, ...]
    unusable: dict[str, str]
    lost: tuple[str, ...] = ()
    steps_off: float | None = None
    queue: bool = False
    recordings: int = 1

    @property
    def parts(self) -> list[tuple[str, tuple[Estimate, ...]]]:
        """What sums to the error: the share of each component, and the rest, by name."""
        return [*((cause.component.name, cause.shares) for cause in self.causes), (UNEXPLAINED, self.residual)]

    def relative_error(self, i: int) -> float | None:
        """Simulated over observed, less one; None where either is not known."""
        observed_us, error_us = self.observed_us[i], self.error[i].value_us
        return None if isnan(error_us) or isnan(observed_us) or observed_us == 0 else error_us / observed_us


@dataclass(frozen=True)
class _Replay:
    """Latencies of the chosen requests, and float64[QUANTITIES] us, nan where not known.

    ``samples``: None of a summary, which only the observed side may be.
    """

    samples: LatencySamples | None
    numbers_us: Floats


def attribute(
    recording: Recording,
    release: CoefficientRelease,
    mode: ReplayMode | None = None,
    *,
    token_gaps: Gaps | None = None,
    errors: Mapping[MetricStatistic, RelativeEstimate] | None = None,
    window: tuple[float, float] = (0.0, 1.0),
    options: str = "",
    **pool: Unpack[Pool],
) -> Attribution:
    """Attribute the errors of a replay to its components.

    ``mode``: the replay to explain, exact replay if None.  ``token_gaps``: observed gaps, for the p99 of ITL.
    ``window``: share of the run whose requests are compared; ``token_gaps`` and ``errors`` are of them.
    ``errors``: with the intervals that a comparison gives them; None: the errors have none.
    ``options``: of the command line, repeated in the commands that are printed.  ``pool``: of ``map_jobs``.  Raises
    ``NothingToJudgeError`` without observed latencies, and what ``replay`` raises.
    """
    mode = mode or ReplayMode()
    release.refuse_if_invalid()
    replayed = Replayed(recording, mode, entry_of(release, recording), release, options, window)
    components, standings = candidates(replayed)
    run = replayed.run()
    chosen, observed = _observed(run.recording, window, token_gaps)
    forbidden = unusable_cells(recording.findings, token_times=token_gaps is not None)
    usable = [quantity not in forbidden for quantity in QUANTITIES]
    observed = replace(observed, numbers_us=np.where(usable, observed.numbers_us, nan))
    (subsets, weights), first = _sequence(components), _answer(run, chosen)
    job = partial(_replayed, replayed, tuple(components), chosen)
    answers = (first, *map_jobs(job, subsets[1:], **pool))
    e2e_us = next(one.samples.e2e_us for one in (observed, first) if one.samples is not None)
    estimates = partial(_estimates, request_order(run.recording, chosen, e2e_us), answers, observed)
    causes = tuple(Cause(component, estimates(-row)) for component, row in zip(components, weights, strict=True))
    lost = tuple(f"{f.check}: {f.message}" for f in recording.findings if f.severity == "unusable" and not f.metric)
    error = _errors(first, observed, errors or {})
    return Attribution(
        slug=recording.slug,
        alias=recording.alias,
        release=release.name,
        mode=mode.name,
        requests=int(chosen.sum()),
        replays=len(answers),
        observed_us=tuple(map(float, observed.numbers_us)),
        simulated_us=tuple(map(float, first.numbers_us)),
        error=error,
        causes=causes,
        # Where nothing was replaced, all of an error is left, with its interval.
        residual=estimates(np.eye(len(answers))[-1], less_observed=True) if causes else error,
        standings=(*(_standing(cause, observed.numbers_us) for cause in causes), *standings),
        unusable={f"{m} {s}": forbidden[m, s].message for m, s in QUANTITIES if (m, s) in forbidden},
        lost=lost,
        steps_off=_steps_off(recording, replayed.entry) if lost else None,
        queue=overloaded(recording.findings),
    )


def _sequence(components: Sequence[Hypothesis]) -> tuple[list[Subset], Floats]:
    """The sets of components to replace; and float64[components, sets], Shapley values as weighted sums over them.

    Inputs come first, then parts, then recorded step times, each group with all before it put right.  Recorded step
    times go by the clock, so requests that come at other times than the server's take those of others.
    """
    inputs = sum(component.is_input for component in components)
    by_the_clock = sum(isinstance(component.latency, ObservedCycles) for component in components)
    subsets, groups, before = [Subset()], [], 0
    for size in (inputs, len(components) - inputs - by_the_clock, by_the_clock):
        groups.append((slice(before, before + size), slice(len(subsets) - 1, len(subsets) - 1 + 2**size), size))
        subsets += [Subset(range(before)) | {before + i for i in chosen} for chosen in all_subsets(size)[1:]]
        before += size
    weights = np.zeros((len(components), len(subsets)))
    for rows, columns, size in groups:
        weights[rows, columns] = shapley_weights(size)
    return subsets, weights


def _estimates(
    order: TimeOrder, replays: tuple[_Replay, ...], observed: _Replay, weights: Floats, *, less_observed: bool = False
) -> tuple[Estimate, ...]:
    """The sum of the replays' numbers by ``weights`` (float64[replays]); ``less_observed``: less what was observed.

    Intervals are to first order, as a fraction of the observed number: what both sides share cancels.
    """
    sums_us = weights @ np.stack([replay.numbers_us for replay in replays])
    values_us = sums_us - observed.numbers_us if less_observed else sums_us
    pairs = zip(weights.tolist(), replays, strict=True)
    weighted = [(weight, one.samples) for weight, one in pairs if weight and one.samples is not None]
    found = []
    for i, (cell, sum_us, observed_us) in enumerate(zip(QUANTITIES, sums_us, observed.numbers_us, strict=True)):
        half_us = nan
        if of_requests(cell) and (observed.samples is not None or i in MEANS):
            sides = list(weighted)
            if observed.samples is not None and not isnan(observed_us) and observed_us:
                sides.append((-float(sum_us) / float(observed_us), observed.samples))
            half_us = half_width(cell, sides, order)[0]
            # The means of a summary are taken to be as sure as those of the replay.
            half_us *= sqrt(2) if observed.samples is None and less_observed else 1.0
        value_us = float(values_us[i])
        found.append(Estimate.between(value_us, value_us - half_us, value_us + half_us))
    return tuple(found)


def _errors(
    first: _Replay, observed: _Replay, errors: Mapping[MetricStatistic, RelativeEstimate]
) -> tuple[Estimate, ...]:
    """The errors with the intervals that a comparison gives them."""
    found = []
    for quantity, simulated_us, observed_us in zip(QUANTITIES, first.numbers_us, observed.numbers_us, strict=True):
        error, compared = float(simulated_us - observed_us), errors.get(quantity)
        ends = (nan, nan) if compared is None else (compared.low * observed_us, compared.high * observed_us)
        found.append(Estimate.between(error, *map(float, ends)))
    return tuple(found)


def _standing(cause: Cause, observed_us: Floats) -> Standing:
    """A recorded part is proved wrong where it changes a mean that is worth naming, else proved right."""
    one = cause.component
    if not one.recorded:
        return Standing(one.name, OPEN, one.basis, one.decides)
    matters = one.is_input or any(abs(cause.shares[i].value_us) >= WORTH_NAMING * observed_us[i] for i in MEANS)
    return Standing(one.name, PROVED_WRONG if matters else PROVED_RIGHT, one.basis)


def _steps_off(recording: Recording, entry: ModelEntry) -> float | None:
    """Modelled over recorded step times, less one: of the median or of the sum, whichever is nearer to 0.

    None where they agree or are not known.
    """
    of_another_run = f"{ledger.SPAN}: {ledger.STEP_RECORDS}"
    unusable = [f for f in recording.findings if f.severity == "unusable"]
    contradicted = [f for f in unusable if f.metric == "step_time" or of_another_run in f.measured]
    # Step records are not at fault for requests that the client lacks.
    if any(
        f.check != ledger.CHECK or of_another_run in f.measured or not any(ledger.CLIENT in name for name in f.measured)
        for f in contradicted
    ):
        return None
    try:
        recorded = step_cycles(recording)
    except ValidateError:
        return None
    modelled_us = durations_us(entry.latency, recorded.batch)
    median = float(np.median(modelled_us / recorded.time_us)) - 1
    whole = float(modelled_us.sum() / recorded.time_us.sum()) - 1
    # Where some steps stall, a line through all is above their median and right in the mean: then it is not off.
    excess = min(median, whole, key=abs) if median * whole > 0 else 0.0
    return excess if len(recorded.time_us) >= MIN_CYCLES and abs(excess) >= MIN_EXCESS else None


def _observed(recording: Recording, window: tuple[float, float], token_gaps: Gaps | None) -> tuple[Bools, _Replay]:
    """The requests to compare with a replay (bool[n]), and what was observed of them."""
    selection, samples = Selection(window=window), None
    chosen = observed_requests(recording) & selection.of(recording.requests)
    if chosen.any():
        samples = samples_of(recording, chosen)
        cells = numbers_from_requests(recording, samples, selection, token_gaps)
    elif recording.is_summed_up:
        chosen = (recording.requests["status"] == "ok").to_numpy()
        cells = numbers_from_aggregates(recording, None)
    else:
        raise NothingToJudgeError(f"{recording.alias}: no latencies were recorded, so there is no error to attribute")
    values_us = [cells[metric][statistic].value_us for metric, statistic in QUANTITIES]
    return chosen, _Replay(samples, np.array([nan if us is None else us for us in values_us]))


def _replayed(replayed: Replayed, components: tuple[Hypothesis, ...], chosen: Bools, subset: Subset) -> _Replay:
    """The replay with the components of ``subset`` replaced."""
    return _answer(replayed.put_right(components[i] for i in sorted(subset)).run(), chosen)


def _answer(run: ReplayRun, chosen: Bools) -> _Replay:
    samples = simulated_samples(run, chosen)
    numbers = latency_statistics(samples, run.pooled_gaps(chosen & run.simulated.completed))
    return _Replay(samples, np.array([numbers[metric].get(statistic, nan) for metric, statistic in QUANTITIES]))


@dataclass(frozen=True)
class Blame:
    """The cause of the error of one mean.

    ``quantity``: its place in QUANTITIES.  ``error``: simulated over observed, less one.  ``cause``: None where most
    of the error no component explains.  ``explained``: the share of the error that is the cause's.  ``beside``: other
    causes of it, those that hide a part of it as well.
    """

    quantity: int
    error: float
    cause: Cause | None
    explained: float | None
    beside: tuple[Cause, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The component and those that explain the error as well, empty without one."""
        return () if self.cause is None else (self.cause.component.name, *self.cause.component.also)

    @property
    def beside_names(self) -> tuple[str, ...]:
        """The components of the causes beside the largest."""
        return tuple(cause.component.name for cause in self.beside)

    @property
    def metric(self) -> str:
        """``E2E mean``."""
        return f"{QUANTITIES[self.quantity][0].upper()} {QUANTITIES[self.quantity][1]}"


def blames(attribution: Attribution) -> list[Blame]:
    """The causes of each mean off by 1 % or more, the largest for its limit first; then of means right by luck."""
    if attribution.lost:
        return []
    known = [(i, error) for i in MEANS if (error := attribution.relative_error(i)) is not None]
    off = (one for one in known if abs(one[1]) >= WORTH_NAMING)
    named = sorted(off, key=lambda one: -abs(one[1]) / THRESHOLDS[QUANTITIES[one[0]][0]])
    lucky = [one for one in known if abs(one[1]) < WORTH_NAMING and _by_luck(attribution, one[0])]
    return [_blamed(attribution, i, error) for i, error in (*named, *lucky)]


def _by_luck(attribution: Attribution, i: int) -> bool:
    """Whether a mean is right because two causes cancel."""
    parts = [part_of(cause, i) / attribution.observed_us[i] for cause in attribution.causes]
    return max(parts, default=0.0) >= MIN_CANCELLING and min(parts, default=0.0) <= -MIN_CANCELLING


def part_of(cause: Cause, i: int) -> float:
    """What the cause adds to a quantity, us."""
    return cause.shares[i].value_us


def _blamed(attribution: Attribution, i: int, error: float) -> Blame:
    """The cause that adds most to the error; else the wrong input that changes the mean most, either way.

    What a wrong input changes is known however much no component explains.
    """
    observed_us, residual_us = attribution.observed_us[i], attribution.residual[i].value_us
    sign, sizes = 1 if error > 0 else -1, sorted(attribution.causes, key=lambda cause: -abs(part_of(cause, i)))
    # Every part moves a little with the step that a request just catches, so a cause has to be worth naming.
    least_us = max(sign * residual_us, min(WORTH_NAMING, abs(error)) * observed_us)
    input_us = max(MIN_BESIDE * abs(error), WORTH_NAMING) * observed_us
    largest = max(attribution.causes, key=lambda cause: sign * part_of(cause, i), default=None)
    if largest is None or sign * part_of(largest, i) < least_us:
        inputs = (cause for cause in sizes if cause.component.is_input and abs(part_of(cause, i)) >= input_us)
        largest = next(inputs, None)
    if largest is None:
        return Blame(i, error, None, None)
    least_us = max(MIN_BESIDE * abs(part_of(largest, i)), WORTH_NAMING * observed_us)

    def is_named(cause: Cause, part_us: float) -> bool:
        if cause.component.is_input:
            return abs(part_us) >= least_us
        # What was recorded is as large beside a wrong input that makes a queue as without it.
        small = largest.component.is_input and cause.component.recorded and not cause.shares[i].may_be_nothing
        least = WORTH_NAMING * observed_us if small else least_us
        # A part explains nothing if more is left with it as recorded than without.
        return abs(part_us) >= max(least, abs(residual_us)) and abs(part_us + residual_us) > abs(residual_us)

    beside = tuple(cause for cause in sizes if cause is not largest and is_named(cause, part_of(cause, i)))
    # None where causes cancel to the microsecond.
    whole_us = attribution.error[i].value_us
    return Blame(i, error, largest, part_of(largest, i) / whole_us if whole_us else None, beside)
