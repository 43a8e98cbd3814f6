"""The engine loop: sections 1, 7 and 9 of the semantics.

``next_batch`` goes on to the next call of ``schedule()``; ``run_batch`` puts its batch on
the device.  ``advance`` does both with a latency model that is data.  With two batches in
flight (asynchronous scheduling) a batch is scheduled while the one before it runs.
"""

from __future__ import annotations

from blis_replay.blis.kernel.batch import (
    count_resumed,
    finish_all,
    in_flight_input,
    leave_decoding,
    put_in_flight,
    vacate,
)
from blis_replay.blis.kernel.decodes import run_decodes
from blis_replay.blis.kernel.pool import blocks_for
from blis_replay.blis.kernel.queues import (
    close_segment,
    computed_now,
    last_token_step,
    leave_queue,
    queue_up,
    stop_prefill,
)
from blis_replay.blis.kernel.schedule import schedule
from blis_replay.blis.kernel.state import (
    ABORTED,
    COMPLETED,
    DECODING,
    NEVER,
    NEW,
    NONE,
    PREFILLING,
    WAITING,
    State,
    compiled,
    entry,
    full_blocks,
    index,
    separate,
)
from blis_replay.blis.kernel.step_time import batch_duration_us, quick_duration_us
from blis_replay.compiled.arrays import Floats, Int64s
from blis_replay.compiled.functions import by_reference

# What next_batch and advance answer.
BATCH, IDLE, REACHED, NEEDS_ROOM, STUCK = range(5)
# What await_arrival answers besides: there is work again.
ARRIVED = 5
# What serve_rows writes: requests and tokens in prefill, requests and tokens in decode, the step, preemptions.
ROW_STEP, ROW_PREEMPTED, ROW_FIELDS = 4, 5, 6


