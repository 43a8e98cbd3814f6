"""What enters the batch being built, who is preempted for it, and its way to the device.

Sections 2, 5 and 6 of the semantics.
"""

from __future__ import annotations

from blis_replay.blis.kernel.pool import blocks_for, enter_cache, give_keys, hold_found_blocks, release_blocks
from blis_replay.blis.kernel.queues import (
    close_segment,
    computed_now,
    first_to_finish,
    last_token_step,
    leave_finish,
    leave_queue,
    queue_up,
    start_running,
    stop_decoding,
    stop_prefill,
    stop_running,
)
from blis_replay.blis.kernel.state import (
    ABORTED,
    COMPLETED,
    DECODING,
    NONE,
    PREFILLING,
    WAITING,
    State,
    compiled,
    index,
    modulo_block,
    separate,
)
from blis_replay.compiled.arrays import Int64s

# -- Tokens ---------------------------------------------------------------------------------


@compiled
def given_now(state: State, request: int) -> bool:
    """Whether this call has given the request tokens."""
    this = state.requests[request]
    return this.chunk_step == state.at.step and this.chunk > 0


@compiled
def give_decode(state: State, request: int, computed: int) -> None:
    """One decode token for a request with ``computed`` tokens; its block is held."""
    this = state.requests[request]
    this.chunk = 1
    this.chunk_step = state.at.step
    state.batch.served += 1
    count(state, request, computed, 1, 1)
    if modulo_block(state, computed + 1) <= 1:
        enter_decoded(state, request, computed)


@compiled
def give_chunk(state: State, request: int, tokens: int) -> None:
    """A prefill chunk; its blocks are held, and those it fills are cached at once."""
    this = state.requests[request]
    this.chunk = tokens
    this.chunk_step = state.at.step
    computed = this.computed
    count(state, request, computed, tokens, 1)
    if state.config.prefix_caching == 1:
        enter_cache(state, request, computed + tokens)


