"""Who waits, who runs, and who is done: the waiting heap, the lists of running requests, and the ways out of them.

The waiting queue is a heap of ranks for both policies.  Under FCFS a rank is the place
in the order of queueing.  A preempted request is the last of the running list, so going back to
the head of the queue is going back to its rank.  Under priority a rank is the
place by (priority, arrival time, request id).
"""

from __future__ import annotations

from blis_replay.base.arrays import Int32s
from blis_replay.base.tables import call_operation, column
from blis_replay.blis.kernel.pool import blocks_for, enter_cache, modulo_block, release_blocks
from blis_replay.blis.kernel.state import (
    ABORTED,
    BEGIN_DECODING,
    COMPLETED,
    DECODING,
    END_DECODING,
    NEVER,
    NEW,
    NONE,
    PREFILLING,
    WAITING,
    State,
    Table,
    compiled,
    insert,
    remove,
    separate,
)

# -- waiting ----------------------------------------------------------------------------


@compiled
def queue_up(state: State, request: int) -> None:
    """Put a request into the waiting queue."""
    state.requests[request].status = WAITING
    heap, i = state.heap, state.at.waiting_depth
    rank = state.facts[request].rank
    state.at.waiting_depth = i + 1
    while i > 0 and heap[(i - 1) // 2] > rank:
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    heap[i] = rank


@compiled
def first_waiting(state: State) -> int:
    """The head of the waiting queue, which must not be empty."""
    return state.by_rank[state.heap[0]]


@compiled
def leave_queue(state: State, request: int) -> None:
    """Take a request out of the waiting queue, wherever it stands."""
    heap, rank = state.heap, state.facts[request].rank
    i = 0
    while heap[i] != rank:
        i += 1
    size = state.at.waiting_depth - 1
    state.at.waiting_depth = size
    if i == size:
        return
    moved = heap[size]
    while i > 0 and heap[(i - 1) // 2] > moved:
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= moved:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = moved


# -- running ----------------------------------------------------------------------------


@compiled
def start_running(state: State, request: int) -> None:
    """Append an admitted request to the running list and to those in prefill."""
    at, this = state.at, state.requests[request]
    this.status = PREFILLING
    this.admission = at.admissions
    at.admissions += 1
    at.running_depth += 1
    insert(column(state.links, "running"), at.running, request, at.running.tail)
    insert(column(state.links, "prefilling"), at.prefilling, request, at.prefilling.tail)


@compiled
def stop_prefill(state: State, request: int) -> None:
    """Take a request out of those in prefill."""
    remove(column(state.links, "prefilling"), state.at.prefilling, request)


# -- decoding ---------------------------------------------------------------------------
# A decoding request gets a token in every step unless it is passed over, so its progress
# is a difference of step numbers, and it stands in two buckets: of the steps (modulo
# block size) in which it needs a new block, and of the step that gives its last token.


@compiled
def computed_now(state: State, request: int) -> int:
    """Computed tokens of a decoding request at the start of the current step."""
    return state.at.step - state.requests[request].step_offset


@compiled
def last_token_step(state: State, request: int) -> int:
    """The step that gives a decoding request its last token, if none passes it over."""
    return state.facts[request].total_tokens - 2 + state.requests[request].step_offset


@compiled
def start_decoding(state: State, request: int, first_decode_step: int) -> None:
    """From ``first_decode_step`` on the request asks for one token in each step."""
    at, this = state.at, state.requests[request]
    this.status = DECODING
    # Its known tokens are all computed but the one the last step gave.
    this.step_offset = first_decode_step - this.known
    at.decoding_requests += 1
    at.decoding_context += this.known + 1
    at.keyed_decoding += this.keyed
    enter_growth(state, request)
    enter_finish(state, request, last_token_step(state, request))
    if state.config.windowed == 1:
        call_operation(state.config.groups_at, BEGIN_DECODING, state, request, first_decode_step, 0)


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


@compiled
def stop_decoding(state: State, request: int, computed: int) -> None:
    """Take a request with ``computed`` tokens out of those that ask for a decode token."""
    at = state.at
    at.decoding_requests -= 1
    at.decoding_context -= computed + 1
    at.keyed_decoding -= state.requests[request].keyed
    leave_growth(state, request)
    if state.config.windowed == 1:
        call_operation(state.config.groups_at, END_DECODING, state, request, computed, 0)


@compiled
def pass_over(state: State, request: int) -> None:
    """The current step gives a decoding request nothing: all that is to come is one step later."""
    this = state.requests[request]
    close_segment(state, request, state.at.step, state.at.rows - 1)
    this.segment_start = state.at.step + 1
    if state.config.windowed == 1:
        call_operation(state.config.groups_at, END_DECODING, state, request, computed_now(state, request), 0)
    leave_growth(state, request)
    leave_finish(state, request, last_token_step(state, request))
    this.step_offset += 1
    enter_growth(state, request)
    enter_finish(state, request, last_token_step(state, request))
    if state.config.windowed == 1:
        call_operation(state.config.groups_at, BEGIN_DECODING, state, request, state.at.step + 1, 1)


@compiled
def enter_growth(state: State, request: int) -> None:
    """Into the bucket of the steps in which the request has a multiple of the block size computed."""
    slot = modulo_block(state, state.requests[request].step_offset)
    enter_bucket(column(state.links, "growth"), state.growth_head, slot, request)
    state.growth_count[slot] += state.config.growing


@compiled
def leave_growth(state: State, request: int) -> None:
    """Out of that bucket."""
    slot = modulo_block(state, state.requests[request].step_offset)
    leave_bucket(column(state.links, "growth"), state.growth_head, slot, request)
    state.growth_count[slot] -= state.config.growing


@compiled
def enter_finish(state: State, request: int, step: int) -> None:
    """Into the bucket of the step that gives the last token."""
    enter_bucket(column(state.links, "finish"), state.finish_head, step & state.config.ring_mask, request)


@compiled
def leave_finish(state: State, request: int, step: int) -> None:
    """Out of that bucket."""
    leave_bucket(column(state.links, "finish"), state.finish_head, step & state.config.ring_mask, request)


@compiled
def first_to_finish(state: State, step: int) -> int:
    """Of the requests that finish with a step, take the first of the running list out of the bucket."""
    slot = step & state.config.ring_mask
    first = state.finish_head[slot]
    if first == NONE:
        return NONE
    request = state.links[first].finish.next
    while request != NONE:
        if state.requests[request].admission < state.requests[first].admission:
            first = request
        request = state.links[request].finish.next
    leave_finish(state, first, step)
    return first


@compiled
def enter_bucket(links: Table, heads: Int32s, slot: int, request: int) -> None:
    """Put a request into a bucket."""
    after = heads[slot]
    links[request].next = after
    links[request].previous = NONE
    if after != NONE:
        links[after].previous = request
    heads[slot] = request


@compiled
def leave_bucket(links: Table, heads: Int32s, slot: int, request: int) -> None:
    """Take a request out of the bucket that it is in."""
    before, after = links[request].previous, links[request].next
    if before == NONE:
        heads[slot] = after
    else:
        links[before].next = after
    if after != NONE:
        links[after].previous = before


@compiled
def close_segment(state: State, request: int, end_step: int, last_row: int) -> None:
    """Note the steps ``segment_start`` .. ``end_step - 1`` as a run that gave a token each.

    ``last_row``: the row of the last of them (no row between them is empty, so their rows
    follow each other as well).
    """
    this = state.requests[request]
    steps = end_step - this.segment_start
    if this.segment_start != NONE and steps > 0:
        note_segment(state, request, last_row, steps)
    this.segment_start = NONE


@compiled
def note_segment(state: State, request: int, last_row: int, rows: int) -> None:
    """A run of steps that gave a token each, which ends in ``last_row``."""
    i = state.at.segments
    state.segments[i, 0] = request
    state.segments[i, 1] = last_row - rows + 1
    state.segments[i, 2] = rows
    state.at.segments = i + 1


# -- done and gone ----------------------------------------------------------------------


@compiled
def leave_decoding(state: State, request: int, computed: int) -> None:
    """Out of all that is kept of a decode with ``computed`` tokens at the current step."""
    stop_decoding(state, request, computed)
    leave_finish(state, request, last_token_step(state, request))
    close_segment(state, request, state.at.step, state.at.rows - 1)


@separate
def vacate(state: State, request: int, cached: int) -> None:
    """Give up blocks, table row and place in the running list; the first ``cached`` tokens can be looked up."""
    give_up_blocks(state, request, cached)
    leave_list(state, request)


@compiled
def leave_list(state: State, request: int) -> None:
    """Out of the running list, blocks and all."""
    state.at.running_depth -= 1
    remove(column(state.links, "running"), state.at.running, request)


@compiled
def give_up_blocks(state: State, request: int, cached: int) -> None:
    """Give up blocks and table row; the first ``cached`` tokens can be looked up."""
    this = state.requests[request]
    if state.config.prefix_caching == 1:
        enter_cache(state, request, cached)
    release_blocks(state, request, cached)
    state.free_rows[state.at.free_rows] = this.table_row
    state.at.free_rows += 1
    this.table_row = NONE
    this.computed = 0


@compiled
def finish_all(state: State, step: int, row: int) -> None:
    """The tokens of a step are in: requests with their last token finish, in batch order."""
    finished = 0
    while True:
        request = first_to_finish(state, step)
        if request == NONE:
            break
        finished += finish(state, request, step, row)
    this = state.steps[row]
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


@compiled
def next_given_up(state: State) -> int:
    """The next request whose client has given up by now and that is not done; NONE without one."""
    at = state.at
    while at.abort_due_us <= at.now_us:
        if at.next_abort == at.submitted:
            at.abort_due_us = NEVER
            break
        request = state.abort_order[at.next_abort]
        if state.facts[request].abort_us > at.now_us:
            at.abort_due_us = state.facts[request].abort_us
            break
        at.next_abort += 1
        if state.requests[request].status != COMPLETED:
            return request
    return NONE


@separate
def take_aborts(state: State) -> None:
    """Clients that have given up by now; tokens of theirs that are in flight reach nobody."""
    at = state.at
    while True:
        request = next_given_up(state)
        if request == NONE:
            break
        this = state.requests[request]
        status = this.status
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
