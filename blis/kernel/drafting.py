"""Speculative decoding: a step verifies drafted tokens, and gives a request all that it accepts and one more.

The same rules as in ``loop``, with batches of ``draft_batch``.  It is compiled only where somebody drafts, or where
requests have to be walked for another reason (``EngineConfig.walked``).
"""

from __future__ import annotations

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.tables import table_of
from blis_replay.blis.kernel.draft_batch import (
    close_segment,
    leave_running,
    list_batch,
    note_cached,
    schedule,
)
from blis_replay.blis.kernel.flight import Flight, flight_of
from blis_replay.blis.kernel.loop import (
    ARRIVED,
    BATCH,
    NEEDS_ROOM,
    REACHED,
    STUCK,
    await_arrival,
    lacks_room,
    land_oldest,
    put_in_flight,
    take_arrivals,
)
from blis_replay.blis.kernel.queues import leave_list, leave_queue, next_given_up, stop_prefill
from blis_replay.blis.kernel.state import (
    ABORTED,
    COMPLETED,
    NEW,
    NONE,
    PREFILLING,
    WAITING,
    State,
    compiled,
    entry,
    separate,
    state_of,
)
from blis_replay.blis.kernel.step_time import batch_duration_us


@entry
def advance(state: State, flight: Flight, until_us: int, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """As ``loop.advance``."""
    run = state_of(state)
    ints, floats = table_of(int_params), table_of(float_params)
    own = flight_of(flight)
    while True:
        answer = _next_batch(run, own, until_us)
        if answer != BATCH:
            return answer
        start_us = max(run.at.now_us, run.at.device_free_us)
        _run_batch(run, own, batch_duration_us(kind, ints, floats, run.batch, start_us))


@entry
def next_batch(state: State, flight: Flight, until_us: int) -> int:
    """As ``loop.next_batch``."""
    run = state_of(state)
    return _next_batch(run, flight_of(flight), until_us)


@entry
def run_batch(state: State, flight: Flight, duration_us: int) -> None:
    """As ``loop.run_batch``."""
    run = state_of(state)
    _run_batch(run, flight_of(flight), duration_us)


@compiled
def _next_batch(state: State, flight: Flight, until_us: int) -> int:
    at = state.at
    while True:
        if at.now_us >= until_us:
            return REACHED
        if lacks_room(state):
            return NEEDS_ROOM
        if at.steps_without_token > state.config.max_steps_without_token:
            return STUCK
        take_arrivals(state)
        take_aborts(state, flight)
        if at.running_depth + at.waiting_depth > 0:
            schedule(state, flight)
            return BATCH
        if at.in_flight > 0:
            update(state, flight)
            continue
        answer = await_arrival(state, until_us)
        if answer != ARRIVED:
            return answer


@compiled
def _run_batch(state: State, flight: Flight, duration_us: int) -> None:
    """Run the batch just scheduled."""
    at, batch = state.at, state.batch
    list_batch(state, flight, at.in_flight)
    tokens = put_in_flight(state, duration_us)
    at.steps_without_token = 0 if batch.first_tokens > 0 else at.steps_without_token + 1
    at.step += 1
    if tokens == 0 or at.in_flight == state.config.batches_in_flight:
        update(state, flight)


@compiled
def update(state: State, flight: Flight) -> None:
    """The tokens of the oldest batch are in.  Clients that gave up meanwhile come first."""
    row = land_oldest(state)
    if state.config.aborts_before_tokens == 1:
        take_aborts(state, flight)
    finished = 0
    for i in range(flight.counts[0]):
        request, tokens = flight.batches[0, i, 0], flight.batches[0, i, 1]
        finished += take_tokens(
            state, flight, request, tokens, flight.batches[0, i, 2], flight.batches[0, i, 3] == 1, row
        )
    forget_oldest(flight)
    if row == NONE:
        return
    this = state.steps[row]
    this.finished = finished
    this.free_blocks_end = state.at.free_blocks


@compiled
def forget_oldest(flight: Flight) -> None:
    """The oldest batch in flight has ended."""
    flight.counts[0] = flight.counts[1]
    for i in range(flight.counts[1]):
        for field in range(4):
            flight.batches[0, i, field] = flight.batches[1, i, field]
    flight.counts[1] = 0


@compiled
def take_tokens(state: State, flight: Flight, request: int, scheduled: int, drafts: int, gives: bool, row: int) -> int:
    """What a batch gives a request: the drafts that are accepted, and one more.  1 if it has its last token now."""
    this, own = state.requests[request], flight.requests[request]
    own.in_flight -= scheduled
    stale = own.stale > 0
    if stale:
        own.stale -= scheduled
    if this.status == ABORTED or this.status == COMPLETED or not gives:
        return 0
    asynchronous = state.config.batches_in_flight == 2
    accepted = 0
    if drafts < 0:  # padding, which is never accepted
        drafts = -drafts - 1
    elif drafts > 0:
        accepted = min(flight.accepted[flight.start[request] + own.outputs - 1], drafts)
    if not stale:
        if this.computed > 0:
            this.computed -= drafts - accepted
        if own.placeholders > 0:
            own.placeholders -= drafts - accepted
    tokens = min(1 + accepted, state.facts[request].total_tokens - this.known)
    if state.outcomes[request].first_step == NONE:
        state.outcomes[request].first_step = row
    note_tokens(state, flight, request, tokens, row)
    own.outputs += tokens
    this.known += tokens
    running = this.status == PREFILLING
    if not running:
        close_segment(state, flight, request)
    if asynchronous:
        if not stale:
            own.placeholders -= tokens
        if running:
            note_cached(state, flight, request, this.computed - own.placeholders)
    elif running and flight.config.cached_as_accepted == 1:
        note_cached(state, flight, request, this.known - 1)
    if this.known < state.facts[request].total_tokens:
        if not asynchronous:
            own.drafts = flight.drafted[flight.start[request] + own.outputs - 1]
        return 0
    close_segment(state, flight, request)
    if running and own.stays == 1:
        stop_prefill(state, request)
        leave_list(state, request)
    elif running:
        leave_running(state, flight, request)
    else:
        leave_queue(state, request)
    this.status = COMPLETED
    state.outcomes[request].last_step = row
    return 1


@compiled
def note_tokens(state: State, flight: Flight, request: int, tokens: int, row: int) -> None:
    """Tokens of a step: steps that follow each other with one token each are one segment, each further token is one."""
    own = flight.requests[request]
    if tokens != 1 or own.segment_row != row - 1:
        close_segment(state, flight, request)
    for _ in range(tokens - 1):
        own.segment_row = row
        own.segment_rows = 1
        close_segment(state, flight, request)
    own.segment_row = row
    own.segment_rows += 1


@separate
def take_aborts(state: State, flight: Flight) -> None:
    """Clients that have given up by now; tokens of theirs that are in flight reach nobody."""
    while True:
        request = next_given_up(state)
        if request == NONE:
            break
        this = state.requests[request]
        if this.status == WAITING:
            leave_queue(state, request)
        elif this.status != NEW:
            leave_running(state, flight, request)
        close_segment(state, flight, request)
        this.status = ABORTED
