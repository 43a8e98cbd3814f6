"""A cluster: requests in, a result of each instance and of all together out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import TraceError
from blis_replay.blis.latency.models import Latency, Lifecycle
from blis_replay.blis.parallel.instances import instance_result, new_run, run_to_the_end
from blis_replay.blis.parallel.ranks import pooled
from blis_replay.blis.result import SimResult
from blis_replay.blis.setup import queueing_times
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay_labs.cluster.config import ClusterConfig, Random, RoundRobin, Weighted
from blis_replay_labs.cluster.router import new_router, run_routed


@dataclass(frozen=True)
class ClusterResult:
    """A run of a cluster, its requests in the order of the trace.

    ``whole``: all instances as one, their steps one instance after the other.  ``instance``: int64[n], where each
    request was served.  ``instances``: the run of each.
    """

    whole: SimResult
    instance: Int64s
    instances: tuple[SimResult, ...]


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
    ``simulate`` does, and for prefix affinity without block keys.  Equal input gives byte-equal output.
    """
    if isinstance(cluster.router, Weighted) and cluster.router.prefix_affinity > 0 and trace.block_keys is None:
        raise TraceError("prefix affinity needs to know which prompts are alike; give block_keys, or weight 0")
    lifecycle = lifecycle or Lifecycle()
    # A request is in no queue before the router has seen it, whatever delay was observed.
    queued_us = np.maximum(queueing_times(trace, lifecycle), trace.arrival_us)
    stack, front = new_run(trace, cluster.instances, engine, queued_us)
    router = new_router(cluster, stack, front, given_instances(cluster, len(trace)))
    stack = run_to_the_end(stack, front, latency, "instance", partial(run_routed, router))
    results = [instance_result(trace, stack, front, queued_us, i, lifecycle) for i in range(cluster.instances)]
    return ClusterResult(*pooled(results, front.target), tuple(results))


def given_instances(cluster: ClusterConfig, requests: int) -> Int64s | None:
    """int64[requests]: the instance of each request; None if the router reads the state of the instances."""
    router = cluster.router
    if isinstance(router, RoundRobin):
        return np.arange(requests, dtype=np.int64) % cluster.instances
    if isinstance(router, Random):
        return np.random.default_rng(router.seed).integers(cluster.instances, size=requests)
    return None
