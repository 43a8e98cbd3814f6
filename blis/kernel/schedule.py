"""One ``schedule()`` call: sections 2, 3 and 5 of the semantics.

The batch of a step is what the calls below leave in ``State.batch`` and in the chunks
of requests.  While nothing is short (blocks or budget), all decodes are served at once:
their number and context are kept sums, and only those that need a new block are
touched.  Otherwise the running list is walked member by member.
"""

from __future__ import annotations

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.pool import (
    blocks_for,
    enter_cache,
    get_blocks,
    give_keys,
    hold_cached_blocks,
    let_go,
    release_blocks,
    take_blocks,
)
from blis_replay.blis.kernel.queues import (
    close_segment,
    computed_now,
    enter_finish,
    first_waiting,
    last_token_step,
    leave_finish,
    leave_queue,
    pass_over,
    queue_up,
    start_decoding,
    start_running,
    stop_decoding,
    stop_prefill,
    stop_running,
)
from blis_replay.blis.kernel.state import (
    ADMISSION,
    BATCH_ADMITTED,
    BATCH_CONTEXT_TOKENS,
    BATCH_DECODE_TOKENS,
    BATCH_FIRST_TOKENS,
    BATCH_FREE_BEFORE,
    BATCH_PREFILL_REQUESTS,
    BATCH_PREFILL_TOKENS,
    BATCH_RUNNING_BEFORE,
    BATCH_SERVED,
    BATCH_WAITING_BEFORE,
    BATCHES_IN_FLIGHT,
    BLOCK_SIZE,
    BLOCKS_ENTERED,
    BLOCKS_HELD,
    CACHED_TOKENS,
    CHUNK,
    CHUNK_STEP,
    CHUNKED_PREFILL,
    COMPUTED,
    DECODING,
    DECODING_CONTEXT,
    DECODING_REQUESTS,
    FINISH_NEXT,
    FIRST_STEP,
    FREE_BLOCKS,
    FREE_ROWS,
    GIVEN_HIT,
    GROWTH_NEXT,
    GROWTH_SLOT,
    KEYED,
    KEYED_DECODING,
    KNOWN,
    LAST_IN_FLIGHT,
    LONG_PREFILL_THRESHOLD,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    NONE,
    NOW,
    PREEMPTED_IN_CALL,
    PREEMPTIONS,
    PREFILL_HEAD,
    PREFILL_NEXT,
    PREFILL_TAIL,
    PREFILLING,
    PREFIX_CACHING,
    PRIORITY_POLICY,
    PROMPT_TOKENS,
    RESUME_CACHED_TOKENS,
    RING_MASK,
    ROWS,
    RUN_HEAD,
    RUN_NEXT,
    RUN_TAIL,
    RUNNING_DEPTH,
    SCHEDULED_STEP,
    SCHEDULED_US,
    SEGMENT_START,
    STATUS,
    STEP,
    TABLE_ROW,
    TOTAL_TOKENS,
    URGENCY,
    WAITING_DEPTH,
    State,
)


@compiled
def schedule(state: State) -> None:
    """Build one batch at the current time; ``State.batch`` says what is in it."""
    at, batch = state.at, state.batch
    batch[:] = 0
    batch[BATCH_FREE_BEFORE] = at[FREE_BLOCKS]
    batch[BATCH_RUNNING_BEFORE] = at[RUNNING_DEPTH]
    batch[BATCH_WAITING_BEFORE] = at[WAITING_DEPTH]
    at[PREEMPTED_IN_CALL] = 0
    budget = serve_all_running(state) if nothing_is_short(state) else walk_running(state)
    if at[PREEMPTED_IN_CALL] == 0:
        admit_waiting(state, budget)
    end_decodes(state)
    end_prefills(state)


# -- 2a. Running requests first ------------------------------------------------------------


@compiled
def chunk_wanted(state: State, request: int) -> int:
    """Tokens that a request in prefill asks for, before the budget."""
    wanted = state.request[request, KNOWN] - state.request[request, COMPUTED]
    threshold = state.config[LONG_PREFILL_THRESHOLD]
    if 0 < threshold < wanted:
        wanted = threshold
    return min(wanted, state.config[MAX_MODEL_LEN] - 1 - state.request[request, COMPUTED])


