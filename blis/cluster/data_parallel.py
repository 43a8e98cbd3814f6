"""Data parallelism: one server of several ranks, an engine each, behind vLLM's own balancer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from blis_replay.blis.cluster.balancer import new_balancer
from blis_replay.blis.cluster.config import ClusterConfig
from blis_replay.blis.cluster.ranks import run_ranks
from blis_replay.blis.cluster.simulate import instance_result
from blis_replay.blis.cluster.state import new_run, with_room_for
from blis_replay.blis.errors import TraceError
from blis_replay.blis.kernel import loop
from blis_replay.blis.latency.models import Latency, Lifecycle, StepTime
from blis_replay.blis.result import SimResult
from blis_replay.blis.setup import queueing_times
from blis_replay.blis.trace import EngineConfig, RequestTrace
from blis_replay.compiled.arrays import Int64s

_OF_STEPS = ("scheduled_step", "first_step", "last_step")


def simulate_ranks(
    trace: RequestTrace, engine: EngineConfig, latency: Latency | StepTime, lifecycle: Lifecycle | None = None
) -> tuple[SimResult, Int64s]:
    """Serve ``trace`` in virtual time on ``data_parallel_size`` ranks of an engine.

    The result of all ranks as one, their steps one rank after the other, and the rank of each request, int64[n].
    Raises ``TraceError`` as ``blis.engine.simulate`` does.  Equal input gives byte-equal output.
    """
    if not isinstance(latency, Latency):
        raise TraceError("data parallelism needs a latency model that is data; give one, or one engine")
    lifecycle = lifecycle or Lifecycle()
    queued_us = np.maximum(queueing_times(trace, lifecycle), trace.arrival_us)
    nowhere = np.full(len(trace), -1, np.int64)
    stack, front = new_run(trace, ClusterConfig(engine.data_parallel_size), engine, queued_us, nowhere)
    balancer = new_balancer(engine, len(trace), int(stack.config["num_blocks"].item()))
    kind, int_params, float_params = latency.for_kernel()
    while (answer := run_ranks(stack, front, balancer, kind, int_params, float_params)) != loop.IDLE:
        stopped_at = front.progress["stopped_at"].item()
        if answer == loop.STUCK:
            raise TraceError(
                f"at {stack.at[stopped_at].now_us} us requests of rank {stopped_at} evict each other for ever "
                "without a token; raise num_gpu_blocks, or break the ties in priority and arrival time"
            )
        stack = with_room_for(stack, stopped_at)
    ranks = range(engine.data_parallel_size)
    return pooled([instance_result(trace, stack, front, queued_us, i, lifecycle) for i in ranks], front.target)


def pooled(results: list[SimResult], rank: Int64s) -> tuple[SimResult, Int64s]:
    """Results of ranks as one, in the order of the trace; ``rank``: int64[n]."""
    rows = np.cumsum([0, *(len(result.steps) for result in results)])
    numbers = [np.flatnonzero(rank == i) for i in range(len(results))]
    columns: dict[str, Any] = {}
    for name in vars(results[0]):
        values = [getattr(result, name) for result in results]
        if name in ("steps", "segments", "lifecycle", "stored_blocks", "fetched_blocks"):
            continue
        if name in _OF_STEPS:
            values = [np.where(value >= 0, value + first, value) for value, first in zip(values, rows, strict=False)]
        columns[name] = np.empty(len(rank), np.int64)
        for chosen, value in zip(numbers, values, strict=True):
            columns[name][chosen] = value
    segments = [
        np.column_stack([chosen[result.segments[:, 0]], result.segments[:, 1] + first, result.segments[:, 2]])
        for result, chosen, first in zip(results, numbers, rows, strict=False)
    ]
    whole = replace(
        results[0],
        **columns,
        steps=np.concatenate([result.steps for result in results]),
        segments=np.concatenate(segments),
        stored_blocks=sum(result.stored_blocks for result in results),
        fetched_blocks=sum(result.fetched_blocks for result in results),
    )
    return whole, rank
