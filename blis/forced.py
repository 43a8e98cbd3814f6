"""A run whose steps take what was observed, and what a latency model makes of each of its batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.engine import Engine
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency import Latency, Lifecycle, ObservedCycles
from blis_replay.blis.trace import EngineConfig, Int64s, RequestTrace


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
