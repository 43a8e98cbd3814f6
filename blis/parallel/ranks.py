"""Data parallelism: one server of several ranks, an engine each with its own queue, behind vLLM's own balancer.

Ranks of dense models go each by itself.  Where experts are spread over the ranks, they exchange tokens in every layer:
all take a step together, as long as the longest, and who has nothing runs a step for nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.errors import TraceError
from blis_replay.base.tables import table_of
from blis_replay.blis.kernel.loop import BATCH, IDLE, NEEDS_ROOM, REACHED, STUCK, build_batch, start_batch
from blis_replay.blis.kernel.state import NEVER
from blis_replay.blis.kernel.step_time import batch_duration_us
from blis_replay.blis.latency.models import Latency, Lifecycle, StepTime
from blis_replay.blis.parallel.balancer import (
    Balancer,
    balancer_of,
    choose_rank,
    deliver,
    forget_finished,
    new_balancer,
    note_open,
    post,
)
from blis_replay.blis.parallel.instances import (
    Front,
    Stack,
    compiled,
    entry,
    front_of,
    instance,
    instance_result,
    new_run,
    queue_at,
    run_to_the_end,
    stack_of,
)
from blis_replay.blis.result import SimResult
from blis_replay.blis.setup import queueing_times
from blis_replay.blis.trace import EngineConfig, RequestTrace

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
    stack, front = new_run(trace, engine.data_parallel_size, engine, queued_us)
    balancer = new_balancer(engine, len(trace), int(stack.config["num_blocks"].item()))
    stack = run_to_the_end(stack, front, latency, "rank", partial(run_ranks, balancer))
    ranks = range(engine.data_parallel_size)
    return pooled([instance_result(trace, stack, front, queued_us, i, lifecycle) for i in ranks], front.target)


def pooled(results: list[SimResult], rank: Int64s) -> tuple[SimResult, Int64s]:
    """Results of ranks as one, in the order of the trace; ``rank``: int64[n]."""
    rows = np.cumsum([0, *(len(result.steps) for result in results)])
    numbers = [np.flatnonzero(rank == i) for i in range(len(results))]
    columns: dict[str, Any] = {}
    for name in vars(results[0]):
        values = [getattr(result, name) for result in results]
        if name in ("steps", "segments", "lifecycle"):
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
    )
    return whole, rank


# -- The loop ------------------------------------------------------------------------------

# Steps after which ranks in lockstep ask each other whether one has work (DPEngineCoreProc).
_STEPS_BETWEEN_SYNCS = 32


@entry
def run_ranks(given: Balancer, stack: Stack, front: Front, kind: int, int_params: Int64s, float_params: Floats) -> int:
    """Route all requests and serve them (IDLE), or stop at a rank that NEEDS_ROOM or is STUCK."""
    ints, floats = table_of(int_params), table_of(float_params)
    return _run(stack_of(stack), front_of(front), balancer_of(given), kind, ints, floats)


@compiled
def _run(stack: Stack, front: Front, balancer: Balancer, kind: int, int_params: Int64s, float_params: Floats) -> int:
    progress = front.progress
    while True:
        decision = progress.decisions
        everything_routed = decision == len(front.routed_us)
        now_us = NEVER if everything_routed else front.routed_us[decision]
        answer = hand_over(stack, front, balancer, now_us)
        if answer != NEEDS_ROOM:
            if balancer.coordinator.lockstep == 1:
                answer = advance_together(stack, front, balancer, now_us, kind, int_params, float_params)
            else:
                answer = advance_apart(stack, front, balancer, now_us, kind, int_params, float_params)
        if answer in (NEEDS_ROOM, STUCK) or everything_routed:
            return answer
        deliver(balancer, now_us)
        forget_finished(stack, balancer, now_us)
        front.target[decision] = choose_rank(stack, balancer, decision, now_us)
        progress.decisions += 1


@compiled
def hand_over(stack: Stack, front: Front, balancer: Balancer, until_us: int) -> int:
    """Requests that reach their queue before a time become known to their rank."""
    progress = front.progress
    while progress.queued < len(front.facts) and front.facts[progress.queued].queued_us < until_us:
        rank = front.target[front.order[progress.queued]]
        if stack.at[rank].submitted == stack.facts.shape[1]:
            progress.stopped_at = rank
            return NEEDS_ROOM
        front_end = front.order[progress.queued] % len(balancer.first)
        note_open(balancer, rank, stack.at[rank].submitted, front_end)
        queue_at(stack, front, progress.queued, rank)
        progress.queued += 1
    return IDLE


@compiled
def next_turn_us(stack: Stack, rank: int) -> int:
    """When a rank takes its next turn; NEVER if it has nothing to do."""
    at = stack.at[rank]
    if at.running_depth + at.waiting_depth + at.in_flight > 0:
        return int(at.now_us)
    if at.arrived == at.submitted:
        return NEVER
    return int(max(at.now_us, stack.facts[rank, at.arrived].queued_us))


# -- Each by itself ------------------------------------------------------------------------


@compiled
def advance_apart(
    stack: Stack, front: Front, balancer: Balancer, until_us: int, kind: int, int_params: Int64s, float_params: Floats
) -> int:
    """Let ranks take turns, the earliest first, until no turn is left before a time."""
    for rank in range(len(stack.at)):
        balancer.busy[rank] = 1
    while True:
        rank, turn_us = -1, until_us
        for i in range(len(stack.at)):
            if balancer.busy[i] == 1 and next_turn_us(stack, i) < turn_us:
                rank, turn_us = i, next_turn_us(stack, i)
        if rank < 0:
            return IDLE
        deliver(balancer, turn_us)
        answer = build_batch(instance(stack, rank), until_us)
        if answer in (NEEDS_ROOM, STUCK):
            front.progress.stopped_at = rank
            return answer
        if answer != BATCH:
            balancer.busy[rank] = 0
            if stack.at[rank].arrived > 0 and stack.at[rank].running_depth + stack.at[rank].waiting_depth == 0:
                post(balancer, rank, stack.at[rank].now_us, 0, 0, 0, stack.at[rank].free_blocks)
            continue
        post_before(stack, balancer, rank, stack.at[rank].now_us, 0)
        start_us = max(stack.at[rank].now_us, stack.at[rank].device_free_us)
        duration_us = batch_duration_us(kind, int_params, float_params, stack.batch[rank], start_us)
        start_batch(instance(stack, rank), duration_us)
        post_after(stack, balancer, rank, stack.at[rank].now_us, 0)


@compiled
def post_before(stack: Stack, balancer: Balancer, rank: int, at_us: int, step: int) -> None:
    """What a rank reports before the step whose batch was just built."""
    if balancer.coordinator.reports_before == 0:
        return
    at, batch = stack.at[rank], stack.batch[rank]
    moved = batch.admitted - at.preempted_in_call
    post(balancer, rank, at_us, step, at.waiting_depth + moved, at.running_depth - moved, batch.free_before)


@compiled
def post_after(stack: Stack, balancer: Balancer, rank: int, at_us: int, step: int) -> None:
    """What it reports after a step."""
    at = stack.at[rank]
    post(balancer, rank, at_us, step, at.waiting_depth, at.running_depth, at.free_blocks)


# -- In lockstep -----------------------------------------------------------------------------


@compiled
def advance_together(
    stack: Stack, front: Front, balancer: Balancer, until_us: int, kind: int, int_params: Int64s, float_params: Floats
) -> int:
    """Let all ranks take steps together until none is left before a time."""
    clock = balancer.coordinator
    while True:
        if clock.running == 0:
            first_us = NEVER
            for rank in range(len(stack.at)):
                first_us = min(first_us, next_turn_us(stack, rank))
            if first_us >= until_us:
                return IDLE
            clock.now_us = max(clock.now_us, first_us)
            clock.running = 1
        if clock.now_us >= until_us:
            return REACHED
        deliver(balancer, clock.now_us)
        answer = step_together(stack, front, balancer, kind, int_params, float_params)
        if answer in (NEEDS_ROOM, STUCK):
            return answer
        clock.steps += 1
        if clock.steps % _STEPS_BETWEEN_SYNCS == 0:
            unfinished = 0
            for rank in range(len(stack.at)):
                unfinished += stack.at[rank].running_depth + stack.at[rank].waiting_depth
            if unfinished == 0:
                clock.running = 0


@compiled
def step_together(
    stack: Stack, front: Front, balancer: Balancer, kind: int, int_params: Int64s, float_params: Floats
) -> int:
    """One step of all ranks."""
    clock = balancer.coordinator
    now_us = clock.now_us
    start_us = max(now_us, clock.device_free_us)
    longest_us = 0
    for rank in range(len(stack.at)):
        at, batch = stack.at[rank], stack.batch[rank]
        at.now_us = max(at.now_us, now_us)
        at.device_free_us = max(at.device_free_us, clock.device_free_us)
        if balancer.busy[rank] == 0:  # else its batch was built before room was made for another rank
            answer = build_batch(instance(stack, rank), now_us + 1)
            if answer in (NEEDS_ROOM, STUCK):
                front.progress.stopped_at = rank
                return answer
            balancer.busy[rank] = 1 if answer == BATCH else 0
        if balancer.busy[rank] == 1:
            post_before(stack, balancer, rank, now_us, clock.steps)
            if batch.prefill_tokens + batch.decode_tokens > 0:
                longest_us = max(longest_us, batch_duration_us(kind, int_params, float_params, batch, start_us))
    if longest_us == 0:
        longest_us = empty_step_us(stack, kind, int_params, float_params, start_us)
        clock.now_us = start_us + longest_us
    clock.device_free_us = start_us + longest_us
    for rank in range(len(stack.at)):
        if balancer.busy[rank] == 1:
            start_batch(instance(stack, rank), longest_us)
            balancer.busy[rank] = 0
        clock.now_us = max(clock.now_us, stack.at[rank].now_us)
        post_after(stack, balancer, rank, stack.at[rank].now_us, clock.steps)
    return REACHED


@compiled
def empty_step_us(stack: Stack, kind: int, int_params: Int64s, float_params: Floats, start_us: int) -> int:
    """How long a step for nothing takes: that of a single token."""
    batch = stack.batch[0]
    batch.prefill_tokens = batch.prefill_requests = batch.attended_tokens = 0
    batch.decode_tokens = batch.context_tokens = 1
    duration_us = batch_duration_us(kind, int_params, float_params, batch, start_us)
    batch.decode_tokens = batch.context_tokens = 0
    return duration_us
