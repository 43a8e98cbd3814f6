"""Step cycles against batch size: recorded ones, and what the latency model gave in the replay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.trace import Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.step_records import one_a_step
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.report.bands import Band, band_by

Floats = NDArray[np.float64]

# With fewer requests running, the engine may have been idle between two steps.
_BUSY_DEPTH = 4
_MOST_BINS = 32
_CYCLE_BINS = 48
_FEWEST_CYCLES = 20


@dataclass(frozen=True)
class StepCycles:
    """Recorded cycles of consecutive steps by the requests running in the later one, and the model's.

    ``observed``: bands of us.  ``model_us``: float64[k], median simulated step time at the same batch sizes (nan
    where the replay had none).  ``density``: int64[batch bins, cycle bins] cycles between ``batch_edges`` and
    ``cycle_edges_us``; ``beyond``: how many are longer than the last edge.
    """

    observed: Band
    model_us: Floats
    density: NDArray[np.int64]
    batch_edges: Floats
    cycle_edges_us: Floats
    beyond: int

    @property
    def residual_us(self) -> Floats:
        """float64[k]: median recorded cycle less the model's."""
        return self.observed.middle - self.model_us


def step_cycles(run: ReplayRun) -> StepCycles | None:
    """The picture of a replay's latency model; None with fewer than 20 consecutive recorded steps."""
    batch, cycle_us = recorded_cycles(run.recording)
    if len(batch) < _FEWEST_CYCLES:
        return None
    edges = _batch_edges(batch)
    observed = band_by(edges, batch, cycle_us)
    steps = run.result.steps
    model = band_by(edges, steps["running_depth"].astype(np.int64), steps["end_us"] - steps["start_us"])
    # Both name their bins by what lies in them: find each recorded bin among the simulated.
    at = {int(np.searchsorted(edges, x, side="right")): value for x, value in zip(model.x, model.middle, strict=True)}
    model_us = np.array([at.get(int(np.searchsorted(edges, x, side="right")), np.nan) for x in observed.x])
    cycle_edges = np.linspace(0, 1.1 * float(np.quantile(cycle_us, 0.995)), _CYCLE_BINS + 1)
    density = np.histogram2d(batch, cycle_us, bins=(edges, cycle_edges))[0].astype(np.int64)
    return StepCycles(observed, model_us, density, edges, cycle_edges, int((cycle_us > cycle_edges[-1]).sum()))


def recorded_cycles(recording: Recording) -> tuple[Int64s, Int64s]:
    """Running requests in the later of two consecutive recorded steps, and us from start to start; while busy."""
    names = ["step_id", "start_us", "running_depth"]
    steps = one_a_step(recording.steps.whole(names).drop_nulls())
    step_id, start_us, depth = (steps[name].to_numpy() for name in names)
    later = np.flatnonzero(np.diff(step_id) == 1) + 1
    cycle_us = start_us[later] - start_us[later - 1]
    usable = (depth[later - 1] >= _BUSY_DEPTH) & (cycle_us > 0)
    return depth[later][usable].astype(np.int64), cycle_us[usable].astype(np.int64)


def _batch_edges(batch: Int64s) -> Floats:
    low, high = int(batch.min()), int(batch.max()) + 1
    width = -(-(high - low) // _MOST_BINS)
    return np.arange(low, high + width, width, dtype=np.float64)
