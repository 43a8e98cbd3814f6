"""A run whose steps take what was observed, and what a latency model makes of each of its batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.engine import Engine
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency import Latency, Lifecycle, ObservedCycles
from blis_replay.blis.trace import EngineConfig, Int64s, RequestTrace


@dataclass(frozen=True)
class ForcedSteps:
    """Steps of a run with observed cycles, int64[steps] each, us: start, and what the model would have them take."""

    start_us: Int64s
    modelled_us: Int64s


def forced_steps(
    trace: RequestTrace, engine: EngineConfig, lifecycle: Lifecycle, cycles: ObservedCycles, model: Latency
) -> ForcedSteps:
    """Serve ``trace`` in the step cycles that were observed, and ask ``model`` about every batch on the way.

    So the model is asked about the batches that the server had, as far as the trace is the server's.
    Raises ``TraceError`` as ``simulate`` does.
    """
    running = Engine(trace, engine, lifecycle)
    observed, asked = cycles.for_kernel(), model.for_kernel()
    starts, modelled = [], []
    while (batch := running.schedule()) is not None:
        contents = running.state.batch
        if contents[k.BATCH_PREFILL_TOKENS] + contents[k.BATCH_DECODE_TOKENS] > 0:
            starts.append(batch.start_us)
            modelled.append(step_duration_us(*asked, contents, batch.start_us))
        running.run(step_duration_us(*observed, contents, batch.start_us))
    return ForcedSteps(np.array(starts, np.int64), np.array(modelled, np.int64))
