"""A cluster: requests in, a result of each instance and of all together out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.cluster import state as c
from blis_replay.blis.cluster.admission import admitted
from blis_replay.blis.cluster.assignment import given_instances
from blis_replay.blis.cluster.config import ClusterConfig, Weighted
from blis_replay.blis.cluster.loop import run
from blis_replay.blis.cluster.setup import new_run, with_room_for
from blis_replay.blis.errors import TraceError
from blis_replay.blis.kernel import loop
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency import Latency, Lifecycle
from blis_replay.blis.result import SimResult, check_conservation, read_result
from blis_replay.blis.setup import queueing_times
from blis_replay.blis.trace import EngineConfig, Int64s, RequestTrace

REFUSED = -1


@dataclass(frozen=True)
class ClusterResult:
    """A run of a cluster; ``int64[n]`` are in the order of the trace, -1 where there is nothing.

    ``instance``: where each request was served, ``REFUSED`` by admission.  ``instances``: the run of each, its
    requests in the order of the trace.  ``ttft_us``, ``e2e_us``: as the client sees them, of ``completed`` (bool[n]).
    """

    instance: Int64s
    instances: tuple[SimResult, ...]
    completed: NDArray[np.bool_]
    ttft_us: Int64s
    e2e_us: Int64s


def simulate_cluster(
    trace: RequestTrace,
    cluster: ClusterConfig,
    engine: EngineConfig,
    latency: Latency,
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
    stack = _run(stack, front, latency)
    instance = np.full(len(trace), REFUSED, np.int64)
    instance[let_in] = front.target
    results = tuple(_instance_result(served, stack, front, queued_us, i, lifecycle) for i in range(cluster.instances))
    return _pooled(instance, results)


def _run(stack: k.State, front: c.Front, latency: Latency) -> k.State:
    kind, whole, real = latency.for_kernel()
    while (answer := run(stack, front, kind, whole, real)) != loop.IDLE:
        stopped_at = int(front.progress[c.STOPPED_AT])
        if answer == loop.STUCK:
            raise TraceError(
                f"at {stack.at[stopped_at, k.NOW]} us requests of instance {stopped_at} evict each other for ever "
                "without a token; raise num_gpu_blocks, or break the ties in priority and arrival time"
            )
        stack = with_room_for(stack, stopped_at)
    return stack


def _instance_result(
    served: RequestTrace, stack: k.State, front: c.Front, queued_us: Int64s, i: int, lifecycle: Lifecycle
) -> SimResult:
    chosen = np.flatnonzero(front.target == i)
    state = c.instance_view(stack, i)
    state = state._replace(request=state.request[: len(chosen)], scheduled_us=state.scheduled_us[: len(chosen)])
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