@compiled
def nothing_is_short(state: State) -> bool:
    """Whether every running request certainly gets what it asks for, so that order is no matter.

    With one exception: a single prefill at the end of the list may be cut by the budget.
    """
    at = state.at
    blocks = state.growth_count[at[GROWTH_SLOT]]
    tokens = at[DECODING_REQUESTS]
    request = at[PREFILL_HEAD]
    while request != NONE:
        wanted = chunk_wanted(state, request)
        tokens += wanted
        blocks += blocks_for(state, state.request[request, COMPUTED] + wanted) - state.request[request, BLOCKS_HELD]
        request = state.link[request, PREFILL_NEXT]
    if blocks > at[FREE_BLOCKS]:
        return False
    budget = state.config[MAX_NUM_BATCHED_TOKENS]
    if tokens <= budget:
        return True
    only_last = at[PREFILL_HEAD] == at[PREFILL_TAIL] and at[PREFILL_HEAD] == at[RUN_TAIL]
    return only_last and at[DECODING_REQUESTS] < budget


@compiled
def serve_all_running(state: State) -> int:
    """Serve all running requests; the budget that is left.  O(prefills), and a little for what is evicted."""
    at, batch = state.at, state.batch
    take_blocks(state, state.growth_count[at[GROWTH_SLOT]])
    if at[KEYED_DECODING] > 0:
        # Known at once, a block is entered in the step that fills it (whose request needs a
        # new one in the next step); asynchronously when its last token has arrived.
        at_once = state.config[BATCHES_IN_FLIGHT] == 1
        slot = (at[STEP] + 1) % state.config[BLOCK_SIZE] if at_once else at[GROWTH_SLOT]
        request = state.growth_head[slot]
        while request != NONE:
            enter_decoded(state, request, computed_now(state, request))
            request = state.link[request, GROWTH_NEXT]
    batch[BATCH_SERVED] = at[DECODING_REQUESTS]
    batch[BATCH_DECODE_TOKENS] = at[DECODING_REQUESTS]
    batch[BATCH_CONTEXT_TOKENS] = at[DECODING_CONTEXT]
    budget = state.config[MAX_NUM_BATCHED_TOKENS] - at[DECODING_REQUESTS]
    request = at[PREFILL_HEAD]
    while request != NONE:
        tokens = min(chunk_wanted(state, request), budget)
        get_blocks(state, request, state.request[request, COMPUTED] + tokens)
        give_chunk(state, request, tokens)
        budget -= tokens
        request = state.link[request, PREFILL_NEXT]
    return budget


@compiled
def walk_running(state: State) -> int:
    """Go through the running list in its order; the budget that is left."""
    at = state.at
    budget = state.config[MAX_NUM_BATCHED_TOKENS]
    request = at[RUN_HEAD]
    skip = 0  # members to pass over because the list has shifted under the cursor
    while request != NONE:
        if budget <= 0 or skip > 0:
            skip -= 1
            if state.request[request, STATUS] == DECODING:
                pass_over(state, request)
            request = state.link[request, RUN_NEXT]
            continue
        computed = state.request[request, COMPUTED]
        tokens = 0
        if state.request[request, STATUS] == DECODING:
            computed = computed_now(state, request)
            state.request[request, BLOCKS_HELD] = blocks_for(state, computed)
            tokens = 1
        elif state.request[request, STATUS] == PREFILLING:
            tokens = min(chunk_wanted(state, request), budget)
        if tokens > 0:
            after = NONE
            itself = False
            while not itself and not get_blocks(state, request, computed + tokens):
                victim = choose_victim(state)
                if given_now(state, victim):
                    budget += state.request[victim, CHUNK]
                elif state.request[victim, ADMISSION] < state.request[request, ADMISSION]:
                    skip += 1
                itself = victim == request
                after = state.link[request, RUN_NEXT]
                preempt(state, victim)
            if itself:
                # It has preempted itself: the pass ends, those behind it get nothing.
                budget = 0
                request = after
                continue
            if state.request[request, STATUS] == DECODING:
                give_decode(state, request, computed)
            else:
                give_chunk(state, request, tokens)
            budget -= tokens
        request = state.link[request, RUN_NEXT]
    return budget


@compiled
def given_now(state: State, request: int) -> bool:
    """Whether this call has given the request tokens."""
    return state.request[request, CHUNK_STEP] == state.at[STEP] and state.request[request, CHUNK] > 0


@compiled
def give_decode(state: State, request: int, computed: int) -> None:
    """One decode token for a request with ``computed`` tokens; its block is held."""
    state.request[request, CHUNK] = 1
    state.request[request, CHUNK_STEP] = state.at[STEP]
    state.batch[BATCH_SERVED] += 1
    count(state, request, computed, 1, 1)
    if (computed + 1) % state.config[BLOCK_SIZE] == 0 or computed % state.config[BLOCK_SIZE] == 0:
        enter_decoded(state, request, computed)


