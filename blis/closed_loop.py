"""A closed loop: clients that each send their next request when the one before is answered."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace

import numpy as np

from blis_replay.blis.engine import Engine
from blis_replay.blis.errors import TraceError
from blis_replay.blis.latency.models import Latency, Lifecycle
from blis_replay.blis.result import SimResult, check_conservation
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

# Requests that nobody has sent yet wait from here on, in their order, further apart than any delay before the queue;
# no run lasts so long.
_UNSENT_US, _APART_US = NEVER_US // 4, 2**32


@dataclass(frozen=True)
class ClosedLoop:
    """``concurrency`` clients: first requests go out evenly over ``ramp_us``, others ``think_us`` after an answer.

    Raises ``TraceError`` for less than one client or a negative time.
    """

    concurrency: int
    ramp_us: int = 0
    think_us: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.think_us < 0 or self.ramp_us < 0:
            raise TraceError(
                f"a closed loop of {self.concurrency} requests, {self.think_us} us apart, over {self.ramp_us} us; "
                "use at least 1, and times from 0 us on"
            )


def simulate_closed_loop(
    trace: RequestTrace, engine: EngineConfig, latency: Latency, loop: ClosedLoop, lifecycle: Lifecycle | None = None
) -> SimResult:
    """Serve the requests of ``trace`` in their order, so many at a time.

    Its arrivals are not used.  Raises ``TraceError`` as ``simulate``, for requests that are held back, aborted or
    given priorities, and for speculative decoding.
    """
    delays = lifecycle or Lifecycle()
    if engine.speculation is not None:
        raise TraceError("speculation: a closed loop is not simulated with it; leave out one of the two")
    if (trace.abort_us < NEVER_US).any() or (trace.priority, trace.pre_queue_us, trace.held_us) != (None,) * 3:
        raise TraceError("a closed loop takes no aborts, priorities or observed delays; leave them out")
    trace = replace(trace, arrival_us=_UNSENT_US + _APART_US * np.arange(len(trace)))
    running, model = Engine(trace, engine, delays), latency.for_kernel()
    clients = min(loop.concurrency, len(trace))
    # When the next requests are sent, as far as that is known: clients that begin, and those that were answered.
    due_us = [loop.ramp_us * client // clients for client in range(clients)]
    answer_us = int(delays.post_token_us) + int(delays.post_request_us) + loop.think_us
    sent, seen, left, goes_on = 0, 0, len(trace) - clients, True
    _send(running, 0, due_us)
    while goes_on:
        goes_on, seen = running.advance_to_answer(model, _UNSENT_US, seen)
        arrived = int(running.state.at["arrived"].item())
        del due_us[: arrived - sent]
        sent = arrived
        if goes_on and left:
            step = running.state.steps[seen - 1]
            answered = min(int(step["finished"]), left)
            left -= answered
            for _ in range(answered):
                insort(due_us, int(step["end_us"]) + answer_us)
            _send(running, sent, due_us)
    result = running.result()
    check_conservation(trace.abort_us, running.state, result)
    return result


def _send(running: Engine, first: int, at_us: list[int]) -> None:
    """The requests from ``first`` on are sent at these times: they reach the queue after the delay they were given."""
    requests = slice(first, first + len(at_us))
    delay_us = running.queued_us[requests] - running.trace.arrival_us[requests]
    running.trace.arrival_us[requests] = at_us
    running.queued_us[requests] = at_us + delay_us
    running.state.facts["queued_us"][requests] = running.queued_us[requests]
