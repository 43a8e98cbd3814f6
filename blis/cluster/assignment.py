"""Where requests go if the router looks at nothing to know it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.cluster.config import ClusterConfig, Random, Recorded, RoundRobin
from blis_replay.blis.errors import TraceError
from blis_replay.blis.trace import Int64s


def given_instances(cluster: ClusterConfig, let_in: NDArray[np.bool_]) -> Int64s | None:
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
