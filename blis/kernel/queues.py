"""Who waits and who runs: the waiting heap and the lists of running requests.

The waiting queue is a heap of ranks for both policies.  Under FCFS a rank is the place
in the order of queueing: a victim is the last of the running list, so "back to the head
of the queue" and "back to its rank" are the same place.  Under priority a rank is the
place by (priority, arrival time, request id).
"""

from __future__ import annotations

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.state import (
    ADMISSION,
    ADMISSIONS,
    BASE,
    BLOCK_SIZE,
    DECODING,
    DECODING_CONTEXT,
    DECODING_REQUESTS,
    FINISH_NEXT,
    FINISH_PREV,
    GROWTH_NEXT,
    GROWTH_PREV,
    KEYED,
    KEYED_DECODING,
    KNOWN,
    NONE,
    PREFILL_HEAD,
    PREFILL_NEXT,
    PREFILL_PREV,
    PREFILL_TAIL,
    PREFILLING,
    RANK,
    RING_MASK,
    ROWS,
    RUN_HEAD,
    RUN_NEXT,
    RUN_PREV,
    RUN_TAIL,
    RUNNING_DEPTH,
    SEGMENT_START,
    SEGMENTS,
    STATUS,
    STEP,
    TOTAL_TOKENS,
    WAITING,
    WAITING_DEPTH,
    State,
)

# -- waiting ----------------------------------------------------------------------------


@compiled
def queue_up(state: State, request: int) -> None:
    """Put a request into the waiting queue."""
    state.request[request, STATUS] = WAITING
    heap, i = state.heap, state.at[WAITING_DEPTH]
    rank = state.request[request, RANK]
    state.at[WAITING_DEPTH] = i + 1
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
    heap, rank = state.heap, state.request[request, RANK]
    i = 0
    while heap[i] != rank:
        i += 1
    size = state.at[WAITING_DEPTH] - 1
    state.at[WAITING_DEPTH] = size
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
def _append(state: State, request: int, before: int, after: int, head: int, tail: int) -> None:
    """Put a request at the end of the list whose links and ends these are."""
    at, link = state.at, state.link
    last = at[tail]
    link[request, before] = last
    link[request, after] = NONE
    if last == NONE:
        at[head] = request
    else:
        link[last, after] = request
    at[tail] = request


@compiled
def _unlink(state: State, request: int, before: int, after: int, head: int, tail: int) -> None:
    """Take a request out of the list whose links and ends these are."""
    at, link = state.at, state.link
    previous, following = link[request, before], link[request, after]
    if previous == NONE:
        at[head] = following
    else:
        link[previous, after] = following
    if following == NONE:
        at[tail] = previous
    else:
        link[following, before] = previous


@compiled
def start_running(state: State, request: int) -> None:
    """Append an admitted request to the running list and to those in prefill."""
    at = state.at
    state.request[request, STATUS] = PREFILLING
    state.request[request, ADMISSION] = at[ADMISSIONS]
    at[ADMISSIONS] += 1
    at[RUNNING_DEPTH] += 1
    _append(state, request, RUN_PREV, RUN_NEXT, RUN_HEAD, RUN_TAIL)
    _append(state, request, PREFILL_PREV, PREFILL_NEXT, PREFILL_HEAD, PREFILL_TAIL)


@compiled
def stop_running(state: State, request: int) -> None:
    """Take a request out of the running list."""
    state.at[RUNNING_DEPTH] -= 1
    _unlink(state, request, RUN_PREV, RUN_NEXT, RUN_HEAD, RUN_TAIL)


@compiled
def stop_prefill(state: State, request: int) -> None:
    """Take a request out of those in prefill."""
    _unlink(state, request, PREFILL_PREV, PREFILL_NEXT, PREFILL_HEAD, PREFILL_TAIL)


# -- decoding ---------------------------------------------------------------------------
# A decoding request gets a token in every step unless it is passed over, so its progress
# is a difference of step numbers, and it stands in two buckets: of the steps (modulo
# block size) in which it needs a new block, and of the step that gives its last token.


@compiled
def computed_now(state: State, request: int) -> int:
    """Computed tokens of a decoding request at the start of the current step."""
    return state.at[STEP] - state.request[request, BASE]


