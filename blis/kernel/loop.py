"""The engine loop: sections 1, 7 and 9 of the semantics.

``next_batch`` goes on to the next call of ``schedule()``; ``run_batch`` puts its batch on
the device.  ``advance`` does both with a latency model that is data.  With two batches in
flight (asynchronous scheduling) a batch is scheduled while the one before it runs.
"""

from __future__ import annotations

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.tables import table_of
from blis_replay.blis.kernel.decodes import run_decodes
from blis_replay.blis.kernel.pool import full_blocks
from blis_replay.blis.kernel.queues import (
    finish_all,
    queue_up,
    take_aborts,
)
from blis_replay.blis.kernel.schedule import schedule
from blis_replay.blis.kernel.state import (
    NEVER,
    NEW,
    NONE,
    Record,
    State,
    compiled,
    entry,
    state_of,
)
from blis_replay.blis.kernel.step_time import batch_duration_us, quick_duration_us

# What next_batch and advance answer.
BATCH, IDLE, REACHED, NEEDS_ROOM, STUCK = range(5)
# What await_arrival answers besides: there is work again.
ARRIVED = 5
# What serve_rows writes: requests and tokens in prefill, requests and tokens in decode, the step, preemptions.
ROW_STEP, ROW_PREEMPTED, ROW_FIELDS = 4, 5, 6


