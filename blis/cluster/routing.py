"""What the router sees and what it decides: blis-semantics, section 4."""

from __future__ import annotations

from blis_replay.blis.cluster.state import ALWAYS_BUSIEST, GIVEN, LEAST_LOADED, Front, compiled
from blis_replay.blis.kernel.lru import drop, enter, is_listed, oldest
from blis_replay.blis.kernel.state import State


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