@entry
def advance(state: State, until_us: int, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """Run until nothing is left to do (IDLE), the time is reached, or arrays are full (NEEDS_ROOM)."""
    run = by_reference(State(state.config[0], state.at[0], state.batch[0], *state[3:]))
    while True:
        run_decodes(run, until_us, kind, int_params, float_params)
        answer = _next_batch(run, until_us)
        if answer != BATCH:
            return answer
        start_us = max(run.at.now_us, run.at.device_free_us)
        _run_batch(run, quick_duration_us(kind, int_params, float_params, run.batch, start_us))


@entry
def advance_to_answer(
    state: State, until_us: int, kind: int, int_params: Int64s, float_params: Floats, seen: int
) -> tuple[int, int]:
    """As ``advance``, but only to the next step that answered a request (BATCH), of those from row ``seen`` on.

    The answer, and the row after that step; after the last step whose tokens are in, if none answered.
    """
    run = by_reference(State(state.config[0], state.at[0], state.batch[0], *state[3:]))
    while True:
        answer = _next_batch(run, until_us)
        if answer == BATCH:
            start_us = max(run.at.now_us, run.at.device_free_us)
            _run_batch(run, batch_duration_us(kind, int_params, float_params, run.batch, start_us))
        ended = run.at.rows
        for i in range(run.at.in_flight):
            if run.flight[i] != NONE:
                ended -= 1
        while seen < ended:
            seen += 1
            if run.steps[index(seen - 1)].finished > 0:
                return BATCH, seen
        if answer != BATCH:
            return answer, seen


@entry
def next_batch(state: State, until_us: int) -> int:
    """Build the next batch for a caller in Python; answers as ``advance`` does, or BATCH."""
    return _next_batch(by_reference(State(state.config[0], state.at[0], state.batch[0], *state[3:])), until_us)


@entry
def run_batch(state: State, duration_us: int) -> None:
    """Let the batch just built take this long, for a caller in Python."""
    _run_batch(by_reference(State(state.config[0], state.at[0], state.batch[0], *state[3:])), duration_us)


@entry
def serve_rows(state: State, row: int, until_row: int, table: Int64s, resumed_as_decode: bool) -> tuple[int, int]:
    """Schedule a batch with tokens in each row of ``table``, where the row's number is the time.

    ``table``: int64[rows, ROW_FIELDS], takes what is in the batches; a row in which nothing can be scheduled stays as
    it is.  ``resumed_as_decode``: a request that computes again what it had, some of it output, counts as a decode.
    The answer, REACHED or as ``advance`` answers, and the row where to go on.
    """
    run = by_reference(State(state.config[0], state.at[0], state.batch[0], *state[3:]))
    at, batch, preempted = run.at, run.batch, table[:row, ROW_PREEMPTED].sum()
    while row < until_row:
        at.now_us = max(at.now_us, row)
        answer = _next_batch(run, row + 1)
        if answer in (NEEDS_ROOM, STUCK):
            return answer, row
        if answer != BATCH:
            row += 1
            continue
        preempted += at.preempted_in_call
        table[row, ROW_PREEMPTED] += at.preempted_in_call
        has_tokens = batch.prefill_tokens + batch.decode_tokens > 0
        if has_tokens:
            table[row, 0] = batch.prefill_requests
            table[row, 1] = batch.prefill_tokens
            table[row, 2] = batch.decode_tokens
            table[row, 3] = batch.decode_tokens
            table[row, ROW_STEP] = at.rows
            if resumed_as_decode and preempted > 0:
                count_resumed(run, table[row])
        _run_batch(run, 1)
        if has_tokens:
            row += 1
    return REACHED, row


@compiled
def _next_batch(state: State, until_us: int) -> int:
    """Go on to the next ``schedule()`` before ``until_us`` and build its batch (BATCH)."""
    at = state.at
    while True:
        if at.now_us >= until_us:
            return REACHED
        if lacks_room(state):
            return NEEDS_ROOM
        if at.steps_without_token > state.config.max_steps_without_token:
            return STUCK
        take_arrivals(state)
        if at.abort_due_us <= at.now_us:
            take_aborts(state)
        if at.running_depth + at.waiting_depth > 0:
            schedule(state)
            return BATCH
        if at.in_flight > 0:
            update(state)
            continue
        answer = await_arrival(state, until_us)
        if answer != ARRIVED:
            return answer


@compiled
def await_arrival(state: State, until_us: int) -> int:
    """Go on to the next arrival (ARRIVED); IDLE if there is none, REACHED if it is not before ``until_us``."""
    at = state.at
    if at.arrived == at.submitted:
        return IDLE
    arrival_us = state.facts[index(at.arrived)].queued_us
    if arrival_us >= until_us:
        return REACHED
    at.now_us = max(at.now_us, arrival_us)
    return ARRIVED


@compiled
def _run_batch(state: State, duration_us: int) -> None:
    """Run the batch just scheduled."""
    at, batch = state.at, state.batch
    tokens = put_in_flight(state, duration_us)
    at.steps_without_token += 1
    if batch.served + batch.first_tokens > 0:
        at.steps_without_token = 0
    at.step += 1
    at.growth_slot += 1
    if at.growth_slot == state.config.block_size:
        at.growth_slot = 0
    if tokens == 0 or at.in_flight == state.config.batches_in_flight:
        update(state)


@compiled
def update(state: State) -> None:
    """The tokens of the oldest batch are in: requests with their last token finish, in batch order.

    Clients that gave up meanwhile come first.
    """
    at, flight = state.at, state.flight
    row, end_us = flight[0], flight[2]
    at.waiting_before = at.waiting_depth
    at.running_before = at.running_depth
    at.free_before = at.free_blocks
    step = at.step - at.in_flight
    at.in_flight -= 1
    flight[0] = flight[1]
    flight[2] = flight[3]
    at.now_us = max(at.now_us, end_us)
    if state.config.aborts_before_tokens == 1 and at.abort_due_us <= at.now_us:
        take_aborts(state)
    if row == NONE:
        return
    finish_all(state, step, row)


@compiled
def take_arrivals(state: State) -> None:
    """Requests that have queued by now join the waiting queue, in their order."""
    at = state.at
    while at.arrived < at.submitted and state.facts[index(at.arrived)].queued_us <= at.now_us:
        if state.requests[at.arrived].status == NEW:
            begin(state, at.arrived)
        at.arrived += 1


@compiled
def begin(state: State, request: int) -> None:
    """A request, whose row is all zeros, joins the waiting queue for the first time."""
    this, facts = state.requests[request], state.facts[request]
    this.known = facts.prompt_tokens
    this.keyed = 1 if facts.key_count > full_blocks(state, facts.prompt_tokens) else 0
    this.segment_start = NONE
    this.dynamic_key = NONE
    queue_up(state, request)


@separate
def take_aborts(state: State) -> None:
    """Clients that have given up by now; tokens of theirs that are in flight reach nobody."""
    at = state.at
    while at.abort_due_us <= at.now_us:
        if at.next_abort == at.submitted:
            at.abort_due_us = NEVER
            break
        request = state.abort_order[index(at.next_abort)]
        if state.facts[request].abort_us > at.now_us:
            at.abort_due_us = state.facts[request].abort_us
            break
        at.next_abort += 1
        this = state.requests[request]
        status = this.status
        if status == COMPLETED:
            continue
        if status == WAITING:
            leave_queue(state, request)
        elif status != NEW:
            cached = this.computed
            if status == DECODING:
                cached = computed_now(state, request)
                this.blocks_held = blocks_for(state, cached)
                if in_flight_input(state, request, False):
                    cached -= 1
                leave_decoding(state, request, computed_now(state, request))
            elif status == PREFILLING:
                stop_prefill(state, request)
            else:
                # It stays in the bucket of its last step, which passes over it.
                last = last_token_step(state, request)
                cached = state.facts[request].total_tokens - 1
                if state.config.batches_in_flight == 2 and this.segment_start < last:
                    cached -= 1
                close_segment(state, request, at.step, at.rows - 1)
            vacate(state, request, cached)
        this.status = ABORTED


@compiled
def lacks_room(state: State) -> bool:
    """Whether the next step might not fit the arrays that grow."""
    at = state.at
    return (
        at.rows >= len(state.steps)
        or at.segments + state.config.segments_of_step > state.segments.shape[0]
        or at.keys_used + state.config.keys_of_step > len(state.extent_of_key)
    )
