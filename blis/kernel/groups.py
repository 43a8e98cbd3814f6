"""KV-cache groups: layers with blocks of their own, such as sliding windows beside full attention.

All groups take their blocks from one pool, each one block for each block size of tokens.  Blocks that a window has left
are freed while the request runs, and a cached prefix is used as far as every group has it.  A block that can be looked
up is an extent of its own here, named in ``State.table``; the others are only counted, as in ``pool``.

The kernel calls ``operate`` by its address.  So these rules are compiled, by themselves, only where there are groups.
"""

from __future__ import annotations

from blis_replay.base.tables import column
from blis_replay.blis.kernel.free_queue import (
    append_unkeyed,
    insert_before,
    new_extent,
    prepend_unkeyed,
    take_blocks,
    unlink,
)
from blis_replay.blis.kernel.pool import blocks_for, full_blocks, modulo_block
from blis_replay.blis.kernel.queues import computed_now, in_flight_input, leave_bucket
from blis_replay.blis.kernel.state import (
    ADMIT,
    AWAIT_LEAVING,
    DECODING,
    ENTER,
    FIND,
    FORGET_LEAVING,
    LACKS,
    LEAVE,
    LEAVE_DUE,
    NONE,
    UNKEYED,
    State,
    Table,
    compiled,
    of_kind,
    separate,
    state_of,
)

# -- Group.kind: what a layer attends to --------------------------------------------------
FULL, WINDOW, CHUNK = range(3)
DENSE = -1  # Grouping.retention: every block is cached


@of_kind
def operate(operation: int, address: int, request: int, first: int, second: int) -> int:
    """Do one of the operations of ``kernel.state`` on the state at an address."""
    state = state_of(address)
    if operation == LEAVE:
        leave(state, request, first, second)
    elif operation == LEAVE_DUE:
        return leave_due(state)
    elif operation == FIND:
        return find_prefix(state, request, first)
    elif operation == LACKS:
        return 1 if lacks_blocks(state, request, first, second) else 0
    elif operation == ADMIT:
        admit(state, request, first, second)
    elif operation == ENTER:
        enter(state, request, first)
    elif operation == AWAIT_LEAVING:
        await_leaving(state, request, first)
        enter_leaving(state, request)
    elif operation == FORGET_LEAVING:
        forget_leaving(state, request)
    else:
        release(state, request, first)
    return 0


