"""Steps of nothing but decodes: a token for each request there is, or has its last one in flight.

Four steps of five are such ones.  What ``schedule`` and the loop would do in them is little, and done here without
asking what else there might be to do.
"""

from __future__ import annotations

from blis_replay.blis.kernel.free_queue import take_blocks
from blis_replay.blis.kernel.schedule import end_decodes
from blis_replay.blis.kernel.state import NEVER, NONE, UNKEYED, State, compiled, index
from blis_replay.blis.kernel.step_time import quick_duration_us
from blis_replay.compiled.arrays import Floats, Int64s


@compiled
def decodes_until(state: State, until_us: int) -> int:
    """Before when the batches are only decodes, as far as is known: nobody comes till then; 0: the next one is not."""
    at, config = state.at, state.config
    asynchronous = config.batches_in_flight == 2
    if (
        at.waiting_depth > 0
        or at.decoding_requests == 0
        or at.prefilling.head != NONE
        or at.keyed_decoding > 0
        or at.decoding_requests > config.token_budget
        or config.prefill_interval > 1
        or at.in_flight != config.batches_in_flight - 1
        or (asynchronous and state.flight[0] == NONE)
        or at.abort_due_us <= (max(at.now_us, state.flight[2]) if asynchronous else NEVER - 1)
        or at.steps_without_token > 0
        or at.segments + config.segments_of_step > state.segments.shape[0]
    ):
        return 0
    return until_us if at.arrived == at.submitted else min(until_us, state.facts[index(at.arrived)].queued_us)


@compiled
def run_decodes(state: State, until_us: int, kind: int, int_params: Int64s, float_params: Floats) -> None:
    """Build and run such batches as long as nobody gets or has got the last token and blocks are at hand.

    Nothing but time, and what can be counted, goes on in them: it is kept out of memory meanwhile.
    """
    at, batch, config = state.at, state.batch, state.config
    steps, growth_count, finish_head, mask = state.steps, state.growth_count, state.finish_head, config.ring_mask
    now_us, free_us, row, step, slot = at.now_us, at.device_free_us, at.rows, at.step, at.growth_slot
    first_row, decodes, running, free_blocks = row, at.decoding_requests, at.running_depth, at.free_blocks
    asynchronous = config.batches_in_flight == 2
    if finish_head[index((step - at.in_flight) & mask)] != NONE:
        return
    head = state.extents[index(at.free_queue.head)]
    at_hand = head.blocks - 1 if head.depth == UNKEYED else 0
    batch.prefill_tokens = batch.attended_tokens = batch.prefill_requests = 0
    batch.served = batch.decode_tokens = decodes
    while now_us < until_us and row < len(steps) and finish_head[index(step & mask)] == NONE:
        taken = growth_count[index(slot)]
        if taken > at_hand or (asynchronous and free_us >= at.abort_due_us):
            break
        at_hand -= taken
        start_us = max(now_us, free_us)
        batch.context_tokens = context = at.decoding_context + decodes * (row - first_row)
        end_us = start_us + quick_duration_us(kind, int_params, float_params, batch, start_us)
        this = steps[index(row)]
        this.start_us = start_us
        this.end_us = end_us
        this.scheduled_us = now_us
        this.context_tokens = context
        this.prefill_tokens = this.waiting_depth = 0
        this.free_blocks_before = free_blocks
        free_blocks -= taken
        this.free_blocks = free_blocks
        this.decode_tokens = decodes
        this.prefill_requests = 0
        this.running_depth = running
        this.admitted = this.preempted = this.finished = 0
        if asynchronous:
            steps[index(row - 1)].free_blocks_end = free_blocks
            steps[index(row - 1)].finished = 0
            now_us = max(now_us, free_us)
        else:
            this.free_blocks_end = free_blocks
            now_us = end_us
        free_us = end_us
        row += 1
        step += 1
        slot = slot + 1 if slot + 1 < config.block_size else 0
    count = row - first_row
    if count > 0:
        at.now_us, at.device_free_us, at.rows, at.step, at.growth_slot = now_us, free_us, row, step, slot
        at.decoding_context += decodes * count
        at.steps_with_tokens += count
        at.preempted_in_call = at.waiting_before = 0
        at.running_before = running
        head.blocks -= at.free_blocks - free_blocks
        at.free_blocks = at.free_before = free_blocks
        if asynchronous:
            state.flight[0] = row - 1
            state.flight[2] = free_us


@compiled
def only_decodes(state: State, until_us: int) -> bool:
    """Whether the next batch, before the time that ``decodes_until`` says, is such a one."""
    at = state.at
    return (
        at.now_us < until_us
        and at.rows < len(state.steps)
        and state.growth_count[index(at.growth_slot)] <= at.free_blocks
        and (state.config.batches_in_flight == 1 or state.flight[2] < at.abort_due_us)
    )


@compiled
def serve_decodes(state: State) -> None:
    """Build it; somebody may get the last token."""
    at, batch = state.at, state.batch
    batch.prefill_tokens = batch.attended_tokens = batch.prefill_requests = 0
    batch.admitted = batch.first_tokens = batch.has_prefill = 0
    at.preempted_in_call = 0
    batch.free_before = at.free_blocks
    take_blocks(state, state.growth_count[index(at.growth_slot)])
    batch.served = batch.decode_tokens = at.decoding_requests
    batch.context_tokens = at.decoding_context
    at.steps_with_tokens += 1
    end_decodes(state)
