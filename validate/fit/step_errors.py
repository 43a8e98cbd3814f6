"""Step times against recorded step cycles, by regime and by batch size.

A cycle is the start of a step to the start of the next, of two consecutive sampled steps.  ``step.duration_us`` is CPU
time inside the scheduling call, and no step time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.base.errors import ValidateError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency.models import Latency, durations_us
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.records import is_asynchronous
from blis_replay.validate.fit.cycle_rows import busy_depth, mean_lengths
from blis_replay.validate.metrics.latency import correlation

# Below this many prefill tokens a mixed step is light (the regimes of the published step models).
HEAVY_FROM = 256
_BATCH_EDGES = (1, 16, 32, 48, 64, 80, 96, 112, 2**31)


_COLUMNS = ("prefill_tokens", "decode_tokens", "prefill_requests", "context_tokens", "attended_tokens")


@dataclass(frozen=True)
class RecordedSteps:
    """Steps with a batch and a time: ``batch`` int64[rows, 5], ``time_us`` int64[rows].

    Columns of a batch as ``_COLUMNS``: prefill and decode tokens, prefilling requests, context tokens of the decodes
    and of the prefills.  Steps do not record contexts: they are those of an average request.
    """

    batch: Int64s
    time_us: Int64s


@dataclass(frozen=True)
class StepError:
    """Predicted against recorded time over a group of steps: fractions; None where there are too few."""

    group: str
    steps: int
    recorded_us: float
    mape: float
    signed: float
    correlation: float | None


def step_cycles(recording: Recording) -> RecordedSteps:
    """The cycles of consecutive sampled steps of a busy engine.  Raises ``ValidateError`` where there are none.

    A synchronous engine schedules the next step when the batch of the earlier one is done; under asynchronous
    scheduling the later step is long in coming if it has a prefill.
    """
    steps = recording.steps.frame().unique("step_id").sort("step_id")
    batch, elapsed_us = _batches(recording, steps), np.diff(steps["start_us"].to_numpy())
    depth = steps["running_depth"].fill_null(0).to_numpy()[:-1]
    busy = (np.diff(steps["step_id"].to_numpy()) == 1) & (elapsed_us > 0) & (depth >= busy_depth(recording))
    if not busy.any():
        raise ValidateError(
            f"{recording.alias}: no two consecutive steps of a busy engine were sampled, so no step cycle is known; "
            "ingest step records (traces), or sample more of them"
        )
    timed_by = batch[1:] if is_asynchronous(recording) else batch[:-1]
    return RecordedSteps(timed_by[busy], elapsed_us[busy])


_MOST_TOKENS = 2**31  # of a step: far above any batch, and small enough to be multiplied by a length


def _batches(recording: Recording, steps: pl.DataFrame) -> Int64s:
    counts = steps.select("prefill_tokens", "decode_tokens", "prefill_requests").fill_null(0).to_numpy()
    lengths = mean_lengths(recording)
    contexts = counts[:, [1, 0]] * np.array([lengths.context_tokens, lengths.prompt_tokens])
    if counts.size and (most := int(counts.max())) > _MOST_TOKENS:
        raise ValidateError(f"{recording.alias}: a step of {most:,} tokens or requests; check its step records")
    return np.column_stack([counts, np.rint(contexts)]).astype(np.int64)


def predicted_us(latency: Latency, steps: RecordedSteps) -> Floats:
    """float64[rows]: what a latency model makes of each batch, us."""
    batches = np.zeros(len(steps.batch), k.BATCH)
    for name, column in zip(_COLUMNS, steps.batch.T, strict=True):
        batches[name] = column
    return durations_us(latency, batches)


def step_mape(recording: Recording, latency: Latency) -> float | None:
    """Mean absolute error of single step cycles, as a fraction; None where no cycle is known."""
    try:
        steps = step_cycles(recording)
    except ValidateError:
        return None
    return float(np.abs(predicted_us(latency, steps) / steps.time_us - 1).mean())


def step_errors(latency: Latency, steps: RecordedSteps) -> list[StepError]:
    """Errors over all steps, by regime, and by batch size (decodes); groups without steps are left out."""
    prefill, decode = steps.batch[:, 0], steps.batch[:, 1]
    groups: dict[str, Bools] = {
        "all": np.ones(len(prefill), bool),
        "decode-only": prefill == 0,
        f"mixed, light (< {HEAVY_FROM})": (prefill > 0) & (prefill < HEAVY_FROM),
        f"mixed, heavy (>= {HEAVY_FROM})": prefill >= HEAVY_FROM,
    }
    for low, high in pairwise(_BATCH_EDGES):
        name = f"{low} to {high - 1} decodes" if high < 2**31 else f"{low} decodes and more"
        groups[name] = (decode >= low) & (decode < high)
    predicted = predicted_us(latency, steps)
    return [_error(name, steps.time_us[chosen], predicted[chosen]) for name, chosen in groups.items() if chosen.any()]


def _error(group: str, recorded_us: Int64s, predicted: Floats) -> StepError:
    ratio = predicted / recorded_us - 1
    return StepError(
        group=group,
        steps=len(ratio),
        recorded_us=float(recorded_us.mean()),
        mape=float(np.abs(ratio).mean()),
        signed=float(predicted.mean() / recorded_us.mean() - 1),
        correlation=correlation(recorded_us, predicted),
    )
