"""What enters the batch being built, who is preempted for it, and what it leads to.

Sections 2, 5, 6 and 7 of the semantics.
"""

from __future__ import annotations

from blis_replay.base.tables import call_operation
from blis_replay.blis.kernel.pool import (
    blocks_for,
    enter_cache,
    give_keys,
    hold_found_blocks,
    modulo_block,
)
from blis_replay.blis.kernel.queues import (
    computed_now,
    enter_finish,
    in_flight_input,
    leave_decoding,
    leave_queue,
    queue_up,
    start_decoding,
    start_running,
    stop_decoding,
    stop_prefill,
    vacate,
)
from blis_replay.blis.kernel.state import (
    ATTENDED,
    DECODING,
    LAST_IN_FLIGHT,
    NONE,
    PREFILLING,
    State,
    compiled,
    separate,
)

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
        count_context(state, computed, 1, sign)
    else:
        batch.prefill_tokens += sign * tokens
        batch.prefill_requests += sign
        count_attended(state, computed, tokens, sign)


@compiled
def count_context(state: State, computed: int, tokens: int, sign: int) -> None:
    """Add what a decode of ``tokens`` tokens, the last ones drafts, attends to behind ``computed`` ones."""
    state.batch.context_tokens += sign * (computed + tokens)
    if state.config.windowed == 1:
        attended = call_operation(state.config.groups_at, ATTENDED, state, NONE, computed + tokens - 1, 1)
        state.batch.grouped_context_tokens += sign * attended


@compiled
def count_attended(state: State, computed: int, tokens: int, sign: int) -> None:
    """Add what the prefill of ``tokens`` tokens attends to: token number n of a request attends to n tokens."""
    attended = tokens * computed + tokens * (tokens + 1) // 2
    if state.config.windowed == 1:
        attended = call_operation(state.config.groups_at, ATTENDED, state, NONE, computed, tokens)
    state.batch.attended_tokens += sign * attended


@compiled
def of_mean_layer(state: State) -> None:
    """Of KV-cache groups, whose layers attend to different tokens, the batch gets what a mean layer attends to.

    vLLM makes groups of equally many layers; some may be filled up with layers that there are not.
    """
    if state.config.groups_at != 0:
        batch, growing = state.batch, state.config.growing
        layers = growing + state.grouping.states
        context, attended = batch.grouped_context_tokens, batch.attended_tokens
        if state.config.windowed == 0:
            context, attended = growing * batch.context_tokens, growing * attended
        batch.whole_context_tokens = batch.context_tokens
        batch.context_tokens = (2 * context + layers) // (2 * layers)
        if batch.attended_tokens > 0:  # most steps have no prefill, and a division takes as long as the rest
            batch.attended_tokens = (2 * attended + layers) // (2 * layers)


@compiled
def widen(state: State, step: int) -> None:
    """On from ``step`` to the next one, in which each decode attends to one token more (``groups``)."""
    at, slot = state.at, (step + 1) & state.config.ring_mask
    at.decoding_attended += at.widening - state.attended_less[slot]
    at.widening -= state.widening_less[slot]
    state.attended_less[slot] = state.widening_less[slot] = 0


@compiled
def enter_decoded(state: State, request: int, computed: int) -> None:
    """Cache what a decode at ``computed`` tokens fills, as far as its tokens are known."""
    if state.config.prefix_caching == 1 and state.requests[request].keyed == 1:
        unknown = 1 if in_flight_input(state, request, True) else 0
        enter_cache(state, request, computed + 1 - unknown)


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
    leave_queue(state, request)
    start_running(state, request)
    hold_prefix(state, request, row, hits, extents)


@compiled
def hold_prefix(state: State, request: int, row: int, hits: int, extents: int) -> None:
    """Give a request a row of the block table, and the blocks that were found for it."""
    this = state.requests[request]
    state.at.free_rows -= 1
    this.table_row = row
    this.blocks_held = hits
    this.blocks_entered = hits
    hold_found_blocks(state, request, extents)


# -- What the batch leads to -------------------------------------------------------------


@compiled
def end_decodes(state: State) -> None:
    """Decodes that were served are one token on."""
    at = state.at
    at.decoding_context += state.batch.served
    if state.config.windowed == 1:
        widen(state, at.step)
    if state.finish_head[at.step & state.config.ring_mask] != NONE:
        end_last_decodes(state)


@compiled
def end_last_decodes(state: State) -> None:
    """Decodes whose last token the step gives stop asking."""
    at = state.at
    request = state.finish_head[at.step & state.config.ring_mask]
    while request != NONE:
        this = state.requests[request]
        if this.status == DECODING:
            stop_decoding(state, request, computed_now(state, request) + 1)
            this.status = LAST_IN_FLIGHT
            this.blocks_held = blocks_for(state, state.facts[request].total_tokens - 1)
        request = state.links[request].finish.next


@compiled
def end_prefills(state: State) -> None:
    """Advance the prefills of the batch; one that reaches its last known token yields a token."""
    at = state.at
    request = at.prefilling.head
    while request != NONE:
        after = state.links[request].prefilling.next
        this, outcome = state.requests[request], state.outcomes[request]
        if given_now(state, request):
            this.computed += this.chunk
            if this.computed == this.known:
                stop_prefill(state, request)
                state.batch.first_tokens += 1
                this.segment_start = at.step
                if outcome.first_step == NONE:
                    outcome.first_step = at.rows
                if this.known + 1 == state.facts[request].total_tokens:
                    this.status = LAST_IN_FLIGHT
                    this.step_offset = at.step + 2 - state.facts[request].total_tokens  # see last_token_step
                    enter_finish(state, request, at.step)
                else:
                    start_decoding(state, request, at.step + 1)
        request = after
