"""A closed loop: each client sends its next request when its previous one is answered.

Requests may be turns of sessions: a client then sends the turns of one session in order.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import ReplayError, TraceError
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.latency.models import Latency, Lifecycle
from blis_replay.blis.result import SimResult, check_conservation
from blis_replay.blis.setup import eligible_times
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

# Unsent requests are parked at times that no run reaches, further apart than any pre-queue delay.
_UNSENT_US, _APART_US = NEVER_US // 4, 2**32
# Sends that are put into slots beyond those that are due; the kernel stops before the next one.
_AHEAD = 64
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


@dataclass(frozen=True)
class Answered:
    """Requests that a client sent when another one was answered, as it had a limit of requests in flight.

    ``after``: int64[n], for each request the one whose answer it waited for, -1 if it came at its own time.
    ``later_us``: int64[n], how long after that answer it was sent.
    """

    after: Int64s
    later_us: Int64s

    def part(self, first: slice) -> Answered:
        """Of the first requests."""
        return Answered(self.after[first], self.later_us[first])


# A client with a limit sends within some milliseconds of an answer; later, something else held it up.
_AT_ONCE_US = 50_000


def answered_of(arrival_us: Int64s, end_us: Int64s, in_flight: int) -> Answered:
    """Which requests waited for an answer, where a client had at most ``in_flight`` requests.

    A request waited if it was sent within 50 ms of an answer to a client at its limit.  Answers are used up in order.

    ``arrival_us``: int64[n], when they were sent, in order; ``end_us``: when they were answered.
    """
    after, later_us = np.full(len(arrival_us), -1), np.zeros(len(arrival_us), np.int64)
    by_end = np.argsort(end_us, kind="stable")
    answers: deque[int] = deque()
    ended, busy = 0, 0
    for request, sent_us in enumerate(arrival_us.tolist()):
        while ended < len(by_end) and end_us[by_end[ended]] <= sent_us:
            if busy == in_flight or answers:
                answers.append(int(by_end[ended]))
            busy, ended = busy - 1, ended + 1
        while answers and sent_us - end_us[answers[0]] > _AT_ONCE_US:
            answers.popleft()
        busy += 1
        if answers:
            after[request] = answers.popleft()
            later_us[request] = sent_us - end_us[after[request]]
    return Answered(after, later_us)


def _parked(trace: RequestTrace, engine: EngineConfig) -> RequestTrace:
    """The trace with no request sent yet; raises ``TraceError`` for what a closed loop cannot take."""
    if engine.speculation is not None:
        raise TraceError("speculation: a closed loop is not simulated with it; leave out one of the two")
    if (trace.abort_us < NEVER_US).any() or trace.priority is not None:
        raise TraceError("a closed loop takes no aborts or priorities; leave them out")
    return replace(trace, arrival_us=_UNSENT_US + _APART_US * np.arange(len(trace)))


def _served(running: Engine, latency: Latency, sends: _Sends, think_us: int) -> SimResult:
    """The run to its end; requests are sent as far as the answers are known."""
    model, delays = latency.for_kernel(), running.lifecycle
    answer_us = int(delays.post_token_us) + int(delays.post_request_us) + think_us
    seen, answered = 0, True
    while answered or sends.due:
        until_us = sends.send()
        answered, seen = running.advance_to_answer(model, until_us, seen)
        sends.arrived(int(running.state.at["arrived"].item()))
        if answered:
            sends.answered(seen - 1, int(running.state.steps[seen - 1]["end_us"]) + answer_us)
    result = running.result()
    check_conservation(running.trace.abort_us, running.state, result)
    return result


def simulate_load(
    trace: RequestTrace,
    engine: EngineConfig,
    latency: Latency,
    lifecycle: Lifecycle | None = None,
    loop: ClosedLoop | None = None,
    sessions: Int64s | None = None,
    answered: Answered | None = None,
) -> SimResult:
    """Serve ``trace`` at its arrivals; in a closed loop if ``loop`` is given, or where requests wait for answers.

    In a closed loop arrivals of the trace are ignored, and ``loop.concurrency`` requests are in flight.  ``sessions``:
    int64[n]; requests with equal numbers are the turns of one session, in order.  None: every request is a session.
    Raises ``TraceError`` like ``simulate``; with ``loop`` or ``answered`` also for aborts, priorities and speculative
    decoding, with ``loop`` for held-back requests.
    """
    if loop is not None:
        if (trace.pre_queue_us, trace.held_us) != (None,) * 2:
            raise TraceError("a closed loop takes no observed delays; leave them out")
        running = Engine(_parked(trace, engine), engine, lifecycle)
        sends: _Sends = _Clients(running, loop, np.arange(len(trace)) if sessions is None else sessions)
        return _served(running, latency, sends, loop.think_us)
    if answered is not None:
        running = Engine(_parked(trace, engine), engine, lifecycle)
        return _served(running, latency, _Followers(running, trace.arrival_us, answered), 0)
    return simulate(trace, engine, latency, lifecycle)


class _Sends:
    """The pending sends of clients: ``due``, (time, request or _NEW_SESSION) in order of time.

    The kernel admits requests in the order of their slots.  A slot gets its request once the next send is known;
    ``running.order`` maps slots to requests.
    """

    def __init__(self, running: Engine) -> None:
        self.running = running
        eligible_us = eligible_times(running.trace, running.queued_us)
        self.queued_later_us = running.queued_us - running.trace.arrival_us
        self.eligible_later_us = eligible_us - running.trace.arrival_us
        self.facts = running.state.facts[list(_OF_A_REQUEST)].copy()
        self.slot_of = np.argsort(running.order)
        self.sent = 0
        self.in_flight: list[int] = []  # slots
        self.due: list[tuple[int, int]] = []

    def send(self) -> int:
        """Move the next sends into the next slots; until when the kernel may go on with these, us."""
        if not self.due:
            return _UNSENT_US
        # Whatever is sent before the first of them reaches the queue has to be known, or the kernel cannot go on.
        reached_us = self.due[0][0] + int(self.eligible_later_us[self.requests(1)[0]])
        ahead = bisect_right(self.due, max(self.running.now_us, reached_us), key=itemgetter(0)) + _AHEAD
        times_us = [at_us for at_us, _ in self.due[:ahead]]
        for slot, (at_us, request) in enumerate(zip(times_us, self.requests(ahead), strict=True), self.sent):
            self._put(slot, request)
            self.running.trace.arrival_us[request] = at_us
            self.running.queued_us[request] = at_us + self.queued_later_us[request]
            self.running.state.facts["queued_us"][slot] = at_us + self.eligible_later_us[request]
        return self.due[ahead][0] if len(self.due) > ahead else _UNSENT_US

    def requests(self, ahead: int) -> list[int]:
        """The requests of the first sends that are due."""
        return [request for _, request in self.due[:ahead]]

    def answered(self, row: int, end_us: int) -> None:
        """Requests were answered in step ``row``; the client has the answers at ``end_us``."""
        raise NotImplementedError

    def arrived(self, slots: int) -> None:
        """The kernel has admitted the first ``slots`` slots."""
        self.in_flight += range(self.sent, slots)
        del self.due[: slots - self.sent]
        self.sent = slots

    def _put(self, slot: int, request: int) -> None:
        """Swap ``request`` into ``slot``."""
        order, other = self.running.order, int(self.running.order[slot])
        if other == request:
            return
        for there, moved in ((int(self.slot_of[request]), other), (slot, request)):
            order[there], self.slot_of[moved] = moved, there
            for name in _OF_A_REQUEST:
                self.running.state.facts[name][there] = self.facts[name][moved]

    def _answered_in(self, row: int) -> list[int]:
        """The requests that were answered in a step; they leave ``in_flight``."""
        last_step = self.running.state.outcomes["last_step"]
        over = [slot for slot in self.in_flight if last_step[slot] == row]
        self.in_flight = [slot for slot in self.in_flight if last_step[slot] != row]
        return [int(self.running.order[slot]) for slot in over]


class _Followers(_Sends):
    """Each request is sent when the one that it waited for is answered, or at its own time."""

    def __init__(self, running: Engine, arrival_us: Int64s, answered: Answered) -> None:
        super().__init__(running)
        self.later_us = answered.later_us
        self.followers: dict[int, list[int]] = {}
        for request, after in enumerate(answered.after.tolist()):
            if after < 0:
                self.due.append((int(arrival_us[request]), request))
            else:
                self.followers.setdefault(after, []).append(request)
        self.due.sort()

    def answered(self, row: int, end_us: int) -> None:
        for request in self._answered_in(row):
            for follower in self.followers.get(request, ()):
                insort(self.due, (end_us + int(self.later_us[follower]), follower), key=itemgetter(0))


class _Clients(_Sends):
    """Clients that send their next request when their last one is answered."""

    def __init__(self, running: Engine, loop: ClosedLoop, sessions: Int64s) -> None:
        super().__init__(running)
        self.begun = 0
        by_session = np.argsort(sessions, kind="stable")
        goes_on = np.diff(sessions[by_session]) == 0
        self.next_turn = dict(zip(by_session[:-1][goes_on].tolist(), by_session[1:][goes_on].tolist(), strict=True))
        self.first_turns = np.sort(by_session[np.r_[True, ~goes_on][: len(sessions)]]).tolist()
        clients = min(loop.concurrency, len(self.first_turns))
        self.due = [(loop.ramp_us * client // clients, _NEW_SESSION) for client in range(clients)]
        self.to_begin = len(self.first_turns) - clients

    def requests(self, ahead: int) -> list[int]:
        fresh = iter(self.first_turns[self.begun : self.begun + ahead])
        return [next(fresh) if turn == _NEW_SESSION else turn for _, turn in self.due[:ahead]]

    def arrived(self, slots: int) -> None:
        self.begun += sum(turn == _NEW_SESSION for _us, turn in self.due[: slots - self.sent])
        super().arrived(slots)

    def answered(self, row: int, end_us: int) -> None:
        for request in self._answered_in(row):
            turn = self.next_turn.get(request, _NEW_SESSION)
            if turn == _NEW_SESSION and not self.to_begin:
                continue
            self.to_begin -= turn == _NEW_SESSION
            insort(self.due, (end_us, turn), key=itemgetter(0))


def sessions_of(trace: RequestTrace, alias: str) -> tuple[Int64s, str]:
    """int64[n]: requests with one number are turns of one session, as far as block identities show; and in words.

    The next turn of a request is the first one behind it whose prompt holds all of its blocks and has room for its
    answer; of several that it could follow, it follows the longest.  Raises ``ReplayError`` without identities of
    prompts, or if no prompt goes on from another.
    """
    keys, sessions, tokens = trace.block_keys, np.arange(len(trace)), trace.prompt_tokens + trace.output_tokens
    if keys is None:
        raise ReplayError(f"{alias}: the identities of its prompts are not known; leave out sessions=prompts")
    ended_in = np.full(int(keys.keys.max(initial=-1)) + 1, -1)  # by key: the request whose last block that is
    for i in range(len(trace)):
        row = keys.keys[keys.start[i] : keys.start[i] + keys.count[i]]
        blocks = row[: trace.prompt_tokens[i] // keys.block_size]
        before = ended_in[blocks]
        goes_on = np.flatnonzero((before >= 0) & (tokens[before] < trace.prompt_tokens[i]))
        if len(goes_on):
            sessions[i] = sessions[before[goes_on[-1]]]
            ended_in[blocks[goes_on[-1]]] = -1
        if len(row):
            ended_in[row[-1]] = i
    if (count := len(np.unique(sessions))) == len(trace):
        raise ReplayError(f"{alias}: no prompt goes on where another request ended; leave out sessions=prompts")
    turns = f"{len(trace):,} requests in {count:,} sessions"
    return sessions, f"{turns}: a prompt that goes on where an earlier request ended is taken for its next turn"
