"""Coefficients of physical parts of a step, fitted to recordings from priors: shared ones, and those on operator times.

Few models cannot tell ten costs apart (three intercepts do not say what is a layer's and what is
an all-reduce's), so each coefficient has a prior from the datasheet or from a measurement made
elsewhere, and moves from it as far as the recordings insist.  Operator times say how a step's time grows with its
tokens, requests and contexts, so a recording need not; it says how much faster or slower than measured each part is
on its server, and what the host adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from msgspec.structs import astuple

from blis_replay.blis.latency.datasheets import Architecture, Gpus, gpu_named
from blis_replay.blis.latency.operators import OperatorCoefficients, OperatorModel
from blis_replay.blis.latency.operators import batch_times_us as operator_times_us
from blis_replay.blis.latency.physical import (
    ATTENDED,
    COEFFICIENT_NAMES,
    CONTEXT,
    DECODE,
    PREFILL,
    QUANTITIES,
    REQUESTS,
    STEP,
    PhysicalCoefficients,
    batch_times_us,
)
from blis_replay.blis.releases.fit import CoefficientFit, Told
from blis_replay.blis.releases.release import DELAYS, CoefficientRelease, FittedOn
from blis_replay.compiled.arrays import Floats
from blis_replay.ingest.identity import requests_hash
from blis_replay.ingest.recording import Recording
from blis_replay.replay.profile import of_aggregates
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.validate.calibration.calibrate import Data, ModelFit, Options, fitted_release, groups_of, scored_fit
from blis_replay.validate.calibration.cycle_rows import CycleRows, mean_lengths, rows_from_latencies, rows_from_steps
from blis_replay.validate.calibration.evidence import configured_scheduling, is_load_level, load_level, rows_from_levels
from blis_replay.validate.calibration.own_data import lacking_ttft_us, missed
from blis_replay.validate.errors import ValidateError
from blis_replay.validate.metrics.observed import observed_requests

# Fewer windows of step records than this say little; latencies do better then.
_FEWEST_WINDOWS = 20

# Rows of neighbouring requests tell the same; this many, spread over the run, are enough.
_MOST_ROWS = 2_000


@dataclass(frozen=True)
class PhysicalRows:
    """Rows of one recording: ``times_us`` float64[rows, 10] for each coefficient at 1, ``cycle_us`` float64[rows]."""

    model: str
    fitted_on: FittedOn
    times_us: Floats
    cycle_us: Floats


def physical_rows(recording: Recording, architecture: Architecture, gpus: Gpus | None = None) -> PhysicalRows | None:
    """What the physical model is fitted to: step cycles where there are step records, else latencies.

    None where the recording has neither (published aggregates).  ``gpus``: as of ``gpu_named``.  Raises
    ``ReleaseError`` for hardware whose datasheet is not among them.
    """
    batches, cycle_us, _mixed_share, data = _mean_steps(recording, (0.0, 1.0))
    if not len(cycle_us):
        return None
    gpu, tensor_parallelism = gpu_named(recording.hardware, gpus), recording.tensor_parallelism or 1
    times_us = batch_times_us(architecture, gpu, tensor_parallelism, batches)
    fitted_on = FittedOn(recording.slug, recording.content_hash, data, requests_hash(recording))
    return PhysicalRows(model_of(recording), fitted_on, times_us, cycle_us)


def _mean_steps(recording: Recording, window: tuple[float, float]) -> tuple[Floats, Floats, Floats, Data]:
    """Mean batches as ``mean_batches``, their cycles, and the share of steps that prefill: of step records where there
    are enough, else of latencies."""
    data: Data = "latencies" if is_load_level(recording) else "steps"
    if is_load_level(recording):
        levels = rows_from_levels([recording])
        return mean_batches(of_aggregates(recording), levels), levels.cycle_us, levels.mixed_share, data
    rows = rows_from_steps(recording, window) if recording.steps.height > 1 else None
    if rows is None or len(rows.cycle_us) < _FEWEST_WINDOWS:
        data, rows = "latencies", rows_from_latencies(recording, window)
    chosen = np.arange(0, len(rows.cycle_us), -(-len(rows.cycle_us) // _MOST_ROWS) or 1)
    return mean_batches(recording, rows)[chosen], rows.cycle_us[chosen], rows.mixed_share[chosen], data


def mean_batches(recording: Recording, rows: CycleRows) -> Floats:
    """float64[rows, 6]: the batches of cycle rows in the quantities of the physical model.

    What rows do not hold is taken from the recording's means: a decode's context is its
    prompt and half its output; a prefill token attends to a mean prompt, most of it cached;
    each request adds a step with its prefill to those in which it decodes.
    """
    lengths = mean_lengths(recording)
    batches = np.zeros((len(rows.cycle_us), len(QUANTITIES)))
    _one, prefill, decode, context = rows.batch.T
    batches[:, STEP] = 1
    batches[:, PREFILL] = prefill
    batches[:, DECODE] = decode
    batches[:, CONTEXT] = context if rows.context_known else decode * lengths.context_tokens
    batches[:, ATTENDED] = prefill * lengths.prompt_tokens
    batches[:, REQUESTS] = decode * lengths.output_tokens / max(lengths.output_tokens - 1, 1)
    return batches


class Prior(NamedTuple):
    """What a coefficient is believed to be before any recording, how far it may be off, and why."""

    value: float
    spread: float
    why: str


_NO_IDEA = 1_000.0

PRIORS: Mapping[str, Prior] = {
    "weight_read": Prior(1.0, 0.1, "datasheet: weights at the bandwidth of the memory"),
    "kv_read": Prior(1.0, 0.2, "datasheet: KV cache at the bandwidth of the memory"),
    "prefill_compute": Prior(1.5, 0.5, "two thirds of the dense peak, as large matrix products reach"),
    "decode_compute": Prior(0.0, 0.5, "hidden behind the reading of weights"),
    "traffic": Prior(1.0, 1.0, "datasheet: the link's bandwidth in one direction"),
    "per_layer_us": Prior(60.0, _NO_IDEA, "none"),
    "per_exchange_us": Prior(7.0, 2.0, "Vidur's H100 profile: all-reduce of up to 26 KB on 2 GPUs, 6 to 7 us"),
    "per_moe_layer_us": Prior(26.0, 10.0, "kernels timed on an H100 (scripts/expert_kernels.py): 22 to 31 us"),
    "per_step_us": Prior(0.0, 500.0, "scheduling runs beside the step before"),
    "per_request_us": Prior(0.0, 50.0, "none"),
}

# How far the mean cycle of a model may stand off the shared coefficients: what a fit with all of
# them leaves is about this much.
_MODEL_SCATTER = 0.02

# Beyond this share of a cycle a row counts linearly, not squared, so that stalls do not bend the fit.
_ROBUST = 0.05
_ROUNDS = 50
_SETTLED = 1e-4

# A coefficient whose spread the recordings did not halve is its prior's, not theirs.
_IDENTIFIED_BELOW = 0.5


@dataclass(frozen=True)
class PhysicalFit:
    """Shared coefficients, how sure they are, and what each recording's rows were off by.

    ``spread``: standard deviation, by coefficient; ``identified``: whether the recordings determine
    it, rather than the prior.  ``mape_percent``: mean absolute error of a row's cycle, by slug.
    """

    coefficients: PhysicalCoefficients
    spread: Mapping[str, float]
    identified: Mapping[str, bool]
    rows: tuple[PhysicalRows, ...]
    mape_percent: Mapping[str, float]


def fit_physical(parts: Sequence[PhysicalRows], priors: Mapping[str, Prior] = PRIORS) -> PhysicalFit:
    """Fit the shared coefficients: non-negative, robust, each model weighing the same.

    Least squares of relative errors with a soft-l1 loss (by reweighting) and Gaussian priors.
    Coefficients are rounded to what a release holds (ns, ten-thousandths).  Raises
    ``ValidateError`` if there is nothing to fit to.
    """
    if not parts:
        raise ValidateError("no step records or per-request latencies to fit to; ingest recordings of other models")
    believed = [priors[name] for name in COEFFICIENT_NAMES]
    solution, spread = robust_non_negative(*_relative(parts), believed)
    precision = np.array([1 / prior.spread for prior in believed])
    coefficients = PhysicalCoefficients(
        **{
            name: round(float(value), 3 if name.endswith("_us") else 4)
            for name, value in zip(COEFFICIENT_NAMES, solution, strict=True)
        }
    )
    return PhysicalFit(
        coefficients=coefficients,
        spread=dict(zip(COEFFICIENT_NAMES, map(float, spread), strict=True)),
        identified=dict(zip(COEFFICIENT_NAMES, map(bool, spread * precision < _IDENTIFIED_BELOW), strict=True)),
        rows=tuple(parts),
        mape_percent={part.fitted_on.experiment: _mape_percent(part, coefficients) for part in parts},
    )


def robust_non_negative(times: Floats, weight: Floats, priors: Sequence[Prior]) -> tuple[Floats, Floats]:
    """Coefficients that bring ``times`` (rows over their cycle) nearest to 1, and their standard deviations."""
    belief = np.array([prior.value for prior in priors])
    precision = np.array([1 / prior.spread for prior in priors])
    trust = np.ones(len(times))
    solution, system = belief, np.zeros((0, len(priors)))
    for _ in range(_ROUNDS):
        scale = np.sqrt(weight * trust) / _MODEL_SCATTER
        system, right = _compact(times * scale[:, None], scale)
        solution = _non_negative(np.vstack([system, np.diag(precision)]), np.concatenate([right, precision * belief]))
        before, trust = trust, 1 / np.sqrt(1 + ((times @ solution - 1) / _ROBUST) ** 2)
        if np.abs(trust - before).max() < _SETTLED:
            break
    return solution, _deviations(system, 1 / precision)


def _deviations(system: Floats, before: Floats) -> Floats:
    """Standard deviations of coefficients that had those ``before`` a system of rows of unit deviation.

    The diagonal of (S'S + P)^-1 by singular values: that sum is singular in doubles where rows are large.
    """
    _left, values, rows = np.linalg.svd(system * before)
    # Of smaller ones only the rounding is left: nothing is known there.
    values[values < max(system.shape) * np.finfo(np.float64).eps * values.max(initial=0)] = 0
    kept = np.ones(len(before))
    kept[: len(values)] = 1 / np.hypot(1, values)
    deviations: Floats = before * np.sqrt(((rows * kept[:, None]) ** 2).sum(axis=0))
    return deviations


def _relative(parts: Sequence[PhysicalRows]) -> tuple[Floats, Floats]:
    """Rows over their cycle, and weights: 1 for each model, shared by its recordings and their rows."""
    models = [part.model for part in parts]
    times = np.vstack([part.times_us / part.cycle_us[:, None] for part in parts])
    weights = [np.full(len(part.cycle_us), 1 / len(part.cycle_us) / models.count(part.model)) for part in parts]
    return times, np.concatenate(weights)


def _compact(system: Floats, right: Floats) -> tuple[Floats, Floats]:
    """As many rows as columns with the same least-squares solutions (the triangle of a QR decomposition)."""
    triangle: Floats = np.asarray(np.linalg.qr(np.column_stack([system, right]), mode="r"))
    return triangle[:, :-1], triangle[:, -1]


def _non_negative(system: Floats, right: Floats) -> Floats:
    from scipy.optimize import nnls  # heavy, and only calibration needs it

    solution, _residual = nnls(system, right)
    return np.asarray(solution, np.float64)


def _mape_percent(part: PhysicalRows, coefficients: PhysicalCoefficients) -> float:
    return 100 * float(np.abs(part.times_us @ coefficients.as_array() / part.cycle_us - 1).mean())


def known_architecture(architectures: Mapping[str, Architecture], model: str) -> Architecture:
    """The architecture of a model; raises ``ValidateError`` for one that nobody described."""
    by_name: Callable[[str], Architecture | None] = {name.lower(): a for name, a in architectures.items()}.get
    if (architecture := by_name(model.lower())) is None:
        raise ValidateError(
            f"the architecture of {model} is not known; give its own configuration with --config {model}=config.json"
        )
    return architecture


NAMES = OperatorCoefficients.__struct_fields__

# Kernels of a server run within some per cent of those measured alone; contexts that requests share are read from the
# cache of the GPU, so its attention may be much cheaper; what the host adds is not in the tables at all.
OPERATOR_PRIORS = {
    "products": Prior(1.0, 0.1, "as measured"),
    "attention": Prior(1.0, 0.4, "as measured"),
    "all_reduce": Prior(1.0, 0.5, "as measured"),
    "per_step_us": Prior(0.0, 1_000.0, "the host works while the GPU does"),
    "per_request_us": Prior(0.0, 20.0, "the host works while the GPU does"),
}
_SPREAD_95 = 1.96
_FEWEST_ROWS = 5


@dataclass(frozen=True)
class OperatorRows:
    """Rows of one recording: ``times_us`` float64[rows, 5] for each coefficient at 1, ``cycle_us`` float64[rows]."""

    times_us: Floats
    cycle_us: Floats
    data: Data


def operator_rows(recording: Recording, model: OperatorModel, window: tuple[float, float]) -> OperatorRows:
    """Mean batches and mean cycles of a recording: step records where there are enough, else latencies."""
    batches, cycle_us, mixed_share, data = _mean_steps(recording, window)
    prefill, decode, context = (batches[:, i] for i in (PREFILL, DECODE, CONTEXT))
    prompt_tokens, of_each = mean_lengths(of_aggregates(recording)).prompt_tokens, context / np.maximum(decode, 1)
    times_us = operator_times_us(model, prefill, decode, of_each, mixed_share, prompt_tokens)
    return OperatorRows(times_us, cycle_us, data)


def calibrate_operators(
    recordings: Sequence[Recording], name: str, measured: CoefficientRelease, options: Options, source: str
) -> tuple[CoefficientRelease, list[ModelFit]]:
    """Fit what stands on top of the operator times in ``measured``, model by model, and make a release of the fits.

    Of ``options`` only the split counts: all before its second share is fitted to.  Raises ``ReleaseError`` for a model
    that ``measured`` lacks, ``ValidateError`` for one without operator times, or nothing to fit to.
    """
    groups = sorted(groups_of(recordings), key=lambda group: (model_of(group[0]), str(group[0].tensor_parallelism)))
    fits = [_fit_model(group, measured, options.split[1]) for group in groups]
    summary = f"Operator times, scaled to {', '.join(recording.alias for recording in recordings)}."
    fitted_on = [
        FittedOn(r.slug, r.content_hash, kind, requests_hash(r) or None) for fit in fits for r, kind in fit.used
    ]
    return fitted_release(name, summary, source, recordings, [fit.entry for fit in fits], fitted_on), fits


def _fit_model(recordings: Sequence[Recording], measured: CoefficientRelease, until: float) -> ModelFit:
    entry = entry_of(measured, recordings[0])
    model = entry.latency
    if not isinstance(model, OperatorModel):
        raise ValidateError(
            f"release {measured.name}: {entry.model} has no operator times; make some with "
            "`blis-replay coefficients silicon`"
        )
    parts = [operator_rows(recording, model, (0.0, until)) for recording in recordings]
    if sum(len(part.cycle_us) for part in parts) < _FEWEST_ROWS:
        named = ", ".join(recording.alias for recording in recordings)
        raise ValidateError(f"{named}: fewer than {_FEWEST_ROWS} mean cycles to fit to; use more recordings")
    values, spread = fit_coefficients(parts)
    entry = replace(
        entry,
        latency=replace(model, coefficients=values),
        lifecycle=replace(entry.lifecycle, pre_queue_us=0.0, **dict.fromkeys(f"{name}_source" for name in DELAYS)),
    )
    delay_us = _pre_queue_us(recordings, replace(measured, models=(entry,)))
    middle = "median" if any(map(is_load_level, recordings)) else "mean"
    source = f"what the replayed recordings lack in TTFT, median of a recording, {middle} over recordings"
    entry = replace(entry, lifecycle=replace(entry.lifecycle, pre_queue_us=delay_us, pre_queue_source=source))
    asynchronous = configured_scheduling(recordings[0])[0] == "asynchronous"
    coefficients = _coefficients(values, spread, delay_us, source)
    why: tuple[Told, str] = ("not told apart", "taken from the engine arguments")
    form, split = "measured operator times", (until, until)
    record = scored_fit(recordings, entry, form, split, asynchronous, why, coefficients)
    errors = np.concatenate([np.abs(part.times_us @ np.array(astuple(values)) / part.cycle_us - 1) for part in parts])
    return ModelFit(
        entry=replace(entry, fit=record),
        record=record,
        used=tuple((recording, part.data) for recording, part in zip(recordings, parts, strict=True)),
        rows=len(errors),
        agreement={"cycle": 100 * float(errors.mean())},
        scheduling=None,
        missed=missed(record.scores, {"e2e": 0.0}, recordings) if all(map(is_load_level, recordings)) else (),
    )


def _pre_queue_us(recordings: Sequence[Recording], release: CoefficientRelease) -> float:
    timed = [r for r in recordings if is_load_level(r) or observed_requests(r).any()]
    lacking_us = np.array([lacking_ttft_us(recording, release) for recording in timed])
    if not timed or not any(map(is_load_level, timed)):
        return max(round(float(lacking_us.mean())), 0) if timed else 0.0
    return max(round(_middle(lacking_us, np.array([_mean_ttft_us(recording) for recording in timed]))), 0)


def _middle(lacking_us: Floats, ttft_us: Floats) -> float:
    """The delay with the least mean absolute error of TTFT in percent: a median weighted by 1 over TTFT.

    How levels were sent is not known, so a mean would follow those whose clients waited for one another.
    """
    order = np.argsort(lacking_us)
    share = np.cumsum(1 / ttft_us[order])
    return float(lacking_us[order][np.searchsorted(share, share[-1] / 2)])


def _mean_ttft_us(recording: Recording) -> float:
    if is_load_level(recording):
        return load_level(recording, "recorded").numbers["ttft"]["mean"]
    return float(recording.requests["ttft_us"].to_numpy()[observed_requests(recording)].mean())


def _coefficients(
    values: OperatorCoefficients, spread: Floats, delay_us: float, delay_source: str
) -> tuple[CoefficientFit, ...]:
    """Each with its bounds; what the recordings leave within its prior is called one."""
    fits = []
    for name, value, deviation in zip(NAMES, astuple(values), spread, strict=True):
        prior = OPERATOR_PRIORS[name]
        identified = deviation < _IDENTIFIED_BELOW * prior.spread
        margin = _SPREAD_95 * float(deviation) if identified else 0.0
        unit = "us" if name.endswith("_us") else "a multiple of what was measured"
        bounds = round(max(value - margin, 0.0), 4), round(value + margin, 4)
        status, remark = ("fitted", unit) if identified else ("prior", f"{unit}; {prior.why}")
        fits.append(CoefficientFit(name.removesuffix("_us"), value, *bounds, status, remark))  # type: ignore[arg-type]
    return (*fits, CoefficientFit("pre_queue", delay_us, delay_us, delay_us, "measured", delay_source))


def fit_coefficients(parts: Sequence[OperatorRows]) -> tuple[OperatorCoefficients, Floats]:
    """The coefficients over some recordings of a model, which weigh the same, and their standard deviations."""
    times = np.vstack([part.times_us / part.cycle_us[:, None] for part in parts])
    weights = np.concatenate([np.full(len(p.cycle_us), 1 / len(p.cycle_us) / len(parts)) for p in parts])
    solution, spread = robust_non_negative(times, weights, [OPERATOR_PRIORS[name] for name in NAMES])
    return OperatorCoefficients(**{n: round(float(v), 4) for n, v in zip(NAMES, solution, strict=True)}), spread
