"""The replay driver: a recording through the simulator with a coefficient release."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.engine import simulate
from blis_replay.blis.release import CoefficientRelease, ModelEntry
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import ReplayPlan, plan_replay


@dataclass(frozen=True)
class ReplayRun:
    """A finished replay: what was simulated, with what, and the client's view of it.

    ``ttft_us``, ``e2e_us``: int64[n] in request order, meaningful where
    ``result.completed``; they carry the mode's reporting conventions (surplus step).
    """

    recording: Recording
    release: CoefficientRelease
    entry: ModelEntry
    mode: ReplayMode
    plan: ReplayPlan
    result: SimResult
    ttft_us: Int64s
    e2e_us: Int64s


def replay(recording: Recording, release: CoefficientRelease, mode: ReplayMode | None = None) -> ReplayRun:
    """Replay the requests of a recording; the default mode is exact replay.

    Raises ``ReleaseError`` if the release is invalid or lacks the model, ``ReplayError``
    or ``TraceError`` if the recording cannot be replayed, and ``ReplayError`` if the
    simulator did not complete every request that the recording completed.
    """
    mode = mode or ReplayMode()
    release.refuse_if_invalid()
    entry = release.entry_for(recording.model, recording.tensor_parallelism, recording.alias)
    plan = plan_replay(recording, mode)
    result = simulate(plan.trace, plan.engine, entry.latency, entry.lifecycle)
    completed_in_recording = (recording.requests["status"] == "ok").to_numpy()
    lost = completed_in_recording & ~result.completed
    if lost.any():
        raise ReplayError(
            f"{recording.slug}: the simulator did not complete {int(lost.sum())} requests that the recording "
            "completed, so there is nothing to compare; check the engine arguments"
        )
    surplus_us = mode.surplus_steps * (result.last_step_us + result.post_token_us)
    return ReplayRun(
        recording, release, entry, mode, plan, result, result.ttft_us, result.e2e_us + surplus_us.astype(np.int64)
    )