@entry
def advance(state: State, until_us: int, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """Run until nothing is left to do (IDLE), the time is reached, or arrays are full (NEEDS_ROOM)."""
    return go_on(state_of(state), until_us, kind, table_of(int_params), table_of(float_params))


@compiled
def go_on(state: State, until_us: int, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """As ``advance``."""
    while True:
        run_decodes(state, until_us, kind, int_params, float_params)
        answer = build_batch(state, until_us)
        if answer != BATCH:
            return answer
        start_us = max(state.at.now_us, state.at.device_free_us)
        start_batch(state, quick_duration_us(kind, int_params, float_params, state.batch, start_us))


@entry
def advance_to_answer(
    state: State, until_us: int, kind: int, int_params: Int64s, float_params: Floats, seen: int
) -> tuple[int, int]:
    """As ``advance``, but only to the next step that answered a request (BATCH), of those from row ``seen`` on.

    The answer, and the row after that step; after the last step whose tokens are in, if none answered.
    """
    run = state_of(state)
    ints, floats = table_of(int_params), table_of(float_params)
    while True:
        answer = build_batch(run, until_us)
        if answer == BATCH:
            start_us = max(run.at.now_us, run.at.device_free_us)
            start_batch(run, batch_duration_us(kind, ints, floats, run.batch, start_us))
        ended = run.at.rows
        for i in range(run.at.in_flight):
            if run.flight[i] != NONE:
                ended -= 1
        while seen < ended:
            seen += 1
            if run.steps[seen - 1].finished > 0:
                return BATCH, seen
        if answer != BATCH:
            return answer, seen


@entry
def advance_kept(state: State, kept: Record, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """As ``advance`` to the end, step by step; each batch with tokens is kept in the row of its step.

    ``kept``: of ``Batch``, as long as the steps.
    """
    run = state_of(state)
    ints, floats = table_of(int_params), table_of(float_params)
    while True:
        answer = build_batch(run, NEVER)
        if answer != BATCH:
            return answer
        if run.batch.prefill_tokens + run.batch.decode_tokens > 0:
            kept[run.at.rows] = run.batch
        start_us = max(run.at.now_us, run.at.device_free_us)
        start_batch(run, batch_duration_us(kind, ints, floats, run.batch, start_us))


@entry
def next_batch(state: State, until_us: int) -> int:
    """Build the next batch for a caller in Python; answers as ``advance`` does, or BATCH."""
    return build_batch(state_of(state), until_us)


@entry
def run_batch(state: State, duration_us: int) -> None:
    """Let the batch just built take this long, for a caller in Python."""
    start_batch(state_of(state), duration_us)


@entry
def serve_rows(state: State, row: int, until_row: int, table: Int64s) -> tuple[int, int]:
    """Schedule a batch with tokens in each row of ``table``, where the row's number is the time.

    ``table``: int64[rows, ROW_FIELDS], takes what is in the batches; a row in which nothing can be scheduled stays as
    it is.  A request that computes again what it had, some of it output, counts as a decode, as in a server's log.
    The answer, REACHED or as ``advance`` answers, and the row where to go on.
    """
    run = state_of(state)
    at, batch, preempted = run.at, run.batch, table[:row, ROW_PREEMPTED].sum()
    while row < until_row:
        at.now_us = max(at.now_us, row)
        answer = build_batch(run, row + 1)
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
            if preempted > 0:
                count_resumed(run, table[row])
        start_batch(run, 1)
        if has_tokens:
            row += 1
    return REACHED, row


@compiled
def count_resumed(state: State, counts: Int64s) -> None:
    """Take the requests of the batch that were preempted and have output tokens from the prefills to the decodes."""
    request = state.at.running.head
    while request != NONE:
        this = state.requests[request]
        had_output = this.known > state.facts[request].prompt_tokens
        given = this.chunk_step == state.at.step and this.chunk > 1
        if given and had_output:
            counts[0] -= 1
            counts[1] -= this.chunk
            counts[2] += 1
            counts[3] += this.chunk
        request = state.links[request].running.next


@compiled
def build_batch(state: State, until_us: int) -> int:
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
    """Go on to the next arrival (ARRIVED); IDLE without one, REACHED if it is not before ``until_us``."""
    at = state.at
    if at.arrived == at.submitted:
        return IDLE
    arrival_us = state.facts[at.arrived].queued_us
    if arrival_us >= until_us:
        return REACHED
    at.now_us = max(at.now_us, arrival_us)
    return ARRIVED


@compiled
def start_batch(state: State, duration_us: int) -> None:
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
def put_in_flight(state: State, duration_us: int) -> int:
    """Put the batch just scheduled on the device; its tokens.  An empty one takes no device time and leaves no row."""
    at, batch = state.at, state.batch
    tokens = batch.prefill_tokens + batch.decode_tokens
    start_us = max(at.now_us, at.device_free_us)
    row = NONE
    if tokens > 0:
        row = at.rows
        at.device_free_us = start_us + duration_us
        note_step(state, row, start_us)
        at.rows += 1
    state.flight[at.in_flight] = row
    state.flight[at.in_flight + 2] = max(start_us, at.device_free_us)
    at.in_flight += 1
    return tokens


@compiled
def note_step(state: State, row: int, start_us: int) -> None:
    """The row of a batch in the table of steps."""
    at, batch, this = state.at, state.batch, state.steps[row]
    this.start_us = start_us
    this.end_us = at.device_free_us
    this.scheduled_us = at.now_us
    this.context_tokens = batch.context_tokens if state.config.groups_at == 0 else batch.whole_context_tokens
    this.prefill_tokens = batch.prefill_tokens
    this.waiting_depth = at.waiting_depth
    this.free_blocks_before = batch.free_before
    this.free_blocks = at.free_blocks
    this.decode_tokens = batch.decode_tokens
    this.prefill_requests = batch.prefill_requests
    this.running_depth = at.running_depth
    this.admitted = batch.admitted
    this.preempted = at.preempted_in_call


@compiled
def update(state: State) -> None:
    """The tokens of the oldest batch are in: requests with their last token finish, in batch order.

    Clients that gave up meanwhile come first.
    """
    at = state.at
    step = at.step - at.in_flight
    row = land_oldest(state)
    if state.config.aborts_before_tokens == 1 and at.abort_due_us <= at.now_us:
        take_aborts(state)
    if row == NONE:
        return
    finish_all(state, step, row)


@compiled
def land_oldest(state: State) -> int:
    """The oldest batch in flight has ended; the row of its step, NONE if it was empty."""
    at, flight = state.at, state.flight
    row, end_us = flight[0], flight[2]
    at.waiting_before = at.waiting_depth
    at.running_before = at.running_depth
    at.free_before = at.free_blocks
    at.in_flight -= 1
    flight[0] = flight[1]
    flight[2] = flight[3]
    at.now_us = max(at.now_us, end_us)
    return row


@compiled
def take_arrivals(state: State) -> None:
    """Requests that have queued by now join the waiting queue, in their order."""
    at = state.at
    while at.arrived < at.submitted and state.facts[at.arrived].queued_us <= at.now_us:
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


@compiled
def lacks_room(state: State) -> bool:
    """Whether the next step might not fit the arrays that grow."""
    at = state.at
    return (
        at.rows >= len(state.steps)
        or at.segments + state.config.segments_of_step > state.segments.shape[0]
        or at.keys_used + state.config.keys_of_step > len(state.extent_of_key)
    )
