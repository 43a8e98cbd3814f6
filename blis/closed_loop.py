"""A closed loop: clients that each send their next request when the one before is answered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from blis_replay.blis.engine import Engine
from blis_replay.blis.errors import TraceError
from blis_replay.blis.kernel.state import NONE, State
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency.models import Latency, Lifecycle
from blis_replay.blis.result import SimResult, check_conservation
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

# Requests that nobody has sent yet wait here, in their order; no run lasts so long.
_UNSENT_US = NEVER_US // 4


def simulate_closed_loop(
    trace: RequestTrace,
    engine: EngineConfig,
    latency: Latency,
    concurrency: int,
    lifecycle: Lifecycle | None = None,
    think_us: int = 0,
) -> SimResult:
    """Serve the requests of ``trace`` in their order, ``concurrency`` at a time.

    The first ones are sent at 0, each other one ``think_us`` after one is answered; arrivals of the trace are not
    used.  Raises ``TraceError`` as ``simulate``, and for requests that are held back, aborted or given priorities.
    """
    delays = lifecycle or Lifecycle()
    if concurrency < 1 or think_us < 0:
        raise TraceError(f"a closed loop of {concurrency} requests, {think_us} us apart; use at least 1, and 0 us")
    if (trace.abort_us < NEVER_US).any() or (trace.priority, trace.pre_queue_us, trace.held_us) != (None,) * 3:
        raise TraceError("a closed loop takes no aborts, priorities or observed delays; leave them out")
    unsent = _UNSENT_US + np.arange(len(trace))
    trace = replace(trace, arrival_us=np.where(np.arange(len(trace)) < concurrency, 0, unsent))
    running, kernel = Engine(trace, engine, delays), latency.for_kernel()
    sent, seen = min(concurrency, len(trace)), 0
    while True:
        batch = running.schedule(_UNSENT_US)
        if batch is not None:
            running.run(step_duration_us(*kernel, running.state.batch, batch.start_us))
        ended = _ended_rows(running.state)
        for step in running.state.steps[seen:ended]:
            answered = min(int(step["finished"]), len(trace) - sent)
            _send(running, slice(sent, sent + answered), int(step["end_us"] + delays.post_token_us) + think_us)
            sent += answered
        if batch is None and seen == ended:
            break
        seen = ended
    result = running.result()
    check_conservation(trace.abort_us, running.state, result)
    return result


def _ended_rows(state: State) -> int:
    """Rows of steps whose tokens are in: all but those of the batches in flight."""
    in_flight = state.flight[: int(state.at["in_flight"][0]), 0]
    return int(state.at["rows"][0]) - int((in_flight != NONE).sum())


def _send(running: Engine, requests: slice, at_us: int) -> None:
    """Requests are sent: they reach the queue after the delay that the engine gave them."""
    delay_us = running.queued_us[requests] - running.trace.arrival_us[requests]
    running.trace.arrival_us[requests] = at_us
    running.queued_us[requests] = at_us + delay_us
    running.state.facts["queued_us"][requests] = at_us + delay_us
