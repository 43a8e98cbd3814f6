"""Coefficients that models share on their architectures, fitted to recordings from priors.

A few models do not determine ten costs: three intercepts do not separate the cost of a layer from that of an
all-reduce.  So each coefficient has a prior, from the datasheet or from another measurement, which the recordings
correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import ValidateError
from blis_replay.blis.grouping import attended_by
from blis_replay.blis.latency.datasheets import Architecture, Gpu, Gpus, architecture_named, gpu_named
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
    expert_read_us,
    unit_times_us,
)
from blis_replay.blis.releases.release import CoefficientRelease, FittedOn
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import replay
from blis_replay.replay.engine import cache_groups_of
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.replay.summary import of_aggregates
from blis_replay.validate.fit.calibrate import stated_fits
from blis_replay.validate.fit.cycle_rows import CycleRows, mean_lengths, rows_from_latencies, rows_from_steps
from blis_replay.validate.fit.evidence import is_load_level, rows_from_levels
from blis_replay.validate.fit.linear import Prior, fit_costs
from blis_replay.validate.fit.refused import Data
from blis_replay.validate.fit.scores import served
from blis_replay.validate.metrics.observed import on_both_sides

# Windows of step records; with fewer, latencies determine more.
_FEWEST_WINDOWS = 20

# Rows per recording, spread over the run: those of neighbouring requests are alike.
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

    None where the recording has neither (published aggregates).  ``gpus``: see ``gpu_named``.  Raises
    ``ReleaseError`` for hardware whose datasheet is not among them.
    """
    batches, cycle_us, _mixed_share, data = mean_steps(recording, (0.0, 1.0))
    if not len(cycle_us):
        return None
    gpu, tensor_parallelism = gpu_named(recording.hardware, gpus), recording.tensor_parallelism or 1
    times_us = batch_times_us(architecture, gpu, tensor_parallelism, batches)
    (fitted_on,) = stated_fits([(recording, data)])
    return PhysicalRows(model_of(recording), fitted_on, times_us, cycle_us)


def mean_steps(recording: Recording, window: tuple[float, float]) -> tuple[Floats, Floats, Floats, Data]:
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

    Rows lack some quantities, which follow from the means of the recording.  The context of a decode is its prompt and
    half its output.  A prefill token attends to a mean prompt, most of it cached.  A mean layer attends to as much of
    both as is in its window.  Each request is in one more step than it decodes in.
    """
    lengths = mean_lengths(recording)
    batches = np.zeros((len(rows.cycle_us), len(QUANTITIES)))
    _one, prefill, decode, context = rows.batch.T
    batches[:, STEP] = 1
    batches[:, PREFILL] = prefill
    batches[:, DECODE] = decode
    batches[:, CONTEXT] = context if rows.context_known else decode * lengths.context_tokens
    batches[:, ATTENDED] = prefill * attended_by(cache_groups_of(recording), lengths.prompt_tokens - 1, 1)
    batches[:, REQUESTS] = decode * lengths.output_tokens / max(lengths.output_tokens - 1, 1)
    return batches


def batch_times_us(architecture: Architecture, gpu: Gpu, tensor_parallelism: int, batch: Floats) -> Floats:
    """float64[rows, 10]: what batches cost for each coefficient at 1, for fitting.

    ``batch``: float64[rows, 6], a row of ``QUANTITIES`` each; fractions are mean batches.
    """
    times_us = batch @ unit_times_us(architecture, gpu, tensor_parallelism).T
    if architecture.experts:
        share = 1 - architecture.experts_per_token / architecture.experts
        touched = architecture.experts * (1 - share ** (batch[:, PREFILL] + batch[:, DECODE]))
        times_us[:, COEFFICIENT_NAMES.index("weight_read")] += touched * expert_read_us(
            architecture, gpu, tensor_parallelism
        )
    return times_us


_NO_IDEA = 1_000.0

PRIORS: Mapping[str, Prior] = {
    "weight_read": Prior(1.0, 0.1, "datasheet: weights at the bandwidth of the memory"),
    "kv_read": Prior(1.0, 0.2, "datasheet: KV cache at the bandwidth of the memory"),
    "prefill_compute": Prior(1.5, 0.5, "two thirds of the dense peak, as large matrix products reach"),
    "decode_compute": Prior(0.0, 0.5, "hidden behind the reading of weights"),
    "traffic": Prior(1.0, 1.0, "datasheet: the link's bandwidth in one direction"),
    "per_layer_us": Prior(60.0, _NO_IDEA, "none"),
    "per_exchange_us": Prior(7.0, 2.0, "Vidur's H100 profile: all-reduce of up to 26 KB on 2 GPUs, 6 to 7 us"),
    "per_moe_layer_us": Prior(26.0, 10.0, "expert kernels of aiconfigurator-core, timed on an H100: 22 to 31 us"),
    "per_step_us": Prior(0.0, 500.0, "scheduling runs beside the step before"),
    "per_request_us": Prior(0.0, 50.0, "none"),
}

# Relative error of the mean cycle of a model with shared coefficients: about what a fit leaves.
_MODEL_SCATTER = 0.02

# Share of a cycle beyond which an error counts linearly, so that stalls do not bend the fit.
_ROBUST = 0.05

# A coefficient is identified if the recordings at least halve the spread of its prior.
IDENTIFIED_BELOW = 0.5


@dataclass(frozen=True)
class PhysicalFit:
    """Shared coefficients with their standard deviations (``spread``), and the errors that they leave.

    ``identified``: whether the recordings, not the prior, determine a coefficient.  ``mape_percent``: mean absolute
    error of the cycle of a row, by slug.
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
    solution, spread = fit_relative(*_relative(parts), believed)
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
        identified=dict(zip(COEFFICIENT_NAMES, map(bool, spread * precision < IDENTIFIED_BELOW), strict=True)),
        rows=tuple(parts),
        mape_percent={part.fitted_on.experiment: _mape_percent(part, coefficients) for part in parts},
    )


