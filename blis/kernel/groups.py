"""KV-cache groups: layers with blocks of their own, such as sliding windows beside full attention.

All groups take their blocks from one pool.  A request has a table of blocks for each group.  Blocks that a window has
left are freed while the request runs, and a cached prefix is used as far as every group has it.  Blocks are single
rows of ``State.extents`` here, numbered from 1; 0 stands for one that a group need not keep.  It is compiled with
``draft_batch``, and only there.
"""

from __future__ import annotations

from blis_replay.blis.kernel.flight import CHUNK, DENSE, FULL, UNFINDABLE, WINDOW, Flight
from blis_replay.blis.kernel.free_queue import insert_before, unlink
from blis_replay.blis.kernel.state import NONE, State, compiled, separate


@compiled
def skipped_tokens(kind: int, window: int, computed: int) -> int:
    """Leading tokens that nothing behind the first ``computed`` ones attends to."""
    if kind == WINDOW:
        return max(computed - window + 1, 0)
    return computed // window * window if kind == CHUNK else 0


# -- Looking cached prefixes up ----------------------------------------------------------------


@compiled
def key_of(state: State, flight: Flight, request: int, g: int, i: int) -> int:
    """Place in ``State.extent_of_key`` of a request's i-th full block of a group; UNFINDABLE if it has no key."""
    this, facts, groups = state.requests[request], state.facts[request], len(flight.groups)
    if i < facts.key_count:
        return state.keys[facts.key_start + i] * groups + g
    if this.dynamic_key == NONE:
        return UNFINDABLE
    return this.dynamic_key + (i - facts.key_count) * groups + g


@compiled
def all_cached(state: State, flight: Flight, request: int, row: int, g: int, i: int) -> bool:
    """Whether all groups like ``g`` have the i-th block cached; it is noted in a row of the table then."""
    for other in range(g, len(flight.groups)):
        if flight.groups[other].first_alike == g:
            key = key_of(state, flight, request, other, i)
            if key < 0 or state.extent_of_key[key] == NONE:
                return False
            state.table[row, flight.groups[other].column + i] = state.extent_of_key[key]
    return True


@compiled
def look_up(state: State, flight: Flight, request: int, row: int, g: int, most: int) -> int:
    """Tokens of the longest prefix of at most ``most`` that the groups like ``g`` have; their blocks are noted."""
    group, alignment = flight.groups[g], flight.grouping.alignment
    size = group.block_size
    blocks, first, run = most // size, 0, 0
    if group.kind == WINDOW:
        need = (group.window - 1 + size - 1) // size
        i, found = blocks - 1, 0
        blocks = 0
        while i >= 0 and found == 0:
            if not all_cached(state, flight, request, row, g, i):
                run = 0
            elif run > 0 or (i + 1) * size % alignment == 0:
                run += 1
                found = 1 if run >= need else 0
                if found == 1:
                    first, blocks = i, i + run
            i -= 1
        if found == 0:
            blocks = run
    else:
        if group.kind == CHUNK:
            first = most // group.window * group.window // size
        i = first
        while i < blocks and all_cached(state, flight, request, row, g, i):
            i += 1
        blocks = i
    while blocks > 0 and blocks * size % alignment != 0:
        blocks -= 1
    for other in range(g, len(flight.groups)):
        if flight.groups[other].first_alike == g:
            held = flight.held[row * len(flight.groups) + other]
            held.blocks = blocks
            held.first = first
    return blocks * size


