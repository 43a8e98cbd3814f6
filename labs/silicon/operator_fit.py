"""Fit operator times to a recorded server: a factor for each kind of operator, and the time of the host.

Operator times already give how a step grows with tokens, requests and contexts, so a recording need not show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec.structs import astuple

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import ValidateError
from blis_replay.blis.latency.physical import CONTEXT, DECODE, PREFILL
from blis_replay.blis.releases.fit import CoefficientFit, Told
from blis_replay.blis.releases.release import DELAYS, CoefficientRelease
from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.replay.summary import of_aggregates
from blis_replay.validate.fit.calibrate import (
    ModelFit,
    Options,
    fitted_release,
    groups_of,
    scored_fit,
    stated_fits,
)
from blis_replay.validate.fit.cycle_rows import mean_lengths
from blis_replay.validate.fit.evidence import configured_scheduling, is_load_level, load_level
from blis_replay.validate.fit.linear import Prior
from blis_replay.validate.fit.refused import Data
from blis_replay.validate.fit.scores import missed
from blis_replay.validate.metrics.observed import observed_requests
from blis_replay_labs.silicon.operators import OperatorCoefficients, OperatorModel, batch_times_us
from blis_replay_labs.silicon.physical_fit import IDENTIFIED_BELOW, fit_relative, lacking_ttft_us, mean_steps

NAMES = OperatorCoefficients.__struct_fields__

# Kernels of a server run within some per cent of those measured alone.  Attention may be much cheaper, because contexts
# that requests share are read from the cache of the GPU.  The tables have no time of the host.
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
    batches, cycle_us, mixed_share, data = mean_steps(recording, window)
    prefill, decode, context = (batches[:, i] for i in (PREFILL, DECODE, CONTEXT))
    prompt_tokens, of_each = mean_lengths(of_aggregates(recording)).prompt_tokens, context / np.maximum(decode, 1)
    times_us = batch_times_us(model, prefill, decode, of_each, mixed_share, prompt_tokens)
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
    fitted_on = stated_fits(used for fit in fits for used in fit.used)
    return fitted_release(name, summary, source, recordings, [fit.entry for fit in fits], fitted_on), fits


def _fit_model(recordings: Sequence[Recording], measured: CoefficientRelease, until: float) -> ModelFit:
    entry = entry_of(measured, recordings[0])
    model = entry.latency
    if not isinstance(model, OperatorModel):
        raise ValidateError(
            f"release {measured.name}: {entry.model} has no operator times; make some with "
            "`blis-replay coefficients make --operators`"
        )
    parts = [operator_rows(recording, model, (0.0, until)) for recording in recordings]
    if sum(len(part.cycle_us) for part in parts) < _FEWEST_ROWS:
        named = ", ".join(recording.alias for recording in recordings)
        raise ValidateError(f"{named}: fewer than {_FEWEST_ROWS} mean cycles to fit to; use more recordings")
    values, spread = fit_coefficients(parts)
    of_tables: dict[str, Any] = dict.fromkeys(f"{name}_source" for name in DELAYS)
    lifecycle = replace(entry.lifecycle, pre_queue_us=0.0, **of_tables)
    entry = replace(entry, latency=replace(model, coefficients=values), lifecycle=lifecycle)
    delay_us = _pre_queue_us(recordings, replace(measured, models=(entry,)))
    middle = "median" if any(map(is_load_level, recordings)) else "mean"
    source = f"what the replayed recordings lack in TTFT, median of a recording, {middle} over recordings"
    entry = replace(entry, lifecycle=replace(entry.lifecycle, pre_queue_us=delay_us, pre_queue_source=source))
    asynchronous = configured_scheduling(recordings[0])[0] == "asynchronous"
    coefficients = _coefficients(values, spread, delay_us, source)
    why: tuple[Told, str] = ("not told apart", "taken from the engine arguments")
    form, edges = "measured operator times", (0.0, until, until, 1.0)
    record = scored_fit(recordings, entry, form, edges, asynchronous, why, coefficients)
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
        identified = deviation < IDENTIFIED_BELOW * prior.spread
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
    solution, spread = fit_relative(times, weights, [OPERATOR_PRIORS[name] for name in NAMES])
    return OperatorCoefficients(**{n: round(float(v), 4) for n, v in zip(NAMES, solution, strict=True)}), spread
