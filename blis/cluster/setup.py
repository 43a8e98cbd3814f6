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
    Random,
    Recorded,
    StateFreeRouter,
    Weighted,
)
from blis_replay.blis.errors import TraceError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.setup import looked_at_times, new_state, with_room
from blis_replay.blis.trace import EngineConfig, Int64s, RequestTrace

_KINDS = {LeastLoaded: c.LEAST_LOADED, AlwaysBusiest: c.ALWAYS_BUSIEST, Weighted: c.WEIGHTED}
# Of an instance's state: written before they are read, so copies of them would be of nothing.
_UNWRITTEN = ("queued_us", "abort_us", "scheduled_us", "link", "abort_order", "by_rank", "heap", "piece", "segments")
_SHARED = ("config", "keys")


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


def given_instances(router: StateFreeRouter, instances: int, requests: int) -> Int64s:
    """int64[requests]: where a router that looks at nothing sends each request.

    Raises ``TraceError`` if a recorded assignment is not of these requests and instances.
    """
    if isinstance(router, Recorded):
        if len(router.instance) != requests:
            raise TraceError(f"an assignment of {len(router.instance)} requests for {requests}; give an instance each")
        if requests and (router.instance.min() < 0 or router.instance.max() >= instances):
            raise TraceError(f"the assignment names an instance that is not within 0 and {instances - 1}")
        return router.instance.astype(np.int64)
    if isinstance(router, Random):
        return np.random.default_rng(router.seed).integers(instances, size=requests)
    return np.arange(requests, dtype=np.int64) % instances


def with_room_for(stack: k.State, i: int) -> k.State:
    """The same states with the arrays that are nearly full for instance ``i`` made longer for all."""
    wanted = with_room(c.instance_view(stack, i))
    used = {"steps": k.ROWS, "segments": k.SEGMENTS}
    longer = {}
    for name in ("steps", "segments", "found"):
        table, length = getattr(stack, name), len(getattr(wanted, name))
        if length > table.shape[1]:
            rows = stack.at[:, used[name]].tolist() if name in used else [table.shape[1]] * len(table)
            longer[name] = _longer(table, length, rows)
    return stack._replace(**longer)


def _longer(table: NDArray[Any], length: int, rows: list[int]) -> NDArray[Any]:
    """Tables of ``length`` rows with the rows that each has; the new ones take no memory unless read as "none"."""
    shape = (len(table), length, *table.shape[2:])
    longer = np.full(shape, k.NONE, table.dtype) if table.dtype == np.int32 else np.empty(shape, table.dtype)
    for old, new, count in zip(table, longer, rows, strict=True):
        new[:count] = old[:count]
    return longer


def _stacked(alone: k.State, instances: int) -> k.State:
    """As many states as instances, without a request, from one that knows them all."""
    at = alone.at.copy()
    at[k.SUBMITTED] = 0
    fields: dict[str, NDArray[Any]] = {name: getattr(alone, name) for name in _SHARED}
    for name in _UNWRITTEN:
        array = getattr(alone, name)
        fields[name] = np.empty((instances, *array.shape), array.dtype)
    fields["piece"][:, 0] = alone.piece[0]
    fields["request"] = np.empty((instances, *alone.request.T.shape), np.int32)
    fields["steps"] = np.empty((instances, len(alone.steps) // instances + 1), k.STEP_DTYPE)
    for name in k.State._fields:
        if name not in fields:
            array = at if name == "at" else getattr(alone, name)
            fields[name] = np.repeat(array[np.newaxis], instances, axis=0)
    return k.State(**fields)


def _front(trace: RequestTrace, cluster: ClusterConfig, alone: k.State, order: Int64s, given: Int64s | None) -> c.Front:
    n, instances, router = len(trace), cluster.instances, cluster.router
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    policy = np.zeros(c.POLICY_SIZE, np.int64)
    policy[c.ROUTER] = c.GIVEN if given is not None else _KINDS[type(router)]
    policy[c.INTERVAL_US] = cluster.snapshots.interval_us
    policy[c.LIVE_DEPTHS] = cluster.snapshots.live_depths
    policy[c.MEMORY_BLOCKS] = ROUTER_MEMORY_BLOCKS
    weights = np.zeros(3)
    if isinstance(router, Weighted):
        weights[:] = router.prefix_affinity, router.queue_depth, router.kv_utilization
        weights /= weights.sum()
    newer = np.zeros((instances, int(alone.at[k.KEYS_USED]) + 1 if weights[c.PREFIX_AFFINITY] > 0 else 1), np.int32)
    newer[:, 0] = 1
    return c.Front(
        progress=np.zeros(c.PROGRESS_SIZE, np.int64),
        policy=policy,
        weights=weights,
        routed_us=np.ascontiguousarray(trace.arrival_us),
        target=np.full(n, k.NONE, np.int64) if given is None else given.copy(),
        place=place,
        order=order,
        columns=alone.request.T,
        queued_us=alone.queued_us,
        abort_us=alone.abort_us,
        member=np.empty((instances, n), np.int64),
        routed=np.zeros(instances, np.int64),
        snapshot=np.zeros((instances, c.SNAPSHOT_COLUMNS), np.int64),
        newer=newer,
        older=newer.copy(),
        remembered=np.zeros(instances, np.int64),
    )
