"""A cluster: requests in, a result of each instance and of all together out.

Its loop routes requests in order of arrival, and advances instances when the router looks.  At a tie the router comes
first: it sees what was before.  What it sees and decides: blis-semantics, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.base.tables import table_of
from blis_replay.blis.cluster.config import ClusterConfig, Random, Recorded, RoundRobin, TokenBucket, Weighted
from blis_replay.blis.cluster.state import (
    ALWAYS_BUSIEST,
    GIVEN,
    LEAST_LOADED,
    Front,
    Stack,
    compiled,
    entry,
    front_of,
    instance,
    instance_view,
    new_run,
    stack_of,
    with_room_for,
)
from blis_replay.blis.errors import TraceError, evicting_for_ever
from blis_replay.blis.kernel import loop
from blis_replay.blis.kernel.free_queue import drop, enter, is_listed, oldest
from blis_replay.blis.kernel.loop import IDLE, NEEDS_ROOM, STUCK, go_on
from blis_replay.blis.kernel.state import NEVER, NONE
from blis_replay.blis.latency.models import EngineLatency, Lifecycle
from blis_replay.blis.result import SimResult, check_conservation, read_result
from blis_replay.blis.setup import queueing_times
from blis_replay.blis.trace import EngineConfig, RequestTrace

REFUSED = -1


@dataclass(frozen=True)
class ClusterResult:
    """A run of a cluster; ``int64[n]`` are in the order of the trace, -1 where there is nothing.

    ``instance``: where each request was served, ``REFUSED`` by admission.  ``instances``: the run of each, its
    requests in the order of the trace.  ``ttft_us``, ``e2e_us``: as the client sees them, of ``completed`` (bool[n]).
    """

    instance: Int64s
    instances: tuple[SimResult, ...]
    completed: Bools
    ttft_us: Int64s
    e2e_us: Int64s


def simulate_cluster(
    trace: RequestTrace,
    cluster: ClusterConfig,
    engine: EngineConfig,
    latency: EngineLatency,
    lifecycle: Lifecycle | None = None,
) -> ClusterResult:
    """Serve ``trace`` in virtual time on several instances of one engine.

    An instance goes exactly as ``blis.engine.simulate`` would with the requests that it got.  Without
    ``num_gpu_blocks`` each has as many blocks as all requests together could take.  Raises ``TraceError`` as
    ``simulate`` does, for an assignment that does not fit, and for prefix affinity without block keys.  Equal input
    gives byte-equal output.
    """
    if isinstance(cluster.router, Weighted) and cluster.router.prefix_affinity > 0 and trace.block_keys is None:
        raise TraceError("prefix affinity needs to know which prompts are alike; give block_keys, or weight 0")
    lifecycle = lifecycle or Lifecycle()
    let_in = admitted(trace, cluster.admission)
    served = trace if let_in.all() else trace.part(let_in)
    # A request is in no queue before the router has seen it, whatever delay was observed.
    queued_us = np.maximum(queueing_times(served, lifecycle), served.arrival_us)
    stack, front = new_run(served, cluster, engine, queued_us, given_instances(cluster, let_in))
    stack = run_to_the_end(stack, front, latency, "instance", run)
    instance = np.full(len(trace), REFUSED, np.int64)
    instance[let_in] = front.target
    results = tuple(instance_result(served, stack, front, queued_us, i, lifecycle) for i in range(cluster.instances))
    return _pooled(instance, results)


def admitted(trace: RequestTrace, bucket: TokenBucket | None) -> Bools:
    """Token-bucket admission, bool[n]: the requests that are let in; all of them without a bucket.

    At each arrival the bucket first refills by the time since the one before (blis-semantics, section 4), in float64
    as BLIS does; one that cannot pay is refused and leaves it as it is.
    """
    n = len(trace)
    if bucket is None:
        return np.ones(n, np.bool_)
    costs = trace.prompt_tokens.tolist() if bucket.cost == "prompt_tokens" else [1] * n
    level, before_us, let_in = bucket.capacity_tokens, 0, []
    for arrival_us, cost in zip(trace.arrival_us.tolist(), costs, strict=True):
        level = min(bucket.capacity_tokens, level + (arrival_us - before_us) * bucket.refill_tokens_per_s / 1e6)
        before_us = arrival_us
        let_in.append(cost <= level)
        if let_in[-1]:
            level -= cost
    return np.array(let_in, np.bool_)


def given_instances(cluster: ClusterConfig, let_in: Bools) -> Int64s | None:
    """int64[requests let in]: the instance of each; None if the router reads the state of the instances.

    ``let_in``: bool[n], in the order of the trace.  Raises ``TraceError`` for a recorded assignment that is not of
    these requests and instances.
    """
    router, requests = cluster.router, int(let_in.sum())
    if isinstance(router, RoundRobin):
        return np.arange(requests, dtype=np.int64) % cluster.instances
    if isinstance(router, Random):
        return np.random.default_rng(router.seed).integers(cluster.instances, size=requests)
    if isinstance(router, Recorded):
        _refuse_misfit(router.instance, cluster.instances, len(let_in))
        return router.instance[let_in].astype(np.int64)
    return None


def _refuse_misfit(assigned: Int64s, instances: int, requests: int) -> None:
    if len(assigned) != requests:
        raise TraceError(f"an assignment of {len(assigned)} requests for {requests}; give an instance for each")
    outside = (assigned < 0) | (assigned >= instances)
    if outside.any():
        i = int(np.argmax(outside))
        raise TraceError(f"request {i}: it was on instance {assigned[i]}; name one from 0 to {instances - 1}")


def run_to_the_end(stack: Stack, front: Front, latency: EngineLatency, one: str, run: Callable[..., int]) -> Stack:
    """The engines as they are when all is served.  ``run``: as ``run`` below; ``one``: what an engine is called.

    Raises ``TraceError`` where requests evict each other for ever.
    """
    model = latency.for_kernel()
    while (answer := run(stack, front, *model)) != loop.IDLE:
        stopped_at = front.progress["stopped_at"].item()
        if answer == loop.STUCK:
            raise evicting_for_ever(stack.at[stopped_at].now_us, f"requests of {one} {stopped_at}")
        stack = with_room_for(stack, stopped_at)
    return stack


def instance_result(
    served: RequestTrace, stack: Stack, front: Front, queued_us: Int64s, i: int, lifecycle: Lifecycle
) -> SimResult:
    """What an instance did, its requests in the order of the trace.  Raises ``TraceError`` for an engine defect."""
    chosen = np.flatnonzero(front.target == i)
    state = instance_view(stack, i)
    n = len(chosen)
    state = state.replaced(facts=state.facts[:n], requests=state.requests[:n], outcomes=state.outcomes[:n])
    by_queueing = front.order[front.target[front.order] == i]
    order = np.searchsorted(chosen, by_queueing)
    result = read_result(state, order, served.arrival_us[chosen], queued_us[chosen], lifecycle)
    check_conservation(served.abort_us[chosen], state, result)
    return result


def _pooled(instance: Int64s, results: tuple[SimResult, ...]) -> ClusterResult:
    completed = np.zeros(len(instance), np.bool_)
    ttft_us, e2e_us = np.full(len(instance), -1, np.int64), np.full(len(instance), -1, np.int64)
    for i, result in enumerate(results):
        chosen = instance == i
        completed[chosen] = result.completed
        ttft_us[chosen] = np.where(result.completed, result.ttft_us, -1)
        e2e_us[chosen] = np.where(result.completed, result.e2e_us, -1)
    return ClusterResult(instance, results, completed, ttft_us, e2e_us)


# -- The loop --------------------------------------------------------------------------------


@entry
def run(stack: Stack, front: Front, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """Route all requests and serve them (IDLE), or stop at an instance that NEEDS_ROOM or is STUCK."""
    return _run(stack_of(stack), front_of(front), kind, table_of(int_params), table_of(float_params))


@compiled
def _run(stack: Stack, front: Front, kind: int, int_params: Int64s, float_params: Floats) -> int:
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
def route(stack: Stack, front: Front, decision: int) -> None:
    """Send the next request to an instance."""
    if front.policy.kind != GIVEN:
        front.target[decision] = choose(stack, front, front.place[decision])
        if front.policy.prefix_affinity > 0:
            remember(stack, front, front.place[decision], front.target[decision])
    front.routed[front.target[decision]] += 1


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


@compiled
def queue_at(stack: Stack, front: Front, request: int, i: int) -> None:
    """Make a request, by its number by queueing, the next one of an instance."""
    local = stack.at[i].submitted
    stack.facts[i, local] = front.facts[request]
    outcome = stack.outcomes[i, local]
    outcome.scheduled_us = outcome.scheduled_step = outcome.first_step = outcome.last_step = NONE
    stack.by_rank[front.facts[request].rank] = local
    note_abort(stack, i, local)
    stack.at[i].submitted += 1


@compiled
def note_abort(stack: Stack, i: int, local: int) -> None:
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
    return bool(now_us - front.progress.snapshot_us >= front.policy.interval_us)


@compiled
def take_snapshot(stack: Stack, front: Front, now_us: int) -> None:
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
            seen.used_blocks = stack.config.num_blocks - (at.free_before if beyond else at.free_blocks)
    if old:
        front.progress.snapshot_us = now_us


@compiled
def load(stack: Stack, front: Front, i: int) -> int:
    """Requests queued and running in the snapshot, and those sent that were in no queue then."""
    seen = front.snapshots[i]
    on_the_way = front.routed[i] - stack.at[i].submitted
    return int(seen.waiting + seen.running + on_the_way)


@compiled
def choose(stack: Stack, front: Front, request: int) -> int:
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
def score_of(stack: Stack, front: Front, request: int, i: int, least: int, most: int) -> float:
    """How good an instance is, 0 at least; ``least`` and ``most``: loads in the cluster."""
    if front.policy.kind == LEAST_LOADED:
        return float(most - load(stack, front, i))
    if front.policy.kind == ALWAYS_BUSIEST:
        return float(load(stack, front, i))
    score = front.policy.queue_depth
    if most > least:
        score *= (most - load(stack, front, i)) / (most - least)
    score += front.policy.kv_utilization * (1 - front.snapshots[i].used_blocks / stack.config.num_blocks)
    if front.policy.prefix_affinity > 0:
        score += front.policy.prefix_affinity * remembered_share(stack, front, request, i)
    return float(score)


# -- Prefix affinity ----------------------------------------------------------------------
# What the router remembers to have sent to each instance: an LRU list of block keys.  It is the router's view, not
# what an instance still holds.


@compiled
def prompt_blocks(stack: Stack, front: Front, request: int) -> int:
    """Full blocks of a prompt, of a request by its number by queueing."""
    return int(front.facts[request].prompt_tokens // stack.config.block_size)


@compiled
def remembered_share(stack: Stack, front: Front, request: int, i: int) -> float:
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
def remember(stack: Stack, front: Front, request: int, i: int) -> None:
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
