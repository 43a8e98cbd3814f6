"""A closed loop: each client sends its next request when its previous one is answered.

Requests may be turns of sessions: a client then sends the turns of one session in order.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.errors import TraceError
from blis_replay.blis.latency.models import EngineLatency, Lifecycle
from blis_replay.blis.result import SimResult, check_conservation
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

# Unsent requests are parked at times that no run reaches, further apart than any pre-queue delay.
_UNSENT_US, _APART_US = NEVER_US // 4, 2**32
# Columns of a request in the kernel's tables, apart from its times.
_OF_A_REQUEST = ("prompt_tokens", "total_tokens", "given_hit", "key_start", "key_count")
_NEW_SESSION = -1


@dataclass(frozen=True)
class ClosedLoop:
    """``concurrency`` clients.  First requests are spread evenly over ``ramp_us``; later ones follow ``think_us`` after
    the previous answer.

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
    """Serve the requests of ``trace`` in order, with ``loop.concurrency`` of them in flight.

    ``sessions``: int64[n]; requests with equal numbers are the turns of one session, in order.  None: every request is
    a session.  Arrivals of the trace are ignored.  Raises ``TraceError`` like ``simulate``, and for held-back requests,
    aborts, priorities and speculative decoding.
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
    """Serve ``trace`` at its arrivals, or in a closed loop if ``loop`` is given."""
    if loop is None:
        return simulate(trace, engine, latency, lifecycle)
    return simulate_closed_loop(trace, engine, latency, loop, lifecycle, sessions)


class _Clients:
    """The clients' pending sends.

    The kernel admits requests in the order of their slots.  A slot gets its request once the next send is known;
    ``running.order`` maps slots to requests.
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
        # (time of the next send, turn to send or _NEW_SESSION), one per client, ascending.
        self.due = [(loop.ramp_us * client // clients, _NEW_SESSION) for client in range(clients)]
        self.to_begin = len(self.first_turns) - clients

    def send(self) -> None:
        """Move due sends into the next slots; each reaches the queue after its pre-queue delay."""
        fresh = self.begun
        for slot, (at_us, turn) in enumerate(self.due, self.sent):
            if turn == _NEW_SESSION:
                turn, fresh = self.first_turns[fresh], fresh + 1
            self._put(slot, turn)
            self.running.trace.arrival_us[turn] = at_us
            self.running.queued_us[turn] = at_us + self.delay_us[turn]
            self.running.state.facts["queued_us"][slot] = at_us + self.delay_us[turn]

    def _put(self, slot: int, request: int) -> None:
        """Swap ``request`` into ``slot``."""
        order, other = self.running.order, int(self.running.order[slot])
        if other == request:
            return
        for there, moved in ((int(self.slot_of[request]), other), (slot, request)):
            order[there], self.slot_of[moved] = moved, there
            for name in _OF_A_REQUEST:
                self.running.state.facts[name][there] = self.facts[name][moved]

    def arrived(self, slots: int) -> None:
        """The kernel has admitted the first ``slots`` slots."""
        self.begun += sum(turn == _NEW_SESSION for _us, turn in self.due[: slots - self.sent])
        if self.next_turn:
            self.in_flight += range(self.sent, slots)
        del self.due[: slots - self.sent]
        self.sent = slots

    def answered(self, row: int, next_us: int) -> None:
        """Requests were answered in step ``row``: their clients send a next turn or session at ``next_us``."""
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
