"""What the router sees and what it decides: blis-semantics, section 4."""

from __future__ import annotations

from blis_replay.blis.cluster.affinity import remembered_share
from blis_replay.blis.cluster.compiled import compiled
from blis_replay.blis.cluster.state import (
    ALWAYS_BUSIEST,
    GIVEN,
    INTERVAL_US,
    KV_UTILIZATION,
    LEAST_LOADED,
    LIVE_DEPTHS,
    PREFIX_AFFINITY,
    QUEUE_DEPTH,
    ROUTER,
    RUNNING,
    SNAPSHOT_US,
    USED_BLOCKS,
    WAITING,
    Front,
)
from blis_replay.blis.kernel.state import (
    ARRIVED,
    FREE_BEFORE,
    FREE_BLOCKS,
    NOW,
    NUM_BLOCKS,
    RUNNING_BEFORE,
    RUNNING_DEPTH,
    SUBMITTED,
    WAITING_BEFORE,
    WAITING_DEPTH,
    State,
)


@compiled
def looks(front: Front, now_us: int) -> bool:
    """Whether the router looks at the instances for this decision."""
    if front.policy[ROUTER] == GIVEN:
        return False
    return front.policy[LIVE_DEPTHS] == 1 or is_old(front, now_us)


@compiled
def is_old(front: Front, now_us: int) -> bool:
    """Whether the last snapshot is as old as one may be."""
    return now_us - front.progress[SNAPSHOT_US] >= front.policy[INTERVAL_US]


@compiled
def take_snapshot(stack: State, front: Front, now_us: int) -> None:
    """Note how the instances are just before ``now_us``, to which they have been advanced.

    An instance may have gone on to the end of a step beyond it; what that changed is not seen yet.
    """
    old = is_old(front, now_us)
    for i in range(len(stack.at)):
        at = stack.at[i]
        beyond = at[NOW] >= now_us
        front.snapshot[i, WAITING] = at[WAITING_BEFORE] if beyond else at[WAITING_DEPTH]
        front.snapshot[i, WAITING] += at[SUBMITTED] - at[ARRIVED]
        front.snapshot[i, RUNNING] = at[RUNNING_BEFORE] if beyond else at[RUNNING_DEPTH]
        if old:
            front.snapshot[i, USED_BLOCKS] = stack.config[NUM_BLOCKS] - (at[FREE_BEFORE] if beyond else at[FREE_BLOCKS])
    if old:
        front.progress[SNAPSHOT_US] = now_us


@compiled
def load(stack: State, front: Front, i: int) -> int:
    """Requests queued and running in the snapshot, and those sent that were in no queue then."""
    on_the_way = front.routed[i] - stack.at[i, SUBMITTED]
    return front.snapshot[i, WAITING] + front.snapshot[i, RUNNING] + on_the_way


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
    if front.policy[ROUTER] == LEAST_LOADED:
        return float(most - load(stack, front, i))
    if front.policy[ROUTER] == ALWAYS_BUSIEST:
        return float(load(stack, front, i))
    score = front.weights[QUEUE_DEPTH]
    if most > least:
        score *= (most - load(stack, front, i)) / (most - least)
    score += front.weights[KV_UTILIZATION] * (1 - front.snapshot[i, USED_BLOCKS] / stack.config[NUM_BLOCKS])
    if front.weights[PREFIX_AFFINITY] > 0:
        score += front.weights[PREFIX_AFFINITY] * remembered_share(stack, front, request, i)
    return score
