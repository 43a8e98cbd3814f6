"""Batches with drafts: ``schedule`` for requests whose progress is known only when a step's tokens are in.

Each running request is walked in each step, and its tokens are numbers of its own.  Drafts are in the budget of the
step and have KV slots; rejected ones give their tokens back, not their blocks.  A block is cached once its tokens are
accepted.  Synchronously the drafts behind a token are known when the next step is built.  With two batches in flight
each step is built with as many as there can be, before the one ahead has accepted any: those count as known until then
(``Drafted.placeholders``).
"""

from __future__ import annotations

from blis_replay.blis.kernel.batch import (
    choose_victim,
    count_attended,
    count_context,
    end_interval,
    enter_running,
    given_now,
    of_mean_layer,
)
from blis_replay.blis.kernel.flight import Flight
from blis_replay.blis.kernel.pool import (
    allocate_admitted,
    allocate_slots,
    enter_cache,
    find_cached_blocks,
    give_keys,
    leave_windows,
)
from blis_replay.blis.kernel.queues import first_waiting, note_segment, queue_up, stop_prefill, vacate
from blis_replay.blis.kernel.schedule import begin_batch, lacks_blocks, note_admission
from blis_replay.blis.kernel.state import NONE, State, compiled, separate


@compiled
def schedule(state: State, flight: Flight) -> None:
    """Build one batch: running requests in their order, then waiting ones."""
    begin_batch(state, somebody_decodes(state, flight))
    budget = walk_running(state, flight)
    if state.at.preempted_in_call == 0:
        admit_waiting(state, flight, budget)
    end_interval(state)
    of_mean_layer(state)
    end_batch(state, flight)


@compiled
def somebody_decodes(state: State, flight: Flight) -> bool:
    """Whether a running request has all its known tokens computed, or on their way."""
    request = state.at.running.head
    while request != NONE:
        if flight.requests[request].in_prefill == 0:
            return True
        request = state.links[request].running.next
    return False


@compiled
def walk_running(state: State, flight: Flight) -> int:
    """Go through the running list in its order; the budget that is left."""
    budget = state.config.token_budget
    request = state.at.running.head
    skip = 0  # members to pass over because the list has shifted under the cursor
    while request != NONE and budget > 0:
        this = state.requests[request]
        tokens = 0 if skip > 0 else min(tokens_wanted(state, flight, request), budget)
        if tokens <= 0:
            skip = max(skip - 1, 0)
            request = state.links[request].running.next
            continue
        itself, pinned, after = False, False, NONE
        slots = min(this.computed + tokens + flight.config.lookahead, state.config.max_model_len)
        own = flight.requests[request]
        leave_windows(state, request, this.computed - own.in_flight * state.config.frees_processed, own.cached)
        while not itself and not allocate_slots(state, request, slots):
            victim = choose_victim(state)
            # A load could overwrite blocks that a batch in flight still writes.
            pinned = state.config.offloads == 1 and flight.requests[victim].in_flight > 0
            if pinned:
                break
            if given_now(state, victim):
                budget += state.requests[victim].chunk
            elif state.config.exact_preemption_cursor == 0 and state.requests[victim].admission < this.admission:
                skip += 1
            itself = victim == request
            after = state.links[request].running.next
            preempt(state, flight, victim)
        if pinned:
            break
        if itself:
            if state.config.pass_outlives_preemption == 0:
                budget = 0
            request = after
            continue
        give(state, flight, request, tokens)
        if flight.requests[request].in_prefill == 1:
            state.batch.has_prefill = 1
        budget -= tokens
        request = state.links[request].running.next
    return budget


@compiled
def tokens_wanted(state: State, flight: Flight, request: int) -> int:
    """Tokens that a running request asks for, drafts included, before the budget."""
    this, own = state.requests[request], flight.requests[request]
    if own.in_prefill == 1 and state.batch.defers_prefill == 1:
        return 0
    # Even if all drafts in flight are rejected, its last token is among what is in flight.
    ends = flight.config.once_more == 0 and own.placeholders > 0
    if ends and this.computed + 2 - own.placeholders >= state.facts[request].total_tokens:
        return 0
    wanted = this.known + own.drafts + own.placeholders - this.computed
    if 0 < state.batch.prefill_cap < wanted:
        wanted = state.batch.prefill_cap
    return min(wanted, state.config.max_model_len - 1 - this.computed)


