"""The router before the instances: what it sees of them, whom it chooses, and the loop in which it does.

The loop routes requests in order of arrival, and advances instances when the router looks.  At a tie the router comes
first: it sees what was before.  What it sees and decides: blis-semantics, section 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec.structs import asdict

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.functions import decorators
from blis_replay.base.tables import Tables, reader, table_of
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.loop import IDLE, NEEDS_ROOM, STUCK, go_on
from blis_replay.blis.kernel.state import NEVER, Record, Table, dtype_of, f64, i32, i64
from blis_replay.blis.parallel import instances
from blis_replay.blis.parallel.instances import Front, Stack, front_of, instance, queue_at, stack_of
from blis_replay_labs.cluster.config import (
    ROUTER_MEMORY_BLOCKS,
    AlwaysBusiest,
    ClusterConfig,
    LeastLoaded,
    Weighted,
)

entry, compiled = decorators(
    Path(__file__).parent, Path(instances.__file__), *sorted(k.FOLDER.glob("*.py")), inline=True
)

# -- Policy.kind --------------------------------------------------------------------------
GIVEN, LEAST_LOADED, ALWAYS_BUSIEST, WEIGHTED = range(4)

_KINDS = {LeastLoaded: LEAST_LOADED, AlwaysBusiest: ALWAYS_BUSIEST, Weighted: WEIGHTED}


class Policy:
    """How instances are chosen; the weights add up to 1, or are all 0 for a router that has none."""

    kind: i64
    memory_blocks: i64
    prefix_affinity: f64
    queue_depth: f64
    kv_utilization: f64


class Snapshot:
    """What the router has seen of an instance."""

    waiting: i64
    running: i64
    used_blocks: i64


class LruLink:
    """The neighbours of a number in an LRU list."""

    newer: i32
    older: i32


POLICY, SNAPSHOT, LRU_LINK = map(dtype_of, (Policy, Snapshot, LruLink))


class Router(Tables):
    """The policy, and what the router knows."""

    policy: Annotated[Record, POLICY, 0]
    place: Int64s  # [requests, by arrival] its number by queueing
    routed: Int64s  # [instances] requests sent there
    snapshots: Annotated[Table, SNAPSHOT, 1]  # [instances]
    # [instances, keys + 1] the blocks that the router remembers to have sent there, an LRU list each
    memory: Annotated[Table, LRU_LINK, 2]
    remembered: Int64s  # [instances] blocks in that memory


router_of = reader(Router)


def new_router(cluster: ClusterConfig, stack: Stack, front: Front, given: Int64s | None) -> Router:
    """The router before the first arrival; ``given``: int64[n], where each request goes if it reads no state."""
    if given is not None:
        front.target[:] = given
    place = np.empty(len(front.order), np.int64)
    place[front.order] = np.arange(len(place))
    policy = _policy(cluster, GIVEN if given is not None else _KINDS[type(cluster.router)])
    keys = stack.at["keys_used"][0].item() if policy["prefix_affinity"] > 0 else 0
    memory = np.zeros(keys + 1, LRU_LINK)
    memory[0] = (1, 1)
    return Router(
        policy=policy,
        place=place,
        routed=np.zeros(cluster.instances, np.int64),
        snapshots=np.zeros(cluster.instances, SNAPSHOT),
        memory=np.repeat(memory[np.newaxis], cluster.instances, axis=0),
        remembered=np.zeros(cluster.instances, np.int64),
    )


def _policy(cluster: ClusterConfig, kind: int) -> Table:
    policy = np.zeros(1, POLICY)
    policy["kind"] = kind
    policy["memory_blocks"] = ROUTER_MEMORY_BLOCKS
    if isinstance(cluster.router, Weighted):
        weights = asdict(cluster.router)
        for scorer, weight in weights.items():
            policy[scorer] = weight / sum(weights.values())
    return policy


# -- The loop --------------------------------------------------------------------------------


@entry
def run_routed(router: Router, stack: Stack, front: Front, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """Route all requests and serve them (IDLE), or stop at an instance that NEEDS_ROOM or is STUCK."""
    return _run(stack_of(stack), front_of(front), router_of(router), kind, table_of(int_params), table_of(float_params))


@compiled
def _run(stack: Stack, front: Front, router: Router, kind: int, int_params: Int64s, float_params: Floats) -> int:
    progress = front.progress
    while True:
        decision = progress.decisions
        everything_routed = decision == len(front.routed_us)
        now_us = NEVER if everything_routed else front.routed_us[decision]
        if everything_routed or router.policy.kind != GIVEN:
            answer = advance_all(stack, front, now_us, kind, int_params, float_params)
            if answer in (NEEDS_ROOM, STUCK) or everything_routed:
                return answer
            take_snapshot(stack, front, router, now_us)
        route(stack, front, router, decision)
        progress.decisions += 1


@compiled
def route(stack: Stack, front: Front, router: Router, decision: int) -> None:
    """Send the next request to an instance."""
    if router.policy.kind != GIVEN:
        front.target[decision] = choose(stack, front, router, router.place[decision])
        if router.policy.prefix_affinity > 0:
            remember(stack, front, router, router.place[decision], front.target[decision])
    router.routed[front.target[decision]] += 1


@compiled
def advance_all(stack: Stack, front: Front, until_us: int, kind: int, int_params: Int64s, float_params: Floats) -> int:
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
            answer = go_on(instance(stack, i), until_us, kind, int_params, float_params)
            if answer in (NEEDS_ROOM, STUCK):
                progress.stopped_at = i
                return answer
    return IDLE


# -- What the router sees and decides -------------------------------------------------------


@compiled
def take_snapshot(stack: Stack, front: Front, router: Router, now_us: int) -> None:
    """Note how the instances are just before ``now_us``, to which they have been advanced.

    An instance may have gone on to the end of a step beyond it; what that changed is not seen yet.
    """
    for i in range(len(stack.at)):
        at, seen = stack.at[i], router.snapshots[i]
        beyond = at.now_us >= now_us
        seen.waiting = at.waiting_before if beyond else at.waiting_depth
        seen.waiting += at.submitted - at.arrived
        seen.running = at.running_before if beyond else at.running_depth
        seen.used_blocks = stack.config.num_blocks - (at.free_before if beyond else at.free_blocks)


@compiled
def load(stack: Stack, front: Front, router: Router, i: int) -> int:
    """Requests queued and running in the snapshot, and those sent that were in no queue then."""
    seen = router.snapshots[i]
    on_the_way = router.routed[i] - stack.at[i].submitted
    return int(seen.waiting + seen.running + on_the_way)


@compiled
def choose(stack: Stack, front: Front, router: Router, request: int) -> int:
    """The instance for a request, by its number by queueing; the first of the best."""
    least = most = load(stack, front, router, 0)
    for i in range(1, len(stack.at)):
        least, most = min(least, load(stack, front, router, i)), max(most, load(stack, front, router, i))
    chosen, best = 0, -1.0
    for i in range(len(stack.at)):
        score = score_of(stack, front, router, request, i, least, most)
        if score > best:
            chosen, best = i, score
    return chosen


@compiled
def score_of(stack: Stack, front: Front, router: Router, request: int, i: int, least: int, most: int) -> float:
    """How good an instance is, 0 at least; ``least`` and ``most``: loads in the cluster."""
    if router.policy.kind == LEAST_LOADED:
        return float(most - load(stack, front, router, i))
    if router.policy.kind == ALWAYS_BUSIEST:
        return float(load(stack, front, router, i))
    score = router.policy.queue_depth
    if most > least:
        score *= (most - load(stack, front, router, i)) / (most - least)
    score += router.policy.kv_utilization * (1 - router.snapshots[i].used_blocks / stack.config.num_blocks)
    if router.policy.prefix_affinity > 0:
        score += router.policy.prefix_affinity * remembered_share(stack, front, router, request, i)
    return float(score)


# -- Prefix affinity ----------------------------------------------------------------------
# What the router remembers to have sent to each instance: an LRU list of block keys.  It is the router's view, not
# what an instance still holds.


@compiled
def prompt_blocks(stack: Stack, front: Front, request: int) -> int:
    """Full blocks of a prompt, of a request by its number by queueing."""
    return int(front.facts[request].prompt_tokens // stack.config.block_size)


@compiled
def remembered_share(stack: Stack, front: Front, router: Router, request: int, i: int) -> float:
    """Share of the full blocks of a prompt, from the first on, that were sent to an instance."""
    blocks = prompt_blocks(stack, front, request)
    if blocks == 0:
        return 0.0
    facts = front.facts[request]
    start, known = facts.key_start, min(blocks, facts.key_count)
    matched = 0
    while matched < known and is_listed(router.memory[i], stack.keys[start + matched]):
        matched += 1
    return matched / blocks


@compiled
def remember(stack: Stack, front: Front, router: Router, request: int, i: int) -> None:
    """A prompt is sent to an instance; its first block is the last to be forgotten."""
    facts, memory = front.facts[request], router.memory[i]
    for block in range(min(prompt_blocks(stack, front, request), facts.key_count) - 1, -1, -1):
        key = stack.keys[facts.key_start + block]
        if is_listed(memory, key):
            drop(memory, key)
        elif router.remembered[i] == router.policy.memory_blocks:
            drop(memory, oldest(memory))
        else:
            router.remembered[i] += 1
        enter(memory, key)


# -- LRU list -----------------------------------------------------------------------------
# Numbers by their last use, in a table of links: circular through node 0, number k is node k + 1.  A link holds a node
# and 1; 0: the number is not in the list.  An empty list has the links 1, 1 at node 0.


@compiled
def is_listed(lru: Table, number: int) -> bool:
    """Whether a number is in the list."""
    return bool(lru[number + 1].older != 0)


@compiled
def oldest(lru: Table) -> int:
    """The least recently used; there is one."""
    return int(lru[0].newer - 2)


@compiled
def drop(lru: Table, number: int) -> None:
    """Take a number out of the list, which has it."""
    newer, older = lru[number + 1].newer, lru[number + 1].older
    lru[newer - 1].older = older
    lru[older - 1].newer = newer
    lru[number + 1].older = 0


@compiled
def enter(lru: Table, number: int) -> None:
    """Enter a number, which is not in the list, as the most recently used."""
    node, second = number + 1, lru[0].older
    lru[node].newer = 1
    lru[node].older = second
    lru[second - 1].newer = node + 1
    lru[0].older = node + 1
