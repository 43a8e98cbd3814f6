"""Counterfactual attribution: which component of a replay an error comes from.

Every set of components is replaced by what was recorded, and replayed.  A component's share of an
error is its Shapley value over these replays; the shares and what is left when everything is
replaced sum to the error exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, pairwise
from math import factorial, isnan
from typing import Unpack

import numpy as np

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.simulator import entry_of, has_entry
from blis_replay.validate.errors import NothingToJudgeError, ValidateError
from blis_replay.validate.explain.candidates import candidates
from blis_replay.validate.explain.hypothesis import Hypothesis, Replayed
from blis_replay.validate.explain.tails import hidden_errors
from blis_replay.validate.fit.step_errors import predicted_us, step_targets
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
from blis_replay.validate.metrics.resampling import (
    QUANTITIES,
    SEED,
    Blocks,
    PooledGaps,
    draws,
    interval,
    quantities,
    request_blocks,
    widened,
)

Subset = frozenset[int]


def all_subsets(players: int) -> list[Subset]:
    """All subsets of ``range(players)``, the empty one first and the whole one last."""
    return [frozenset(chosen) for size in range(players + 1) for chosen in combinations(range(players), size)]


def shapley_values(players: int, value: Mapping[Subset, Floats]) -> Floats:
    """float64[players, ...]: each player's share of ``value[all] - value[none]``; the shares sum to it exactly.

    ``value``: of every subset, arrays of one shape.  A share is the mean, over all orders in which the
    players can join, of what the value changes when this one does (Shapley 1953):
    the sum over S without i of |S|! (n - |S| - 1)! / n! * (value[S + i] - value[S]).
    """
    shares = np.zeros((players, *value[frozenset()].shape))
    for player in range(players):
        for subset in all_subsets(players):
            if player not in subset:
                weight = factorial(len(subset)) * factorial(players - len(subset) - 1) / factorial(players)
                shares[player] += weight * (value[subset | {player}] - value[subset])
    return shares


ATTRIBUTION_RESAMPLES = 100  # draws of blocks of requests
MIN_DRAWS = 40  # a 95 % interval leaves 2.5 % on either side: fewer draws show none
FAR_ABOVE = 2.0  # a server that keeps up has no component that doubles E2E and TTFT alone
MIN_CYCLES = 100  # recorded step cycles to compare with the model's
MIN_EXCESS = 0.05  # a median that is off by less may be that of what steps do beside their model
WORTH_NAMING = 0.01  # errors of a mean below this share of the observed value are not worth a cause
MIN_BESIDE = 0.25  # further causes are named from this share of the largest on
MIN_CANCELLING = 0.03  # two causes cancel if each adds this share: less is what a tenth of the steps leaves unknown


@dataclass(frozen=True)
class Estimate:
    """A number in us with its 95 % interval over resampled requests; nan where it is not known."""

    value_us: float
    low_us: float
    high_us: float

    @property
    def half_us(self) -> float:
        """Half of the interval."""
        return abs(self.high_us - self.low_us) / 2


@dataclass(frozen=True)
class Cause:
    """A component and what it adds to the simulated value, by place in QUANTITIES.

    ``shares``: Shapley values.  ``changes``: in the one order in which the causes stand: what replacing it takes
    away when all before it are replaced already.
    """

    component: Hypothesis
    shares: tuple[Estimate, ...]
    changes: tuple[Estimate, ...]


@dataclass(frozen=True)
class Attribution:
    """Where the errors of a replay come from, by place in QUANTITIES.

    ``error``: simulated less observed; ``residual``: the same with every component replaced, which no component
    explains.  error = sum of the causes' shares + residual = sum of their changes + residual.
    ``replays``: how many they rest on; ``overloaded``: how many of these have a queue that grows, which neither the
    replay nor the recording has: causes that hide one another.  ``observed_us`` is nan where the recording has no such
    number, or an instrument check (``unusable``) forbids it; the shares are known even then.  ``not_replaced``:
    components that stay, and why.  ``lost``: why the recording is not the load that was served, so that nothing is
    blamed.  ``steps_off``: of such a recording, what the model makes of its recorded batches, which lost requests do
    not change.  ``hidden``: sentences on errors that the means hide, of tails and of load stages.
    ``queue``: whether the recording is overloaded, so that its latencies measure its queue.  ``drawn``: in words, the
    blocks of requests that intervals rest on, or why intervals are missing.
    """

    slug: str
    alias: str
    release: str
    reference: str | None
    mode: str
    requests: int
    resamples: int
    replays: int
    overloaded: int
    observed_us: tuple[float, ...]
    simulated_us: tuple[float, ...]
    error: tuple[Estimate, ...]
    causes: tuple[Cause, ...]
    residual: tuple[Estimate, ...]
    not_replaced: dict[str, str]
    unusable: dict[str, str]
    lost: tuple[str, ...] = ()
    steps_off: StepsOff | None = None
    hidden: tuple[str, ...] = ()
    queue: bool = False
    drawn: str = ""

    @property
    def is_one_way(self) -> bool:
        """Whether causes are named by what they change one after the other: inputs that are wrong come first."""
        return self.overloaded > 0 or any(cause.component.is_input for cause in self.causes)

    def part(self, cause: Cause, i: int) -> Estimate:
        """What the cause adds to a quantity: what it changes one after the other, where parts act on one another.

        Shares over orders in which the server is overloaded say how much it would be, not what is wrong now.  And where
        a wrong input makes a queue, all else would count for more in it than it does once that is put right.
        """
        return (cause.changes if self.is_one_way else cause.shares)[i]

    def may_be_nothing(self, estimate: Estimate) -> bool:
        """Whether other requests of the same load may well not have it."""
        return self.resamples >= MIN_DRAWS and estimate.low_us <= 0 <= estimate.high_us


@dataclass(frozen=True)
class StepsOff:
    """``excess``: modelled over recorded time of ``steps`` step cycles with their batches, less one: of the median or
    of the sum, whichever is nearer to nothing."""

    steps: int
    excess: float


@dataclass(frozen=True)
class _Shared:
    replayed: Replayed
    components: tuple[Hypothesis, ...]
    chosen: Bools
    blocks: Blocks
    resamples: int
    seed: int

    @cached_property
    def times(self) -> Int64s:
        """The draws, the same for every replay."""
        return draws(self.blocks, self.resamples, self.seed)


def attribute(
    recording: Recording,
    release: CoefficientRelease,
    mode: ReplayMode | None = None,
    *,
    reference: CoefficientRelease | None = None,
    token_gaps: Gaps | None = None,
    options: str = "",
    resamples: int = ATTRIBUTION_RESAMPLES,
    seed: int = SEED,
    **pool: Unpack[Pool],
) -> Attribution:
    """Attribute the errors of a replay to its components.

    ``mode``: the replay to explain, exact replay if None.  ``reference``: its coefficients, if it has the model,
    replace those of parts that were not recorded.  ``token_gaps``: observed gaps, for the p99 of ITL.
    ``options``: of the command line, repeated in the commands that are printed.  ``pool``: of ``map_jobs``.  Raises
    ``NothingToJudgeError`` without observed latencies, and what ``replay`` raises.
    """
    mode = mode or ReplayMode()
    release.refuse_if_invalid()
    if reference is not None and (reference.sha256 == release.sha256 or not has_entry(reference, recording)):
        reference = None
    replayed = Replayed(recording, mode, entry_of(release, recording), release, options)
    components, not_replaced = candidates(replayed, reference)
    run = replayed.run()
    chosen, blocks, observed = _observed(run, token_gaps, resamples, seed)
    forbidden = unusable_cells(recording.findings, token_times=token_gaps is not None)
    for column, quantity in enumerate(QUANTITIES):
        if quantity in forbidden:
            observed[:, column] = np.nan
    shared = _Shared(replayed, tuple(components), chosen, blocks, resamples, seed)
    subsets = all_subsets(len(components))
    others = map_jobs(partial(_replayed, shared), subsets[1:], **pool)
    answers = [_numbers_of(shared, run), *others]
    components, value = _not_followers(components, dict(zip(subsets, answers, strict=True)), observed[0], not_replaced)
    shares = -shapley_values(len(components), value)
    one_by_one = [value[frozenset(range(replaced))] for replaced in range(len(components) + 1)]
    first, last = one_by_one[0], one_by_one[-1]
    changes = [before - after for before, after in pairwise(one_by_one)]
    lost = tuple(f"{f.check}: {f.message}" for f in recording.findings if f.severity == "unusable" and not f.metric)
    return Attribution(
        slug=recording.slug,
        alias=recording.alias,
        release=release.name,
        reference=reference.name if reference else None,
        mode=mode.name,
        requests=int(chosen.sum()),
        resamples=resamples,
        replays=len(value),
        overloaded=_overloaded(list(value.values()), np.vstack([first[0], last[0], observed[0]])),
        observed_us=tuple(map(float, observed[0])),
        simulated_us=tuple(map(float, first[0])),
        error=_estimates(first - observed, blocks),
        causes=tuple(
            Cause(component, _estimates(share, blocks), _estimates(change, blocks))
            for component, share, change in zip(components, shares, changes, strict=True)
        ),
        residual=_estimates(last - observed, blocks),
        not_replaced=not_replaced,
        unusable=_reasons(forbidden),
        lost=lost,
        steps_off=_steps_off(recording, replayed.entry) if lost else None,
        hidden=() if lost else _hidden(run, chosen, {metric for metric, _ in forbidden}),
        queue=overloaded(recording.findings),
        drawn=blocks.words,
    )


def _not_followers(
    components: list[Hypothesis], value: dict[Subset, Floats], observed_us: Floats, not_replaced: dict[str, str]
) -> tuple[list[Hypothesis], dict[Subset, Floats]]:
    """The components and values without scheduling decisions, if those follow from the others; then says so.

    Whom a scheduler passes over follows from its queue, and that from how long steps and delays are.  With both as they
    are, forcing it makes half of an error good that has another cause; with all others replaced it changes nothing.
    """
    place = next((i for i, component in enumerate(components) if "schedule" in component.mode), None)
    if place is None or len(components) == 1:
        return components, value
    every = frozenset(range(len(components)))
    share_us = shapley_values(len(components), {subset: row[0] for subset, row in value.items()})[place]
    last_us = value[every][0] - value[every - {place}][0]
    means = [i for i, (_, statistic) in enumerate(QUANTITIES) if statistic == "mean" and not isnan(observed_us[i])]
    if any(abs(last_us[i]) > max(MIN_BESIDE * abs(share_us[i]), WORTH_NAMING * observed_us[i]) for i in means):
        return components, value
    not_replaced[components[place].name] = (
        "they follow from the other components; with those replaced they change no mean"
    )
    fewer = {frozenset(i - (i > place) for i in one): row for one, row in value.items() if place not in one}
    return [*components[:place], *components[place + 1 :]], fewer


def _hidden(run: ReplayRun, chosen: Bools, forbidden: set[str]) -> tuple[str, ...]:
    single = observed_requests(run.recording).any()
    return tuple(hidden_errors(run, chosen, forbidden)) if single else ()


def _steps_off(recording: Recording, entry: ModelEntry) -> StepsOff | None:
    """Step times against recorded ones, batch by batch; None where they agree or are not known."""
    if any(f.severity == "unusable" and f.metric == "step_time" for f in recording.findings):
        return None
    try:
        recorded = step_targets(recording).cycle
    except ValidateError:
        return None
    modelled_us = predicted_us(entry.latency, recorded)
    median = float(np.median(modelled_us / recorded.time_us)) - 1
    whole = float(modelled_us.sum() / recorded.time_us.sum()) - 1
    # Where some steps stall, a line through all is above their median and right in the mean: then it is not off.
    excess = min(median, whole, key=abs) if median * whole > 0 else 0.0
    enough = len(recorded.time_us) >= MIN_CYCLES and abs(excess) >= MIN_EXCESS
    return StepsOff(len(recorded.time_us), excess) if enough else None


def _observed(run: ReplayRun, token_gaps: Gaps | None, resamples: int, seed: int) -> tuple[Bools, Blocks, Floats]:
    """bool[n] requests to compare with a replay, the blocks in which they are drawn, and what was observed of them,
    float64[1 + resamples, QUANTITIES].
    """
    recording = run.recording
    chosen = observed_requests(recording)
    if chosen.any():
        samples = samples_of(recording, chosen)
        blocks = request_blocks(recording, chosen, [samples, simulated_samples(run, chosen)])
        observed = quantities(samples, draws(blocks, resamples, seed), None)
        cells = numbers_from_requests(recording, samples, Selection(), token_gaps)
        observed[:, QUANTITIES.index(("itl", "p99"))] = _number(cells["itl"]["p99"].value_us)
        return chosen, blocks, observed
    if not recording.is_summed_up:
        raise NothingToJudgeError(f"{recording.alias}: no latencies were recorded, so there is no error to attribute")
    cells = numbers_from_aggregates(recording, None)
    row = [_number(cells[metric][statistic].value_us) for metric, statistic in QUANTITIES]
    chosen = (recording.requests["status"] == "ok").to_numpy()
    blocks = request_blocks(recording, chosen, [simulated_samples(run, chosen)])
    return chosen, blocks, np.tile(row, (1 + resamples, 1))


def _number(value_us: float | None) -> float:
    return float("nan") if value_us is None else value_us


def _replayed(shared: _Shared, subset: Subset) -> Floats:
    """float64[1 + resamples, QUANTITIES]: simulated, with the components of ``subset`` replaced."""
    return _numbers_of(shared, shared.replayed.put_right(shared.components[i] for i in sorted(subset)).run())


def _numbers_of(shared: _Shared, run: ReplayRun) -> Floats:
    gaps = PooledGaps(run.token_gaps(), np.flatnonzero(shared.chosen))
    return quantities(simulated_samples(run, shared.chosen), shared.times, gaps)


def _overloaded(answers: Sequence[Floats], ends: Floats) -> int:
    """How many of the replays have a mean E2E and TTFT far above both ends of the attribution and the recording."""
    means = [QUANTITIES.index((metric, "mean")) for metric in ("e2e", "ttft")]
    most = FAR_ABOVE * np.nanmax(ends[:, means], axis=0)
    return sum(bool((answer[0, means] > most).all()) for answer in answers)


def _estimates(values_us: Floats, blocks: Blocks) -> tuple[Estimate, ...]:
    """The first row with the intervals of the others."""
    drawn = widened(values_us[1:], blocks)
    return tuple(Estimate(float(value), *interval(drawn[:, i])) for i, value in enumerate(values_us[0]))


def _reasons(forbidden: dict[tuple[str, str], Finding]) -> dict[str, str]:
    named: Sequence[tuple[str, str]] = [q for q in QUANTITIES if q in forbidden]
    return {f"{metric} {statistic}": forbidden[metric, statistic].message for metric, statistic in named}


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
    """The causes of each mean that is off by 1 % or more, the largest error first; then of means right by luck."""
    if attribution.lost:
        return []
    means = [i for i, (_, statistic) in enumerate(QUANTITIES) if statistic == "mean"]
    errors = {i: fraction(attribution.error[i].value_us, attribution.observed_us[i]) for i in means}
    named = {i: error for i, error in errors.items() if error is not None and abs(error) >= WORTH_NAMING}
    found = [_blamed(attribution, i, named[i]) for i in sorted(named, key=lambda i: -abs(named[i]))]
    right = {i: error for i, error in errors.items() if error is not None and i not in named}
    lucky = [_blamed(attribution, i, error) for i, error in right.items() if _by_luck(attribution, i)]
    return [*found, *lucky]


def _by_luck(attribution: Attribution, i: int) -> bool:
    """Whether a mean is right because two causes cancel."""
    parts = [part_of(attribution, cause, i) / attribution.observed_us[i] for cause in attribution.causes]
    return max(parts, default=0.0) >= MIN_CANCELLING and min(parts, default=0.0) <= -MIN_CANCELLING


def fraction(value_us: float, observed_us: float) -> float | None:
    """Of what was observed; None where that is not known."""
    return None if isnan(value_us) or isnan(observed_us) or observed_us == 0 else value_us / observed_us


def part_of(attribution: Attribution, cause: Cause, i: int) -> float:
    """What the cause adds to a quantity, us."""
    return attribution.part(cause, i).value_us


def _largest_input(attribution: Attribution, i: int, error: float) -> Cause | None:
    """The wrong input that changes a mean most, either way: that is known however much no component explains."""
    least_us = max(MIN_BESIDE * abs(error), WORTH_NAMING) * attribution.observed_us[i]
    inputs = [c for c in attribution.causes if c.component.is_input and abs(part_of(attribution, c, i)) >= least_us]
    return max(inputs, key=lambda cause: abs(part_of(attribution, cause, i)), default=None)


def _blamed(attribution: Attribution, i: int, error: float) -> Blame:
    sign = 1 if error > 0 else -1
    largest = max(attribution.causes, key=lambda cause: sign * part_of(attribution, cause, i), default=None)
    # Every part moves a little with the step that a request just catches, so a cause has to be worth naming.
    least_us = max(sign * attribution.residual[i].value_us, min(WORTH_NAMING, abs(error)) * attribution.observed_us[i])
    if largest is None or sign * part_of(attribution, largest, i) < least_us:
        largest = _largest_input(attribution, i, error)
    if largest is None:
        return Blame(i, error, None, None)
    least_us = max(MIN_BESIDE * abs(part_of(attribution, largest, i)), WORTH_NAMING * attribution.observed_us[i])
    # What a wrong input changes is known however much no component explains.
    modelled_us = max(least_us, abs(attribution.residual[i].value_us))
    others = [
        c
        for c in attribution.causes
        if c is not largest and abs(part_of(attribution, c, i)) >= (least_us if c.component.is_input else modelled_us)
    ]
    beside = tuple(sorted(others, key=lambda cause: -abs(part_of(attribution, cause, i))))
    # None where causes cancel to the microsecond.
    explained = fraction(part_of(attribution, largest, i), attribution.error[i].value_us)
    return Blame(i, error, largest, explained, beside)
