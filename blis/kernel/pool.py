"""Blocks of requests and the prefix cache: sections 4 and 6 of the semantics.

A cached block is found by its key, a small number that stands for its tokens and all
before them: equal keys have equal keys before them.  Blocks that nobody can ever look up
(generated tokens that no later request repeats) have no key; when their request is
preempted it may look them up itself, and they get keys then.

Cached blocks that were entered together and are held by the same requests are one extent
(``State.extents``): holding, releasing and queueing it costs the same however long it is.  An
extent is split where requests begin to differ, or where one block gets a twin (two requests
computed the same block; the first entered is found).  What a split cuts off an extent is
linked to it (``rest``), so whoever held the whole finds all its parts.

In one extent the later blocks never outlive the earlier ones: who holds a block holds
those before it, and the last is freed and taken first.  So ``State.extent_of_key`` may name, for
a key, an extent that the block was cut off from: the way to it is the chain of ``rest``.
"""

from __future__ import annotations

from blis_replay.base.tables import call_operation
from blis_replay.blis.kernel.free_queue import (
    append_unkeyed,
    insert_before,
    key_in_extent,
    new_extent,
    prepend_unkeyed,
    release_extent,
    take_blocks,
    unlink,
)
from blis_replay.blis.kernel.state import (
    ADMIT,
    ENTER,
    EVERYWHERE,
    FIND,
    LEAVE,
    NONE,
    RELEASE,
    State,
    compiled,
    separate,
)

# -- Blocks of a request ------------------------------------------------------------------


@compiled
def blocks_for(state: State, tokens: int) -> int:
    """Blocks that this many tokens fill, the last one perhaps in part."""
    return full_blocks(state, tokens + state.config.block_size - 1)


@compiled
def full_blocks(state: State, tokens: int) -> int:
    """Blocks that this many tokens fill."""
    shift = state.config.block_shift  # a division takes ten times as long
    return tokens >> shift if shift >= 0 else tokens // state.config.block_size


@compiled
def modulo_block(state: State, number: int) -> int:
    """A number modulo block size."""
    size = state.config.block_size
    return number & (size - 1) if state.config.block_shift >= 0 else number % size


@compiled
def allocate_slots(state: State, request: int, tokens: int) -> bool:
    """Hold blocks for ``tokens`` tokens; False, and nothing changed, if too few are free."""
    this = state.requests[request]
    more = blocks_for(state, tokens) - this.blocks_held
    wanted = more * state.config.growing
    if wanted > state.at.free_blocks:
        return False
    if wanted > 0:
        take_blocks(state, wanted)
    if more > 0:
        this.blocks_held += more
    return True


@compiled
def allocate_admitted(state: State, request: int, hit: int, tokens: int) -> None:
    """Hold blocks for ``tokens`` tokens of a request that has just begun to run, with ``hit`` cached ones."""
    if state.config.groups_at == 0:
        allocate_slots(state, request, tokens)
    else:
        call_operation(state.config.groups_at, ADMIT, state, request, hit, tokens)


@compiled
def leave_windows(state: State, request: int, computed: int, cached: int) -> None:
    """Free what the windows of a running request have left: see ``groups.leave``."""
    if state.config.windowed == 1:
        call_operation(state.config.groups_at, LEAVE, state, request, computed, cached)


@compiled
def release_blocks(state: State, request: int, cached: int) -> None:
    """Give up all blocks of a request, last block first; the unheld go to the end of the queue.

    Newer releases put blocks that its first ``cached`` tokens do not fill to the head: nothing is lost with them.
    """
    this = state.requests[request]
    if state.config.groups_at == 0:
        release_extents(state, request, cached)
    else:
        call_operation(state.config.groups_at, RELEASE, state, request, cached, 0)
    this.blocks_held = 0
    this.blocks_entered = 0
    this.extents_held = 0


@compiled
def release_extents(state: State, request: int, cached: int) -> None:
    """As ``release_blocks``, of layers that share their blocks."""
    this = state.requests[request]
    row = this.table_row
    freed = this.blocks_held - this.blocks_entered
    if state.config.uncached_blocks_first == EVERYWHERE:
        uncached = this.blocks_held - full_blocks(state, cached)
        if uncached > 0:
            prepend_unkeyed(state, uncached)
        if freed > uncached:
            append_unkeyed(state, freed - uncached)
    elif freed > 0:
        append_unkeyed(state, freed)
    for i in range(this.extents_held - 1, -1, -1):
        freed += release_extent(state, state.table[row, 2 * i], state.table[row, 2 * i + 1])
    state.at.free_blocks += freed


# -- Keys ---------------------------------------------------------------------------------


@compiled
def keys_at(state: State, request: int, i: int) -> int:
    """Where the keys of a request's full blocks from the i-th on are, as in an extent; NONE if it has none."""
    this, facts = state.requests[request], state.facts[request]
    given = facts.key_count
    if i < given:
        return facts.key_start + i
    if this.dynamic_key == NONE:
        return NONE
    return -(this.dynamic_key + i - given) - 2


@compiled
def key_of(state: State, request: int, i: int) -> int:
    """Key of the i-th full block of a request, which has one."""
    where = keys_at(state, request, i)
    return state.keys[where] if where >= 0 else -where - 2


@compiled
def give_keys(state: State, request: int) -> None:
    """Let a request that is preempted find its own generated blocks again."""
    this = state.requests[request]
    if state.config.prefix_caching == 0 or this.dynamic_key != NONE:
        return
    this.dynamic_key = state.at.keys_used
    this.keyed = 1
    full = full_blocks(state, state.facts[request].total_tokens) + 1
    state.at.keys_used += max(full - state.facts[request].key_count, 0) * state.config.growing