@compiled
def skipped_blocks(state: State, g: int, computed: int) -> int:
    """Leading blocks of a group that nothing behind the first ``computed`` tokens attends to."""
    group = state.groups[g]
    if group.kind == WINDOW:
        return full_blocks(state, max(computed - group.window + 1, 0))
    return full_blocks(state, computed // group.window * group.window) if group.kind == CHUNK else 0


# -- Looking cached prefixes up ----------------------------------------------------------------


@compiled
def key_of(state: State, request: int, g: int, i: int) -> int:
    """Place in ``State.extent_of_key`` of a request's i-th full block of a group; NONE if it has no key."""
    this, facts, groups = state.requests[request], state.facts[request], len(state.groups)
    if i < facts.key_count:
        return state.keys[facts.key_start + i] * groups + g
    if this.dynamic_key == NONE:
        return NONE
    return this.dynamic_key + (i - facts.key_count) * groups + g


@compiled
def all_cached(state: State, request: int, row: int, g: int, i: int) -> bool:
    """Whether all groups like ``g`` have the i-th block cached; it is noted in a row of the table then."""
    for other in range(g, len(state.groups)):
        if state.groups[other].first_alike == g:
            key = key_of(state, request, other, i)
            if key < 0 or state.extent_of_key[key] == NONE:
                return False
            state.table[row, state.groups[other].column + i] = state.extent_of_key[key]
    return True


@separate
def look_up(state: State, request: int, row: int, g: int, most: int) -> int:
    """Blocks of the longest prefix of at most ``most`` that the groups like ``g`` have; they are noted."""
    group, size, first = state.groups[g], state.config.block_size, 0
    blocks = most
    if group.kind == WINDOW:
        need = (group.window - 1 + size - 1) // size
        i, run, found = blocks - 1, 0, False
        while i >= 0 and not found:
            run = run + 1 if all_cached(state, request, row, g, i) else 0
            found = run > 0 and run >= need
            if found:
                first = i
            i -= 1
        blocks = first + run if found else run
    else:
        if group.kind == CHUNK:
            first = most * size // group.window * group.window // size
        i = first
        while i < blocks and all_cached(state, request, row, g, i):
            i += 1
        blocks = i
    for other in range(g, len(state.groups)):
        if state.groups[other].first_alike == g:
            state.left[row * len(state.groups) + other] = first
    return blocks


@separate
def find_prefix(state: State, request: int, row: int) -> int:
    """Blocks of the longest prefix that every group has cached; they are noted in a row, and not held yet.

    vllm/v1/core/kv_cache_coordinator.py: lookups go on until no group has less than another, full attention first.
    """
    groups = len(state.groups)
    state.leaving[request].junction = 0
    state.grouping.found = 0
    for g in range(groups):
        state.left[row * groups + g] = 0
    if state.config.prefix_caching == 0 or groups == 0:
        return 0
    hit = full_blocks(state, state.requests[request].known - 1)
    longest, whole, looked, settled = 0, hit, False, False
    while not settled:
        current = hit
        for windows in range(2):
            for g in range(groups):
                if state.groups[g].first_alike == g and (state.groups[g].kind != FULL) == (windows == 1):
                    if windows == 0 and looked:
                        current = min(current, whole)
                    else:
                        current = look_up(state, request, row, g, current)
                        longest = max(longest, current)
                    if windows == 0:
                        whole = current
        looked = True
        settled = current >= hit or state.grouping.once == 1
        hit = min(hit, current)
    if longest > hit:
        state.leaving[request].junction = longest * state.config.block_size
    state.grouping.found = hit
    return hit


# -- Blocks of a request -----------------------------------------------------------------------


@separate
def lacks_blocks(state: State, request: int, hit: int, slots: int) -> bool:
    """Whether too few blocks are free to admit a request with ``hit`` tokens of the prefix that was found for it."""
    at, config, found = state.at, state.config, state.grouping.found
    row, free = state.free_rows[at.free_rows - 1], at.free_blocks - state.grouping.states
    if at.running_depth > 0:
        free -= config.watermark_blocks
    blocks, whole, wanted, wanted_of_whole = blocks_for(state, slots), 0, 0, 0
    if config.full_prompt_admission == 1:
        whole = blocks_for(state, min(state.requests[request].known, config.max_model_len))
    for g in range(len(state.groups)):
        group, skipped = state.groups[g], skipped_blocks(state, g, hit)
        held = max(skipped, found)
        wanted += max(blocks - held, 0)
        wanted_of_whole += max((min(whole, group.most_admitted) if group.most_admitted >= 0 else whole) - held, 0)
        # Of the found prefix, what nobody holds is among the free blocks.
        for i in range(max(skipped, state.left[row * len(state.groups) + g]), found):
            if state.extents[state.table[row, group.column + i]].ref_count == 0:
                free -= 1
    return max(wanted, wanted_of_whole) > free


@separate
def admit(state: State, request: int, hit: int, slots: int) -> None:
    """Hold the found prefix of a request that has just begun to run, and blocks for ``slots`` tokens."""
    this, found, wanted = state.requests[request], state.grouping.found, state.grouping.states
    row, blocks = this.table_row, blocks_for(state, slots)
    for g in range(len(state.groups)):
        at = row * len(state.groups) + g
        first = max(state.left[at], skipped_blocks(state, g, hit))
        state.left[at] = first
        for i in range(first, found):
            extent = state.table[row, state.groups[g].column + i]
            if state.extents[extent].ref_count == 0:
                unlink(state, extent)
                state.at.free_blocks -= 1
            state.extents[extent].ref_count += 1
        wanted += blocks - max(found, first)
    take_blocks(state, wanted)
    this.blocks_held = blocks
    note_next(state, request)


@compiled
def note_next(state: State, request: int) -> None:
    """Note with how many processed tokens a window leaves its first block."""
    row, groups, left = state.requests[request].table_row, len(state.groups), 2**30
    for g in range(groups):
        group = state.groups[g]
        behind = (state.left[row * groups + g] + 1) * state.config.block_size
        if group.kind == WINDOW:
            left = min(left, behind + group.window - 1)
        elif group.kind == CHUNK:
            left = min(left, (behind + group.window - 1) // group.window * group.window)
    state.leaving[request].next_left = left


@separate
def leave(state: State, request: int, computed: int, cached: int) -> None:
    """Free what the windows of a running request have left; tokens in flight still attend to what is before them.

    ``cached``: tokens whose full blocks can be looked up; NONE: of a request without drafts, whose ``computed`` tokens
    are those that are computed or in flight.
    """
    if cached == NONE:
        cached = computed
        if state.requests[request].status == DECODING and in_flight_input(state, request, False):
            cached -= 1
        if state.config.frees_processed == 1:
            computed -= in_flight_of(state, request, state.at.step)
    if computed < state.leaving[request].next_left:
        return
    row, groups = state.requests[request].table_row, len(state.groups)
    for g in range(groups):
        at, skipped = row * groups + g, skipped_blocks(state, g, computed)
        if skipped > state.left[at]:
            give_up(state, request, g, state.left[at], skipped, full_blocks(state, cached))
            state.left[at] = skipped
    note_next(state, request)
    if state.requests[request].status == DECODING:
        await_leaving(state, request, state.at.step + 1)
        if modulo_block(state, state.leaving[request].due) != state.leaving[request].slot:
            forget_leaving(state, request)
            enter_leaving(state, request)


@separate
def release(state: State, request: int, cached: int) -> None:
    """Give up all blocks of a request, group by group; those that its first ``cached`` tokens fill are cached."""
    this, groups = state.requests[request], len(state.groups)
    full = full_blocks(state, cached) if state.config.prefix_caching == 1 else 0
    for g in range(groups):
        give_up(state, request, g, state.left[this.table_row * groups + g], this.blocks_held, full)
    append_free(state, state.grouping.states, True)


@compiled
def give_up(state: State, request: int, g: int, first: int, last: int, full: int) -> None:
    """Give up the blocks from ``first`` to ``last`` - 1, the last one first; unheld and cached ones are taken last."""
    this = state.requests[request]
    dense = state.groups[g].kind != WINDOW or state.grouping.retention == DENSE
    cached, lost = 0, 0
    if dense:
        begin = max(first, this.blocks_entered)
        cached = max(min(full, last) - begin, 0)
        lost = max(last - begin, 0) - cached
    else:
        for i in range(max(first, this.blocks_entered), last):
            if i < full and is_reachable(state, request, g, i):
                cached += 1
            else:
                lost += 1
    append_free(state, lost, False)
    append_free(state, cached, True)
    for i in range(min(last, this.blocks_entered) - 1, first - 1, -1):
        extent = state.table[this.table_row, state.groups[g].column + i]
        if extent == NONE:
            append_free(state, 1, False)
            continue
        state.extents[extent].ref_count -= 1
        if state.extents[extent].ref_count == 0:
            insert_before(state, extent, NONE)
            state.at.free_blocks += 1


@compiled
def append_free(state: State, count: int, cached: bool) -> None:
    """Blocks that nobody can look up are free; newer releases take first what is not cached."""
    if count > 0:
        if cached or state.config.uncached_blocks_first == 0:
            append_unkeyed(state, count)
        else:
            prepend_unkeyed(state, count)
        state.at.free_blocks += count


# -- When windows leave blocks of decoding requests --------------------------------------------


@compiled
def in_flight_of(state: State, request: int, step: int) -> int:
    """Tokens of a request in flight when a step is scheduled: those that the step before gave it, asynchronously."""
    this = state.requests[request]
    if state.config.batches_in_flight == 1:
        return 0
    if this.chunk_step == step - 1:
        return this.chunk
    return 1 if this.status == DECODING and this.segment_start != step else 0


@compiled
def await_leaving(state: State, request: int, step: int) -> None:
    """Note in which step, from ``step`` on, a window leaves a block of a decoding request."""
    this = state.leaving[request]
    due, in_flight, steady = this.next_left + state.requests[request].step_offset, 0, 0
    if state.config.frees_processed == 1:
        in_flight, steady = in_flight_of(state, request, step), state.config.batches_in_flight - 1
    this.due = step if step - in_flight >= due else max(step + 1, due + steady)


@compiled
def enter_leaving(state: State, request: int) -> None:
    """Into the bucket of the step in which a block is left, in the order of the running list."""
    this = state.leaving[request]
    slot, before, after = modulo_block(state, this.due), NONE, NONE
    this.slot = slot
    after = state.leave_head[slot]
    while after != NONE and state.requests[after].admission < state.requests[request].admission:
        before, after = after, state.leaving[after].next
    this.next, this.previous = after, before
    if after != NONE:
        state.leaving[after].previous = request
    if before == NONE:
        state.leave_head[slot] = request
    else:
        state.leaving[before].next = request


@compiled
def forget_leaving(state: State, request: int) -> None:
    """A request decodes no more, or leaves a block in another step."""
    leave_bucket(state.leaving, state.leave_head, state.leaving[request].slot, request)


@separate
def leave_due(state: State) -> int:
    """Free what the windows of decoding requests leave in this step; the blocks for their growth that it has taken.

    Requests come in the order of the running list, and take blocks between what they free.  That only counts where
    there are too few blocks without contents at the head of the queue.
    """
    at, taken, admission = state.at, 0, NONE
    slot, growth = at.growth_slot, column(state.links, "growth")
    request, growing, grows = state.leave_head[slot], state.growth_count[slot], NONE
    if request != NONE and growing > 0:
        head = state.extents[at.free_queue.head]
        if head.depth != UNKEYED or head.blocks <= growing:
            grows = next_admitted(state, growth, state.growth_head[slot], NONE)
    while request != NONE:
        following, admission = state.leaving[request].next, state.requests[request].admission
        if state.leaving[request].due <= at.step:
            while grows != NONE and state.requests[grows].admission < admission:
                take_blocks(state, state.config.growing)
                taken += state.config.growing
                grows = next_admitted(state, growth, state.growth_head[slot], state.requests[grows].admission)
            leave(state, request, computed_now(state, request), NONE)
        request = following
    return taken


@compiled
def next_admitted(state: State, links: Table, request: int, admission: int) -> int:
    """Of a bucket that begins with ``request``, the first one of the running list behind ``admission``, or NONE."""
    following = NONE
    while request != NONE:
        this = state.requests[request].admission
        if this > admission and (following == NONE or this < state.requests[following].admission):
            following = request
        request = links[request].next
    return following


# -- The cache ---------------------------------------------------------------------------------


@separate
def enter(state: State, request: int, full: int) -> None:
    """Cache the first ``full`` blocks of a request, whose keys are known."""
    this, groups = state.requests[request], len(state.groups)
    for g in range(groups):
        for i in range(max(this.blocks_entered, state.left[this.table_row * groups + g]), full):
            extent = NONE
            if is_reachable(state, request, g, i):
                extent = new_extent(state)
                set_key(state, extent, key_of(state, request, g, i), i)
            state.table[this.table_row, state.groups[g].column + i] = extent
    this.blocks_entered = full


@compiled
def is_reachable(state: State, request: int, g: int, i: int) -> bool:
    """Whether a later request could use the i-th block of a group (``SlidingWindowManager.reachable_block_mask``)."""
    group, size, retention = state.groups[g], state.config.block_size, state.grouping.retention
    if group.kind != WINDOW or retention == DENSE:
        return True
    need = (group.window - 1 + size - 1) // size
    if retention > 0:
        stretch = retention // size
        if i % stretch >= stretch - need:
            return True
    end = full_blocks(state, state.facts[request].prompt_tokens - 1)
    if end - need <= i < end:
        return True
    end = full_blocks(state, state.leaving[request].junction)
    return end - need <= i < end


@compiled
def set_key(state: State, extent: int, key: int, depth: int) -> None:
    """A new extent of one held block, entered under a key behind those that have the same."""
    this = state.extents[extent]
    this.ref_count = this.blocks = 1
    this.depth = depth
    this.keys_at = -key - 2  # like keys that are given at a preemption
    this.rest = this.twin = NONE
    first = state.extent_of_key[key]
    if first == NONE:
        state.extent_of_key[key] = extent
        return
    while state.extents[first].twin != NONE:
        first = state.extents[first].twin
    state.extents[first].twin = extent
