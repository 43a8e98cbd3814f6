"""Coefficients of one model from the evidence of its recordings: search, choose a form, and say how sure they are.

What the recordings cannot determine stays at what is measured or at the prior of ``prior_for``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from blis_replay.base.arrays import Bools, Floats
from blis_replay.base.errors import ReleaseError, ValidateError
from blis_replay.blis.latency.models import LatencyModel, Lifecycle, RegimeModel, Roofline
from blis_replay.blis.releases.fit import CoefficientFit, Status
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.validate.fit.cycle_rows import COEFFICIENTS, fit_line, rows_from_latencies, rows_from_steps
from blis_replay.validate.fit.evidence import (
    Gathered,
    is_load_level,
    lifecycle_of,
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
from blis_replay.validate.metrics.resampling import drawn, row_blocks

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


@dataclass(frozen=True)
class Basis:
    """What is known before a search: the prior of each coefficient of a line, and the delays that stamps show."""

    priors: Sequence[Prior]
    measured: Mapping[str, CoefficientFit]
    seed: int

    @property
    def values(self) -> Floats:
        """float64[coefficients of a line] of the priors."""
        return np.array([prior.value for prior in self.priors])

    @property
    def delays(self) -> Lifecycle:
        return lifecycle_of(self.measured.values())

    def why(self, coefficient: int) -> str:
        """Where its prior is from; all costs of decodes have one."""
        return self.priors[min(coefficient, DECODE)].why


@dataclass(frozen=True)
class Fitted:
    """A form and its coefficients (``minimum.vector``), bounds, which were free, and why the others were not."""

    form: StepForm
    minimum: Minimum
    free: Bools
    held: dict[int, tuple[Status, str]]
    bounds: Confidence


@dataclass(frozen=True)
class Start:
    """Where a search starts: the vector of a line through ``batch`` (float64[rows, 4]), and what the batches show.

    ``alike``: coefficients that the others can stand in for: in every batch they cost in proportion.
    ``context_per_decode``: mean tokens.  ``first_token_waits``: whether it may wait for the decodes of its step.
    """

    vector: Floats
    alike: tuple[int, ...]
    context_per_decode: float
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
        vector[DECODE], vector[CONTEXT] = vector[DECODE] + vector[CONTEXT] * self.context_per_decode, 0.0
        return replace(self, vector=vector, alike=tuple(CONTEXT if i == DECODE else i for i in self.alike))


def line_start(recordings: Sequence[Recording], window: tuple[float, float], basis: Basis, gathered: Gathered) -> Start:
    """A line through step cycles if they are more than it has coefficients, else through client gaps."""
    with_steps = [r for r in recordings if r.steps.height > 1] if gathered.cycles else []
    rows = [rows_from_steps(r, window) for r in with_steps]
    # A line passes through as many windows as it has costs, whatever they are.  All costs would then look alike, and
    # those that latencies identify would be held.
    if gathered.latencies and sum(len(part.cycle_us) for part in rows) <= COEFFICIENTS:
        single, levels = [r for r in recordings if not is_load_level(r)], [r for r in recordings if is_load_level(r)]
        rows = [rows_from_latencies(r, window) for r in single]
        rows += [rows_from_levels(levels), row_of_first_token(levels)] if levels else []
    line = fit_line(rows)
    intercept, prefill, decode, context = map(float, agreed(line, np.maximum(line, _LEAST_COST_US)))
    batch = np.vstack([part.batch for part in rows])
    context_per_decode = float(batch[:, 3].sum() / max(batch[:, 2].sum(), 1e-9))  # tokens
    vector = basis.values
    context_has_prior = vector[CONTEXT] != 0
    vector[INTERCEPT], vector[PREFILL] = intercept, max(prefill, 1.0)
    # The prior takes its part of what decodes and their context cost together.
    vector[DECODE] = max(decode + (context - vector[CONTEXT]) * context_per_decode, 0.0)
    if not context_has_prior and context_per_decode:
        vector[CONTEXT], vector[DECODE] = vector[DECODE] / context_per_decode, 0.0
    return Start(vector, _alike(StepForm().design(batch), keep_context=not context_has_prior), context_per_decode)


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


def fit_form(gathered: Gathered, form: StepForm, start: Start, basis: Basis, *, everywhere: bool = False) -> Fitted:
    """Fit the coefficients of a form that the evidence determines; the others stay at what is measured or prior.

    ``everywhere``: search from several starts, the prior among them, and not only from ``start``.
    """
    residuals = partial(gathered.residuals, form, basis.delays)
    held, vector = _held_from_the_start(gathered, form, start, basis)
    at_prior, probe = form.vector(basis.values), form.probe_us(max(start.vector[INTERCEPT], _LEAST_STEP_US))
    has_prior = (at_prior > 0) | (np.arange(len(at_prior)) == FIRST_TOKEN)
    starts = _starts(residuals, vector, held, at_prior, start.context_per_decode) if everywhere else [vector]
    kinds = gathered.kinds()
    while True:
        free = ~np.isin(np.arange(len(form.names)), [*held])
        minimum = minimise(residuals, starts, probe, free, kinds, FINE if everywhere else ROUGH)
        if (unseen := free & ~minimum.slopes.any(axis=(0, 1))).any():
            for i in np.flatnonzero(unseen).tolist():
                held[i] = ("prior", f"no step of the replay shows it; {basis.why(i)}")
            starts = [minimum.vector]
            continue
        bounds = confidence(minimum, free, gathered.groups(), gathered.strata(), basis.seed, kinds == 0)
        width = bounds.high - bounds.low
        # Without a prior the fitted value stays: its bounds say how little it is worth.  It also stays where the bounds
        # exclude the prior.  How long a first token waits for others is not known in advance: that prior is 0.
        agrees = (bounds.low <= at_prior) & (at_prior <= bounds.high)
        wide = (width > _WIDE * np.maximum(minimum.vector, probe)) & has_prior & agrees
        if not wide.any():
            return Fitted(form, minimum, free, held, bounds)
        i = int(np.argmax(np.where(wide, width / probe, 0)))
        why = f"not determined: between {bounds.low[i]:.4g} and {bounds.high[i]:.4g} us"
        held[i], vector = ("prior", f"{why}; {basis.why(i)}"), minimum.vector.copy()
        vector[i] = at_prior[i]
        starts = [vector]


def _held_from_the_start(
    gathered: Gathered, form: StepForm, start: Start, basis: Basis
) -> tuple[dict[int, tuple[Status, str]], Floats]:
    """Coefficients that the recordings cannot determine, with the reason, and the vector with their values."""
    vector, held, priors = form.vector(start.vector), dict[int, tuple[Status, str]](), basis.values
    if (delay := basis.measured.get("pre_queue")) is not None:
        held[PRE_QUEUE], vector[PRE_QUEUE] = ("measured", delay.remark), delay.value_us
    elif not gathered.latencies:
        held[PRE_QUEUE] = ("prior", f"no latencies to fit it to; {basis.why(PRE_QUEUE)}")
        vector[PRE_QUEUE] = priors[PRE_QUEUE]
    if not gathered.latencies:
        held[FIRST_TOKEN] = ("prior", f"no latencies to fit it to; {basis.why(FIRST_TOKEN)}")
    elif not start.first_token_waits:
        held[FIRST_TOKEN] = ("prior", "left out")
    for i in start.alike:
        held[i] = ("prior", f"the recordings do not tell it from other costs of a step; {basis.why(i)}")
        # The start has already given the context its prior, or all that decodes cost to the context.
        vector[i] = priors[i] if i == PREFILL else vector[i]
    if DECODE in start.alike:
        decodes = range(DECODE, DECODE + 1 + len(form.bends))
        vector[decodes.start : decodes.stop] = 0.0 if CONTEXT not in start.alike else priors[DECODE]
        held |= dict.fromkeys(decodes, held[DECODE])
    return held, vector


def _starts(
    residuals: Residuals, vector: Floats, held: Mapping[int, object], at_prior: Floats, context_per_decode: float
) -> list[Floats]:
    """Where to search from: ``vector`` with its best prefill, with decodes and context sharing what they cost, prior.

    The prior where it says something of every step, what is held as in ``vector``.
    """
    prefills = {vector[PREFILL] * share for share in _PREFILL_STARTS} | {at_prior[PREFILL] or vector[PREFILL]}
    with_prefill = [np.where(np.arange(len(vector)) == PREFILL, value, vector) for value in sorted(prefills)]
    starts = [min(with_prefill, key=lambda x: robust_cost(residuals(x)))]
    if not {CONTEXT, DECODE} & held.keys() and context_per_decode:
        shared = starts[0].copy()
        half = (shared[CONTEXT] * context_per_decode + shared[DECODE]) / 2
        shared[DECODE:] += half - shared[DECODE]
        shared[CONTEXT] = half / context_per_decode
        starts.append(shared)
    if at_prior[INTERCEPT] > 0:
        free = np.array([i not in held for i in range(len(vector))])
        starts.append(np.where(free, at_prior, vector))
    return starts


def choose_form(
    gathered: Gathered, later: Gathered, line: Fitted, start: Start, basis: Basis, rooflines: Sequence[Roofline]
) -> tuple[Fitted, tuple[Fitted, ...]]:
    """The form to use, and those that later windows do not tell from it.

    A bent form has to do better than the line by more than two standard errors.  A roofline only has to do better: it
    is how a GPU works, and has no coefficient more.  Within two standard errors the other form is kept beside it.
    """
    best, of_line = line, _level(later, line, basis)
    scales = scales_of(of_line, later.kinds(), len(line.form.names))
    cost = losses(of_line / scales)
    at_line = replace(start, vector=line.minimum.vector)
    for bends in _BENDS:
        if not _supported(gathered, bends):
            continue
        bent = fit_form(gathered, form := StepForm(bends), at_line.for_form(form), basis)
        if bent.held.keys() & range(len(line.form.names), len(form.names)):
            continue  # no step of the replay is beyond its bends
        new = losses(_level(later, bent, basis) / scales)
        if _gain(cost, new, later, basis) > _CLEARLY:
            best, cost = bent, new
    used, others = best, tuple[Fitted, ...]()
    for roofline in rooflines:
        physical = StepForm(roofline=roofline)
        roofed = fit_form(gathered, physical, at_line.for_form(physical), basis)
        if not is_possible(roofed, basis.priors[PREFILL]):
            continue
        # What it was fitted to judges as well as what came later: it has as many coefficients as the line.
        gain = sum(_gain_of(used, roofed, part, basis) for part in (gathered, later)) / math.sqrt(2)
        # A second one has a coefficient more, for experts that nobody said there are.
        if gain > (0.0 if roofline is rooflines[0] else _CLEARLY):
            used, others = roofed, (used,) if gain <= _CLEARLY else ()
        elif gain >= -_CLEARLY and roofline is rooflines[0]:
            others = (roofed,)
    return used, others


def _gain_of(one: Fitted, other: Fitted, windows: Gathered, basis: Basis) -> float:
    """By how many standard errors another form does better on windows."""
    of_one = _level(windows, one, basis)
    scales = scales_of(of_one, windows.kinds(), len(one.form.names))
    return _gain(losses(of_one / scales), losses(_level(windows, other, basis) / scales), windows, basis)


def is_possible(fitted: Fitted, prior: Prior) -> bool:
    """Whether a GPU may have the roofline that came out: tokens that cost too much leave no time to read weights.

    ``prior``: of the cost of a prompt token.
    """
    roofline, per_token_us = fitted.form.fitted_roofline(fitted.minimum.vector), fitted.minimum.vector[PREFILL]
    if roofline is None or PREFILL in fitted.held or roofline.knee_tokens < FEWEST_KNEE_TOKENS:
        return roofline is None
    return bool(per_token_us <= _MOST_OF_PRIOR * prior.value or not prior.value)


def _gain(before: Floats, after: Floats, windows: Gathered, basis: Basis) -> float:
    """How much costs of rows fell, in standard errors by blocks of windows: neighbours are alike."""
    gain = np.asarray(np.bincount(windows.groups(), before - after), np.float64)
    blocks = row_blocks(windows.strata(), [gain])
    draws = drawn(lambda rows: float(gain[rows].sum()), blocks, basis.seed)
    return float(gain.sum() / max(float(draws.std()), 1e-12))


def _level(gathered: Gathered, fitted: Fitted, basis: Basis) -> Floats:
    """float64[rows]: residuals of a fit on windows, without the chance of a single run."""
    vector = fitted.minimum.vector
    probe = fitted.form.probe_us(max(float(vector[INTERCEPT]), _LEAST_STEP_US))
    residuals = partial(gathered.residuals, fitted.form, basis.delays)
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
        vector[PRE_QUEUE], why = PUBLISHED_PRE_QUEUE_US, f"{release.name} has no coefficients for {model_of(recording)}"
    sources = [delay_source if i == PRE_QUEUE else why for i in range(len(vector))]
    return tuple(Prior(float(value), math.inf, source) for value, source in zip(vector, sources, strict=True))


def _vector(entry: ModelEntry, name: str) -> Floats:
    """float64[coefficients of a line], us: those of a release entry; of bends those below the first."""
    latency, vector = entry.latency, np.zeros(len(StepForm().names))
    if isinstance(latency, LatencyModel) and latency.kind == "blackbox":
        costs_ns = latency.intercept_ns, latency.per_prefill_token_ns, latency.per_context_token_ns
        vector[[INTERCEPT, PREFILL, CONTEXT, DECODE]] = np.array([*costs_ns, latency.per_decode_token_ns]) / 1000
    elif isinstance(latency, RegimeModel) and not any(regime.expm1 for regime in latency.regimes):
        slopes = dict.fromkeys(("prefill_tokens", "kv_sum", "decode_tokens"), 0.0) | dict(
            latency.regimes[0].coefficients
        )
        prefill, context, decode = slopes["prefill_tokens"], slopes["kv_sum"], slopes["decode_tokens"]
        costs = latency.regimes[0].intercept_us, prefill, context, decode - context
        vector[[INTERCEPT, PREFILL, CONTEXT, DECODE]] = np.maximum(costs, 0)
    else:
        raise ValidateError(
            f"release {name}: {entry.model} has no linear step time, so it gives no prior; choose another with --prior"
        )
    vector[PRE_QUEUE], vector[FIRST_TOKEN] = entry.lifecycle.pre_queue_us, entry.lifecycle.first_token_per_decode_us
    return vector
