"""What a run of a cluster is made of: the states of its instances, stacked, and the front before them.

The states of all instances are one ``kernel.state.State`` whose tables and arrays have the instance as a further,
first axis, so that compiled code can go from one to the next.  An instance numbers its requests in the order in which
they reach its queue.  ``config``, ``keys`` and ``by_rank`` are the same for all: ranks are those among all requests,
and a rank leads to the number that its request has in its instance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.arrays import Int64s
from blis_replay.base.functions import decorators
from blis_replay.base.tables import AS_PYTHON, Tables, reader
from blis_replay.blis.cluster.config import ROUTER_MEMORY_BLOCKS, AlwaysBusiest, ClusterConfig, LeastLoaded, Weighted
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.state import Record, State, Table, dtype_of, f64, i64, state_of
from blis_replay.blis.setup import eligible_times, empty_lru, new_state, with_room
from blis_replay.blis.trace import EngineConfig, RequestTrace

entry, compiled = decorators(Path(__file__).parent, *sorted(k.FOLDER.glob("*.py")), inline=True)

# -- Policy.kind --------------------------------------------------------------------------
GIVEN, LEAST_LOADED, ALWAYS_BUSIEST, WEIGHTED = range(4)

_KINDS = {LeastLoaded: LEAST_LOADED, AlwaysBusiest: ALWAYS_BUSIEST, Weighted: WEIGHTED}
_BY_REQUEST = ("facts", "requests", "outcomes", "links", "abort_order", "heap")
# By block key, with what stands for nothing.
_PADDING = {"extent_of_key": k.NONE, "cpu_lru": 0}
_SHARED = ("config", "keys", "by_rank")


class Progress:
    """Where the routing stands."""

    decisions: i64  # requests that have been routed
    queued: i64  # requests handed to their instance because they have reached its queue
    snapshot_us: i64  # when the last one was taken
    stopped_at: i64  # the instance that could not go on


class Policy:
    """How instances are chosen; the weights add up to 1, or are all 0 for a router that has none."""

    kind: i64
    interval_us: i64  # of snapshots
    live_depths: i64
    memory_blocks: i64
    prefix_affinity: f64
    queue_depth: f64
    kv_utilization: f64


class Snapshot:
    """What the router has seen of an instance."""

    waiting: i64
    running: i64
    used_blocks: i64


PROGRESS, POLICY, SNAPSHOT = map(dtype_of, (Progress, Policy, Snapshot))


class Front(Tables):
    """What stands before the instances.  Requests are numbered by arrival, and by when they reach a queue."""

    progress: Annotated[Record, PROGRESS, 0]
    policy: Annotated[Record, POLICY, 0]
    routed_us: Int64s  # [requests, by arrival] when the router decides
    target: Int64s  # [requests, by arrival] the instance; given to a router that reads no state
    place: Int64s  # [requests, by arrival] its number by queueing
    order: Int64s  # [requests, by queueing] its number by arrival
    facts: Annotated[Table, k.FACTS, 1]  # [requests, by queueing]
    routed: Int64s  # [instances] requests sent there
    snapshots: Annotated[Table, SNAPSHOT, 1]  # [instances]
    memory: Annotated[
        Table, k.LRU_LINK, 2
    ]  # [instances, keys + 1] the blocks that the router remembers to have sent there, an LRU list each
    remembered: Int64s  # [instances] blocks in that memory


front_of = reader(Front)


class Stack(State):
    """The states of all instances: the arrays of ``State`` with the instance as a further, first axis."""

    views: Annotated[Int64s, 2]  # [instances, words] the words of the state of each instance

    def __init__(self, **arrays: NDArray[Any]) -> None:
        states = [_state(arrays, i) for i in range(len(arrays["at"]))]
        super().__init__(**{**arrays, "views": np.stack([state.words for state in states])})

    @classmethod
    def layout(cls) -> dict[str, tuple[np.dtype[Any], int]]:
        """Dtype and number of axes of each array."""
        further = {name for name in State.layout() if name not in _SHARED}
        return {name: (dtype, axes + (name in further)) for name, (dtype, axes) in super().layout().items()}


def _state(arrays: dict[str, NDArray[Any]], i: int) -> State:
    def part(name: str, axes: int) -> NDArray[Any]:
        if name in _SHARED:
            return arrays[name]
        return arrays[name][i] if axes else arrays[name][i : i + 1]

    return State(**{name: part(name, axes) for name, (_, axes) in State.layout().items()})


stack_of = reader(Stack)


def instance_view(stack: Stack, i: int) -> State:
    """The state of one instance; a view."""
    return _state(stack.arrays(), i)


def _instance(stack: Stack, i: int) -> State:
    return state_of(stack.views[i])  # type: ignore[arg-type]  # words


def _instance_as_python(stack: Any, i: int) -> State:
    return state_of(instance_view(stack.tables, i))


# The state of one instance, in compiled code.
instance = _instance_as_python if AS_PYTHON else compiled(_instance)


def new_run(
    trace: RequestTrace, cluster: ClusterConfig, engine: EngineConfig, queued_us: Int64s, given: Int64s | None
) -> tuple[Stack, Front]:
    """The stacked states and the front before the first arrival.

    ``queued_us``: when requests reach a queue, us.  ``given``: int64[n], where each goes; None if the router decides.
    Raises ``TraceError`` for a request that an instance can never serve.
    """
    eligible_us = eligible_times(trace, queued_us)
    order = np.argsort(eligible_us, kind="stable")
    alone = new_state(trace, engine, eligible_us, order)
    return _stacked(alone, cluster.instances), _front(trace, cluster, alone, order, given)


def with_room_for(stack: Stack, i: int) -> Stack:
    """The same states with the arrays that are nearly full for instance ``i`` made longer for all."""
    submitted, capacity = stack.at["submitted"], stack.facts.shape[1]
    if submitted[i] == capacity:
        length = capacity + capacity // 2 + 1
        return stack.replaced(**{name: _longer(stack, name, length, submitted) for name in _BY_REQUEST})
    wanted = with_room(instance_view(stack, i))
    used = {"steps": stack.at["rows"], "segments": stack.at["segments"]}
    used |= {name: np.full(len(stack.at), getattr(stack, name).shape[1]) for name in _PADDING}
    short = [name for name in used if len(getattr(wanted, name)) > getattr(stack, name).shape[1]]
    return stack.replaced(**{name: _longer(stack, name, len(getattr(wanted, name)), used[name]) for name in short})


def _longer(stack: Stack, name: str, length: int, rows: Int64s) -> NDArray[Any]:
    """An array with room for ``length`` rows per instance, and the rows that each has."""
    table = getattr(stack, name)
    longer = np.zeros((len(table), length, *table.shape[2:]), table.dtype)
    if _PADDING.get(name):
        longer[:] = _PADDING[name]
    for old, new, count in zip(table, longer, rows.tolist(), strict=True):
        new[:count] = old[:count]
    return longer


def _stacked(alone: State, instances: int) -> Stack:
    """As many states as instances, without a request, from one that knows them all.

    There is room for an even share of the requests and some; an instance that gets more makes it longer.
    """
    requests = len(alone.facts)
    share = min(requests, requests // instances * 2 + 16)
    fields: dict[str, NDArray[Any]] = {name: getattr(alone, name) for name in _SHARED}
    for name in _BY_REQUEST:
        fields[name] = np.zeros((instances, share), getattr(alone, name).dtype)
    fields["extents"] = np.empty((instances, len(alone.extents)), k.EXTENT)
    fields["extents"][:, 0] = alone.extents[0]
    fields["segments"] = np.empty((instances, len(alone.segments) - requests + share, 3), np.int64)
    fields["steps"] = np.empty((instances, len(alone.steps) // instances + 1), k.STEP)
    fields["at"] = np.repeat(alone.at, instances)
    fields["at"]["submitted"] = 0
    fields["batch"] = np.repeat(alone.batch, instances)
    for name in State.layout():
        if name not in fields:
            fields[name] = np.repeat(getattr(alone, name)[np.newaxis], instances, axis=0)
    return Stack(**fields)


def _front(trace: RequestTrace, cluster: ClusterConfig, alone: State, order: Int64s, given: Int64s | None) -> Front:
    n, instances = len(trace), cluster.instances
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    policy = _policy(cluster, GIVEN if given is not None else _KINDS[type(cluster.router)])
    memory = empty_lru(alone.at["keys_used"].item() if policy["prefix_affinity"] > 0 else 0)
    return Front(
        progress=np.zeros(1, PROGRESS),
        policy=policy,
        routed_us=np.ascontiguousarray(trace.arrival_us),
        target=np.full(n, k.NONE, np.int64) if given is None else given.copy(),
        place=place,
        order=order,
        facts=alone.facts,
        routed=np.zeros(instances, np.int64),
        snapshots=np.zeros(instances, SNAPSHOT),
        memory=np.repeat(memory[np.newaxis], instances, axis=0),
        remembered=np.zeros(instances, np.int64),
    )


def _policy(cluster: ClusterConfig, kind: int) -> Table:
    policy = np.zeros(1, POLICY)
    policy["kind"] = kind
    policy["interval_us"] = cluster.snapshots.interval_us
    policy["live_depths"] = cluster.snapshots.live_depths
    policy["memory_blocks"] = ROUTER_MEMORY_BLOCKS
    if isinstance(cluster.router, Weighted):
        weights = vars(cluster.router)
        for scorer, weight in weights.items():
            policy[scorer] = weight / sum(weights.values())
    return policy