@compiled
def give_chunk(state: State, request: int, tokens: int) -> None:
    """A prefill chunk; its blocks are held, and those it fills are cached at once."""
    state.request[request, CHUNK] = tokens
    state.request[request, CHUNK_STEP] = state.at[STEP]
    computed = state.request[request, COMPUTED]
    count(state, request, computed, tokens, 1)
    if state.config[PREFIX_CACHING] == 1:
        enter_cache(state, request, computed + tokens)


@compiled
def count(state: State, request: int, computed: int, tokens: int, sign: int) -> None:
    """Add a request's tokens to the batch (``sign`` 1) or take them out (-1).

    A decode is one token that is the last known one, at or past the prompt; all else,
    recomputation included, is prefill.
    """
    batch = state.batch
    decode = state.request[request, STATUS] == DECODING
    if not decode:
        decode = (
            tokens == 1
            and computed + 1 == state.request[request, KNOWN]
            and computed >= state.request[request, PROMPT_TOKENS]
        )
    if decode:
        batch[BATCH_DECODE_TOKENS] += sign
        batch[BATCH_CONTEXT_TOKENS] += sign * (computed + 1)
    else:
        batch[BATCH_PREFILL_TOKENS] += sign * tokens
        batch[BATCH_PREFILL_REQUESTS] += sign


@compiled
def enter_decoded(state: State, request: int, computed: int) -> None:
    """Cache what a decode at ``computed`` tokens fills, as far as its tokens are known."""
    if state.config[PREFIX_CACHING] == 1 and state.request[request, KEYED] == 1:
        unknown = 1 if in_flight_input(state, request, True) else 0
        enter_cache(state, request, computed + 1 - unknown)


@compiled
def in_flight_input(state: State, request: int, given: bool) -> bool:
    """Whether the last token a decode was given as input was not known when it was scheduled.

    Asynchronous only.  ``given``: it is in the batch being built, so its input is the token
    of the step before; else it was last in the batch before, or not at all.
    """
    if state.config[BATCHES_IN_FLIGHT] == 1:
        return False
    last = state.at[STEP] if given else state.at[STEP] - 1
    return state.request[request, SEGMENT_START] < last


# -- 2b. Then waiting requests ---------------------------------------------------------------


@compiled
def admit_waiting(state: State, budget: int) -> None:
    """Admit from the head of the waiting queue until something is short."""
    at, config = state.at, state.config
    while at[WAITING_DEPTH] > 0 and budget > 0 and at[RUNNING_DEPTH] < config[MAX_NUM_SEQS]:
        request = first_waiting(state)
        row = state.free_rows[at[FREE_ROWS] - 1]
        hits = hold_cached_blocks(state, request, row)
        hit_tokens = max(hits * config[BLOCK_SIZE], state.request[request, GIVEN_HIT])
        tokens = state.request[request, KNOWN] - hit_tokens
        if 0 < config[LONG_PREFILL_THRESHOLD] < tokens:
            tokens = config[LONG_PREFILL_THRESHOLD]
        refused = tokens > budget and config[CHUNKED_PREFILL] == 0
        tokens = min(tokens, budget)
        if refused or blocks_for(state, hit_tokens + tokens) - hits > at[FREE_BLOCKS]:
            let_go(state, row, hits)
            break
        leave_queue(state, request)
        start_running(state, request)
        at[FREE_ROWS] -= 1
        state.request[request, TABLE_ROW] = row
        state.request[request, BLOCKS_HELD] = hits
        state.request[request, BLOCKS_ENTERED] = hits
        get_blocks(state, request, hit_tokens + tokens)
        state.request[request, COMPUTED] = hit_tokens
        note_admission(state, request, hit_tokens)
        give_chunk(state, request, tokens)
        budget -= tokens


@compiled
def note_admission(state: State, request: int, hit_tokens: int) -> None:
    """Results of an admission; the cached tokens reported are those of the first."""
    state.batch[BATCH_ADMITTED] += 1
    if state.request[request, SCHEDULED_US] < 0:
        state.request[request, SCHEDULED_US] = state.at[NOW]
        state.request[request, SCHEDULED_STEP] = state.at[ROWS]
        state.request[request, CACHED_TOKENS] = hit_tokens
    else:
        state.request[request, RESUME_CACHED_TOKENS] += hit_tokens


# -- 5. Preemption ------------------------------------------------------------------------------


