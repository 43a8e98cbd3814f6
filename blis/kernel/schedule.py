"""One ``schedule()`` call: sections 2 and 3 of the semantics.

The batch of a step is what the calls below leave in ``State.batch`` and in the chunks
of requests.  While nothing is short (blocks or budget), all decodes are served at once:
their number and context are kept sums, and only those that need a new block are
touched.  Otherwise the running list is walked member by member.
"""

from __future__ import annotations

from blis_replay.blis.kernel.batch import enter_decoded, give_chunk, give_decode, given_now
from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.free_queue import take_blocks
from blis_replay.blis.kernel.pool import (
    blocks_for,
    fetch_blocks,
    find_cached_blocks,
    find_stored_blocks,
    get_blocks,
    hold_found_blocks,
)
from blis_replay.blis.kernel.preempt import choose_victim, preempt
from blis_replay.blis.kernel.queues import (
    computed_now,
    enter_finish,
    first_waiting,
    leave_queue,
    pass_over,
    start_decoding,
    start_running,
    stop_decoding,
    stop_prefill,
)
from blis_replay.blis.kernel.state import (
    ADMISSION,
    BATCH_ADMITTED,
    BATCH_CONTEXT_TOKENS,
    BATCH_DECODE_TOKENS,
    BATCH_FIRST_TOKENS,
    BATCH_FREE_BEFORE,
    BATCH_SERVED,
    BATCH_SIZE,
    BATCHES_IN_FLIGHT,
    BLOCK_SIZE,
    BLOCKS_ENTERED,
    BLOCKS_HELD,
    CACHED_TOKENS,
    CHUNK,
    CHUNKED_PREFILL,
    COMPUTED,
    CPU_BLOCKS,
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
    PREFILL_HEAD,
    PREFILL_NEXT,
    PREFILL_TAIL,
    PREFILLING,
    RESUME_CACHED_TOKENS,
    RING_MASK,
    ROWS,
    RUN_HEAD,
    RUN_NEXT,
    RUN_TAIL,
    RUNNING_DEPTH,
    SCHEDULED_STEP,
    SEGMENT_START,
    STATUS,
    STEP,
    TABLE_ROW,
    TOTAL_TOKENS,
    WAITING_DEPTH,
    State,
    index,
)


@compiled
def schedule(state: State) -> None:
    """Build one batch at the current time; ``State.batch`` says what is in it."""
    at, batch = state.at, state.batch
    for i in range(BATCH_SIZE):
        batch[i] = 0
    batch[BATCH_FREE_BEFORE] = at[FREE_BLOCKS]
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
    blocks = state.growth_count[index(at[GROWTH_SLOT])]
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
    take_blocks(state, state.growth_count[index(at[GROWTH_SLOT])])
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


# -- 2b. Then waiting requests ---------------------------------------------------------------


@compiled
def admit_waiting(state: State, budget: int) -> None:
    """Admit from the head of the waiting queue until something is short."""
    at, config = state.at, state.config
    while at[WAITING_DEPTH] > 0 and budget > 0 and at[RUNNING_DEPTH] < config[MAX_NUM_SEQS]:
        request = first_waiting(state)
        row = state.free_rows[at[FREE_ROWS] - 1]
        hits, free_hits, pieces = find_cached_blocks(state, request, row)
        stored = find_stored_blocks(state, request, hits) if config[CPU_BLOCKS] > 0 else 0
        hit_tokens = max((hits + stored) * config[BLOCK_SIZE], state.request[request, GIVEN_HIT])
        tokens = state.request[request, KNOWN] - hit_tokens
        if 0 < config[LONG_PREFILL_THRESHOLD] < tokens:
            tokens = config[LONG_PREFILL_THRESHOLD]
        refused = tokens > budget and config[CHUNKED_PREFILL] == 0
        tokens = min(tokens, budget)
        if refused or blocks_for(state, hit_tokens + tokens) - hits > at[FREE_BLOCKS] - free_hits:
            break
        leave_queue(state, request)
        start_running(state, request)
        at[FREE_ROWS] -= 1
        state.request[request, TABLE_ROW] = row
        state.request[request, BLOCKS_HELD] = hits
        state.request[request, BLOCKS_ENTERED] = hits
        hold_found_blocks(state, request, pieces)
        if stored > 0:
            fetch_blocks(state, request, hits, stored)
        get_blocks(state, request, hit_tokens + tokens)
        state.request[request, COMPUTED] = hit_tokens
        note_admission(state, request, hit_tokens)
        give_chunk(state, request, tokens)
        budget -= tokens


@compiled
def note_admission(state: State, request: int, hit_tokens: int) -> None:
    """Results of an admission; the cached tokens reported are those of the first."""
    state.batch[BATCH_ADMITTED] += 1
    if state.scheduled_us[request] < 0:
        state.scheduled_us[request] = state.at[NOW]
        state.request[request, SCHEDULED_STEP] = state.at[ROWS]
        state.request[request, CACHED_TOKENS] = hit_tokens
    else:
        state.request[request, RESUME_CACHED_TOKENS] += hit_tokens


# -- 7. What the batch leads to ------------------------------------------------------------------


@compiled
def end_decodes(state: State) -> None:
    """Decodes that were served are one token on; those whose last token this gives stop asking."""
    at = state.at
    at[DECODING_CONTEXT] += state.batch[BATCH_SERVED]
    request = state.finish_head[index(at[STEP] & state.config[RING_MASK])]
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