@compiled
def last_token_step(state: State, request: int) -> int:
    """The step that gives a decoding request its last token, if none passes it over."""
    return state.request[request, TOTAL_TOKENS] - 2 + state.request[request, BASE]


@compiled
def start_decoding(state: State, request: int, first_decode_step: int) -> None:
    """From ``first_decode_step`` on the request asks for one token a step."""
    at = state.at
    state.request[request, STATUS] = DECODING
    # Its known tokens are all computed but the one the last step gave.
    state.request[request, BASE] = first_decode_step - state.request[request, KNOWN]
    at[DECODING_REQUESTS] += 1
    at[DECODING_CONTEXT] += state.request[request, KNOWN] + 1
    at[KEYED_DECODING] += state.request[request, KEYED]
    enter_growth(state, request)
    enter_finish(state, request, last_token_step(state, request))


@compiled
def stop_decoding(state: State, request: int, computed: int) -> None:
    """Take a request with ``computed`` tokens out of those that ask for a decode token."""
    at = state.at
    at[DECODING_REQUESTS] -= 1
    at[DECODING_CONTEXT] -= computed + 1
    at[KEYED_DECODING] -= state.request[request, KEYED]
    leave_growth(state, request)


@compiled
def pass_over(state: State, request: int) -> None:
    """The current step gives a decoding request nothing: all that is to come is one step later."""
    close_segment(state, request, state.at[STEP], state.at[ROWS] - 1)
    state.request[request, SEGMENT_START] = state.at[STEP] + 1
    leave_growth(state, request)
    leave_finish(state, request, last_token_step(state, request))
    state.request[request, BASE] += 1
    enter_growth(state, request)
    enter_finish(state, request, last_token_step(state, request))


@compiled
def enter_growth(state: State, request: int) -> None:
    """Into the bucket of the steps in which the request has a multiple of the block size computed."""
    slot = state.request[request, BASE] % state.config[BLOCK_SIZE]
    after = state.growth_head[slot]
    state.link[request, GROWTH_NEXT] = after
    state.link[request, GROWTH_PREV] = NONE
    if after != NONE:
        state.link[after, GROWTH_PREV] = request
    state.growth_head[slot] = request
    state.growth_count[slot] += 1


@compiled
def leave_growth(state: State, request: int) -> None:
    """Out of that bucket."""
    slot = state.request[request, BASE] % state.config[BLOCK_SIZE]
    before, after = state.link[request, GROWTH_PREV], state.link[request, GROWTH_NEXT]
    if before == NONE:
        state.growth_head[slot] = after
    else:
        state.link[before, GROWTH_NEXT] = after
    if after != NONE:
        state.link[after, GROWTH_PREV] = before
    state.growth_count[slot] -= 1


@compiled
def enter_finish(state: State, request: int, step: int) -> None:
    """Into the bucket of the step that gives the last token."""
    slot = step & state.config[RING_MASK]
    after = state.finish_head[slot]
    state.link[request, FINISH_NEXT] = after
    state.link[request, FINISH_PREV] = NONE
    if after != NONE:
        state.link[after, FINISH_PREV] = request
    state.finish_head[slot] = request


@compiled
def leave_finish(state: State, request: int, step: int) -> None:
    """Out of that bucket."""
    before, after = state.link[request, FINISH_PREV], state.link[request, FINISH_NEXT]
    if before == NONE:
        state.finish_head[step & state.config[RING_MASK]] = after
    else:
        state.link[before, FINISH_NEXT] = after
    if after != NONE:
        state.link[after, FINISH_PREV] = before


@compiled
def close_segment(state: State, request: int, end_turn: int, last_row: int) -> None:
    """Note the turns SEGMENT_START .. ``end_turn - 1`` as a run that gave a token each.

    ``last_row``: the row of the last of them (they are none of them empty, so their rows
    follow each other as well).
    """
    turns = end_turn - state.request[request, SEGMENT_START]
    if state.request[request, SEGMENT_START] != NONE and turns > 0:
        i = state.at[SEGMENTS]
        state.segments[i, 0] = request
        state.segments[i, 1] = last_row - turns + 1
        state.segments[i, 2] = turns
        state.at[SEGMENTS] = i + 1
    state.request[request, SEGMENT_START] = NONE
