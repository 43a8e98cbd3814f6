"""The scheduling kernel: vLLM V1 continuous batching over arrays, compiled.

First form: waiting and running order, token budget, chunked prefill,
``max_num_seqs``, synchronous and asynchronous scheduling, aborts.  KV blocks are
not limited here, so nothing is preempted and three facts hold that make a step
cheap (each is a consequence of "running requests first, in list order"):

* at most one request is partly prefilled, and it is the last of the running list;
* every decoding request gets one token in every step, so the step in which a
  request finishes is known when its prefill ends;
* the waiting queue is a window of the requests sorted by the time they queue.

A step therefore costs O(1) plus O(1) per admission; no token is ever stored.
The times of a request's tokens are a slice of ``step_end_us``.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

# Rows of the per-step table, one column a step.
STEP_START, STEP_END, STEP_PREFILL, STEP_DECODE, STEP_CONTEXT, STEP_RUNNING, STEP_WAITING, STEP_SCHEDULED_AT = range(8)
STEP_ROWS = 8

# Request states at the end of a run.
UNFINISHED, COMPLETED, ABORTED = 0, 1, 2

NEVER = np.int64(2**62)


@njit(cache=True)
def step_duration_us(coefficients_ns: Int64s, prefill_tokens: int, decode_tokens: int, context_tokens: int) -> int:
    """Step time of a linear latency model, us: see ``latency.LatencyModel``.

    ``coefficients_ns``: intercept, per prefill token, per decode token, per decode
    context token, floor, and the nanoseconds added before the division (500 rounds
    half up, 0 truncates).
    """
    total_ns = (
        coefficients_ns[0]
        + coefficients_ns[1] * prefill_tokens
        + coefficients_ns[2] * decode_tokens
        + coefficients_ns[3] * context_tokens
    )
    duration_us: int = max((max(total_ns, coefficients_ns[4]) + coefficients_ns[5]) // 1000, 1)
    return duration_us


@njit(cache=True)
def run(
    queued_us: Int64s,  # [n], ascending: when a request reaches the waiting queue
    prompt_tokens: Int64s,  # [n]
    prefill_tokens: Int64s,  # [n]: prompt tokens that no prefix cache holds, >= 1
    output_tokens: Int64s,  # [n], >= 1
    abort_us: Int64s,  # [n]: when the client gives up, NEVER if it does not
    abort_order: Int64s,  # [n]: requests by abort_us
    max_num_seqs: int,
    max_num_batched_tokens: int,
    batches_in_flight: int,  # 1: synchronous, 2: asynchronous
    coefficients_ns: Int64s,  # [6], see step_duration_us
) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
    """Run the engine loop until every request has finished or was aborted.

    Returns ``(steps, scheduled_us, first_step, last_step, state)``: the step table
    (``STEP_ROWS`` x number of steps, int64) and, per request, when it was admitted
    (us), the steps that gave its first and last token (-1: none), and its state.
    """
    n = len(queued_us)
    scheduled_us = np.full(n, -1, np.int64)
    first_step = np.full(n, -1, np.int64)
    last_step = np.full(n, -1, np.int64)
    state = np.zeros(n, np.int64)
    steps = np.empty((STEP_ROWS, 4096), np.int64)
    step = 0

    # Decoding requests by the step that gives their last token: number and context.
    ring = 2
    for i in range(n):
        ring = max(ring, output_tokens[i] + 1)
    finishing = np.zeros(ring, np.int64)
    finishing_context = np.zeros(ring, np.int64)

    arrived = 0  # requests [head, arrived) have queued
    head = 0
    waiting = 0
    running = 0  # the running list: in prefill, decoding, or waiting for the last token
    decoding = 0  # members that take a decode token in the next batch
    context = 0  # KV tokens those decodes attend to, each one's own included
    partial = -1  # the request whose prefill is under way
    partial_left = 0
    next_abort = 0

    now = np.int64(0)
    device_free_us = np.int64(0)
    in_flight = 0  # scheduled batches whose tokens are not in yet, oldest first
    batch_end_us = np.zeros(3, np.int64)
    batch_finishes = np.zeros(3, np.int64)

    while True:
        # 1. The engine loop: arrivals, then clients that have given up.
        while arrived < n and queued_us[arrived] <= now:
            if state[arrived] != ABORTED:
                waiting += 1
            arrived += 1
        while next_abort < n and abort_us[abort_order[next_abort]] <= now:
            r = abort_order[next_abort]
            next_abort += 1
            if scheduled_us[r] < 0:
                if r < arrived:
                    waiting -= 1
            elif r == partial:
                partial = -1
                running -= 1
            elif last_step[r] >= step:
                running -= 1
                decoding -= 1
                context -= prompt_tokens[r] + step - first_step[r]
                finishing[last_step[r] % ring] -= 1
                finishing_context[last_step[r] % ring] -= prompt_tokens[r] + output_tokens[r] - 1
            else:
                continue  # its last token is computed or in flight: it completes
            state[r] = ABORTED

        if running + waiting > 0:
            # 2. schedule()
            budget = max_num_batched_tokens - decoding
            prefilled = 0
            joining = 0
            joining_context = 0
            finishes = 0
            # 2a. Running requests first: the decodes (above), then the one unfinished
            # prefill.  2b. Then waiting requests, head first.  Both end the same way.
            while True:
                if partial < 0:
                    if waiting == 0 or budget <= 0 or running >= max_num_seqs:
                        break
                    while state[head] == ABORTED:
                        head += 1
                    partial = head
                    partial_left = prefill_tokens[head]
                    scheduled_us[head] = now
                    head += 1
                    waiting -= 1
                    running += 1
                chunk = min(partial_left, budget)
                budget -= chunk
                prefilled += chunk
                partial_left -= chunk
                if partial_left > 0:
                    break
                # This chunk reaches the last known token, so this step gives token one.
                first_step[partial] = step
                last_step[partial] = step + output_tokens[partial] - 1
                if output_tokens[partial] == 1:
                    finishes += 1
                else:
                    joining += 1
                    joining_context += prompt_tokens[partial] + 1
                    finishing[last_step[partial] % ring] += 1
                    finishing_context[last_step[partial] % ring] += prompt_tokens[partial] + output_tokens[partial] - 1
                partial = -1

            # 3. The batch runs when the device is free.  An empty one (all members
            # wait for their last token) takes no device time.
            scheduled_tokens = prefilled + decoding
            start_us = max(now, device_free_us)
            if scheduled_tokens > 0:
                if step == steps.shape[1]:
                    grown = np.empty((STEP_ROWS, 2 * step), np.int64)
                    grown[:, :step] = steps
                    steps = grown
                device_free_us = start_us + step_duration_us(coefficients_ns, prefilled, decoding, context)
                steps[STEP_START, step] = start_us
                steps[STEP_END, step] = device_free_us
                steps[STEP_PREFILL, step] = prefilled
                steps[STEP_DECODE, step] = decoding
                steps[STEP_CONTEXT, step] = context
                steps[STEP_RUNNING, step] = running
                steps[STEP_WAITING, step] = waiting
                steps[STEP_SCHEDULED_AT, step] = now
                # The next batch: those that stay are one token longer, and the
                # requests whose prefill ended here join them.
                finishes += finishing[step % ring]
                decoding -= finishing[step % ring]
                context += decoding - finishing_context[step % ring]
                finishing[step % ring] = 0
                finishing_context[step % ring] = 0
                decoding += joining
                context += joining_context
                step += 1
            batch_end_us[in_flight] = max(start_us, device_free_us)
            batch_finishes[in_flight] = finishes
            in_flight += 1
            if scheduled_tokens > 0 and in_flight < batches_in_flight:
                continue
        elif in_flight == 0:
            # Idle: sleep until an arrival.
            if arrived == n:
                break
            now = max(now, queued_us[arrived])
            continue

        # 4. update: the oldest batch's tokens are in, finished requests leave.
        now = max(now, batch_end_us[0])
        running -= batch_finishes[0]
        in_flight -= 1
        for b in range(in_flight):
            batch_end_us[b] = batch_end_us[b + 1]
            batch_finishes[b] = batch_finishes[b + 1]

    for i in range(n):
        if state[i] == ABORTED:
            last_step[i] = -1
        elif last_step[i] >= 0:
            state[i] = COMPLETED
    return steps[:, :step].copy(), scheduled_us, first_step, last_step, state
