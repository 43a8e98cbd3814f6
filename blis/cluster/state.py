"""What a run of a cluster is made of: the states of its instances, stacked, and the front before them.

The states of all instances are one ``kernel.state.State`` whose arrays have the instance as a further, first axis,
so that compiled code can go from one to the next; ``request`` is column after column there too.  An instance numbers
its requests in the order in which they reach its queue.  ``config``, ``keys`` and ``by_rank`` are the same for all:
ranks are those among all requests, and a rank leads to the number that its request has in its instance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.cluster.compiled import compiled
from blis_replay.blis.kernel.state import State
from blis_replay.blis.trace import Int32s, Int64s

Floats = NDArray[np.float64]

# -- Front.progress ----------------------------------------------------------------------
(
    DECISIONS,  # requests that have been routed
    QUEUED,  # requests handed to their instance because they have reached its queue
    SNAPSHOT_US,  # when the last one was taken
    STOPPED_AT,  # the instance that could not go on
) = range(4)
PROGRESS_SIZE = 4

# -- Front.policy ------------------------------------------------------------------------
ROUTER, INTERVAL_US, LIVE_DEPTHS, MEMORY_BLOCKS = range(4)
POLICY_SIZE = 4
GIVEN, LEAST_LOADED, ALWAYS_BUSIEST, WEIGHTED = range(4)

# -- Front.weights -------------------------------------------------------------------------
PREFIX_AFFINITY, QUEUE_DEPTH, KV_UTILIZATION = range(3)

# -- Front.snapshot: columns ---------------------------------------------------------------
WAITING, RUNNING, USED_BLOCKS = range(3)
SNAPSHOT_COLUMNS = 3


class Front(NamedTuple):
    """What stands before the instances.  Requests are numbered by arrival, and by when they reach a queue."""

    progress: Int64s
    policy: Int64s
    weights: Floats  # sum 1
    routed_us: Int64s  # [requests, by arrival] when the router decides
    target: Int64s  # [requests, by arrival] the instance; given to a router that reads no state
    place: Int64s  # [requests, by arrival] its number by queueing
    order: Int64s  # [requests, by queueing] its number by arrival
    columns: Int32s  # [REQUEST_COLUMNS; requests, by queueing] its row in State.request before it queues
    queued_us: Int64s  # [requests, by queueing]
    abort_us: Int64s  # [requests, by queueing]
    routed: Int64s  # [instances] requests sent there
    snapshot: Int64s  # [instances, SNAPSHOT_COLUMNS]
    newer: Int32s  # [instances, keys + 1] the router's memory of blocks sent, see affinity
    older: Int32s
    remembered: Int64s  # [instances] blocks in that memory


def instance_view(stack: State, i: int) -> State:
    """The state of one instance; a view."""
    return State(
        config=stack.config,
        at=stack.at[i],
        batch=stack.batch[i],
        flight=stack.flight[i],
        request=stack.request[i].T,
        queued_us=stack.queued_us[i],
        abort_us=stack.abort_us[i],
        scheduled_us=stack.scheduled_us[i],
        link=stack.link[i],
        abort_order=stack.abort_order[i],
        by_rank=stack.by_rank,
        heap=stack.heap[i],
        growth_head=stack.growth_head[i],
        growth_count=stack.growth_count[i],
        finish_head=stack.finish_head[i],
        keys=stack.keys,
        piece=stack.piece[i],
        found=stack.found[i],
        cpu_newer=stack.cpu_newer[i],
        cpu_older=stack.cpu_older[i],
        table=stack.table[i],
        free_rows=stack.free_rows[i],
        steps=stack.steps[i],
        segments=stack.segments[i],
    )


instance = compiled(instance_view)
