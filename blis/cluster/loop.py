"""The loop of a cluster: requests are routed in order of arrival, and instances advanced when the router looks.

At a tie the router comes first: it sees what was before (blis-semantics, section 4).
"""

from __future__ import annotations

from blis_replay.blis.cluster.routing import choose, looks, remember, take_snapshot
from blis_replay.blis.cluster.state import GIVEN, Front, compiled, entry, instance
from blis_replay.blis.kernel.loop import IDLE, NEEDS_ROOM, STUCK, advance
from blis_replay.blis.kernel.state import NEVER, NONE, State
from blis_replay.compiled.arrays import Floats, Int64s


@entry
def run(stack: State, front: Front, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """Route all requests and serve them (IDLE), or stop at an instance that NEEDS_ROOM or is STUCK."""
    return _run(stack, Front(front.progress[0], front.policy[0], *front[2:]), kind, int_params, float_params)


@compiled
def _run(stack: State, front: Front, kind: int, int_params: Int64s, float_params: Floats) -> int:
    progress = front.progress
    while True:
        decision = progress.decisions
        everything_routed = decision == len(front.routed_us)
        now_us = NEVER if everything_routed else front.routed_us[decision]
        if everything_routed or looks(front, now_us):
            answer = advance_all(stack, front, now_us, kind, int_params, float_params)
            if answer in (NEEDS_ROOM, STUCK) or everything_routed:
                return answer
            take_snapshot(stack, front, now_us)
        route(stack, front, decision)
        progress.decisions += 1


@compiled
def route(stack: State, front: Front, decision: int) -> None:
    """Send the next request to an instance."""
    if front.policy.kind != GIVEN:
        front.target[decision] = choose(stack, front, front.place[decision])
        if front.policy.prefix_affinity > 0:
            remember(stack, front, front.place[decision], front.target[decision])
    front.routed[front.target[decision]] += 1


@compiled
def advance_all(stack: State, front: Front, until_us: int, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """Bring every instance to where no step can be scheduled before ``until_us``.

    Who queues by then has been routed: nobody queues before the router has seen it.
    """
    progress = front.progress
    while progress.queued < len(front.facts) and front.facts[progress.queued].queued_us < until_us:
        i = front.target[front.order[progress.queued]]
        if stack.at[i].submitted == stack.facts.shape[1]:
            progress.stopped_at = i
            return NEEDS_ROOM
        queue_at(stack, front, progress.queued, i)
        progress.queued += 1
    for i in range(len(stack.at)):
        if stack.at[i].now_us < until_us:
            answer = advance(instance(stack, i), until_us, kind, int_params, float_params)
            if answer in (NEEDS_ROOM, STUCK):
                progress.stopped_at = i
                return answer
    return IDLE


@compiled
def queue_at(stack: State, front: Front, request: int, i: int) -> None:
    """Make a request, by its number by queueing, the next one of an instance."""
    local = stack.at[i].submitted
    stack.facts[i, local] = front.facts[request]
    outcome = stack.outcomes[i, local]
    outcome.scheduled_us = outcome.scheduled_step = outcome.first_step = outcome.last_step = NONE
    stack.by_rank[front.facts[request].rank] = local
    note_abort(stack, i, local)
    stack.at[i].submitted += 1


@compiled
def note_abort(stack: State, i: int, local: int) -> None:
    """Put the newest request of an instance to its place among those that may still be given up."""
    facts, order = stack.facts[i], stack.abort_order[i]
    place = stack.at[i].submitted
    while place > stack.at[i].next_abort and facts[order[place - 1]].abort_us > facts[local].abort_us:
        order[place] = order[place - 1]
        place -= 1
    order[place] = local