@separate
def find_prefix(state: State, flight: Flight, request: int, row: int) -> int:
    """Tokens of the longest prefix that every group has cached; its blocks are noted in a row, and not held yet.

    vllm/v1/core/kv_cache_coordinator.py: lookups go on until no group has less than another, full attention first.
    """
    groups, own = len(flight.groups), flight.requests[request]
    own.junction = 0
    for g in range(groups):
        flight.held[row * groups + g].blocks = 0
        flight.held[row * groups + g].first = 0
    if state.config.prefix_caching == 0:
        return 0
    hit = state.requests[request].known - 1
    longest, looked, settled = 0, 0, 0
    while settled == 0:
        current = hit
        for windows in range(2):
            for g in range(groups):
                group = flight.groups[g]
                if group.first_alike == g and (group.kind != FULL) == (windows == 1):
                    if windows == 0 and looked == 1:
                        current = min(current, flight.held[row * groups + g].blocks * group.block_size)
                    else:
                        current = look_up(state, flight, request, row, g, current)
                        longest = max(longest, current)
        looked = 1
        settled = 1 if current >= hit or flight.grouping.once == 1 else 0
        hit = min(hit, current)
    for g in range(groups):
        held, size = flight.held[row * groups + g], flight.groups[g].block_size
        held.blocks = min(held.blocks, (hit + size - 1) // size)
    if longest > hit:
        own.junction = longest
    return hit


# -- Blocks of a request -----------------------------------------------------------------------


@compiled
def lacks_blocks(state: State, flight: Flight, request: int, row: int, hit: int, slots: int) -> bool:
    """Whether too few blocks are free to admit a request with ``hit`` tokens of the prefix that was found for it."""
    spare = state.config.watermark_blocks if state.at.running_depth > 0 else 0
    if state.config.full_prompt_admission == 1:
        whole = min(state.requests[request].known, state.config.max_model_len)
        if blocks_to_admit(state, flight, row, hit, whole, True) + spare > state.at.free_blocks:
            return True
    return blocks_to_admit(state, flight, row, hit, slots, False) + spare > state.at.free_blocks


@compiled
def blocks_to_admit(state: State, flight: Flight, row: int, hit: int, slots: int, bounded: bool) -> int:
    """Free blocks that an admission takes, those of the found prefix that nobody holds included."""
    wanted = 0
    for g in range(len(flight.groups)):
        group, held = flight.groups[g], flight.held[row * len(flight.groups) + g]
        blocks = (slots + group.block_size - 1) // group.block_size
        if bounded and group.most_admitted >= 0:
            blocks = min(blocks, group.most_admitted)
        skipped = skipped_tokens(group.kind, group.window, hit) // group.block_size
        wanted += max(blocks - max(skipped, held.blocks), 0)
        for i in range(max(skipped, held.first), held.blocks):
            if state.extents[state.table[row, group.column + i]].ref_count == 0:
                wanted += 1
    return wanted


@separate
def admit(state: State, flight: Flight, request: int, hit: int, slots: int) -> None:
    """Hold the found prefix of a request that has just begun to run, and blocks for ``slots`` tokens."""
    row, groups = state.requests[request].table_row, len(flight.groups)
    flight.requests[request].next_entered = 0
    for g in range(groups):
        group, held = flight.groups[g], flight.held[row * groups + g]
        held.first = max(held.first, skipped_tokens(group.kind, group.window, hit) // group.block_size)
        held.blocks = max(held.blocks, held.first)
        held.entered = held.blocks
        for i in range(held.first, held.blocks):
            block = state.table[row, group.column + i]
            if state.extents[block].ref_count == 0:
                unlink(state, block)
                state.at.free_blocks -= 1
            state.extents[block].ref_count += 1
    take(state, flight, request, slots)


@compiled
def allocate(state: State, flight: Flight, request: int, slots: int) -> bool:
    """Free what the windows of a running request have left, and hold blocks for ``slots`` tokens.

    False if too few are free.  Tokens in flight still attend to what is before them.
    """
    this, own = state.requests[request], flight.requests[request]
    processed = this.computed - own.in_flight * flight.config.frees_processed
    if slots <= own.slots_held and processed < own.next_left:
        return True
    return allocate_anew(state, flight, request, slots, processed)


@separate
def allocate_anew(state: State, flight: Flight, request: int, slots: int, processed: int) -> bool:
    """As ``allocate``, where something is to be done."""
    row, groups = state.requests[request].table_row, len(flight.groups)
    wanted = 0
    for g in range(groups):
        group, held = flight.groups[g], flight.held[row * groups + g]
        skipped = min(skipped_tokens(group.kind, group.window, processed) // group.block_size, held.blocks)
        for i in range(skipped - 1, held.first - 1, -1):
            give_up(state, state.table[row, group.column + i])
        held.first = max(held.first, skipped)
        wanted += max((slots + group.block_size - 1) // group.block_size - held.blocks, 0)
    note_next(state, flight, request)
    if wanted > state.at.free_blocks:
        return False
    take(state, flight, request, slots)
    return True


@compiled
def take(state: State, flight: Flight, request: int, slots: int) -> None:
    """Take blocks from the head of the queue until every group has those of ``slots`` tokens."""
    row, groups = state.requests[request].table_row, len(flight.groups)
    for g in range(groups):
        group, held = flight.groups[g], flight.held[row * groups + g]
        while held.blocks * group.block_size < slots:
            block = state.at.free_queue.head
            unlink(state, block)
            forget(state, block)
            state.extents[block].ref_count = 1
            state.at.free_blocks -= 1
            state.table[row, group.column + held.blocks] = block
            held.blocks += 1
    note_next(state, flight, request)


@compiled
def note_next(state: State, flight: Flight, request: int) -> None:
    """Note up to when there is nothing to do for a request."""
    own, row, groups = flight.requests[request], state.requests[request].table_row, len(flight.groups)
    slots, left = 2**30, 2**30
    for g in range(groups):
        group, held = flight.groups[g], flight.held[row * groups + g]
        slots = min(slots, held.blocks * group.block_size)
        behind = (held.first + 1) * group.block_size
        if group.kind == WINDOW:
            left = min(left, behind + group.window - 1)
        elif group.kind == CHUNK:
            left = min(left, (behind + group.window - 1) // group.window * group.window)
    own.slots_held = slots
    own.next_left = left


@separate
def release(state: State, flight: Flight, request: int) -> None:
    """Give up all blocks of a request, group by group, the last block first."""
    row, groups = state.requests[request].table_row, len(flight.groups)
    for g in range(groups):
        held = flight.held[row * groups + g]
        for i in range(held.blocks - 1, held.first - 1, -1):
            give_up(state, state.table[row, flight.groups[g].column + i])
        held.blocks = 0


@compiled
def give_up(state: State, block: int) -> None:
    """One request less holds a block; if it was the last, it is free: cached ones are taken last."""
    this = state.extents[block]
    this.ref_count -= 1
    if this.ref_count == 0:
        first = this.keys_at == NONE and state.config.uncached_blocks_first == 1
        insert_before(state, block, state.at.free_queue.head if first else NONE)
        state.at.free_blocks += 1


# -- The cache ---------------------------------------------------------------------------------


@compiled
def enter(state: State, flight: Flight, request: int, tokens: int) -> None:
    """Cache what the first ``tokens`` tokens of a request fill."""
    if tokens >= flight.requests[request].next_entered:
        enter_anew(state, flight, request, tokens)


@separate
def enter_anew(state: State, flight: Flight, request: int, tokens: int) -> None:
    """As ``enter``, where something is to be done."""
    row, groups = state.requests[request].table_row, len(flight.groups)
    cacheable = tokens // flight.grouping.alignment * flight.grouping.alignment
    for g in range(groups):
        group, held = flight.groups[g], flight.held[row * groups + g]
        full = cacheable // group.block_size
        for i in range(max(held.entered, held.first), full):
            if is_reachable(state, flight, request, g, i):
                set_key(state, state.table[row, group.column + i], key_of(state, flight, request, g, i))
        held.entered = max(held.entered, full)
    flight.requests[request].next_entered = cacheable + flight.grouping.alignment


@compiled
def is_reachable(state: State, flight: Flight, request: int, g: int, i: int) -> bool:
    """Whether a later request could use the i-th block of a group (``SlidingWindowManager.reachable_block_mask``)."""
    group, grouping = flight.groups[g], flight.grouping
    if group.kind != WINDOW or grouping.alignment % group.block_size != 0:
        return True
    need = (group.window - 1 + group.block_size - 1) // group.block_size
    segment = grouping.alignment if grouping.retention == DENSE else grouping.retention
    if segment > 0:
        stretch = segment // group.block_size
        if i % stretch >= stretch - need:
            return True
    if grouping.retention == DENSE:
        return False
    end = (state.facts[request].prompt_tokens - 1) // grouping.alignment * grouping.alignment // group.block_size
    if end - need <= i < end:
        return True
    end = flight.requests[request].junction // grouping.alignment * grouping.alignment // group.block_size
    return end - need <= i < end


@compiled
def set_key(state: State, block: int, key: int) -> None:
    """Enter a block under its key, behind those that have the same."""
    this = state.extents[block]
    this.keys_at = key
    this.twin = NONE
    if key < 0:
        return
    first = state.extent_of_key[key]
    if first == NONE:
        state.extent_of_key[key] = block
        return
    while state.extents[first].twin != NONE:
        first = state.extents[first].twin
    state.extents[first].twin = block


@compiled
def forget(state: State, block: int) -> None:
    """The contents of a block are lost."""
    this = state.extents[block]
    if this.keys_at >= 0:
        before = state.extent_of_key[this.keys_at]
        if before == block:
            state.extent_of_key[this.keys_at] = this.twin
        else:
            while state.extents[before].twin != block:
                before = state.extents[before].twin
            state.extents[before].twin = this.twin
    this.keys_at = NONE


@separate
def give_keys(state: State, flight: Flight, request: int) -> None:
    """Let a request that is preempted find its own generated blocks again, those cached already included."""
    this, groups = state.requests[request], len(flight.groups)
    if state.config.prefix_caching == 0 or this.dynamic_key != NONE:
        return
    this.dynamic_key = state.at.keys_used
    full = state.facts[request].total_tokens // state.config.block_size + 1
    state.at.keys_used += max(full - state.facts[request].key_count, 0) * groups
    for g in range(groups):
        held = flight.held[this.table_row * groups + g]
        for i in range(held.first, held.blocks):
            block = state.table[this.table_row, flight.groups[g].column + i]
            if state.extents[block].keys_at == UNFINDABLE:
                set_key(state, block, key_of(state, flight, request, g, i))