# -- Finding cached blocks ----------------------------------------------------------------


@compiled
def find_cached_blocks(state: State, request: int, row: int) -> tuple[int, int, int]:
    """The leading blocks of a request that the cache has: how many, how many of them are free, and their extents.

    The extents, and how many blocks of each, are noted in a row of the table; nothing is
    held yet.
    """
    found, free, extents = 0, 0, 0
    if state.config.groups_at != 0:
        return call_operation(state.config.groups_at, FIND, state, request, row, 0), free, extents
    if state.config.prefix_caching == 0:
        return found, free, extents
    this = state.requests[request]
    most = full_blocks(state, this.known - 1)  # the last known token is always computed
    if this.dynamic_key == NONE:
        most = min(most, state.facts[request].key_count)
    while found < most:
        extent = state.extent_of_key[key_of(state, request, found)]
        if extent == NONE:
            break
        blocks = common_blocks(state, request, found, extent, most - found)
        state.table[row, 2 * extents] = extent
        state.table[row, 2 * extents + 1] = blocks
        extents += 1
        found += blocks
        if state.extents[extent].ref_count == 0:
            free += blocks
    return found, free, extents


@compiled
def common_blocks(state: State, request: int, first: int, extent: int, most: int) -> int:
    """How many blocks of an extent are those of the request from its ``first`` on; the first one is."""
    most = min(most, state.extents[extent].blocks)
    if keys_at(state, request, first) == state.extents[extent].keys_at:
        given = state.facts[request].key_count
        if first + most <= given or first >= given:
            return most
    # Equal keys have equal keys before them: mostly all are alike, else halving finds where they part.
    if key_of(state, request, first + most - 1) == key_in_extent(state, extent, most - 1):
        return most
    low, high = 1, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if key_of(state, request, first + middle - 1) == key_in_extent(state, extent, middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def hold_found_blocks(state: State, request: int, extents: int) -> None:
    """Hold what ``find_cached_blocks`` noted in the request's row of the table."""
    row = state.requests[request].table_row
    for i in range(extents):
        extent = state.table[row, 2 * i]
        blocks = state.table[row, 2 * i + 1]
        this = state.extents[extent]
        if blocks < this.blocks:
            split(state, extent, blocks)
        if this.ref_count == 0:
            unlink(state, extent)
            state.at.free_blocks -= blocks
        this.ref_count += 1
    state.requests[request].extents_held = extents


@separate
def split(state: State, extent: int, blocks: int) -> int:
    """Cut an extent behind its first ``blocks`` blocks; the new extent with the others.

    Free, the others are taken first, so they stand nearer to the head of the queue.
    """
    rest = new_extent(state)
    this, other = state.extents[extent], state.extents[rest]
    other.ref_count = this.ref_count
    other.blocks = this.blocks - blocks
    other.depth = this.depth + blocks
    where = this.keys_at
    other.keys_at = where + blocks if where >= 0 else where - blocks
    other.rest = this.rest
    other.twin = NONE
    this.rest = rest
    this.blocks = blocks
    state.extent_of_key[key_in_extent(state, rest, 0)] = rest
    if this.ref_count == 0:
        insert_before(state, rest, extent)
    return rest


# -- Entering the cache -------------------------------------------------------------------


@separate
def enter_cache(state: State, request: int, tokens: int) -> None:
    """Enter the request's blocks that its first ``tokens`` tokens fill, if they have keys."""
    this = state.requests[request]
    full = full_blocks(state, tokens)
    i = this.blocks_entered
    if i >= full:
        return
    if this.dynamic_key == NONE:
        full = min(full, state.facts[request].key_count)
    if state.config.groups_at != 0:
        call_operation(state.config.groups_at, ENTER, state, request, full, 0)
        return
    while i < full:
        key = key_of(state, request, i)
        if state.extent_of_key[key] == NONE:
            extent = extent_of_request(state, request, i)
            end = full if i >= state.facts[request].key_count else min(full, state.facts[request].key_count)
            end = i + 1 if state.config.offloads == 1 else end
            blocks = 0
            while i < end and state.extent_of_key[key_of(state, request, i)] == NONE:
                state.extent_of_key[key_of(state, request, i)] = extent
                blocks += 1
                i += 1
        else:
            first = isolate(state, state.extent_of_key[key], i)
            extent = extent_of_request(state, request, i)
            while state.extents[first].twin != NONE:
                first = state.extents[first].twin
            state.extents[first].twin = extent
            blocks = 1
            i += 1
        state.extents[extent].blocks = blocks
        state.table[this.table_row, 2 * this.extents_held] = extent
        state.table[this.table_row, 2 * this.extents_held + 1] = blocks
        this.extents_held += 1
        this.blocks_entered += blocks


@compiled
def extent_of_request(state: State, request: int, i: int) -> int:
    """A new extent that begins with the i-th block of the request, which holds it."""
    extent = new_extent(state)
    this = state.extents[extent]
    this.ref_count = 1
    this.depth = i
    this.keys_at = keys_at(state, request, i)
    this.rest = NONE
    this.twin = NONE
    return extent


@separate
def isolate(state: State, extent: int, depth: int) -> int:
    """Make the cached block at this depth, found by way of ``extent``, an extent of its own."""
    while depth >= state.extents[extent].depth + state.extents[extent].blocks:
        extent = state.extents[extent].rest
    if depth > state.extents[extent].depth:
        extent = split(state, extent, depth - state.extents[extent].depth)
    if state.extents[extent].blocks > 1:
        split(state, extent, 1)
    return extent
