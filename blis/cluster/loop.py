"""The loop of a cluster: requests are routed in order of arrival, and instances advanced when the router looks.

At a tie the router comes first: it sees what was before.  What it sees and decides: blis-semantics, section 4.
"""

from __future__ import annotations

from blis_replay.blis.cluster.state import ALWAYS_BUSIEST, GIVEN, LEAST_LOADED, Front, compiled, entry, instance
from blis_replay.blis.kernel.free_queue import drop, enter, is_listed, oldest
from blis_replay.blis.kernel.loop import IDLE, NEEDS_ROOM, STUCK, advance
from blis_replay.blis.kernel.state import NEVER, NONE, State
from blis_replay.compiled.arrays import Floats, Int64s
from blis_replay.compiled.functions import by_reference


@entry
def run(stack: State, front: Front, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """Route all requests and serve them (IDLE), or stop at an instance that NEEDS_ROOM or is STUCK."""
    own = by_reference(Front(front.progress[0], front.policy[0], *front[2:]))
    return _run(by_reference(stack), own, kind, int_params, float_params)


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
    stack.at[i].abort_due_us = min(stack.at[i].abort_due_us, facts[local].abort_us)


# -- What the router sees and decides -------------------------------------------------------


@compiled
def looks(front: Front, now_us: int) -> bool:
    """Whether the router looks at the instances for this decision."""
    if front.policy.kind == GIVEN:
        return False
    return front.policy.live_depths == 1 or is_old(front, now_us)


@compiled
def is_old(front: Front, now_us: int) -> bool:
    """Whether the last snapshot is as old as one may be."""
    return now_us - front.progress.snapshot_us >= front.policy.interval_us


@compiled
def take_snapshot(stack: State, front: Front, now_us: int) -> None:
    """Note how the instances are just before ``now_us``, to which they have been advanced.

    An instance may have gone on to the end of a step beyond it; what that changed is not seen yet.
    """
    old = is_old(front, now_us)
    for i in range(len(stack.at)):
        at, seen = stack.at[i], front.snapshots[i]
        beyond = at.now_us >= now_us
        seen.waiting = at.waiting_before if beyond else at.waiting_depth
        seen.waiting += at.submitted - at.arrived
        seen.running = at.running_before if beyond else at.running_depth
        if old:
            seen.used_blocks = stack.config[0].num_blocks - (at.free_before if beyond else at.free_blocks)
    if old:
        front.progress.snapshot_us = now_us


@compiled
def load(stack: State, front: Front, i: int) -> int:
    """Requests queued and running in the snapshot, and those sent that were in no queue then."""
    seen = front.snapshots[i]
    on_the_way = front.routed[i] - stack.at[i].submitted
    return seen.waiting + seen.running + on_the_way


@compiled
def choose(stack: State, front: Front, request: int) -> int:
    """The instance for a request, by its number by queueing; the first of the best."""
    least = most = load(stack, front, 0)
    for i in range(1, len(stack.at)):
        least, most = min(least, load(stack, front, i)), max(most, load(stack, front, i))
    chosen, best = 0, -1.0
    for i in range(len(stack.at)):
        score = score_of(stack, front, request, i, least, most)
        if score > best:
            chosen, best = i, score
    return chosen


@compiled
def score_of(stack: State, front: Front, request: int, i: int, least: int, most: int) -> float:
    """How good an instance is, 0 at least; ``least`` and ``most``: loads in the cluster."""
    if front.policy.kind == LEAST_LOADED:
        return float(most - load(stack, front, i))
    if front.policy.kind == ALWAYS_BUSIEST:
        return float(load(stack, front, i))
    score = front.policy.queue_depth
    if most > least:
        score *= (most - load(stack, front, i)) / (most - least)
    score += front.policy.kv_utilization * (1 - front.snapshots[i].used_blocks / stack.config[0].num_blocks)
    if front.policy.prefix_affinity > 0:
        score += front.policy.prefix_affinity * remembered_share(stack, front, request, i)
    return score


# -- Prefix affinity ----------------------------------------------------------------------
# What the router remembers to have sent to each instance: an LRU list of block keys.  It is the router's view, not
# what an instance still holds.


@compiled
def prompt_blocks(stack: State, front: Front, request: int) -> int:
    """Full blocks of a prompt, of a request by its number by queueing."""
    return front.facts[request].prompt_tokens // stack.config[0].block_size


@compiled
def remembered_share(stack: State, front: Front, request: int, i: int) -> float:
    """Share of the full blocks of a prompt, from the first on, that were sent to an instance."""
    blocks = prompt_blocks(stack, front, request)
    if blocks == 0:
        return 0.0
    facts = front.facts[request]
    start, known = facts.key_start, min(blocks, facts.key_count)
    matched = 0
    while matched < known and is_listed(front.memory[i], stack.keys[start + matched]):
        matched += 1
    return matched / blocks


@compiled
def remember(stack: State, front: Front, request: int, i: int) -> None:
    """A prompt is sent to an instance; its first block is the last to be forgotten."""
    facts, memory = front.facts[request], front.memory[i]
    for block in range(min(prompt_blocks(stack, front, request), facts.key_count) - 1, -1, -1):
        key = stack.keys[facts.key_start + block]
        if is_listed(memory, key):
            drop(memory, key)
        elif front.remembered[i] == front.policy.memory_blocks:
            drop(memory, oldest(memory))
        else:
            front.remembered[i] += 1
        enter(memory, key)
