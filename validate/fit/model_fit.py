"""Coefficients of one model from its recordings: gather, search, choose a form, and say how sure they are.

What the recordings cannot determine stays at what is measured or at the prior of ``prior_for``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.base.errors import ReleaseError, ValidateError
from blis_replay.blis.latency.models import LatencyModel, Lifecycle, RegimeModel, Roofline
from blis_replay.blis.releases.fit import CoefficientFit, Status
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.validate.fit.cycle_rows import COEFFICIENTS, fit_line, rows_from_latencies, rows_from_steps
from blis_replay.validate.fit.evidence import (
    CycleEvidence,
    Evidence,
    LatencyEvidence,
    cycle_evidence,
    is_load_level,
    latency_evidence,
    level_evidence,
    row_of_first_token,
    rows_from_levels,
)
from blis_replay.validate.fit.linear import Prior
from blis_replay.validate.fit.minimise import (
    FINE,
    ROUGH,
    Confidence,
    Minimum,
    Residuals,
    agreed,
    confidence,
    level,
    losses,
    minimise,
    robust_cost,
    scales_of,
    variance_inflation,
)
from blis_replay.validate.fit.step_form import (
    CONTEXT,
    DECODE,
    FEWEST_KNEE_TOKENS,
    FIRST_TOKEN,
    INTERCEPT,
    PRE_QUEUE,
    PREFILL,
    StepForm,
)
from blis_replay.validate.metrics.resampling import RESAMPLES, resampled, row_blocks, spread

# Variance inflation from which the other coefficients stand in for one: 100 if they explain 99 % of its column.
ALIKE_FROM = 100.0

# Decodes at which the cost of one more may change: matrix products are made of tiles of 16, 32 or 64 rows.
_BENDS: tuple[tuple[int, ...], ...] = ((16,), (32,), (64,), (32, 64))
# Standard errors by which a bend must do better than a line; one of four is better by one standard error by chance.
_CLEARLY = 2.0
# By how much a prompt token may cost more than a prior of this model and GPU says.
_MOST_OF_PRIOR = 2.0
# Least share of the windows on either side of a bend.
_BEND_SHARE = 0.1

# us, least empty step that probes are shares of: a line through latencies may pass through 0.
_LEAST_STEP_US = 1_000.0

# us, unit of the digits of a cost that is 0; a context token costs some 0.02 us.
_LEAST_COST_US = 1e-6

# Distance of the bounds of 95 %, as a share of a coefficient, from which it is not determined.
_WIDE = 1.0

# Multiples of the line's cost of a prefill token to start from: it is far off where the first requests stalled.
_PREFILL_STARTS = (0.25, 0.5, 1.0, 2.0)


# The prior of each coefficient of a line.
Priors = Sequence[Prior]


@dataclass(frozen=True)
class Gathered:
    """What a share of the runs has to say: cycles and latencies, some of either or none."""

    cycles: tuple[CycleEvidence, ...]
    latencies: tuple[LatencyEvidence, ...]

    @property
    def parts(self) -> tuple[Evidence, ...]:
        """All of it."""
        return (*self.cycles, *self.latencies)

    def residuals(self, form: StepForm, vector: Floats, delays: Lifecycle) -> Floats:
        """float64[rows] of all parts, one after the other."""
        return np.concatenate([part.residuals(form, vector, delays) for part in self.parts])

    def with_scheduling(self, asynchronous: bool) -> Gathered:
        """The same for engines of this scheduling mode."""
        return replace(self, latencies=tuple(part.with_scheduling(asynchronous) for part in self.latencies))

    def kinds(self) -> Int64s:
        """int64[rows]: 0 cycles, 1 E2E, 2 TTFT."""
        numbers = [np.zeros(len(part.cycle_us), np.int64) for part in self.cycles]
        numbers += [np.repeat(np.array([1, 2]), part.observed_us.shape[1]) for part in self.latencies]
        return np.concatenate(numbers)

    def strata(self) -> Int64s:
        """int64[groups]: a number for each part and stratum of it."""
        own = [np.stack([np.full(len(part.stratum), i), part.stratum]) for i, part in enumerate(self.parts)]
        return np.unique(np.hstack(own), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def groups(self) -> Int64s:
        """int64[rows]: rows of one window of one part have one number."""
        numbers, first = [], 0
        for part in self.parts:
            rows = len(part.cycle_us) if isinstance(part, CycleEvidence) else part.observed_us.shape[1]
            numbers += [np.arange(first, first + rows)] * (1 if isinstance(part, CycleEvidence) else 2)
            first += rows
        return np.concatenate(numbers).astype(np.int64)


@dataclass(frozen=True)
class Fitted:
    """A form with its coefficients (``minimum.vector``), their bounds, which were free, and why the others were not."""

    form: StepForm
    minimum: Minimum
    free: Bools
    held: dict[int, tuple[Status, str]]
    bounds: Confidence

    @property
    def pre_queue_us(self) -> float:
        """The pre-queue delay that came out."""
        return float(self.minimum.vector[PRE_QUEUE])


def gather(
    recordings: Sequence[Recording], window: tuple[float, float], *, steps: bool, latencies: bool, levels: bool
) -> Gathered:
    """The evidence in a share of the runs, by time: step records, latencies of requests, and load levels."""
    single = [recording for recording in recordings if not is_load_level(recording)]
    cycles = [cycle_evidence(recording, window) for recording in single] if steps else []
    parts = [latency_evidence(recording, window) for recording in single] if latencies else []
    summed_up = [r for r in recordings if is_load_level(r)] if latencies and levels else []
    parts += [level_evidence(summed_up)] if summed_up else []
    return Gathered(tuple(c for c in cycles if c is not None), tuple(p for p in parts if p is not None))


@dataclass(frozen=True)
class Start:
    """Where a search starts: the vector of a line through ``batch`` (float64[rows, 4]), and what the batches show.

    ``alike``: coefficients that the others can stand in for, as in every batch they cost in proportion.
    ``a_decode``: mean context tokens of one.  ``first_token_waits``: whether it may wait for the decodes of its step.
    """

    vector: Floats
    alike: tuple[int, ...]
    a_decode: float
    first_token_waits: bool = True

    def for_form(self, form: StepForm) -> Start:
        """The start for a form: what decodes and their context cost together can bend with the decodes only."""
        if form.experts:
            # Half of what steps cost is reading experts, until a search knows better.
            vector = form.vector(self.vector)
            vector[[INTERCEPT, DECODE]] /= 2
            vector[-1] = vector[INTERCEPT] / form.experts
            return replace(self, vector=vector)
        if not form.bends or DECODE not in self.alike or CONTEXT in self.alike:
            return self
        vector = self.vector.copy()
        vector[DECODE], vector[CONTEXT] = vector[DECODE] + vector[CONTEXT] * self.a_decode, 0.0
        return replace(self, vector=vector, alike=tuple(CONTEXT if i == DECODE else i for i in self.alike))


def line_start(
    recordings: Sequence[Recording], window: tuple[float, float], priors: Priors, gathered: Gathered
) -> Start:
    """A line through step cycles if they are more than it has coefficients, else through client gaps."""
    with_steps = [r for r in recordings if r.steps.height > 1] if gathered.cycles else []
    rows = [rows_from_steps(r, window) for r in with_steps]
    # Through as many windows as there are costs a line passes whatever they are, and all of them look alike: what the
    # latencies tell apart would be held.
    if gathered.latencies and sum(len(part.cycle_us) for part in rows) <= COEFFICIENTS:
        single, levels = [r for r in recordings if not is_load_level(r)], [r for r in recordings if is_load_level(r)]
        rows = [rows_from_latencies(r, window) for r in single]
        rows += [rows_from_levels(levels), row_of_first_token(levels)] if levels else []
    line = fit_line(rows)
    intercept, prefill, decode, context = map(float, agreed(line, np.maximum(line, _LEAST_COST_US)))
    batch = np.vstack([part.batch for part in rows])
    a_decode = float(batch[:, 3].sum() / max(batch[:, 2].sum(), 1e-9))  # context tokens
    vector = _values(priors)
    vector[INTERCEPT], vector[PREFILL] = intercept, max(prefill, 1.0)
    # The prior takes its part of what decodes and their context cost together.
    vector[DECODE] = max(decode + (context - vector[CONTEXT]) * a_decode, 0.0)
    if priors[CONTEXT].value == 0 and a_decode:
        vector[CONTEXT], vector[DECODE] = vector[DECODE] / a_decode, 0.0
    return Start(vector, _alike(StepForm().design(batch), keep_context=priors[CONTEXT].value == 0), a_decode)


def _alike(design: Floats, *, keep_context: bool) -> tuple[int, ...]:
    """Coefficients that have to be held so that the rest can be distinguished, the least trusted first."""
    # A step reads the KV cache of its context whatever the model; without a prior for that the context
    # keeps what the two cost together, because it is what carries over to other lengths.
    order = (DECODE, CONTEXT, PREFILL) if keep_context else (CONTEXT, DECODE, PREFILL)
    free = np.array([i in (INTERCEPT, PREFILL, CONTEXT, DECODE) for i in range(design.shape[1])])
    for i in order:
        if variance_inflation(design, free)[i] > ALIKE_FROM:
            free[i] = False
    return tuple(i for i in order if not free[i])


def fit_form(
    gathered: Gathered,
    form: StepForm,
    start: Start,
    priors: Priors,
    measured: dict[str, CoefficientFit],
    seed: int,
    *,
    everywhere: bool = False,
) -> Fitted:
    """Fit the coefficients of a form that the evidence determines; the others stay at what is measured or prior.

    ``everywhere``: search from several starts, the prior among them, and not only from ``start``.
    """
    delays = lifecycle_of(measured)

    def residuals(x: Floats) -> Floats:
        return gathered.residuals(form, x, delays)

    held, vector = _held_from_the_start(gathered, form, start, priors, measured)
    at_prior, probe = form.vector(_values(priors)), form.probe_us(max(start.vector[INTERCEPT], _LEAST_STEP_US))
    has_prior = (at_prior > 0) | (np.arange(len(at_prior)) == FIRST_TOKEN)
    starts = _starts(residuals, vector, held, at_prior, a_decode=start.a_decode) if everywhere else [vector]
    while True:
        free = np.array([i not in held for i in range(len(form.names))])
        minimum = minimise(residuals, starts, probe, free, gathered.kinds(), FINE if everywhere else ROUGH)
        if (unseen := free & ~minimum.slopes.any(axis=(0, 1))).any():
            for i in np.flatnonzero(unseen).tolist():
                held[i] = ("prior", f"no step of the replay shows it; {priors[min(i, DECODE)].why}")
            starts = [minimum.vector]
            continue
        kinds = gathered.kinds()
        bounds = confidence(minimum, free, gathered.groups(), gathered.strata(), seed, kinds == 0)
        width = bounds.high - bounds.low
        # Without a prior the fitted value stays: its bounds say how little it is worth.  It also stays where the bounds
        # exclude the prior.  How long a first token waits for others is not known in advance: that prior is 0.
        agrees = (bounds.low <= at_prior) & (at_prior <= bounds.high)
        wide = (width > _WIDE * np.maximum(minimum.vector, probe)) & has_prior & agrees
        if not wide.any():
            return Fitted(form, minimum, free, held, bounds)
        i = int(np.argmax(np.where(wide, width / probe, 0)))
        why = f"not determined: between {bounds.low[i]:.4g} and {bounds.high[i]:.4g} us"
        held[i], vector = ("prior", f"{why}; {priors[min(i, DECODE)].why}"), minimum.vector.copy()
        vector[i] = at_prior[i]
        starts = [vector]


def _held_from_the_start(
    gathered: Gathered, form: StepForm, start: Start, priors: Priors, measured: dict[str, CoefficientFit]
) -> tuple[dict[int, tuple[Status, str]], Floats]:
    """Coefficients that the recordings cannot determine, with the reason, and the vector with their values."""
    vector, held = form.vector(start.vector), dict[int, tuple[Status, str]]()
    if "pre_queue" in measured:
        held[PRE_QUEUE], vector[PRE_QUEUE] = ("measured", measured["pre_queue"].remark), measured["pre_queue"].value_us
    elif not gathered.latencies:
        held[PRE_QUEUE] = ("prior", f"no latencies to fit it to; {priors[PRE_QUEUE].why}")
        vector[PRE_QUEUE] = priors[PRE_QUEUE].value
    if not gathered.latencies:
        held[FIRST_TOKEN] = ("prior", f"no latencies to fit it to; {priors[FIRST_TOKEN].why}")
    elif not start.first_token_waits:
        held[FIRST_TOKEN] = ("prior", "left out")
    for i in start.alike:
        held[i] = ("prior", f"the recordings do not tell it from other costs of a step; {priors[i].why}")
        # The start has already given the context its prior, or all that decodes cost to the context.
        vector[i] = priors[i].value if i == PREFILL else vector[i]
    if DECODE in start.alike:
        vector[DECODE : DECODE + 1 + len(form.bends)] = 0.0 if CONTEXT not in start.alike else priors[DECODE].value
        held |= dict.fromkeys(range(DECODE, DECODE + 1 + len(form.bends)), held[DECODE])
    return held, vector


def _starts(
    residuals: Residuals, vector: Floats, held: Mapping[int, object], at_prior: Floats, a_decode: float
) -> list[Floats]:
    """Where to search from: ``vector`` with its best prefill, with decodes and context sharing what they cost, prior.

    The prior where it says something of every step, what is held as in ``vector``.
    """
    prefills = {vector[PREFILL] * share for share in _PREFILL_STARTS} | {at_prior[PREFILL] or vector[PREFILL]}
    with_prefill = [np.where(np.arange(len(vector)) == PREFILL, value, vector) for value in sorted(prefills)]
    starts = [min(with_prefill, key=lambda x: robust_cost(residuals(x)))]
    if not {CONTEXT, DECODE} & held.keys() and a_decode:
        shared = starts[0].copy()
        half = (shared[CONTEXT] * a_decode + shared[DECODE]) / 2
        shared[DECODE:] += half - shared[DECODE]
        shared[CONTEXT] = half / a_decode
        starts.append(shared)
    if at_prior[INTERCEPT] > 0:
        free = np.array([i not in held for i in range(len(vector))])
        starts.append(np.where(free, at_prior, vector))
    return starts


def lifecycle_of(measured: dict[str, CoefficientFit]) -> Lifecycle:
    """The delays that were measured."""
    values: dict[str, Any] = {f"{name}_us": delay.value_us for name, delay in measured.items()}
    return Lifecycle(**values)


def choose_form(
    gathered: Gathered,
    later: Gathered,
    line: Fitted,
    start: Start,
    priors: Priors,
    measured: dict[str, CoefficientFit],
    seed: int,
    rooflines: Sequence[Roofline],
) -> tuple[Fitted, tuple[Fitted, ...]]:
    """The form to use, and those that later windows do not tell from it.

    A bent form has to do better than the line by more than two standard errors, a roofline better at all: it is how a
    GPU works, and has no coefficient more.  Of less than two standard errors the other form is kept beside it.
    """
    best, delays = line, lifecycle_of(measured)
    of_line = _level(later, line, delays)
    scales = scales_of(of_line, later.kinds(), len(line.form.names))
    cost = losses(of_line / scales)
    at_line = replace(start, vector=line.minimum.vector)
    for bends in _BENDS:
        if not _supported(gathered, bends):
            continue
        bent = fit_form(gathered, form := StepForm(bends), at_line.for_form(form), priors, measured, seed)
        if bent.held.keys() & range(len(line.form.names), len(form.names)):
            continue  # no step of the replay is beyond its bends
        new = losses(_level(later, bent, delays) / scales)
        if _gain(cost, new, later, seed) > _CLEARLY:
            best, cost = bent, new
    used, others = best, tuple[Fitted, ...]()
    for roofline in rooflines:
        physical = StepForm(roofline=roofline)
        roofed = fit_form(gathered, physical, at_line.for_form(physical), priors, measured, seed)
        if not is_possible(roofed, priors):
            continue
        # What it was fitted to judges as well as what came later: it has as many coefficients as the line.
        gain = sum(_gain_of(used, roofed, part, delays, seed) for part in (gathered, later)) / math.sqrt(2)
        # A second one has a coefficient more, for experts that nobody said there are.
        if gain > (0.0 if roofline is rooflines[0] else _CLEARLY):
            used, others = roofed, (used,) if gain <= _CLEARLY else ()
        elif gain >= -_CLEARLY and roofline is rooflines[0]:
            others = (roofed,)
    return used, others


def _gain_of(one: Fitted, other: Fitted, windows: Gathered, delays: Lifecycle, seed: int) -> float:
    """By how many standard errors another form does better on windows."""
    of_one = _level(windows, one, delays)
    scales = scales_of(of_one, windows.kinds(), len(one.form.names))
    return _gain(losses(of_one / scales), losses(_level(windows, other, delays) / scales), windows, seed)


def is_possible(fitted: Fitted, priors: Priors) -> bool:
    """Whether a GPU may have the roofline that came out: tokens that cost too much leave no time to read weights in."""
    roofline, per_token_us = fitted.form.fitted_roofline(fitted.minimum.vector), fitted.minimum.vector[PREFILL]
    if roofline is None or PREFILL in fitted.held or roofline.knee_tokens < FEWEST_KNEE_TOKENS:
        return roofline is None
    return bool(per_token_us <= _MOST_OF_PRIOR * priors[PREFILL].value or not priors[PREFILL].value)


def _gain(before: Floats, after: Floats, later: Gathered, seed: int) -> float:
    """What costs of rows fell by, in standard errors."""
    gain = np.asarray(np.bincount(later.groups(), before - after), np.float64)
    return float(gain.sum() / max(_standard_error(gain, later.strata(), seed), 1e-12))


def _standard_error(of_window: Floats, stratum: Int64s, seed: int) -> float:
    """Of a sum over windows, by blocks of them: neighbours are alike."""
    blocks = row_blocks(stratum, [of_window])
    return float(spread(np.array([of_window[d].sum() for d in resampled(blocks, RESAMPLES, seed)]), blocks).std())


def _level(gathered: Gathered, fitted: Fitted, delays: Lifecycle) -> Floats:
    """float64[rows]: what a fit is off by on windows, without the chance of a single run."""

    def residuals(x: Floats) -> Floats:
        return gathered.residuals(fitted.form, x, delays)

    vector = fitted.minimum.vector
    probe = fitted.form.probe_us(max(float(vector[INTERCEPT]), _LEAST_STEP_US))
    return level(residuals, vector, probe, fitted.free, gathered.kinds())


def _supported(gathered: Gathered, bends: tuple[int, ...]) -> bool:
    """Whether enough windows lie on either side of each bend."""
    decodes = np.concatenate([part.decodes for part in gathered.parts])
    edges = np.searchsorted(np.sort(decodes), [0, *bends, np.inf])
    return bool((np.diff(edges) >= _BEND_SHARE * len(decodes)).all())


DEFAULT_PRIOR = "h100-datasheet"

# One constant that its publisher fitted over the journeys of all 16 H100 experiments.
PUBLISHED_PRE_QUEUE_US = 9_300.0
PUBLISHED_PRE_QUEUE_SOURCE = (
    "published constant (alpha 0 of the trained roofline, fitted to journeys of 16 H100 experiments, mean absolute "
    "error 4.6 ms)"
)


def prior_for(release: CoefficientRelease, recording: Recording) -> tuple[Prior, ...]:
    """The prior of each coefficient of a line: the release's entry, else the published pre-queue delay and 0 for all.

    Raises ``ValidateError`` for an entry that is neither a line nor bends of one.
    """
    vector, delay_source = np.zeros(len(StepForm().names)), PUBLISHED_PRE_QUEUE_SOURCE
    try:
        entry = entry_of(release, recording)
        vector, why = _vector(entry, release.name), f"release {release.name}"
        delay_source = entry.lifecycle.pre_queue_source or delay_source
    except ReleaseError:
        vector[PRE_QUEUE], why = PUBLISHED_PRE_QUEUE_US, f"{release.name} has no {model_of(recording)}"
    sources = [delay_source if i == PRE_QUEUE else why for i in range(len(vector))]
    return tuple(Prior(float(value), math.inf, source) for value, source in zip(vector, sources, strict=True))


def _values(priors: Priors) -> Floats:
    return np.array([prior.value for prior in priors])


def _vector(entry: ModelEntry, name: str) -> Floats:
    vector = np.zeros(len(StepForm().names))
    vector[PRE_QUEUE] = entry.lifecycle.pre_queue_us
    vector[FIRST_TOKEN] = entry.lifecycle.first_token_per_decode_us
    latency = entry.latency
    if isinstance(latency, LatencyModel) and latency.kind == "blackbox":
        vector[INTERCEPT], vector[PREFILL] = latency.intercept_ns / 1000, latency.per_prefill_token_ns / 1000
        vector[CONTEXT], vector[DECODE] = latency.per_context_token_ns / 1000, latency.per_decode_token_ns / 1000
        return vector
    if isinstance(latency, RegimeModel) and not any(regime.expm1 for regime in latency.regimes):
        first = latency.regimes[0]
        by_name = dict(first.coefficients)
        vector[INTERCEPT], vector[PREFILL] = first.intercept_us, by_name.get("prefill_tokens", 0.0)
        vector[CONTEXT] = by_name.get("kv_sum", 0.0)
        vector[DECODE] = by_name.get("decode_tokens", 0.0) - vector[CONTEXT]
        return np.maximum(vector, 0)
    raise ValidateError(
        f"release {name}: {entry.model} has no linear step time, so it gives no prior; choose another with --prior"
    )