@compiled
def choose_victim(state: State) -> int:
    """FCFS: the last of the running list.  Priority: the greatest (priority, arrival), first on a tie."""
    if state.config[PRIORITY_POLICY] == 0:
        return state.at[RUN_TAIL]
    victim = state.at[RUN_HEAD]
    request = state.link[victim, RUN_NEXT]
    while request != NONE:
        if state.request[request, URGENCY] > state.request[victim, URGENCY]:
            victim = request
        request = state.link[request, RUN_NEXT]
    return victim


@compiled
def preempt(state: State, request: int) -> None:
    """Back to the waiting queue, to recompute its tokens; blocks go, cached contents stay."""
    state.at[PREEMPTED_IN_CALL] += 1
    state.request[request, PREEMPTIONS] += 1
    given = given_now(state, request)
    if state.request[request, STATUS] == DECODING:
        computed = computed_now(state, request)
        cached = computed + 1 if given else computed
        if in_flight_input(state, request, given):
            cached -= 1
        if given:
            count(state, request, computed, 1, -1)
            state.batch[BATCH_SERVED] -= 1
        state.request[request, KNOWN] = computed + 1
        state.request[request, BLOCKS_HELD] = blocks_for(state, computed + 1 if given else computed)
        leave_decoding(state, request, computed)
    elif state.request[request, STATUS] == PREFILLING:
        cached = state.request[request, COMPUTED]
        if given:
            count(state, request, cached, state.request[request, CHUNK], -1)
            cached += state.request[request, CHUNK]
        stop_prefill(state, request)
    else:  # its last token is in flight; it finishes when that is in, from the queue
        cached = state.request[request, TOTAL_TOKENS] - 1
        if in_flight_input(state, request, False):
            cached -= 1
        state.request[request, KNOWN] = state.request[request, TOTAL_TOKENS]
    state.request[request, CHUNK] = 0
    give_keys(state, request)
    if state.config[PREFIX_CACHING] == 1:
        enter_cache(state, request, cached)
    vacate(state, request)
    queue_up(state, request)


@compiled
def leave_decoding(state: State, request: int, computed: int) -> None:
    """Out of all that is kept of a decode with ``computed`` tokens at the current step."""
    stop_decoding(state, request, computed)
    leave_finish(state, request, last_token_step(state, request))
    close_segment(state, request, state.at[STEP], state.at[ROWS] - 1)


@compiled
def vacate(state: State, request: int) -> None:
    """Give up blocks, table row and place in the running list."""
    release_blocks(state, request)
    state.free_rows[state.at[FREE_ROWS]] = state.request[request, TABLE_ROW]
    state.at[FREE_ROWS] += 1
    state.request[request, TABLE_ROW] = NONE
    state.request[request, COMPUTED] = 0
    stop_running(state, request)


# -- 7. What the batch leads to ------------------------------------------------------------------


@compiled
def end_decodes(state: State) -> None:
    """Decodes that were served are one token on; those whose last token this gives stop asking."""
    at = state.at
    at[DECODING_CONTEXT] += state.batch[BATCH_SERVED]
    request = state.finish_head[at[STEP] & state.config[RING_MASK]]
    while request != NONE:
        if state.request[request, STATUS] == DECODING:
            stop_decoding(state, request, computed_now(state, request) + 1)
            state.request[request, STATUS] = LAST_IN_FLIGHT
            state.request[request, BLOCKS_HELD] = blocks_for(state, state.request[request, TOTAL_TOKENS] - 1)
        request = state.link[request, FINISH_NEXT]


@compiled
def end_prefills(state: State) -> None:
    """Advance the prefills of the batch; one that reaches its last known token yields a token."""
    at = state.at
    request = at[PREFILL_HEAD]
    while request != NONE:
        after = state.link[request, PREFILL_NEXT]
        if given_now(state, request):
            state.request[request, COMPUTED] += state.request[request, CHUNK]
            if state.request[request, COMPUTED] == state.request[request, KNOWN]:
                stop_prefill(state, request)
                state.batch[BATCH_FIRST_TOKENS] += 1
                state.request[request, SEGMENT_START] = at[STEP]
                if state.request[request, FIRST_STEP] == NONE:
                    state.request[request, FIRST_STEP] = at[ROWS]
                if state.request[request, KNOWN] + 1 == state.request[request, TOTAL_TOKENS]:
                    state.request[request, STATUS] = LAST_IN_FLIGHT
                    enter_finish(state, request, at[STEP])
                else:
                    start_decoding(state, request, at[STEP] + 1)
        request = after
