"""Coefficients from recordings: a robust, non-negative line per model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from blis_replay.blis.latency import LatencyModel, Lifecycle
from blis_replay.blis.release import CoefficientRelease, FittedOn, ModelEntry
from blis_replay.blis.release_text import format_release
from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import model_of
from blis_replay.validate.calibration.cycle_rows import CycleRows, Floats, rows_from_latencies, rows_from_steps
from blis_replay.validate.errors import ValidateError
from blis_replay.validate.terminal import table

Data = Literal["steps", "latencies"]
DataChoice = Literal["auto", "steps", "latencies"]

# Cycles scatter by 1-3 % of 8 to 20 ms; beyond this residual a row counts linearly, not
# squared, so that stalls do not bend the line.
_ROBUST_US = 200.0

# Fewer windows of step records than this do not make a line; latencies do better then.
_FEWEST_WINDOWS = 20

# Intercept, and per prefill, decode and context token.
_COEFFICIENTS = 4

# Correlation of two columns from which a fit cannot share a cost between them.
_ALIKE_FROM = 0.99

# One constant that its publisher fitted over the journeys of all 16 H100 experiments.
PUBLISHED_PRE_QUEUE_US = 9_300.0
PUBLISHED_PRE_QUEUE_SOURCE = (
    "published constant (alpha 0 of the trained roofline, fitted to journeys of 16 H100 experiments, mean absolute "
    "error 4.6 ms); not identified from these recordings"
)


@dataclass(frozen=True)
class ModelFit:
    """A fitted model: its entry, the data used, rows, and the mean absolute error of a row in %."""

    entry: ModelEntry
    latency: LatencyModel
    data: Data
    recordings: tuple[Recording, ...]
    rows: int
    mape_percent: float


def fit_model(
    recordings: Sequence[Recording],
    data: DataChoice = "auto",
    window: tuple[float, float] = (0.0, 1.0),
) -> ModelFit:
    """Fit one model from its recordings.

    ``auto`` uses step records of the recordings that have them, and latencies where there
    are none, or too few of a busy server.  Raises ``ValidateError`` if the recordings hold
    neither, fewer rows than coefficients, or no prompt lengths.
    """
    _refuse_without_prompts(recordings)
    with_steps = [recording for recording in recordings if recording.steps.height > 1]
    kind: Data = "steps"
    used: Sequence[Recording] = with_steps
    rows = [rows_from_steps(recording, window) for recording in with_steps] if data != "latencies" else []
    if data == "latencies" or (data == "auto" and sum(len(part.cycle_us) for part in rows) < _FEWEST_WINDOWS):
        kind, used = "latencies", recordings
        rows = [rows_from_latencies(recording, window) for recording in recordings]
    for recording in used:
        _refuse_unusable(recording, kind)
    _refuse_too_few(recordings, kind, sum(len(part.cycle_us) for part in rows))
    coefficients_us, mape = fit_line(rows)
    ns = [round(float(value) * 1000) for value in coefficients_us]
    latency = LatencyModel("blackbox", ns[0], ns[1], ns[2], ns[3])
    lifecycle, sources = _lifecycle(used)
    entry = ModelEntry(
        model=model_of(recordings[0]),
        tensor_parallelism=recordings[0].tensor_parallelism or 1,
        latency=latency,
        lifecycle=lifecycle,
        sources=sources,
    )
    return ModelFit(entry, latency, kind, tuple(used), sum(len(part.cycle_us) for part in rows), mape)


def _refuse_without_prompts(recordings: Sequence[Recording]) -> None:
    for recording in recordings:
        if recording.requests["prompt_tokens"].drop_nulls().is_empty():
            raise ValidateError(
                f"{recording.slug}: no request with a known prompt length, so prefills cannot be told from decodes; "
                "ingest its per-request records"
            )


def _refuse_unusable(recording: Recording, kind: Data) -> None:
    """Raise if an instrument check says that what is fitted to must not be used."""
    fitted_to = ("step_time",) if kind == "steps" else ("e2e", "ttft")
    for finding in recording.findings:
        if finding.severity == "unusable" and finding.metric in fitted_to:
            raise ValidateError(
                f"{recording.slug}: {finding.metric} unusable ({finding.check}: {finding.message}); "
                "leave the experiment out, or mend the recording"
            )


def _refuse_too_few(recordings: Sequence[Recording], kind: Data, rows: int) -> None:
    names = ", ".join(recording.alias for recording in recordings)
    if not rows:
        raise ValidateError(
            f"{names}: no {kind} to fit; ingest step records or per-request latencies of {recordings[0].model}"
        )
    if rows < _COEFFICIENTS:
        raise ValidateError(
            f"{names}: {rows} rows of {kind} do not determine {_COEFFICIENTS} coefficients; "
            "use a wider --window or more recordings"
        )


def fit_line(parts: Sequence[CycleRows]) -> tuple[Floats, float]:
    """Non-negative coefficients (us: intercept, per prefill, decode, context token) and MAPE in %.

    Least squares with a soft-l1 loss.  The context column takes part only where every
    part observed it.  Where all requests are alike, decodes and context are one column
    under two names; the context keeps the cost then, because a step reads the KV cache of
    its context whatever the model, and that is what carries over to other lengths.
    """
    from scipy.optimize import least_squares  # heavy, and only calibration needs it

    batch = np.vstack([part.batch for part in parts])
    cycle_us = np.concatenate([part.cycle_us for part in parts])
    columns = [0, 1, 2, 3] if all(part.context_known for part in parts) else [0, 1, 2]
    if 3 in columns and _alike(batch[:, 2], batch[:, 3]):
        columns.remove(2)
    # Columns of like size: context runs to 100,000 tokens, prefill to single ones.
    scale = np.maximum(np.abs(batch[:, columns]).mean(axis=0), 1e-9)
    scaled = batch[:, columns] / scale
    start = np.maximum(np.linalg.lstsq(scaled, cycle_us, rcond=None)[0], 1e-6)
    fit = least_squares(
        lambda x: scaled @ x - cycle_us, start, bounds=(0, np.inf), loss="soft_l1", f_scale=_ROBUST_US, x_scale="jac"
    )
    coefficients_us = np.zeros(_COEFFICIENTS)
    coefficients_us[columns] = fit.x / scale
    mape = 100 * float(np.abs(batch @ coefficients_us / cycle_us - 1).mean())
    return coefficients_us, mape


def _alike(decode: Floats, context: Floats) -> bool:
    """Whether the context of a batch tells no more than its number of decodes."""
    constant = np.ptp(decode) == 0 or np.ptp(context) == 0
    return bool(constant or np.corrcoef(decode, context)[0, 1] > _ALIKE_FROM)


def calibrate(
    recordings: Sequence[Recording], name: str, data: DataChoice = "auto", window: tuple[float, float] = (0.0, 1.0)
) -> tuple[CoefficientRelease, list[ModelFit]]:
    """Fit every model of the recordings and make a release of the fits.

    Recordings are grouped by model, tensor parallelism and deployment (the alias without
    its workload: two servers of one model, as ``70b`` and ``70b-hf``, need not be equally
    fast).  Raises ``ValidateError`` if a group cannot be fitted.
    """
    groups: dict[tuple[str, int | None, str], list[Recording]] = {}
    for recording in recordings:
        groups.setdefault((model_of(recording), recording.tensor_parallelism, deployment(recording)), []).append(
            recording
        )
    fits = [fit_model(group, data, window) for group in groups.values()]
    models = [(model, tensor_parallelism) for model, tensor_parallelism, _ in groups]
    for i, (model, tensor_parallelism, name_of_deployment) in enumerate(groups):
        if models.count((model, tensor_parallelism)) > 1:
            entry = replace(fits[i].entry, applies_to=(f"{name_of_deployment}-*",))
            fits[i] = replace(fits[i], entry=entry)
    # The first entry that applies is used, and "70b-*" also matches "70b-hf-general".
    fits.sort(key=lambda fit: (fit.entry.model, -len("".join(fit.entry.applies_to))))
    hardware = sorted({recording.hardware or "not recorded" for recording in recordings})
    trained_on = ", ".join(recording.alias for recording in recordings)
    summary = f"Step-time lines fitted to {trained_on}."
    return build_release(name, summary, fits, ", ".join(hardware)), fits


def deployment(recording: Recording) -> str:
    """The alias without its workload."""
    return recording.alias.removesuffix(f"-{recording.workload}")


def fits_json(fits: Sequence[ModelFit]) -> list[dict[str, object]]:
    """Fits for ``--json``: coefficients in us, MAPE of a row in percent."""
    return [
        {
            "model": fit.entry.model,
            "tensor_parallelism": fit.entry.tensor_parallelism,
            "applies_to": list(fit.entry.applies_to),
            "data": fit.data,
            "experiments": [recording.slug for recording in fit.recordings],
            "rows": fit.rows,
            "mape_percent": fit.mape_percent,
            "intercept_us": fit.latency.intercept_ns / 1000,
            "per_prefill_token_us": fit.latency.per_prefill_token_ns / 1000,
            "per_decode_token_us": fit.latency.per_decode_token_ns / 1000,
            "per_context_token_us": fit.latency.per_context_token_ns / 1000,
            "pre_queue_us": fit.entry.lifecycle.pre_queue_us,
            "pre_queue_source": (fit.entry.sources or {}).get("pre_queue"),
        }
        for fit in fits
    ]


def fits_text(fits: Sequence[ModelFit]) -> str:
    """A table of fits: coefficients in us, MAPE of a row."""
    header = ["model", "tp", "data", "rows", "MAPE", "b0 us", "us/prefill", "us/decode", "us/context"]
    rows = [
        [
            (fit.entry.applies_to or (fit.entry.model.split("/")[-1],))[0],
            str(fit.entry.tensor_parallelism),
            fit.data,
            f"{fit.rows:,}",
            f"{fit.mape_percent:.2f} %",
            f"{fit.latency.intercept_ns / 1000:,.0f}",
            f"{fit.latency.per_prefill_token_ns / 1000:.1f}",
            f"{fit.latency.per_decode_token_ns / 1000:.1f}",
            f"{fit.latency.per_context_token_ns / 1000:.3f}",
        ]
        for fit in fits
    ]
    return table(header, rows)


def build_release(name: str, summary: str, fits: Sequence[ModelFit], hardware: str) -> CoefficientRelease:
    """A valid release made of fitted models."""
    fitted_on = [
        FittedOn(recording.slug, recording.content_hash, fit.data) for fit in fits for recording in fit.recordings
    ]
    release = CoefficientRelease(
        name=name,
        status="valid",
        summary=summary,
        source="fitted by blis-replay calibrate",
        hardware=hardware,
        sha256="",
        models=tuple(fit.entry for fit in fits),
        fitted_on=tuple(fitted_on),
        published_replay={},
        published_errors={},
    )
    return replace(release, sha256=hashlib.sha256(format_release(release).encode()).hexdigest())


def _lifecycle(recordings: Sequence[Recording]) -> tuple[Lifecycle, dict[str, str]]:
    """The pre-queue delay: from server stamps where there are some, else the published one."""
    delays = np.concatenate(
        [
            r.requests.select(delay=r.requests["ttft_us"] - r.requests["queue_us"] - r.requests["prefill_us"])["delay"]
            .drop_nulls()
            .to_numpy()
            for r in recordings
        ]
    )
    if len(delays) == 0:
        return Lifecycle(pre_queue_us=PUBLISHED_PRE_QUEUE_US), {"pre_queue": PUBLISHED_PRE_QUEUE_SOURCE}
    source = f"median of TTFT - queue - prefill over {len(delays)} server-side requests"
    return Lifecycle(pre_queue_us=float(round(float(np.median(delays))))), {"pre_queue": source}
