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
from blis_replay.blis.grouping import attended_by
from blis_replay.blis.kernel.state import BATCH
from blis_replay.blis.latency.models import Latency, durations_us
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.records import is_asynchronous
from blis_replay.replay.engine import cache_groups_of
from blis_replay.replay.prefix import prompt_tokens
from blis_replay.replay.prefix_estimate import estimate_prefix
from blis_replay.validate.fit.cycle_rows import busy_depth, mean_lengths
from blis_replay.validate.metrics.latency import correlation

# Below this many prefill tokens a mixed step is light (the regimes of the published step models).
HEAVY_FROM = 256
# Decodes at which groups of steps by batch size begin.
_BATCH_EDGES = (1, 16, 32, 48, 64, 80, 96, 112, 2**31)
# Tokens of a step: far above any batch, and small enough to be multiplied by a length.
_MOST_TOKENS = 2**31


@dataclass(frozen=True)
class RecordedSteps:
    """Steps with a batch and a time: ``batch``, ``kernel.state.BATCH``[rows], and ``time_us``, int64[rows].

    Steps do not record contexts: they are those of an average request.
    """

    batch: np.ndarray
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
    """The cycles of consecutive sampled steps of a busy engine.  Raises ``ValidateError`` without any.

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


def _batches(recording: Recording, steps: pl.DataFrame) -> np.ndarray:
    counted = ("prefill_tokens", "decode_tokens", "prefill_requests")
    counts = steps.select(pl.col(counted).fill_null(0)).to_numpy()
    lengths, batch = mean_lengths(recording), np.zeros(len(counts), BATCH)
    if counts.size and (most := int(counts.max())) > _MOST_TOKENS:
        raise ValidateError(f"{recording.alias}: a step of {most:,} tokens or requests; check its step records")
    for name, values in zip(counted, counts.T, strict=True):
        batch[name] = values
    batch["context_tokens"] = np.rint(batch["decode_tokens"] * lengths.context_tokens)
    # The i-th token of a prompt attends to i tokens; those that were cached are not computed.
    prompts, computed = prompt_tokens(recording).astype(np.float64), estimate_prefix(recording).prefill_tokens
    cached = prompts - computed
    attended = attended_by(cache_groups_of(recording), cached, computed).sum() / max(float(computed.sum()), 1.0)
    batch["attended_tokens"] = np.rint(batch["prefill_tokens"] * attended)
    return batch


def step_errors(latency: Latency, steps: RecordedSteps) -> list[StepError]:
    """Errors over all steps, by regime, and by batch size (decodes); groups without steps are left out."""
    prefill, decode = steps.batch["prefill_tokens"], steps.batch["decode_tokens"]
    groups: dict[str, Bools] = {
        "all": np.ones(len(prefill), bool),
        "decode-only": prefill == 0,
        f"mixed, light (< {HEAVY_FROM})": (prefill > 0) & (prefill < HEAVY_FROM),
        f"mixed, heavy (>= {HEAVY_FROM})": prefill >= HEAVY_FROM,
    }
    for low, high in pairwise(_BATCH_EDGES):
        name = f"{low} to {high - 1} decodes" if high < 2**31 else f"{low} decodes and more"
        groups[name] = (decode >= low) & (decode < high)
    predicted = durations_us(latency, steps.batch)
    return [_error(name, steps.time_us[chosen], predicted[chosen]) for name, chosen in groups.items() if chosen.any()]


def _error(group: str, recorded_us: Int64s, predicted: Floats) -> StepError:
    mape = float(np.abs(predicted / recorded_us - 1).mean())
    signed = float(predicted.mean() / recorded_us.mean() - 1)
    mean_us, r = float(recorded_us.mean()), correlation(recorded_us, predicted)
    return StepError(group, len(recorded_us), mean_us, mape, signed, r)
