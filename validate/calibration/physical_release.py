"""A coefficient release of the physical model: what models share, on each model's architecture."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from blis_replay.blis.architecture import Architecture
from blis_replay.blis.gpu import gpu_named
from blis_replay.blis.latency import Lifecycle
from blis_replay.blis.physical import PhysicalModel
from blis_replay.blis.release import CoefficientRelease, ModelEntry
from blis_replay.blis.release_text import format_release
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import replay
from blis_replay.replay.simulator import model_of
from blis_replay.validate.calibration.physical_fit import PRIORS, PhysicalFit, Prior, fit_physical, known_architecture
from blis_replay.validate.calibration.physical_rows import physical_rows
from blis_replay.validate.observed import observed_requests


def calibrate_physical(
    training: Sequence[Recording],
    targets: Sequence[Recording],
    architectures: Mapping[str, Architecture],
    name: str,
    priors: Mapping[str, Prior] = PRIORS,
) -> tuple[CoefficientRelease, PhysicalFit]:
    """Fit to ``training`` and make a release that serves the models of ``training`` and ``targets``.

    Of a target nothing enters but its model, hardware and tensor parallelism.  The delay before
    the queue is one for all: what the replayed training recordings lack in TTFT.  Raises
    ``ValidateError`` for a model of unknown architecture or nothing to fit to, ``ReleaseError``
    for hardware without a datasheet.
    """
    rows = [physical_rows(r, known_architecture(architectures, model_of(r))) for r in training]
    fit = fit_physical([part for part in rows if part is not None], priors)
    release = _release(name, fit, [*training, *targets], architectures, Lifecycle(), {})
    measured = [recording for recording, part in zip(training, rows, strict=True) if part is not None]
    delays_us = {recording.slug: _lacking_us(recording, release) for recording in measured}
    delay_us = float(max(round(_mean_over_models(measured, delays_us)), 0))
    source = (
        f"what {len(measured)} replayed training recordings lack in TTFT, median of a recording, mean over models "
        f"({min(delays_us.values()) / 1000:.1f} to {max(delays_us.values()) / 1000:.1f} ms)"
    )
    lifecycle = Lifecycle(pre_queue_us=delay_us)
    return _release(name, fit, [*training, *targets], architectures, lifecycle, {"pre_queue": source}), fit


def _lacking_us(recording: Recording, release: CoefficientRelease) -> float:
    """Median of observed less simulated TTFT, without a delay before the queue."""
    run = replay(recording, release)
    both = observed_requests(recording) & run.simulated.completed
    return float(np.median(recording.requests["ttft_us"].to_numpy()[both] - run.ttft_us[both]))


def _mean_over_models(recordings: Sequence[Recording], values: Mapping[str, float]) -> float:
    by_model: dict[str, list[float]] = {}
    for recording in recordings:
        by_model.setdefault(model_of(recording), []).append(values[recording.slug])
    return float(np.mean([np.mean(of_model) for of_model in by_model.values()]))


def _release(
    name: str,
    fit: PhysicalFit,
    recordings: Sequence[Recording],
    architectures: Mapping[str, Architecture],
    lifecycle: Lifecycle,
    sources: Mapping[str, str],
) -> CoefficientRelease:
    entries: dict[tuple[str, int, str], ModelEntry] = {}
    for recording in recordings:
        model, tensor_parallelism = model_of(recording), recording.tensor_parallelism or 1
        gpu = gpu_named(recording.hardware)
        latency = PhysicalModel(known_architecture(architectures, model), gpu, tensor_parallelism, fit.coefficients)
        entry = ModelEntry(model, tensor_parallelism, latency, lifecycle, sources=sources)
        entries[model, tensor_parallelism, gpu.name] = entry
    trained_on = sorted({part.model for part in fit.rows})
    release = CoefficientRelease(
        name=name,
        status="valid",
        summary=f"Shared physical coefficients, fitted over {', '.join(trained_on)}.",
        source="fitted by blis-replay generalize",
        hardware=", ".join(sorted({recording.hardware or "" for recording in recordings})),
        sha256="",
        models=tuple(entries[key] for key in sorted(entries)),
        fitted_on=tuple(part.fitted_on for part in fit.rows),
        published_replay={},
        published_errors={},
    )
    return replace(release, sha256=hashlib.sha256(format_release(release).encode()).hexdigest())
