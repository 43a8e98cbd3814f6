"""Step times against recorded steps: by regime, by batch size, and against the two targets there are.

The target is the step cycle: start of a step to start of the next, of two consecutive sampled steps.
``step.duration_us`` is CPU time inside the scheduling call; it is kept beside it because published
work was fitted to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency import Latency
from blis_replay.ingest.recording import Recording
from blis_replay.validate.calibration.cycle_rows import Floats, mean_context
from blis_replay.validate.errors import ValidateError
from blis_replay.validate.metrics import correlation

# Below this many prefill tokens a mixed step is light (the regimes of the published step models).
HEAVY_FROM = 256
_BATCH_EDGES = (1, 16, 32, 48, 64, 80, 96, 112, 2**31)


@dataclass(frozen=True)
class RecordedSteps:
    """Steps with a batch and a time: ``batch`` int64[rows, 3], ``time_us`` int64[rows].

    Columns of a batch: prefill, decode and context tokens.  The context is that of an average request
    for each decode: steps do not record it.
    """

    batch: NDArray[np.int64]
    time_us: NDArray[np.int64]


@dataclass(frozen=True)
class StepTargets:
    """What step times can be held against.

    ``cycle``: consecutive sampled steps, with the batch of the later one, because under asynchronous
    scheduling it is the step with a prefill that is long in coming; ``cycle_before``: with that of the
    earlier one; ``cycle_mean``: adjacent samples, whatever lies between; ``duration``: ``step.duration_us``.
    """

    cycle: RecordedSteps
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
    """The targets of a recording.  Raises ``ValidateError`` if no two consecutive steps were sampled."""
    steps = recording.steps.unique("step_id").sort("step_id")
    step_id, start_us = steps["step_id"].to_numpy(), steps["start_us"].to_numpy()
    tokens = steps.select("prefill_tokens", "decode_tokens").fill_null(0).to_numpy().astype(np.int64)
    batch = np.column_stack([tokens, np.rint(tokens[:, 1] * mean_context(recording)).astype(np.int64)])
    apart, elapsed_us = np.diff(step_id), np.diff(start_us)
    consecutive = (apart == 1) & (elapsed_us > 0)
    if not consecutive.any():
        raise ValidateError(
            f"{recording.alias}: no two consecutive steps were sampled, so no step cycle is known; "
            "ingest step records (traces), or sample more of them"
        )
    adjacent = elapsed_us > 0
    mean_us = np.rint(elapsed_us[adjacent] / apart[adjacent]).astype(np.int64)
    duration_us = steps["duration_us"].fill_null(0).to_numpy()
    timed = duration_us > 0
    return StepTargets(
        cycle=RecordedSteps(batch[1:][consecutive], elapsed_us[consecutive]),
        cycle_before=RecordedSteps(batch[:-1][consecutive], elapsed_us[consecutive]),
        cycle_mean=RecordedSteps(batch[1:][adjacent], mean_us),
        duration=RecordedSteps(batch[timed], duration_us[timed]),
    )


def line_fits(targets: StepTargets) -> list[LineFit]:
    """A line fitted to each target in turn: which of them is predictable.  Targets without steps are left out."""
    named = {
        "duration": targets.duration,
        "cycle, batch before": targets.cycle_before,
        "cycle, batch after": targets.cycle,
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
    for i, (prefill, decode, context) in enumerate(steps.batch):
        batch[k.BATCH_PREFILL_TOKENS], batch[k.BATCH_PREFILL_REQUESTS] = prefill, int(prefill > 0)
        batch[k.BATCH_DECODE_TOKENS], batch[k.BATCH_CONTEXT_TOKENS] = decode, context
        times[i] = step_duration_us(kind, whole, real, batch, 0)
    return times


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
