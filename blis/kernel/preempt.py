"""Preemption by recomputation: section 5 of the semantics."""

from __future__ import annotations

from blis_replay.blis.kernel.batch import count, given_now, in_flight_input
from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.pool import (
    blocks_for,
    enter_cache,
    give_keys,
    release_blocks,
)
from blis_replay.blis.kernel.queues import (
    close_segment,
    computed_now,
    last_token_step,
    leave_finish,
    queue_up,
    stop_decoding,
    stop_prefill,
    stop_running,
)
from blis_replay.blis.kernel.state import (
    BATCH_SERVED,
    BLOCKS_HELD,
    CHUNK,
    COMPUTED,
    DECODING,
    FREE_ROWS,
    KNOWN,
    NONE,
    PREEMPTED_IN_CALL,
    PREEMPTIONS,
    PREFILLING,
    PREFIX_CACHING,
    PRIORITY_POLICY,
    ROWS,
    RUN_HEAD,
    RUN_NEXT,
    RUN_TAIL,
    STATUS,
    STEP,
    TABLE_ROW,
    TOTAL_TOKENS,
    URGENCY,
    State,
)


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
