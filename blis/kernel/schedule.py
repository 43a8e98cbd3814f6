"""One ``schedule()`` call: sections 2 and 3 of the semantics.

The batch of a step is what the calls below leave in ``State.batch`` and in the chunks
of requests.  While nothing is short (blocks or budget), all decodes are served at once:
their number and context are kept sums, and only those that need a new block are
touched.  Otherwise the running list is walked member by member.
"""

from __future__ import annotations

from blis_replay.base.tables import call_operation
from blis_replay.blis.kernel.batch import (
    begin_interval,
    choose_victim,
    end_decodes,
    end_interval,
    end_prefills,
    enter_decoded,
    enter_running,
    give_chunk,
    give_decode,
    given_now,
    of_mean_layer,
    preempt,
    prefilling_depth,
)
from blis_replay.blis.kernel.free_queue import take_blocks
from blis_replay.blis.kernel.pool import (
    allocate_admitted,
    allocate_slots,
    blocks_for,
    find_cached_blocks,
    leave_windows,
    modulo_block,
)
from blis_replay.blis.kernel.queues import (
    computed_now,
    first_waiting,
    pass_over,
)
from blis_replay.blis.kernel.state import DECODING, LACKS, LEAVE_DUE, NONE, PREFILLING, State, compiled


@compiled
def schedule(state: State) -> None:
    """Build one batch at the current time; ``State.batch`` says what is in it."""
    at = state.at
    begin_batch(state, at.running_depth > prefilling_depth(state))
    fast = state.batch.defers_prefill == 0 and nothing_is_short(state)
    budget = serve_all_running(state) if fast else walk_running(state)
    if at.preempted_in_call == 0:
        admit_waiting(state, budget)
    end_interval(state)
    of_mean_layer(state)
    end_decodes(state)
    end_prefills(state)


@compiled
def begin_batch(state: State, somebody_decodes: bool) -> None:
    """An empty batch, and what this call may put in."""
    at, batch = state.at, state.batch
    batch.prefill_tokens = batch.decode_tokens = batch.context_tokens = batch.attended_tokens = 0
    batch.grouped_context_tokens = 0
    batch.prefill_requests = batch.admitted = batch.served = batch.first_tokens = 0
    batch.free_before = at.free_blocks
    batch.prefill_cap = prefill_cap(state)
    at.preempted_in_call = 0
    begin_interval(state, somebody_decodes)


