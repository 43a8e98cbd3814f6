"""Step times against recorded steps: by regime, by batch size, and against the two targets there are.

The target is the step cycle: start of a step to start of the next, of two consecutive sampled steps.
``step.duration_us`` is CPU time inside the scheduling call; it is kept beside it because published
work was fitted to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency import Latency
from blis_replay.ingest.recording import Recording
from blis_replay.validate.calibration.cycle_rows import Floats
from blis_replay.validate.calibration.mean_lengths import mean_lengths
from blis_replay.validate.errors import ValidateError
from blis_replay.validate.metrics import correlation

# Below this many prefill tokens a mixed step is light (the regimes of the published step models).
HEAVY_FROM = 256
# With fewer requests running, the engine may have been idle between two steps.
_BUSY_DEPTH = 4
_BATCH_EDGES = (1, 16, 32, 48, 64, 80, 96, 112, 2**31)


_COLUMNS = [
    k.BATCH_PREFILL_TOKENS,
    k.BATCH_DECODE_TOKENS,
    k.BATCH_PREFILL_REQUESTS,
    k.BATCH_CONTEXT_TOKENS,
    k.BATCH_ATTENDED_TOKENS,
]


@dataclass(frozen=True)
class RecordedSteps:
    """Steps with a batch and a time: ``batch`` int64[rows, 5], ``time_us`` int64[rows].

    Columns of a batch as ``_COLUMNS``: prefill and decode tokens, prefilling requests, context tokens of the decodes
    and of the prefills.  Steps do not record contexts: they are those of an average request.
    """

    batch: NDArray[np.int64]
    time_us: NDArray[np.int64]


@dataclass(frozen=True)
class StepTargets:
    """What step times can be held against.

    ``cycle``: consecutive sampled steps of a busy engine, with the batch of the later one, because under asynchronous
    scheduling it is the step with a prefill that is long in coming.  As published fits had them, idle or not:
    ``cycle_after``: the same; ``cycle_before``: with the batch of the earlier one; ``cycle_mean``: adjacent samples,
    whatever lies between; ``duration``: ``step.duration_us``.
    """

    cycle: RecordedSteps
    cycle_after: RecordedSteps
    cycle_before: RecordedSteps
    cycle_mean: RecordedSteps
    duration: RecordedSteps


@dataclass(frozen=True)
class LineFit:
    """A least-squares line ``b0 + b1 * prefill + b2 * decode`` (us) and how it fits the rows it was fitted to."""

    target: str
    steps: int
    coefficients_us: tuple[float, float, float]
    mape: float
    median_ape: float
    r_squared: float


@dataclass(frozen=True)
class StepError:
    """Predicted against recorded time over a group of steps: fractions; None where there are too few."""

    group: str
    steps: int
    recorded_us: float
    mape: float
    signed: float
    correlation: float | None


def step_targets(recording: Recording) -> StepTargets:
    """The targets of a recording.  Raises ``ValidateError`` without two consecutive sampled steps of a busy engine."""
    steps = recording.steps.whole().unique("step_id").sort("step_id")
    step_id, start_us = steps["step_id"].to_numpy(), steps["start_us"].to_numpy()
    batch = _batches(recording, steps)
    apart, elapsed_us = np.diff(step_id), np.diff(start_us)
    consecutive = (apart == 1) & (elapsed_us > 0)
    busy = consecutive & (steps["running_depth"].fill_null(0).to_numpy()[:-1] >= _BUSY_DEPTH)
    if not busy.any():
        raise ValidateError(
            f"{recording.alias}: no two consecutive steps of a busy engine were sampled, so no step cycle is known; "
            "ingest step records (traces), or sample more of them"
        )
    adjacent = elapsed_us > 0
    mean_us = np.rint(elapsed_us[adjacent] / apart[adjacent]).astype(np.int64)
    duration_us = steps["duration_us"].fill_null(0).to_numpy()
    timed = duration_us > 0
    return StepTargets(
        cycle=RecordedSteps(batch[1:][busy], elapsed_us[busy]),
        cycle_after=RecordedSteps(batch[1:][consecutive], elapsed_us[consecutive]),
        cycle_before=RecordedSteps(batch[:-1][consecutive], elapsed_us[consecutive]),
        cycle_mean=RecordedSteps(batch[1:][adjacent], mean_us),
        duration=RecordedSteps(batch[timed], duration_us[timed]),
    )


def _batches(recording: Recording, steps: pl.DataFrame) -> NDArray[np.int64]:
    counts = steps.select("prefill_tokens", "decode_tokens", "prefill_requests").fill_null(0).to_numpy()
    lengths = mean_lengths(recording)
    contexts = counts[:, [1, 0]] * np.array([lengths.context_tokens, lengths.prompt_tokens])
    return np.column_stack([counts, np.rint(contexts)]).astype(np.int64)


def line_fits(targets: StepTargets) -> list[LineFit]:
    """A line fitted to each target in turn: which of them is predictable.  Targets without steps are left out."""
    named = {
        "duration": targets.duration,
        "cycle, batch before": targets.cycle_before,
        "cycle, batch after": targets.cycle_after,
        "cycle, samples": targets.cycle_mean,
    }
    return [_line(name, steps) for name, steps in named.items() if len(steps.time_us) > 2]


def _line(name: str, steps: RecordedSteps) -> LineFit:
    design = np.column_stack([np.ones(len(steps.batch)), steps.batch[:, 0], steps.batch[:, 1]])
    coefficients = np.linalg.lstsq(design, steps.time_us, rcond=None)[0]
    predicted = design @ coefficients
    off = np.abs(predicted / steps.time_us - 1)
    spread = float(((steps.time_us - steps.time_us.mean()) ** 2).sum())
    r_squared = 1 - float(((steps.time_us - predicted) ** 2).sum()) / spread if spread else 0.0
    b0, b1, b2 = map(float, coefficients)
    return LineFit(name, len(off), (b0, b1, b2), float(off.mean()), float(np.median(off)), r_squared)


def predicted_us(latency: Latency, steps: RecordedSteps) -> Floats:
    """float64[rows]: what a latency model makes of each batch, us."""
    kind, whole, real = latency.for_kernel()
    batch = np.zeros(k.BATCH_SIZE, np.int64)
    times = np.empty(len(steps.batch))
    for i, row in enumerate(steps.batch):
        batch[_COLUMNS] = row
        times[i] = step_duration_us(kind, whole, real, batch, 0)
    return times


def step_mape(recording: Recording, latency: Latency) -> float | None:
    """Mean absolute error of single step cycles, as a fraction; None where no cycle is known."""
    try:
        steps = step_targets(recording).cycle
    except ValidateError:
        return None
    return float(np.abs(predicted_us(latency, steps) / steps.time_us - 1).mean())


def step_errors(latency: Latency, steps: RecordedSteps) -> list[StepError]:
    """Errors over all steps, by regime, and by batch size (decodes); groups without steps are left out."""
    prefill, decode = steps.batch[:, 0], steps.batch[:, 1]
    groups: dict[str, NDArray[np.bool_]] = {
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


def _error(group: str, recorded_us: NDArray[np.int64], predicted: Floats) -> StepError:
    ratio = predicted / recorded_us - 1
    return StepError(
        group=group,
        steps=len(ratio),
        recorded_us=float(recorded_us.mean()),
        mape=float(np.abs(ratio).mean()),
        signed=float(predicted.mean() / recorded_us.mean() - 1),
        correlation=correlation(recorded_us, predicted),
    )
