"""The few coefficients on top of operator times, fitted to recordings.

The tables say how a step's time grows with its tokens, requests and contexts, so a recording need not; it says how
much faster or slower than measured each part is on its server, and what the host adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import astuple

from blis_replay.blis.latency.operators import OperatorCoefficients, OperatorModel, batch_times_us
from blis_replay.blis.latency.physical import CONTEXT, DECODE, PREFILL
from blis_replay.blis.releases.fit import CoefficientFit, FitRecord
from blis_replay.blis.releases.release import CoefficientRelease, FittedOn
from blis_replay.compiled.arrays import Floats
from blis_replay.ingest.fingerprint import requests_hash
from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.validate.calibration.calibrate import Data, ModelFit, Options, fitted_release
from blis_replay.validate.calibration.cycle_rows import rows_from_latencies, rows_from_steps
from blis_replay.validate.calibration.evidence import configured_scheduling
from blis_replay.validate.calibration.generalize import lacking_ttft_us
from blis_replay.validate.calibration.own_data import part_scores
from blis_replay.validate.calibration.physical import Prior, mean_batches, robust_non_negative
from blis_replay.validate.errors import ValidateError
from blis_replay.validate.metrics.observed import observed_requests

NAMES = OperatorCoefficients.__struct_fields__

# Kernels of a server run within some per cent of those measured alone; contexts that requests share are read from the
# cache of the GPU, so its attention may be much cheaper; what the host adds is not in the tables at all.
PRIORS = {
    "products": Prior(1.0, 0.1, "as measured"),
    "attention": Prior(1.0, 0.4, "as measured"),
    "all_reduce": Prior(1.0, 0.5, "as measured"),
    "per_step_us": Prior(0.0, 1_000.0, "the host works while the GPU does"),
    "per_request_us": Prior(0.0, 20.0, "the host works while the GPU does"),
}
_SPREAD_95 = 1.96
# A coefficient whose spread the recordings did not halve is its prior's, not theirs.
_IDENTIFIED_BELOW = 0.5
_MOST_ROWS = 2_000
_FEWEST_WINDOWS = 20
_FEWEST_ROWS = 5


@dataclass(frozen=True)
class OperatorRows:
    """Rows of one recording: ``times_us`` float64[rows, 5] for each coefficient at 1, ``cycle_us`` float64[rows]."""

    times_us: Floats
    cycle_us: Floats
    data: Data


def operator_rows(recording: Recording, model: OperatorModel, window: tuple[float, float]) -> OperatorRows:
    """Mean batches and mean cycles of a recording: step records where there are enough, else latencies."""
    data: Data = "steps"
    rows = rows_from_steps(recording, window) if recording.steps.height > 1 else None
    if rows is None or len(rows.cycle_us) < _FEWEST_WINDOWS:
        data, rows = "latencies", rows_from_latencies(recording, window)
    batches = mean_batches(recording, rows)
    chosen = np.arange(0, len(batches), -(-len(batches) // _MOST_ROWS) or 1)
    prefill, decode, context = (batches[chosen, i] for i in (PREFILL, DECODE, CONTEXT))
    times_us = batch_times_us(model, prefill, decode, context / np.maximum(decode, 1))
    return OperatorRows(times_us, rows.cycle_us[chosen], data)


def calibrate_operators(
    recordings: Sequence[Recording], name: str, measured: CoefficientRelease, options: Options, source: str
) -> tuple[CoefficientRelease, list[ModelFit]]:
    """Fit what stands on top of the operator times in ``measured``, model by model, and make a release of the fits.

    Of ``options`` only the split counts: all before its second share is fitted to.  Raises ``ReleaseError`` for a model
    that ``measured`` lacks, ``ValidateError`` for one without operator times, or nothing to fit to.
    """
    groups: dict[tuple[str, int | None], list[Recording]] = {}
    for recording in recordings:
        groups.setdefault((model_of(recording), recording.tensor_parallelism), []).append(recording)
    fits = [_fit_model(groups[key], measured, options.split[1]) for key in sorted(groups, key=str)]
    summary = f"Operator times, scaled to {', '.join(recording.alias for recording in recordings)}."
    fitted_on = [FittedOn(r.slug, r.content_hash, kind, requests_hash(r)) for fit in fits for r, kind in fit.used]
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
        lifecycle=replace(entry.lifecycle, pre_queue_us=0.0),
        sources=None,
    )
    delay_us = _pre_queue_us(recordings, replace(measured, models=(entry,)))
    source = "what the replayed recordings lack in TTFT, median of a recording, mean over recordings"
    lifecycle = replace(entry.lifecycle, pre_queue_us=delay_us)
    entry = replace(entry, lifecycle=lifecycle, sources={"pre_queue": source})
    asynchronous = configured_scheduling(recordings[0])[0] == "asynchronous"
    scores, steps = part_scores(recordings, entry, asynchronous, until, until)
    coefficients = _coefficients(values, spread, delay_us, source)
    record = FitRecord(
        form="measured operator times",
        fitted_until=until,
        chosen_until=until,
        scheduling="asynchronous" if asynchronous else "synchronous",
        scheduling_told="not told apart",
        scheduling_evidence="taken from the engine arguments",
        coefficients=coefficients,
        scores=scores,
        steps=steps,
    )
    errors = np.concatenate([np.abs(part.times_us @ np.array(astuple(values)) / part.cycle_us - 1) for part in parts])
    return ModelFit(
        entry=replace(entry, fit=record),
        record=record,
        used=tuple((recording, part.data) for recording, part in zip(recordings, parts, strict=True)),
        rows=len(errors),
        agreement={"cycle": 100 * float(errors.mean())},
        scheduling=None,
        missed=(),
    )


def _pre_queue_us(recordings: Sequence[Recording], release: CoefficientRelease) -> float:
    timed = [recording for recording in recordings if observed_requests(recording).any()]
    return max(round(float(np.mean([lacking_ttft_us(recording, release) for recording in timed]))), 0) if timed else 0.0


def _coefficients(
    values: OperatorCoefficients, spread: Floats, delay_us: float, delay_source: str
) -> tuple[CoefficientFit, ...]:
    """Each with its bounds; what the recordings leave within its prior is called one."""
    fits = []
    for name, value, deviation in zip(NAMES, astuple(values), spread, strict=True):
        prior = PRIORS[name]
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
    solution, spread = robust_non_negative(times, weights, [PRIORS[name] for name in NAMES])
    return OperatorCoefficients(**{n: round(float(v), 4) for n, v in zip(NAMES, solution, strict=True)}), spread
