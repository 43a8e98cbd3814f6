"""The engine loop: sections 1, 7 and 9 of the semantics.

``next_batch`` goes on to the next call of ``schedule()``; ``run_batch`` puts its batch on
the device.  ``advance`` does both with a latency model that is data.  With two batches in
flight (asynchronous scheduling) a batch is scheduled while the one before it runs.
"""

from __future__ import annotations

from blis_replay.blis.kernel.batch import in_flight_input
from blis_replay.blis.kernel.compiled import compiled, entry
from blis_replay.blis.kernel.pool import blocks_for, enter_cache
from blis_replay.blis.kernel.preempt import leave_decoding, vacate
from blis_replay.blis.kernel.queues import close_segment, computed_now, leave_queue, queue_up, stop_prefill
from blis_replay.blis.kernel.schedule import schedule
from blis_replay.blis.kernel.state import (
    ABORTED,
    ADMISSION,
    ARRIVED,
    BARREN_TURNS,
    BATCH_ADMITTED,
    BATCH_CONTEXT_TOKENS,
    BATCH_DECODE_TOKENS,
    BATCH_FIRST_TOKENS,
    BATCH_FREE_BEFORE,
    BATCH_PREFILL_REQUESTS,
    BATCH_PREFILL_TOKENS,
    BATCH_SERVED,
    BATCHES_IN_FLIGHT,
    BLOCK_SIZE,
    BLOCKS_HELD,
    COMPLETED,
    COMPUTED,
    DECODING,
    DEVICE_FREE,
    FINISH_NEXT,
    FINISH_PREV,
    FREE_BEFORE,
    FREE_BLOCKS,
    GROWTH_SLOT,
    IN_FLIGHT,
    KEYS_USED,
    LAST_IN_FLIGHT,
    LAST_STEP,
    MAX_NUM_SEQS,
    NEW,
    NEXT_ABORT,
    NONE,
    NOW,
    PATIENCE,
    PREEMPTED_IN_CALL,
    PREFILLING,
    PREFIX_CACHING,
    RING_MASK,
    ROWS,
    RUNNING_BEFORE,
    RUNNING_DEPTH,
    SEGMENTS,
    STATUS,
    STEP,
    SUBMITTED,
    TOTAL_TOKENS,
    WAITING,
    WAITING_BEFORE,
    WAITING_DEPTH,
    Int64s,
    State,
    index,
)
from blis_replay.blis.kernel.step_time import Floats, batch_duration_us

# What next_batch and advance answer.
BATCH, IDLE, REACHED, NEEDS_ROOM, STUCK = range(5)


@entry
def advance(state: State, until_us: int, kind: int, whole: Int64s, real: Floats) -> int:
    """Run until nothing is left to do (IDLE), the time is reached, or arrays are full (NEEDS_ROOM)."""
    while True:
        answer = _next_batch(state, until_us)
        if answer != BATCH:
            return answer
        start_us = max(state.at[NOW], state.at[DEVICE_FREE])
        _run_batch(state, batch_duration_us(kind, whole, real, state.batch, start_us))


@entry
def next_batch(state: State, until_us: int) -> int:
    """Build the next batch for a caller in Python; answers as ``advance`` does, or BATCH."""
    return _next_batch(state, until_us)


@entry
def run_batch(state: State, duration_us: int) -> None:
    """Let the batch just built take this long, for a caller in Python."""
    _run_batch(state, duration_us)


@compiled
def _next_batch(state: State, until_us: int) -> int:
    """Go on to the next ``schedule()`` before ``until_us`` and build its batch (BATCH)."""
    at = state.at
    while True:
        if at[NOW] >= until_us:
            return REACHED
        if lacks_room(state):
            return NEEDS_ROOM
        if at[BARREN_TURNS] > state.config[PATIENCE]:
            return STUCK
        take_arrivals(state)
        take_aborts(state)
        if at[RUNNING_DEPTH] + at[WAITING_DEPTH] > 0:
            schedule(state)
            return BATCH
        if at[IN_FLIGHT] > 0:
            update(state)
            continue
        if at[ARRIVED] == at[SUBMITTED]:
            return IDLE
        arrival_us = state.queued_us[index(at[ARRIVED])]
        if arrival_us >= until_us:
            return REACHED
        at[NOW] = max(at[NOW], arrival_us)


@compiled
def _run_batch(state: State, duration_us: int) -> None:
    """Run the batch just scheduled; an empty one takes no device time and leaves no row."""
    at, batch = state.at, state.batch
    tokens = batch[BATCH_PREFILL_TOKENS] + batch[BATCH_DECODE_TOKENS]
    start_us = max(at[NOW], at[DEVICE_FREE])
    row = NONE
    if tokens > 0:
        row = at[ROWS]
        at[DEVICE_FREE] = start_us + duration_us
        note_step(state, row, start_us)
        at[ROWS] += 1
    state.flight[index(at[IN_FLIGHT]), 0] = row
    state.flight[index(at[IN_FLIGHT]), 1] = max(start_us, at[DEVICE_FREE])
    at[IN_FLIGHT] += 1
    at[BARREN_TURNS] += 1
    if batch[BATCH_SERVED] + batch[BATCH_FIRST_TOKENS] > 0:
        at[BARREN_TURNS] = 0
    at[STEP] += 1
    at[GROWTH_SLOT] += 1
    if at[GROWTH_SLOT] == state.config[BLOCK_SIZE]:
        at[GROWTH_SLOT] = 0
    if tokens == 0 or at[IN_FLIGHT] == state.config[BATCHES_IN_FLIGHT]:
        update(state)