@compiled
def count(state: State, request: int, computed: int, tokens: int, sign: int) -> None:
    """Add a request's tokens to the batch (``sign`` 1) or take them out (-1).

    A decode is one token that is the last known one, at or past the prompt; all else,
    recomputation included, is prefill.
    """
    batch, this = state.batch, state.requests[request]
    decode = this.status == DECODING
    if not decode:
        decode = tokens == 1 and computed + 1 == this.known and computed >= state.facts[request].prompt_tokens
    if decode:
        batch.decode_tokens += sign
        batch.context_tokens += sign * (computed + 1)
    else:
        batch.prefill_tokens += sign * tokens
        batch.prefill_requests += sign
        # Token number n of a request attends to n tokens.
        batch.attended_tokens += sign * (tokens * computed + tokens * (tokens + 1) // 2)


@compiled
def enter_decoded(state: State, request: int, computed: int) -> None:
    """Cache what a decode at ``computed`` tokens fills, as far as its tokens are known."""
    if state.config.prefix_caching == 1 and state.requests[request].keyed == 1:
        unknown = 1 if in_flight_input(state, request, True) else 0
        enter_cache(state, request, computed + 1 - unknown)


@compiled
def in_flight_input(state: State, request: int, given: bool) -> bool:
    """Whether the last token a decode was given as input was not known when it was scheduled.

    Asynchronous only.  ``given``: it is in the batch being built, so its input is the token
    of the step before; else it was last in the batch before, or not at all.
    """
    if state.config.batches_in_flight == 1:
        return False
    last = state.at.step if given else state.at.step - 1
    return state.requests[request].segment_start < last


# -- Preemption by recomputation --------------------------------------------------------------


@compiled
def choose_victim(state: State) -> int:
    """FCFS: the last of the running list.  Priority: the greatest (priority, arrival), first on a tie."""
    if state.config.priority_policy == 0:
        return state.at.running.tail
    victim = state.at.running.head
    request = state.links[victim].running.next
    while request != NONE:
        if state.facts[request].urgency > state.facts[victim].urgency:
            victim = request
        request = state.links[request].running.next
    return victim


@separate
def preempt(state: State, request: int) -> None:
    """Back to the waiting queue, to recompute its tokens; blocks go, cached contents stay."""
    this = state.requests[request]
    state.at.preempted_in_call += 1
    state.outcomes[request].preemptions += 1
    given = given_now(state, request)
    if this.status == DECODING:
        computed = computed_now(state, request)
        cached = computed + 1 if given else computed
        if in_flight_input(state, request, given):
            cached -= 1
        if given:
            count(state, request, computed, 1, -1)
            state.batch.served -= 1
        this.known = computed + 1
        this.blocks_held = blocks_for(state, computed + 1 if given else computed)
        leave_decoding(state, request, computed)
    elif this.status == PREFILLING:
        cached = this.computed
        if given:
            count(state, request, cached, this.chunk, -1)
            cached += this.chunk
        stop_prefill(state, request)
    else:  # its last token is in flight; it finishes when that is in, from the queue
        cached = state.facts[request].total_tokens - 1
        if in_flight_input(state, request, False):
            cached -= 1
        this.known = state.facts[request].total_tokens
    this.chunk = 0
    give_keys(state, request)
    vacate(state, request, cached)
    queue_up(state, request)


@compiled
def leave_decoding(state: State, request: int, computed: int) -> None:
    """Out of all that is kept of a decode with ``computed`` tokens at the current step."""
    stop_decoding(state, request, computed)
    leave_finish(state, request, last_token_step(state, request))
    close_segment(state, request, state.at.step, state.at.rows - 1)


@separate
def vacate(state: State, request: int, cached: int) -> None:
    """Give up blocks, table row and place in the running list; the first ``cached`` tokens can be looked up."""
    this = state.requests[request]
    if state.config.prefix_caching == 1:
        enter_cache(state, request, cached)
    release_blocks(state, request, cached)
    state.free_rows[state.at.free_rows] = this.table_row
    state.at.free_rows += 1
    this.table_row = NONE
    this.computed = 0
    stop_running(state, request)


# -- Steps without prefill (``prefill_schedule_interval``) ----------------------------------


@compiled
def begin_interval(state: State, somebody_decodes: bool) -> None:
    """Decide whether the step has no prefill: too few have passed since the last that had some."""
    at, batch = state.at, state.batch
    interval = state.config.prefill_interval
    soon = at.steps_with_tokens + 1 - at.last_prefill_step < interval
    deferred = interval > 1 and soon and somebody_decodes and at.left_waiting == 0
    batch.defers_prefill = 1 if deferred else 0
    batch.has_prefill = 0


@compiled
def prefilling_depth(state: State) -> int:
    """How many running requests are in prefill; counted only where that may hold prefills back."""
    depth = 0
    if state.config.prefill_interval > 1:
        request = state.at.prefilling.head
        while request != NONE:
            depth += 1
            request = state.links[request].prefilling.next
    return depth


@compiled
def end_interval(state: State) -> None:
    """Note what the batch had for the next ones."""
    at, batch = state.at, state.batch
    if at.preempted_in_call == 0 and batch.defers_prefill == 0:
        at.left_waiting = 1 if at.waiting_depth > 0 else 0
    if batch.prefill_tokens + batch.decode_tokens > 0:
        at.steps_with_tokens += 1
    if batch.has_prefill == 1:
        at.last_prefill_step = at.steps_with_tokens


# -- Admission ---------------------------------------------------------------------------


@compiled
def enter_running(state: State, request: int, row: int, hits: int, extents: int) -> None:
    """A waiting request runs, in a row of the block table that begins with the blocks that were found for it."""
    this = state.requests[request]
    leave_queue(state, request)
    start_running(state, request)
    state.at.free_rows -= 1
    this.table_row = row
    this.blocks_held = hits
    this.blocks_entered = hits
    hold_found_blocks(state, request, extents)


# -- On the device -------------------------------------------------------------------------


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
    state.flight[index(at.in_flight)] = row
    state.flight[index(at.in_flight + 2)] = max(start_us, at.device_free_us)
    at.in_flight += 1
    return tokens


@compiled
def note_step(state: State, row: int, start_us: int) -> None:
    """The row of a batch in the table of steps."""
    at, batch, this = state.at, state.batch, state.steps[index(row)]
    this.start_us = start_us
    this.end_us = at.device_free_us
    this.scheduled_us = at.now_us
    this.context_tokens = batch.context_tokens
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


# -- Tokens are in -------------------------------------------------------------------------


@compiled
def finish_all(state: State, step: int, row: int) -> None:
    """The tokens of a step are in: requests with their last token finish, in batch order."""
    finished = 0
    while True:
        request = first_to_finish(state, step)
        if request == NONE:
            break
        finished += finish(state, request, step, row)
    this = state.steps[index(row)]
    this.finished = finished
    this.free_blocks_end = state.at.free_blocks


@compiled
def finish(state: State, request: int, step: int, row: int) -> int:
    """A request has its last token; one that was preempted meanwhile finishes in the queue.

    The number of requests that finished: 0 if its client gave up meanwhile.
    """
    this = state.requests[request]
    if this.status == ABORTED:
        return 0
    close_segment(state, request, step + 1, row)
    state.outcomes[request].last_step = row
    if this.status == WAITING:
        leave_queue(state, request)
    else:
        vacate(state, request, state.facts[request].total_tokens - 1)
    this.status = COMPLETED
    return 1
