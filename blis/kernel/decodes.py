"""Steps of nothing but decodes: a token for each request there is, or has its last one in flight.

Four steps of five are such ones.  What ``schedule`` and the loop would do in them is little, and done here without
asking what else there might be to do.
"""

from __future__ import annotations

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.tables import call_operation
from blis_replay.blis.kernel.batch import end_last_decodes, of_mean_layer, widen
from blis_replay.blis.kernel.queues import finish_all
from blis_replay.blis.kernel.state import LEAVE_DUE, NEVER, NONE, UNKEYED, State, compiled
from blis_replay.blis.kernel.step_time import quick_duration_us


@compiled
def run_decodes(state: State, until_us: int, kind: int, int_params: Int64s, float_params: Floats) -> None:
    """Build and run such batches as long as blocks without contents are at hand, and nobody comes or gives up.

    What goes on in each of them is kept out of memory, until somebody gets or has got the last token.
    """
    until_us = decodes_until(state, until_us)
    if until_us == 0:
        return
    at, batch, config = state.at, state.batch, state.config
    steps, growth_count, finish_head, mask = state.steps, state.growth_count, state.finish_head, config.ring_mask
    leave_head = state.leave_head
    now_us, free_us, row, step, slot = at.now_us, at.device_free_us, at.rows, at.step, at.growth_slot
    first_row, free_blocks, context, decodes = row, at.free_blocks, at.decoding_context, at.decoding_requests
    running = running_before = at.running_depth
    free_before = free_blocks
    asynchronous = config.batches_in_flight == 2
    ahead = 1 if asynchronous else 0
    give_up_us = at.abort_due_us if asynchronous else NEVER
    size, grouped, windowed = config.block_size, config.groups_at != 0, config.windowed == 1
    ended = finish_head[(step - 1) & mask] if asynchronous else NONE
    at_hand = blocks_at_hand(state)
    batch.prefill_tokens = batch.attended_tokens = batch.prefill_requests = 0
    batch.decode_tokens = decodes
    while now_us < until_us and row < len(steps) and decodes > 0:
        taken = growth_count[slot]
        if taken > at_hand or free_us >= give_up_us:
            break
        free_blocks_before = free_blocks
        if slot < len(leave_head) and leave_head[slot] != NONE:
            take_counted(state, free_blocks)
            at.step, at.growth_slot = step, slot
            call_operation(config.groups_at, LEAVE_DUE, state, NONE, 0, 0)
            free_blocks, at_hand = at.free_blocks, blocks_at_hand(state)
        start_us = max(now_us, free_us)
        batch.context_tokens = context
        if grouped:
            batch.grouped_context_tokens = at.decoding_attended
            of_mean_layer(state)
        end_us = start_us + quick_duration_us(kind, int_params, float_params, batch, start_us)
        this = steps[row]
        this.start_us = start_us
        this.end_us = end_us
        this.scheduled_us = now_us
        this.context_tokens = context
        this.prefill_tokens = this.waiting_depth = 0
        this.free_blocks_before = free_blocks_before
        at_hand -= taken
        free_blocks -= taken
        free_before, running_before = free_blocks, running
        this.free_blocks = free_blocks
        this.decode_tokens = decodes
        this.prefill_requests = 0
        this.running_depth = running
        this.admitted = this.preempted = this.finished = 0
        context += decodes
        if windowed:
            widen(state, step)
        last = finish_head[step & mask]
        if not asynchronous:
            ended = last
        if last != NONE or ended != NONE:
            take_counted(state, free_blocks)
            at.step, at.decoding_context = step, context
            if last != NONE:
                end_last_decodes(state)
            if ended != NONE:
                finish_all(state, step - ahead, row - ahead)
            free_blocks, context, decodes, running = (
                at.free_blocks,
                at.decoding_context,
                at.decoding_requests,
                at.running_depth,
            )
            at_hand = blocks_at_hand(state)
            batch.decode_tokens = decodes
            if lacks_segments(state):
                until_us = 0
        if ended == NONE:
            steps[row - ahead].free_blocks_end = free_blocks
            steps[row - ahead].finished = 0
        ended = last
        now_us = max(now_us, free_us) if asynchronous else end_us
        free_us = end_us
        row += 1
        step += 1
        slot = slot + 1 if slot + 1 < size else 0
    if row > first_row:
        take_counted(state, free_blocks)
        at.now_us, at.device_free_us, at.rows, at.step, at.growth_slot = now_us, free_us, row, step, slot
        at.decoding_context = context
        at.steps_with_tokens += row - first_row
        at.waiting_before = 0
        at.running_before, at.free_before = running_before, free_before
        state.flight[0], state.flight[2] = row - 1, free_us


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
        or lacks_segments(state)
    ):
        return 0
    return until_us if at.arrived == at.submitted else min(until_us, state.facts[at.arrived].queued_us)


@compiled
def lacks_segments(state: State) -> bool:
    """Whether the runs of tokens that the next step ends might not fit the array that grows."""
    return state.at.segments + state.config.segments_of_step > state.segments.shape[0]


@compiled
def blocks_at_hand(state: State) -> int:
    """Blocks that can be taken from the head of the free queue by counting: it keeps one, and they have no contents."""
    if state.at.free_blocks == 0:
        return 0
    head = state.extents[state.at.free_queue.head]
    return head.blocks - 1 if head.depth == UNKEYED else 0


@compiled
def take_counted(state: State, free_blocks: int) -> None:
    """Take blocks until only ``free_blocks`` are free."""
    if state.at.free_blocks > free_blocks:
        state.extents[state.at.free_queue.head].blocks -= state.at.free_blocks - free_blocks
        state.at.free_blocks = free_blocks