@compiled
def note_step(state: State, row: int, start_us: int) -> None:
    """The row of a batch in the table of steps."""
    at, batch, step = state.at, state.batch, state.steps[index(row)]
    step["start_us"] = start_us
    step["end_us"] = at[DEVICE_FREE]
    step["scheduled_us"] = at[NOW]
    step["context_tokens"] = batch[BATCH_CONTEXT_TOKENS]
    step["prefill_tokens"] = batch[BATCH_PREFILL_TOKENS]
    step["waiting_depth"] = at[WAITING_DEPTH]
    step["free_blocks_before"] = batch[BATCH_FREE_BEFORE]
    step["free_blocks"] = at[FREE_BLOCKS]
    step["decode_tokens"] = batch[BATCH_DECODE_TOKENS]
    step["prefill_requests"] = batch[BATCH_PREFILL_REQUESTS]
    step["running_depth"] = at[RUNNING_DEPTH]
    step["admitted"] = batch[BATCH_ADMITTED]
    step["preempted"] = at[PREEMPTED_IN_CALL]


@compiled
def update(state: State) -> None:
    """The tokens of the oldest batch are in: requests with their last token finish, in batch order."""
    at, flight = state.at, state.flight
    row, end_us = flight[0, 0], flight[0, 1]
    at[WAITING_BEFORE] = at[WAITING_DEPTH]
    at[RUNNING_BEFORE] = at[RUNNING_DEPTH]
    at[FREE_BEFORE] = at[FREE_BLOCKS]
    turn = at[STEP] - at[IN_FLIGHT]
    at[IN_FLIGHT] -= 1
    flight[0, 0] = flight[1, 0]
    flight[0, 1] = flight[1, 1]
    at[NOW] = max(at[NOW], end_us)
    if row == NONE:
        return
    finished = 0
    while True:
        request = first_to_finish(state, turn)
        if request == NONE:
            break
        finished += finish(state, request, turn, row)
    step = state.steps[index(row)]
    step["finished"] = finished
    step["free_blocks_end"] = at[FREE_BLOCKS]


@compiled
def first_to_finish(state: State, turn: int) -> int:
    """Of the requests that finish with a turn, take the first of the running list out of the bucket."""
    slot = index(turn & state.config[RING_MASK])
    first = state.finish_head[slot]
    if first == NONE:
        return NONE
    request = state.link[first, FINISH_NEXT]
    while request != NONE:
        if state.request[request, ADMISSION] < state.request[first, ADMISSION]:
            first = request
        request = state.link[request, FINISH_NEXT]
    before, after = state.link[first, FINISH_PREV], state.link[first, FINISH_NEXT]
    if before == NONE:
        state.finish_head[slot] = after
    else:
        state.link[before, FINISH_NEXT] = after
    if after != NONE:
        state.link[after, FINISH_PREV] = before
    return first


@compiled
def finish(state: State, request: int, turn: int, row: int) -> int:
    """A request has its last token; one that was preempted meanwhile finishes in the queue.

    The number of requests that finished: 0 if its client gave up in the same moment.
    """
    if state.request[request, STATUS] == ABORTED:
        return 0
    close_segment(state, request, turn + 1, row)
    state.request[request, LAST_STEP] = row
    if state.request[request, STATUS] == WAITING:
        leave_queue(state, request)
    else:
        if state.config[PREFIX_CACHING] == 1:
            enter_cache(state, request, state.request[request, TOTAL_TOKENS] - 1)
        vacate(state, request)
    state.request[request, STATUS] = COMPLETED
    return 1


@compiled
def take_arrivals(state: State) -> None:
    """Requests that have queued by now join the waiting queue, in their order."""
    at = state.at
    while at[ARRIVED] < at[SUBMITTED] and state.queued_us[index(at[ARRIVED])] <= at[NOW]:
        if state.request[at[ARRIVED], STATUS] == NEW:
            queue_up(state, at[ARRIVED])
        at[ARRIVED] += 1


@compiled
def take_aborts(state: State) -> None:
    """Clients that have given up by now; a request whose last token is computed completes."""
    at = state.at
    while at[NEXT_ABORT] < at[SUBMITTED] and state.abort_us[index(state.abort_order[index(at[NEXT_ABORT])])] <= at[NOW]:
        request = state.abort_order[at[NEXT_ABORT]]
        at[NEXT_ABORT] += 1
        status = state.request[request, STATUS]
        if status in (COMPLETED, LAST_IN_FLIGHT):
            continue
        if status == WAITING:
            leave_queue(state, request)
        elif status != NEW:
            cached = state.request[request, COMPUTED]
            if status == DECODING:
                cached = computed_now(state, request)
                state.request[request, BLOCKS_HELD] = blocks_for(state, cached)
                if in_flight_input(state, request, False):
                    cached -= 1
                leave_decoding(state, request, computed_now(state, request))
            elif status == PREFILLING:
                stop_prefill(state, request)
            if state.config[PREFIX_CACHING] == 1:
                enter_cache(state, request, cached)
            vacate(state, request)
        state.request[request, STATUS] = ABORTED


@compiled
def lacks_room(state: State) -> bool:
    """Whether the next turn might not fit the arrays that grow."""
    at = state.at
    running = state.config[MAX_NUM_SEQS]
    return (
        at[ROWS] >= len(state.steps)
        or at[SEGMENTS] + 2 * running + 2 > state.segments.shape[0]
        or at[KEYS_USED] + (running + 1) * (state.table.shape[1] + 1) > len(state.found)
    )
