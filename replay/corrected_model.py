"""A latency model that is right on average at every time of a recorded run, and otherwise itself.

Observed cycles in the place of a model would also undo what wrong inputs do to a batch: steps that prefill
too much would take as long as the server's, which did not.  So the model keeps its answer to what is in
a batch, and gets added what the server's cycles exceeded it by on the server's batches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.forced import forced_steps
from blis_replay.blis.latency import CorrectedModel, ObservedCycles
from blis_replay.blis.release import ModelEntry
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.observed_cycles import observed_cycles
from blis_replay.replay.plan import plan_replay


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
    place = np.maximum(np.searchsorted(cycles.from_us, steps.start_us, side="right") - 1, 0)
    count = np.bincount(place, minlength=len(cycles.from_us))
    modelled_us = np.bincount(place, steps.modelled_us, len(cycles.from_us))
    asked = count > 0
    mean_us = np.divide(modelled_us, count, out=np.zeros(len(count)), where=asked)
    correction_us = cycles.cycle_us.astype(np.float64) - mean_us
    return CorrectedModel(entry.latency, cycles.from_us, _carried(correction_us, asked)), basis


def _carried(values: NDArray[np.float64], known: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Rounded, and where nothing was asked that of the time before (at the start, of the first known)."""
    if not known.any():
        return np.zeros(len(values), np.int64)
    latest = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    return np.rint(values[np.where(latest >= 0, latest, int(np.argmax(known)))]).astype(np.int64)
