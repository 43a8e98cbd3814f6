"""A latency model that is right on average at every time of a recorded run, and otherwise itself.

Observed cycles in the place of a model would also undo what wrong inputs do to a batch: steps that prefill
too much would take as long as the server's, which did not.  So the model keeps its answer to what is in
a batch.  To that is added a line in the contents of a batch, fitted to what the server's cycles exceed the model by
on the server's batches, and what is left of that second by second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.engine import Engine
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency.models import CorrectedModel, Latency, Lifecycle, ObservedCycles
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.compiled.arrays import Floats, Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.observed import observed_cycles
from blis_replay.replay.plan import plan_replay


@dataclass(frozen=True)
class ForcedSteps:
    """Steps of a run with observed cycles, int64[steps] each.

    ``start_us``; ``observed_us``, how long it took; ``modelled_us``, what the model would have it take;
    ``batch``: int64[steps, 3], prefill, decode and context tokens.
    """

    start_us: Int64s
    observed_us: Int64s
    modelled_us: Int64s
    batch: Int64s


def forced_steps(
    trace: RequestTrace, engine: EngineConfig, lifecycle: Lifecycle, cycles: ObservedCycles, model: Latency
) -> ForcedSteps:
    """Serve ``trace`` in the step cycles that were observed, and ask ``model`` about every batch on the way.

    So the model is asked about the batches that the server had, as far as the trace is the server's.
    Raises ``TraceError`` as ``simulate`` does.
    """
    running = Engine(trace, engine, lifecycle)
    observed, asked = cycles.for_kernel(), model.for_kernel()
    rows = []
    while (batch := running.schedule()) is not None:
        contents = running.state.batch
        duration_us = step_duration_us(*observed, contents, batch.start_us)
        if batch.prefill_tokens + batch.decode_tokens > 0:
            modelled_us = step_duration_us(*asked, contents, batch.start_us)
            tokens = (batch.prefill_tokens, batch.decode_tokens, batch.context_tokens)
            rows.append((batch.start_us, duration_us, modelled_us, *tokens))
        running.run(duration_us)
    table = np.array(rows, np.int64).reshape(-1, 6)
    return ForcedSteps(table[:, 0], table[:, 1], table[:, 2], table[:, 3:])


# Some 50 to 150 steps.
_WINDOW_US = 1_000_000


def corrected_model(recording: Recording, mode: ReplayMode, entry: ModelEntry) -> tuple[CorrectedModel, str]:
    """The latency model of ``entry`` corrected by the recorded cycles, and in words what those rest on.

    ``mode``: a replay whose batches are the server's as nearly as can be.  Raises ``ReplayError`` if no cycles
    were recorded, ``ReleaseError`` for a model that is observed itself.
    """
    if isinstance(entry.latency, ObservedCycles | CorrectedModel):
        raise ReleaseError("observed step times are as observed; there is nothing to correct")
    cycles, basis = observed_cycles(recording)
    plan = plan_replay(recording, mode)
    steps = forced_steps(plan.trace, plan.engine, entry.lifecycle, cycles, entry.latency)
    excess_us = (steps.observed_us - steps.modelled_us).astype(np.float64)
    line_us = _line(steps, excess_us, np.searchsorted(cycles.from_us, steps.start_us, side="right"))
    line_ns = [round(1000 * float(value)) for value in line_us]
    left_us = excess_us - _batch(steps) @ np.array(line_ns) / 1000
    from_us, correction_us = _by_window(steps.start_us, left_us)
    a, b, c, d = line_ns
    return CorrectedModel(entry.latency, (a, b, c, d), from_us, correction_us), basis


def _batch(steps: ForcedSteps) -> Floats:
    """float64[steps, 4]: 1, prefill, decode and context tokens."""
    return np.column_stack([np.ones(len(steps.batch)), steps.batch])


def _line(steps: ForcedSteps, excess_us: Floats, interval: Int64s) -> Floats:
    """float64[4] us: least squares over the intervals between two anchors, whose mean cycle is all that is known."""
    _, interval = np.unique(interval, return_inverse=True)
    count = np.bincount(interval)
    means = [np.bincount(interval, column) / count for column in (*_batch(steps).T, excess_us)]
    weight = np.sqrt(count)
    columns, target = np.column_stack(means[:-1]) * weight[:, None], means[-1] * weight
    # Columns of like size; of costs that no data tell apart, the least squares solution of least size.
    scale = np.maximum(np.abs(columns).mean(axis=0), 1e-9)
    return np.asarray(np.linalg.lstsq(columns / scale, target, rcond=1e-6)[0] / scale, np.float64)


def _by_window(start_us: Int64s, left_us: Floats) -> tuple[Int64s, Int64s]:
    """Begin of each window with a step in it, and the mean of what is left there.

    The mean over steps: one looked up at a random time would be that of a long step too often.
    """
    windows, place = np.unique(start_us // _WINDOW_US, return_inverse=True)
    mean_us = np.bincount(place, left_us) / np.bincount(place)
    return windows * _WINDOW_US, np.rint(mean_us).astype(np.int64)
