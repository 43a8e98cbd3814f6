"""A closed loop: clients that each send their next request when the one before is answered.

Requests may be turns of sessions: a client then sends all turns of one, each after the answer to the turn before.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.errors import TraceError
from blis_replay.blis.latency.models import EngineLatency, Lifecycle
from blis_replay.blis.result import SimResult, check_conservation
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace
from blis_replay.compiled.arrays import Int64s

# Requests that nobody has sent yet wait from here on, further apart than any delay before the queue; no run lasts so
# long.
_UNSENT_US, _APART_US = NEVER_US // 4, 2**32
# What the kernel knows of a request beside its times and its place in the queue.
_OF_A_REQUEST = ("prompt_tokens", "total_tokens", "given_hit", "key_start", "key_count")
_NEW_SESSION = -1


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
    trace: RequestTrace,
    engine: EngineConfig,
    latency: EngineLatency,
    loop: ClosedLoop,
    lifecycle: Lifecycle | None = None,
    sessions: Int64s | None = None,
) -> SimResult:
    """Serve the requests of ``trace`` in their order, so many at a time.

    ``sessions``: int64[n], requests with one number are turns of one session, in their order; each is one by itself if
    None.  Arrivals of the trace are not used.  Raises ``TraceError`` as ``simulate``, for requests that are held back,
    aborted or given priorities, and for speculative decoding.
    """
    delays = lifecycle or Lifecycle()
    if engine.speculation is not None:
        raise TraceError("speculation: a closed loop is not simulated with it; leave out one of the two")
    if (trace.abort_us < NEVER_US).any() or (trace.priority, trace.pre_queue_us, trace.held_us) != (None,) * 3:
        raise TraceError("a closed loop takes no aborts, priorities or observed delays; leave them out")
    trace = replace(trace, arrival_us=_UNSENT_US + _APART_US * np.arange(len(trace)))
    running, model = Engine(trace, engine, delays), latency.for_kernel()
    clients = _Clients(running, loop, np.arange(len(trace)) if sessions is None else sessions)
    answer_us = int(delays.post_token_us) + int(delays.post_request_us) + loop.think_us
    seen, goes_on = 0, True
    clients.send()
    while goes_on:
        goes_on, seen = running.advance_to_answer(model, _UNSENT_US, seen)
        clients.arrived(int(running.state.at["arrived"].item()))
        if goes_on:
            clients.answered(seen - 1, int(running.state.steps[seen - 1]["end_us"]) + answer_us)
            clients.send()
    result = running.result()
    check_conservation(trace.abort_us, running.state, result)
    return result


def simulate_load(
    trace: RequestTrace,
    engine: EngineConfig,
    latency: EngineLatency,
    lifecycle: Lifecycle | None = None,
    loop: ClosedLoop | None = None,
    sessions: Int64s | None = None,
) -> SimResult:
    """Serve the requests of ``trace`` at their arrivals, or as clients send them; raises as those two do."""
    if loop is None:
        return simulate(trace, engine, latency, lifecycle)
    return simulate_closed_loop(trace, engine, latency, loop, lifecycle, sessions)


class _Clients:
    """Who sends what, and when, as far as it is known.

    The kernel takes requests up in the order of their slots.  A slot gets its request when it is known which is sent
    next: ``running.order`` has the request of each slot.
    """

    def __init__(self, running: Engine, loop: ClosedLoop, sessions: Int64s) -> None:
        self.running = running
        self.delay_us = running.queued_us - running.trace.arrival_us
        self.facts = running.state.facts[list(_OF_A_REQUEST)].copy()
        self.slot_of = np.arange(len(sessions))
        self.sent = self.begun = 0
        self.in_flight: list[int] = []  # slots
        by_session = np.argsort(sessions, kind="stable")
        goes_on = np.diff(sessions[by_session]) == 0
        self.next_turn = dict(zip(by_session[:-1][goes_on].tolist(), by_session[1:][goes_on].tolist(), strict=True))
        self.first_turns = np.sort(by_session[np.r_[True, ~goes_on][: len(sessions)]]).tolist()
        clients = min(loop.concurrency, len(self.first_turns))
        # When a client sends next, and its turn, or that it begins a session.
        self.due = [(loop.ramp_us * client // clients, _NEW_SESSION) for client in range(clients)]
        self.to_begin = len(self.first_turns) - clients

    def send(self) -> None:
        """Put what is due into the next slots: its requests reach the queue after the delay that they were given."""
        fresh = self.begun
        for slot, (at_us, turn) in enumerate(self.due, self.sent):
            if turn == _NEW_SESSION:
                turn, fresh = self.first_turns[fresh], fresh + 1
            self._put(slot, turn)
            self.running.trace.arrival_us[turn] = at_us
            self.running.queued_us[turn] = at_us + self.delay_us[turn]
            self.running.state.facts["queued_us"][slot] = at_us + self.delay_us[turn]

    def _put(self, slot: int, request: int) -> None:
        """Have this request in the slot, and the one that was there in its place."""
        order, other = self.running.order, int(self.running.order[slot])
        if other == request:
            return
        for there, moved in ((int(self.slot_of[request]), other), (slot, request)):
            order[there], self.slot_of[moved] = moved, there
            for name in _OF_A_REQUEST:
                self.running.state.facts[name][there] = self.facts[name][moved]

    def arrived(self, slots: int) -> None:
        """So many slots were taken up in all."""
        self.begun += sum(turn == _NEW_SESSION for _us, turn in self.due[: slots - self.sent])
        if self.next_turn:
            self.in_flight += range(self.sent, slots)
        del self.due[: slots - self.sent]
        self.sent = slots

    def answered(self, row: int, next_us: int) -> None:
        """A step answered requests: their clients send the next turn at ``next_us``, or begin another session."""
        for turn in self._turns_after(row):
            if turn == _NEW_SESSION and not self.to_begin:
                continue
            self.to_begin -= turn == _NEW_SESSION
            insort(self.due, (next_us, turn), key=itemgetter(0))

    def _turns_after(self, row: int) -> list[int]:
        state = self.running.state
        if not self.next_turn:
            return [_NEW_SESSION] * int(state.steps[row]["finished"])
        over = {slot for slot in self.in_flight if state.outcomes["last_step"][slot] == row}
        self.in_flight = [slot for slot in self.in_flight if slot not in over]
        return [self.next_turn.get(int(self.running.order[slot]), _NEW_SESSION) for slot in sorted(over)]