@compiled
def prefill_cap(state: State) -> int:
    """Most prefill tokens that one request may be given in this call; 0 if only the budget bounds them."""
    config, cap = state.config, state.config.long_prefill_threshold
    if cap == 0:
        return 0
    requests = state.at.running_depth + state.at.waiting_depth
    if config.lone_prefill_uncapped == 1 and requests <= 1:
        return 0
    if config.adaptive_threshold == 1:
        return max(cap, config.max_num_batched_tokens // requests)
    return cap


# -- 2a. Running requests first ------------------------------------------------------------


@compiled
def chunk_wanted(state: State, request: int) -> int:
    """Tokens that a request in prefill asks for, before the budget."""
    this = state.requests[request]
    wanted = this.known - this.computed
    if 0 < state.batch.prefill_cap < wanted:
        wanted = state.batch.prefill_cap
    return min(wanted, state.config.max_model_len - 1 - this.computed)


@compiled
def nothing_is_short(state: State) -> bool:
    """Whether every running request certainly gets what it asks for, so that the order does not matter.

    With one exception: a single prefill at the end of the list may be cut by the budget.
    """
    at = state.at
    blocks = state.growth_count[at.growth_slot]
    tokens = at.decoding_requests
    request = at.prefilling.head
    while request != NONE:
        this, wanted = state.requests[request], chunk_wanted(state, request)
        tokens += wanted
        blocks += (blocks_for(state, this.computed + wanted) - this.blocks_held) * state.config.growing
        request = state.links[request].prefilling.next
    if blocks > at.free_blocks:
        return False
    if state.config.windowed == 1 and at.prefilling.head != NONE:
        return False  # what windows leave is freed in the order of the running list
    budget = state.config.token_budget
    if tokens <= budget:
        return True
    only_last = at.prefilling.head == at.prefilling.tail and at.prefilling.head == at.running.tail
    return only_last and at.decoding_requests < budget


@compiled
def serve_all_running(state: State) -> int:
    """Serve all running requests; the budget that is left.  O(prefills), and a little for what is evicted."""
    at, batch = state.at, state.batch
    taken = 0
    if state.config.windowed == 1:
        taken = call_operation(state.config.groups_at, LEAVE_DUE, state, NONE, 0, 0)
    take_blocks(state, state.growth_count[at.growth_slot] - taken)
    if at.keyed_decoding > 0:
        # Known at once, a block is entered in the step that fills it (whose request needs a
        # new one in the next step); asynchronously when its last token has arrived.
        at_once = state.config.batches_in_flight == 1
        slot = modulo_block(state, at.step + 1) if at_once else at.growth_slot
        request = state.growth_head[slot]
        while request != NONE:
            enter_decoded(state, request, computed_now(state, request))
            request = state.links[request].growth.next
    batch.served = at.decoding_requests
    batch.decode_tokens = at.decoding_requests
    batch.context_tokens, batch.grouped_context_tokens = at.decoding_context, at.decoding_attended
    budget = state.config.token_budget - at.decoding_requests
    request = at.prefilling.head
    while request != NONE:
        tokens = min(chunk_wanted(state, request), budget)
        allocate_slots(state, request, state.requests[request].computed + tokens)
        give_chunk(state, request, tokens)
        batch.has_prefill = 1
        budget -= tokens
        request = state.links[request].prefilling.next
    return budget


@compiled
def walk_running(state: State) -> int:
    """Go through the running list in its order; the budget that is left."""
    at = state.at
    budget = state.config.token_budget
    request = at.running.head
    skip = 0  # members to pass over because the list has shifted under the cursor
    while request != NONE:
        this = state.requests[request]
        if budget <= 0 or skip > 0:
            skip -= 1
            if this.status == DECODING:
                pass_over(state, request)
            request = state.links[request].running.next
            continue
        computed = this.computed
        tokens = 0
        if this.status == DECODING:
            computed = computed_now(state, request)
            this.blocks_held = blocks_for(state, computed)
            tokens = 1
        elif this.status == PREFILLING and state.batch.defers_prefill == 0:
            tokens = min(chunk_wanted(state, request), budget)
        if tokens > 0:
            after = NONE
            itself = False
            leave_windows(state, request, computed, NONE)
            while not itself and not allocate_slots(state, request, computed + tokens):
                victim = choose_victim(state)
                if given_now(state, victim):
                    budget += state.requests[victim].chunk
                elif state.config.exact_preemption_cursor == 0 and state.requests[victim].admission < this.admission:
                    skip += 1
                itself = victim == request
                after = state.links[request].running.next
                preempt(state, victim)
            if itself:
                # It has preempted itself.  In most releases the pass ends, and those behind it get nothing.
                if state.config.pass_outlives_preemption == 0:
                    budget = 0
                request = after
                continue
            if this.status == DECODING:
                give_decode(state, request, computed)
            else:
                give_chunk(state, request, tokens)
                state.batch.has_prefill = 1
            budget -= tokens
        request = state.links[request].running.next
    return budget


# -- 2b. Then waiting requests ---------------------------------------------------------------


@compiled
def admit_waiting(state: State, budget: int) -> None:
    """Admit from the head of the waiting queue until something is short."""
    at, config = state.at, state.config
    while at.waiting_depth > 0 and budget > 0 and at.running_depth < config.max_active_seqs:
        request = first_waiting(state)
        this = state.requests[request]
        row = state.free_rows[at.free_rows - 1]
        hits, free_hits, extents = find_cached_blocks(state, request, row)
        hit_tokens = max(hits * config.block_size, state.facts[request].given_hit)
        tokens = this.known - hit_tokens
        several = tokens > 1
        if several and state.batch.defers_prefill == 1:
            break
        if 0 < state.batch.prefill_cap < tokens:
            tokens = state.batch.prefill_cap
        refused = tokens > budget and config.chunked_prefill == 0
        tokens = min(tokens, budget)
        if refused or lacks_blocks(state, request, hit_tokens, hit_tokens + tokens, hits - free_hits):
            break
        enter_running(state, request, row, hits, extents)
        allocate_admitted(state, request, hit_tokens, hit_tokens + tokens)
        this.computed = hit_tokens
        note_admission(state, request, hit_tokens)
        if several:
            state.batch.has_prefill = 1
        give_chunk(state, request, tokens)
        budget -= tokens


@compiled
def lacks_blocks(state: State, request: int, hit: int, tokens: int, held: int) -> bool:
    """Whether too few blocks are free to admit a request with ``tokens`` tokens, ``hit`` of them cached.

    ``held``: cached blocks that others hold.  Some blocks are to be left free.
    """
    at, config = state.at, state.config
    if config.groups_at != 0:
        return call_operation(config.groups_at, LACKS, state, request, hit, tokens) == 1
    asked = max(state.requests[request].known, tokens) if config.full_prompt_admission == 1 else tokens
    spare = config.watermark_blocks if at.running_depth > 0 else 0
    return blocks_for(state, asked) + spare - held > at.free_blocks


@compiled
def note_admission(state: State, request: int, hit_tokens: int) -> None:
    """Results of an admission; the cached tokens reported are those of the first."""
    state.batch.admitted += 1
    outcome = state.outcomes[request]
    if outcome.scheduled_us < 0:
        outcome.scheduled_us = state.at.now_us
        outcome.scheduled_step = state.at.rows
        outcome.cached_tokens = hit_tokens
    else:
        outcome.resume_cached_tokens += hit_tokens