def fit_relative(times: Floats, weight: Floats, priors: Sequence[Prior]) -> tuple[Floats, Floats]:
    """Coefficients that fit ``times`` (rows divided by their cycle) to 1, and their standard deviations."""

    def weights(cycles: Floats | None) -> Floats:
        return weight / _MODEL_SCATTER**2 * (1 if cycles is None else soft_l1((cycles - 1) / _ROBUST))

    costs, system = fit_costs(times, np.ones(len(times)), weights, priors)
    return costs, deviations(system, np.array([prior.spread for prior in priors]))


def soft_l1(residuals: Floats) -> Floats:
    """float64[rows]: weights of squares, by which a residual far above 1 counts linearly: stalls do not bend a fit."""
    return np.asarray(1 / np.sqrt(1 + residuals**2), np.float64)


def deviations(system: Floats, before: Floats) -> Floats:
    """Standard deviations of coefficients that had those ``before`` a system of rows of unit deviation.

    The diagonal of (S'S + P)^-1 by singular values: that sum is singular in doubles where rows are large.
    """
    _left, values, rows = np.linalg.svd(system * before)
    # Of smaller ones only the rounding is left: nothing is known there.
    values[values < max(system.shape) * np.finfo(np.float64).eps * values.max(initial=0)] = 0
    kept = np.ones(len(before))
    kept[: len(values)] = 1 / np.hypot(1, values)
    return np.asarray(before * np.sqrt(((rows * kept[:, None]) ** 2).sum(axis=0)), np.float64)


def _relative(parts: Sequence[PhysicalRows]) -> tuple[Floats, Floats]:
    """Rows over their cycle, and weights: 1 for each model, shared by its recordings and their rows."""
    models = [part.model for part in parts]
    times = np.vstack([part.times_us / part.cycle_us[:, None] for part in parts])
    weights = [np.full(len(part.cycle_us), 1 / len(part.cycle_us) / models.count(part.model)) for part in parts]
    return times, np.concatenate(weights)


def _mape_percent(part: PhysicalRows, coefficients: PhysicalCoefficients) -> float:
    return 100 * float(np.abs(part.times_us @ coefficients.as_array() / part.cycle_us - 1).mean())


def known_architecture(architectures: Mapping[str, Architecture], model: str) -> Architecture:
    """The architecture of a model; raises ``ValidateError`` if it is unknown."""
    if (architecture := architecture_named(model, architectures)) is None:
        raise ValidateError(
            f"the architecture of {model} is not known; give its own configuration with --config {model}=config.json"
        )
    return architecture


def lacking_ttft_us(recording: Recording, release: CoefficientRelease) -> float:
    """Median of observed less simulated TTFT, without a delay before the queue; of the means of a load level."""
    if is_load_level(recording):
        level, result = served(recording, entry_of(release, recording), "recorded")
        return level.numbers["ttft"]["mean"] - float(result.ttft_us.mean())
    run = replay(recording, release)
    both = on_both_sides(run)
    return float(np.median(recording.requests["ttft_us"].to_numpy()[both] - run.ttft_us[both]))