@compiled
def give(state: State, flight: Flight, request: int, tokens: int) -> None:
    """Tokens for a request; their slots are held, and blocks that known tokens fill are cached at once."""
    this, own = state.requests[request], flight.requests[request]
    this.chunk = tokens
    this.chunk_step = state.at.step
    drafts = min(max(this.computed + tokens - this.known - own.placeholders, 0), own.drafts)
    own.given_drafts = drafts
    own.drafts = 0
    count(state, flight, request, 1)
    note_cached(state, flight, request, min(this.computed + tokens, this.known))


@compiled
def note_cached(state: State, flight: Flight, request: int, tokens: int) -> None:
    """Blocks that the first ``tokens`` tokens of a request fill may be looked up from now on."""
    own = flight.requests[request]
    own.cached = max(own.cached, min(tokens, state.requests[request].known - flight.config.hash_lookahead))
    if state.config.prefix_caching == 1:
        enter_cache(state, request, own.cached)


@compiled
def count(state: State, flight: Flight, request: int, sign: int) -> None:
    """Add what a request was given to the batch (``sign`` 1), or take it out again (-1).

    A decode is the last known token, at or past the prompt, and the drafts behind it; all else is prefill.
    """
    batch, this, own = state.batch, state.requests[request], flight.requests[request]
    tokens, computed = this.chunk, this.computed
    drafts = max(own.given_drafts, 0)
    last_known = tokens == 1 + drafts and computed + 1 == this.known + own.placeholders
    if last_known and computed >= state.facts[request].prompt_tokens:
        batch.served += sign
        batch.decode_tokens += sign * tokens
        count_context(state, computed, tokens, sign)
    else:
        batch.prefill_tokens += sign * tokens
        batch.prefill_requests += sign
        count_attended(state, computed, tokens, sign)


@separate
def preempt(state: State, flight: Flight, request: int) -> None:
    """Back to the waiting queue, to recompute its tokens; what it has in flight still counts when it is in."""
    this, own = state.requests[request], flight.requests[request]
    state.at.preempted_in_call += 1
    state.outcomes[request].preemptions += 1
    if given_now(state, request):
        count(state, flight, request, -1)
    this.chunk = 0
    close_segment(state, flight, request)
    give_keys(state, request)
    leave_running(state, flight, request)
    own.placeholders = 0
    own.drafts *= flight.config.keeps_drafts
    own.stale = own.in_flight
    if state.config.offloads == 1:
        go_first(state, request)
    queue_up(state, request)


@compiled
def leave_running(state: State, flight: Flight, request: int) -> None:
    """Out of the running list; its blocks go, cached contents stay."""
    stop_prefill(state, request)
    vacate(state, request, flight.requests[request].cached)
    flight.requests[request].cached = 0


