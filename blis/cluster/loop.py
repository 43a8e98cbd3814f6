"""The loop of a cluster: requests are routed in order of arrival, and instances advanced when the router looks.

At a tie the router comes first: it sees what was before (blis-semantics, section 4).
"""

from __future__ import annotations

from blis_replay.blis.cluster.affinity import remember
from blis_replay.blis.cluster.compiled import compiled, entry
from blis_replay.blis.cluster.routing import choose, looks, take_snapshot
from blis_replay.blis.cluster.state import (
    DECISIONS,
    GIVEN,
    PREFIX_AFFINITY,
    QUEUED,
    ROUTER,
    STOPPED_AT,
    Front,
    instance,
)
from blis_replay.blis.kernel.loop import IDLE, NEEDS_ROOM, STUCK, advance
from blis_replay.blis.kernel.state import (
    LINK_COLUMNS,
    NEVER,
    NEXT_ABORT,
    NONE,
    NOW,
    RANK,
    REQUEST_COLUMNS,
    SUBMITTED,
    Int64s,
    State,
)
from blis_replay.blis.kernel.step_time import Floats


@entry
def run(stack: State, front: Front, kind: int, whole: Int64s, real: Floats) -> int:
    """Route all requests and serve them (IDLE), or stop at an instance that NEEDS_ROOM or is STUCK."""
    progress = front.progress
    while True:
        decision = progress[DECISIONS]
        everything_routed = decision == len(front.routed_us)
        now_us = NEVER if everything_routed else front.routed_us[decision]
        if everything_routed or looks(front, now_us):
            answer = advance_all(stack, front, now_us, kind, whole, real)
            if answer in (NEEDS_ROOM, STUCK) or everything_routed:
                return answer
            take_snapshot(stack, front, now_us)
        route(stack, front, decision)
        progress[DECISIONS] += 1


@compiled
def route(stack: State, front: Front, decision: int) -> None:
    """Send the next request to an instance."""
    if front.policy[ROUTER] != GIVEN:
        front.target[decision] = choose(stack, front, front.place[decision])
        if front.weights[PREFIX_AFFINITY] > 0:
            remember(stack, front, front.place[decision], front.target[decision])
    front.routed[front.target[decision]] += 1


@compiled
def advance_all(stack: State, front: Front, until_us: int, kind: int, whole: Int64s, real: Floats) -> int:
    """Bring every instance to where no step can be scheduled before ``until_us``.

    Who queues by then has been routed: nobody queues before the router has seen it.
    """
    progress = front.progress
    while progress[QUEUED] < len(front.queued_us) and front.queued_us[progress[QUEUED]] < until_us:
        i = front.target[front.order[progress[QUEUED]]]
        if stack.at[i, SUBMITTED] == stack.queued_us.shape[1]:
            progress[STOPPED_AT] = i
            return NEEDS_ROOM
        queue_at(stack, front, progress[QUEUED], i)
        progress[QUEUED] += 1
    for i in range(len(stack.at)):
        if stack.at[i, NOW] < until_us:
            answer = advance(instance(stack, i), until_us, kind, whole, real)
            if answer in (NEEDS_ROOM, STUCK):
                progress[STOPPED_AT] = i
                return answer
    return IDLE


@compiled
def queue_at(stack: State, front: Front, request: int, i: int) -> None:
    """Make a request, by its number by queueing, the next one of an instance."""
    local = stack.at[i, SUBMITTED]
    for column in range(REQUEST_COLUMNS):
        stack.request[i, column, local] = front.columns[column, request]
    for column in range(LINK_COLUMNS):
        stack.link[i, local, column] = NONE
    stack.queued_us[i, local] = front.queued_us[request]
    stack.scheduled_us[i, local] = NONE
    stack.by_rank[front.columns[RANK, request]] = local
    note_abort(stack, i, local, front.abort_us[request])
    stack.at[i, SUBMITTED] += 1


@compiled
def note_abort(stack: State, i: int, local: int, abort_us: int) -> None:
    """Put the newest request of an instance to its place among those that may still be given up."""
    stack.abort_us[i, local] = abort_us
    place = stack.at[i, SUBMITTED]
    while place > stack.at[i, NEXT_ABORT] and stack.abort_us[i, stack.abort_order[i, place - 1]] > abort_us:
        stack.abort_order[i, place] = stack.abort_order[i, place - 1]
        place -= 1
    stack.abort_order[i, place] = local
