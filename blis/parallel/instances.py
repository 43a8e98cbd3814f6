"""Several instances of one engine: their states, stacked, the requests before them, and the result of each.

The states of all instances are one ``kernel.state.State`` whose tables and arrays have the instance as a further,
first axis, so that compiled code can go from one to the next.  An instance numbers its requests in the order in which
they reach its queue.  ``config``, ``keys`` and ``by_rank`` are the same for all: ranks are those among all requests,
and a rank leads to the number that its request has in its instance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import evicting_for_ever
from blis_replay.base.functions import decorators
from blis_replay.base.tables import AS_PYTHON, Tables, reader
from blis_replay.blis.kernel import loop
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.state import Record, State, Table, dtype_of, i64, state_of
from blis_replay.blis.latency.models import Latency, Lifecycle
from blis_replay.blis.result import SimResult, check_conservation, read_result
from blis_replay.blis.setup import eligible_times, new_state, with_room
from blis_replay.blis.trace import EngineConfig, RequestTrace

entry, compiled = decorators(Path(__file__).parent, *sorted(k.FOLDER.glob("*.py")), inline=True)

_BY_REQUEST = ("facts", "requests", "outcomes", "links", "abort_order", "heap", "leaving")
# By block key, with what stands for nothing.
_PADDING = {"extent_of_key": k.NONE}
_SHARED = ("config", "keys", "by_rank", "grouping")


class Progress:
    """Where the routing stands."""

    decisions: i64  # requests that have been routed
    queued: i64  # requests handed to their instance because they have reached its queue
    stopped_at: i64  # the instance that could not go on


PROGRESS = dtype_of(Progress)


class Front(Tables):
    """The requests before the instances, numbered by arrival, and by when they reach a queue."""

    progress: Annotated[Record, PROGRESS, 0]
    routed_us: Int64s  # [requests, by arrival] when the router decides
    target: Int64s  # [requests, by arrival] the instance
    order: Int64s  # [requests, by queueing] its number by arrival
    facts: Annotated[Table, k.FACTS, 1]  # [requests, by queueing]


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
    return state_of(stack.views[i])


def _instance_as_python(stack: Any, i: int) -> State:
    return state_of(instance_view(stack.tables, i))


# The state of one instance, in compiled code.
instance = _instance_as_python if AS_PYTHON else compiled(_instance)


def new_run(trace: RequestTrace, instances: int, engine: EngineConfig, queued_us: Int64s) -> tuple[Stack, Front]:
    """The states of the instances and of the front before the first arrival.

    ``queued_us``: when requests reach a queue, us.  Raises ``TraceError`` for a request that no instance can serve.
    """
    eligible_us = eligible_times(trace, queued_us)
    order = np.argsort(eligible_us, kind="stable")
    alone = new_state(trace, engine, eligible_us, order)
    front = Front(
        progress=np.zeros(1, PROGRESS),
        routed_us=np.ascontiguousarray(trace.arrival_us),
        target=np.full(len(trace), k.NONE, np.int64),
        order=order,
        facts=alone.facts,
    )
    return _stacked(alone, instances), front


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


def run_to_the_end(stack: Stack, front: Front, latency: Latency, one: str, run: Callable[..., int]) -> Stack:
    """The engines as they are when all is served.

    ``run``: serves requests until all are done (IDLE), or stops at an engine.  ``one``: what an engine is called.
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


# -- Compiled ---------------------------------------------------------------------------------


@compiled
def queue_at(stack: Stack, front: Front, request: int, i: int) -> None:
    """Make a request, by its number by queueing, the next one of an instance."""
    local = stack.at[i].submitted
    stack.facts[i, local] = front.facts[request]
    outcome = stack.outcomes[i, local]
    outcome.scheduled_us = outcome.scheduled_step = outcome.first_step = outcome.last_step = k.NONE
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