@compiled
def admit_waiting(state: State, flight: Flight, budget: int) -> None:
    """Admit from the head of the waiting queue until something is short."""
    at, config = state.at, state.config
    chunk_ran, anybody_ran = ran_before(state, flight)
    while at.waiting_depth > 0 and budget > 0 and at.running_depth < config.max_active_seqs:
        request = first_waiting(state)
        this, own = state.requests[request], flight.requests[request]
        row = state.free_rows[at.free_rows - 1]
        hits, free_hits, extents = find_cached_blocks(state, request, row)
        if flight.config.drops_last_hit == 1 and hits > 0:
            hits, free_hits, extents = drop_last_found(state, row, hits, free_hits, extents)
        hit_tokens = max(hits * config.block_size, state.facts[request].given_hit)
        tokens = this.known - hit_tokens
        several = tokens > 1
        if several and state.batch.defers_prefill == 1:
            break
        padded = 0
        alone = flight.config.pads_alone == 1 and hit_tokens > 0
        if flight.config.pads == 1 and tokens == 1 and not chunk_ran and (anybody_ran or alone):
            filled = 1 + flight.config.tokens
            waits = flight.config.pads_or_waits == 1
            fits = hit_tokens + filled + (0 if waits else 1) <= config.max_model_len
            if (fits and filled > budget) or (waits and not fits):
                break
            if fits:
                tokens = filled
                padded = flight.config.tokens
        if 0 < state.batch.prefill_cap < tokens:
            tokens = state.batch.prefill_cap
        refused = tokens > budget and config.chunked_prefill == 0
        tokens = min(tokens, budget)
        slots = min(hit_tokens + tokens + flight.config.lookahead_at_admission, config.max_model_len)
        if refused or lacks_blocks(state, request, hit_tokens, slots, hits - free_hits):
            break
        enter_running(state, request, row, hits, extents)
        allocate_admitted(state, request, hit_tokens, slots)
        this.computed = hit_tokens
        own.cached = hit_tokens
        kept = own.drafts  # of before a preemption
        own.drafts = padded
        if several:
            state.batch.has_prefill = 1
        note_admission(state, request, hit_tokens)
        give(state, flight, request, tokens)
        own.drafts = kept
        if padded > 0:
            own.given_drafts = -padded - 1
        budget -= tokens


@compiled
def ran_before(state: State, flight: Flight) -> tuple[bool, bool]:
    """Whether the running requests of the batch have one in prefill among them, and whether there are any."""
    chunk, anybody = False, False
    request = state.at.running.head
    while request != NONE:
        if given_now(state, request):
            anybody = True
            chunk = chunk or flight.requests[request].in_prefill == 1
        request = state.links[request].running.next
    return chunk, anybody


@compiled
def end_batch(state: State, flight: Flight) -> None:
    """Advance the members of the batch; who has all known tokens computed is given tokens by it."""
    request = state.at.running.head
    while request != NONE:
        this, own = state.requests[request], flight.requests[request]
        if given_now(state, request):
            this.computed += this.chunk
            own.in_flight += this.chunk
            own.in_prefill = 1 if this.computed < this.known + own.placeholders else 0
            state.batch.first_tokens += 1 - own.in_prefill
        request = state.links[request].running.next


@compiled
def list_batch(state: State, flight: Flight, place: int) -> None:
    """Note who is in the batch just scheduled, in its order, and what each was given."""
    members, request = 0, state.at.running.head
    while request != NONE:
        this, own = state.requests[request], flight.requests[request]
        if given_now(state, request):
            flight.batches[place, members, 0] = request
            flight.batches[place, members, 1] = this.chunk
            flight.batches[place, members, 2] = own.given_drafts
            flight.batches[place, members, 3] = 1 - own.in_prefill
            members += 1
            if own.in_prefill == 0 and state.config.batches_in_flight == 2:
                drafts = own.given_drafts
                own.placeholders += 1 + (drafts if drafts >= 0 else -drafts - 1)
                own.drafts = flight.config.tokens
        request = state.links[request].running.next
    flight.counts[place] = members


@compiled
def close_segment(state: State, flight: Flight, request: int) -> None:
    """Note the steps that gave the request a token each."""
    own = flight.requests[request]
    if own.segment_rows > 0:
        note_segment(state, request, own.segment_row, own.segment_rows)
    own.segment_rows = 0


@compiled
def drop_last_found(state: State, row: int, found: int, free: int, extents: int) -> tuple[int, int, int]:
    """What ``find_cached_blocks`` found and noted in a row of the table, which is something, without its last block."""
    last = extents - 1
    if state.extents[state.table[row, 2 * last]].ref_count == 0:
        free -= 1
    if state.table[row, 2 * last + 1] == 1:
        return found - 1, free, last
    state.table[row, 2 * last + 1] -= 1
    return found - 1, free, extents


@compiled
def go_first(state: State, request: int) -> None:
    """Put a preempted request before all that wait under FCFS; it need not be older where some are passed over."""
    if state.config.priority_policy == 0:
        facts = state.facts[request]
        if state.at.waiting_depth > 0:
            facts.rank = max(state.heap[0] - 1, 0)  # ``blis.offloading`` leaves a million ranks
        state.by_rank[facts.rank] = request
