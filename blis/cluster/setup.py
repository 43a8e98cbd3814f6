"""From requests, a cluster and engine arguments to the arrays of a run, and room for its results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.cluster import state as c
from blis_replay.blis.cluster.config import (
    ROUTER_MEMORY_BLOCKS,
    AlwaysBusiest,
    ClusterConfig,
    LeastLoaded,
    Router,
    Snapshots,
    Weighted,
)
from blis_replay.blis.kernel import state as k
from blis_replay.blis.setup import looked_at_times, new_state, with_room
from blis_replay.blis.trace import EngineConfig, Int64s, RequestTrace

_KINDS = {LeastLoaded: c.LEAST_LOADED, AlwaysBusiest: c.ALWAYS_BUSIEST, Weighted: c.WEIGHTED}
# Of an instance's state, by request: written before they are read, so copies of them would be of nothing.
_BY_REQUEST = ("request", "queued_us", "abort_us", "scheduled_us", "link", "abort_order", "heap")
_LAST_AXIS = ("request",)  # column after column
# By block key, with what stands for nothing.
_PADDING = {"found": k.NONE, "cpu_newer": 0, "cpu_older": 0}
_SHARED = ("config", "keys", "by_rank")


def new_run(
    trace: RequestTrace, cluster: ClusterConfig, engine: EngineConfig, queued_us: Int64s, given: Int64s | None
) -> tuple[k.State, c.Front]:
    """The stacked states and the front before the first arrival.

    ``queued_us``: when requests reach a queue, us.  ``given``: int64[n], where each goes; None if the router decides.
    Raises ``TraceError`` for a request that an instance can never serve.
    """
    looked_at_us = looked_at_times(trace, queued_us)
    order = np.argsort(looked_at_us, kind="stable")
    alone = new_state(trace, engine, looked_at_us, order)
    return _stacked(alone, cluster.instances), _front(trace, cluster, alone, order, given)


def with_room_for(stack: k.State, i: int) -> k.State:
    """The same states with the arrays that are nearly full for instance ``i`` made longer for all."""
    submitted, capacity = stack.at[:, k.SUBMITTED], stack.queued_us.shape[1]
    if submitted[i] == capacity:
        length = capacity + capacity // 2 + 1
        return stack._replace(**{name: _longer(stack, name, length, submitted) for name in _BY_REQUEST})
    wanted = with_room(c.instance_view(stack, i))
    used = {"steps": stack.at[:, k.ROWS], "segments": stack.at[:, k.SEGMENTS]}
    used |= {name: np.full(len(stack.at), getattr(stack, name).shape[1]) for name in _PADDING}
    short = [name for name in used if len(getattr(wanted, name)) > getattr(stack, name).shape[1]]
    return stack._replace(**{name: _longer(stack, name, len(getattr(wanted, name)), used[name]) for name in short})


def _longer(stack: k.State, name: str, length: int, rows: Int64s) -> NDArray[Any]:
    """An array with room for ``length`` rows an instance, and the rows that each has."""
    table = getattr(stack, name)
    axis = table.ndim - 1 if name in _LAST_AXIS else 1
    longer = np.empty((*table.shape[:axis], length, *table.shape[axis + 1 :]), table.dtype)
    if name in _PADDING:
        longer[:] = _PADDING[name]
    for old, new, count in zip(table, longer, rows.tolist(), strict=True):
        held = (*[slice(None)] * (axis - 1), slice(count))
        new[held] = old[held]
    return longer


def _stacked(alone: k.State, instances: int) -> k.State:
    """As many states as instances, without a request, from one that knows them all.

    There is room for an even share of the requests and some; an instance that gets more makes it longer.
    """
    requests = len(alone.queued_us)
    share = min(requests, requests // instances * 2 + 16)
    fields: dict[str, NDArray[Any]] = {name: getattr(alone, name) for name in _SHARED}
    for name in _BY_REQUEST:
        array = getattr(alone, name).T if name in _LAST_AXIS else getattr(alone, name)
        shape = (*array.shape[:-1], share) if name in _LAST_AXIS else (share, *array.shape[1:])
        fields[name] = np.empty((instances, *shape), array.dtype)
    fields["piece"] = np.empty((instances, *alone.piece.shape), np.int32)
    fields["piece"][:, 0] = alone.piece[0]
    fields["segments"] = np.empty((instances, len(alone.segments) - requests + share, 3), np.int64)
    fields["steps"] = np.empty((instances, len(alone.steps) // instances + 1), k.STEP_DTYPE)
    for name in k.State._fields:
        if name not in fields:
            fields[name] = np.repeat(getattr(alone, name)[np.newaxis], instances, axis=0)
    fields["at"][:, k.SUBMITTED] = 0
    return k.State(**fields)


def _front(trace: RequestTrace, cluster: ClusterConfig, alone: k.State, order: Int64s, given: Int64s | None) -> c.Front:
    n, instances = len(trace), cluster.instances
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    weights = _weights(cluster.router)
    newer = np.zeros((instances, int(alone.at[k.KEYS_USED]) + 1 if weights[c.PREFIX_AFFINITY] > 0 else 1), np.int32)
    newer[:, 0] = 1
    return c.Front(
        progress=np.zeros(c.PROGRESS_SIZE, np.int64),
        policy=_policy(c.GIVEN if given is not None else _KINDS[type(cluster.router)], cluster.snapshots),
        weights=weights,
        routed_us=np.ascontiguousarray(trace.arrival_us),
        target=np.full(n, k.NONE, np.int64) if given is None else given.copy(),
        place=place,
        order=order,
        columns=alone.request.T,
        queued_us=alone.queued_us,
        abort_us=alone.abort_us,
        routed=np.zeros(instances, np.int64),
        snapshot=np.zeros((instances, c.SNAPSHOT_COLUMNS), np.int64),
        newer=newer,
        older=newer.copy(),
        remembered=np.zeros(instances, np.int64),
    )


def _policy(kind: int, snapshots: Snapshots) -> Int64s:
    policy = np.zeros(c.POLICY_SIZE, np.int64)
    policy[c.ROUTER] = kind
    policy[c.INTERVAL_US] = snapshots.interval_us
    policy[c.LIVE_DEPTHS] = snapshots.live_depths
    policy[c.MEMORY_BLOCKS] = ROUTER_MEMORY_BLOCKS
    return policy


def _weights(router: Router) -> c.Floats:
    """By scorer, their sum 1; all 0 for a router that has none."""
    weights = np.zeros(3)
    if isinstance(router, Weighted):
        weights[[c.PREFIX_AFFINITY, c.QUEUE_DEPTH, c.KV_UTILIZATION]] = (
            router.prefix_affinity,
            router.queue_depth,
            router.kv_utilization,
        )
        weights /= weights.sum()
    return weights
