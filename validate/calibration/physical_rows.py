"""Mean batches and mean step cycles of recordings, in the quantities of the physical model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.architecture import Architecture
from blis_replay.blis.gpu import gpu_named
from blis_replay.blis.physical import ATTENDED, CONTEXT, DECODE, PREFILL, QUANTITIES, REQUESTS, STEP, batch_times_us
from blis_replay.blis.release import FittedOn
from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import model_of
from blis_replay.validate.calibration.cycle_rows import CycleRows, rows_from_latencies, rows_from_steps
from blis_replay.validate.calibration.mean_lengths import mean_lengths

Floats = NDArray[np.float64]

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


def physical_rows(recording: Recording, architecture: Architecture) -> PhysicalRows | None:
    """What the physical model is fitted to: step cycles where there are step records, else latencies.

    None where the recording has neither (published aggregates).  Raises ``ReleaseError`` for
    hardware whose datasheet is not known here.
    """
    kind, rows = "steps", None
    if recording.steps.height > 1:
        rows = rows_from_steps(recording)
    if rows is None or len(rows.cycle_us) < _FEWEST_WINDOWS:
        kind, rows = "latencies", rows_from_latencies(recording)
    if not len(rows.cycle_us):
        return None
    batches = mean_batches(recording, rows)
    chosen = np.arange(0, len(batches), -(-len(batches) // _MOST_ROWS))
    gpu, tensor_parallelism = gpu_named(recording.hardware), recording.tensor_parallelism or 1
    times_us = batch_times_us(architecture, gpu, tensor_parallelism, batches[chosen])
    fitted_on = FittedOn(recording.slug, recording.content_hash, "steps" if kind == "steps" else "latencies")
    return PhysicalRows(model_of(recording), fitted_on, times_us, rows.cycle_us[chosen])


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
