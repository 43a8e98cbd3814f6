"""The free queue: section 4 of the semantics.

Blocks that are taken, cached, held and freed together make one entry, an extent, whose last
block is the first to be taken.  Blocks without contents to be found are all alike, so a
extent of them is a mere number; two such extents never stand side by side.
"""

from __future__ import annotations

from blis_replay.blis.kernel.state import NONE, UNKEYED, State, Table, compiled


@compiled
def new_extent(state: State) -> int:
    """A number for an extent; its row holds what an earlier one left."""
    extent = state.at.spare_extent
    if extent == NONE:
        extent = state.at.extents_used
        state.at.extents_used += 1
    else:
        state.at.spare_extent = state.extents[extent].queue_after
    return extent


@compiled
def recycle_extent(state: State, extent: int) -> None:
    """An extent has no blocks any more."""
    state.extents[extent].queue_after = state.at.spare_extent
    state.at.spare_extent = extent


@compiled
def insert_before(state: State, extent: int, after: int) -> None:
    """Put an extent into the queue, nearer to the head than ``after`` (NONE: at its end)."""
    at, this = state.at, state.extents[extent]
    before = at.free_queue.tail if after == NONE else state.extents[after].queue_before
    this.queue_before = before
    this.queue_after = after
    if before == NONE:
        at.free_queue.head = extent
    else:
        state.extents[before].queue_after = extent
    if after == NONE:
        at.free_queue.tail = extent
    else:
        state.extents[after].queue_before = extent


@compiled
def unlink(state: State, extent: int) -> None:
    """Take an extent out of the queue; what stands side by side now and is all alike becomes one."""
    at, this = state.at, state.extents[extent]
    before, after = this.queue_before, this.queue_after
    if before == NONE:
        at.free_queue.head = after
    else:
        state.extents[before].queue_after = after
    if after == NONE:
        at.free_queue.tail = before
    else:
        state.extents[after].queue_before = before
        if before != NONE and is_unkeyed(state, before) and is_unkeyed(state, after):
            state.extents[before].blocks += state.extents[after].blocks
            unlink_last(state, before, after)


@compiled
def unlink_last(state: State, before: int, extent: int) -> None:
    """Take ``extent``, which stands behind ``before``, out of the queue for good."""
    after = state.extents[extent].queue_after
    state.extents[before].queue_after = after
    if after == NONE:
        state.at.free_queue.tail = before
    else:
        state.extents[after].queue_before = before
    recycle_extent(state, extent)


@compiled
def is_unkeyed(state: State, extent: int) -> bool:
    """Whether the blocks of an extent have no contents to be found."""
    return state.extents[extent].depth == UNKEYED


@compiled
def append_unkeyed(state: State, count: int) -> None:
    """Blocks without contents go to the end of the queue."""
    add_unkeyed(state, count, state.at.free_queue.tail, NONE)


@compiled
def prepend_unkeyed(state: State, count: int) -> None:
    """Blocks without contents go to the head of the queue, to be taken first."""
    head = state.at.free_queue.head
    add_unkeyed(state, count, head, head)


@compiled
def add_unkeyed(state: State, count: int, neighbour: int, before: int) -> None:
    """Blocks without contents join ``neighbour`` if it has none either, else a new extent of them stands ``before``."""
    if neighbour != NONE and is_unkeyed(state, neighbour):
        state.extents[neighbour].blocks += count
        return
    extent = new_extent(state)
    state.extents[extent].blocks = count
    state.extents[extent].depth = UNKEYED
    insert_before(state, extent, before)


@compiled
def take_blocks(state: State, count: int) -> None:
    """Take blocks from the head of the queue; cached contents leave the cache at that moment."""
    state.at.free_blocks -= count
    while count > 0:
        extent = state.at.free_queue.head
        this = state.extents[extent]
        blocks = this.blocks
        taken = min(blocks, count)
        if this.depth != UNKEYED:
            for i in range(blocks - 1, blocks - 1 - taken, -1):
                evict(state, extent, i)
        count -= taken
        this.blocks = blocks - taken
        if taken == blocks:
            unlink(state, extent)
            recycle_extent(state, extent)


@compiled
def release_extent(state: State, extent: int, blocks: int) -> int:
    """Give up the first ``blocks`` blocks of what was one extent when it was held; how many nobody holds now."""
    freed = 0
    while blocks > 0:
        last, before = extent, 0
        while before + state.extents[last].blocks < blocks:
            before += state.extents[last].blocks
            last = state.extents[last].rest
        this = state.extents[last]
        this.ref_count -= 1
        if this.ref_count == 0:
            insert_before(state, last, NONE)
            freed += blocks - before
        blocks = before
    return freed


@compiled
def key_in_extent(state: State, extent: int, i: int) -> int:
    """Key of the i-th block of an extent."""
    keys_at = state.extents[extent].keys_at
    # Keys given at a preemption are consecutive numbers; only the first is kept.
    return state.keys[keys_at + i] if keys_at >= 0 else i - keys_at - 2


@compiled
def evict(state: State, extent: int, i: int) -> None:
    """The contents of the i-th block of an extent are lost; a twin, if it has one, is found in its place.

    Without a twin they go to the CPU tier, if there is one.
    """
    key = key_in_extent(state, extent, i)
    this = state.extents[extent]
    if this.blocks > 1 or state.extent_of_key[key] == extent:
        state.extent_of_key[key] = this.twin
        if state.config.cpu_blocks > 0 and this.twin == NONE:
            store_block(state, key_in_extent(state, extent, i))
        return
    before = state.extent_of_key[key]
    while state.extents[before].twin != extent:
        before = state.extents[before].twin
    state.extents[before].twin = this.twin


# -- CPU tier -----------------------------------------------------------------------------
# KV blocks in the memory of the host: what is evicted from the GPU goes there, and can be fetched back.  An extension
# that BLIS has too (blis-semantics 2.7); vLLM's own offloading is another.  A block is known by its key, the least
# recently stored or fetched makes room for another, and fetching copies: the block stays until it makes room.
# Storing takes no time; the device fetches block after block before it runs the batch that is being built.


@compiled
def store_block(state: State, key: int) -> None:
    """The contents with this key leave the GPU."""
    at = state.at
    if is_listed(state.cpu_lru, key):
        drop(state.cpu_lru, key)
    else:
        at.cpu_stored += 1
        if at.cpu_used == state.config.cpu_blocks:
            drop(state.cpu_lru, oldest(state.cpu_lru))
        else:
            at.cpu_used += 1
    enter(state.cpu_lru, key)


# -- LRU list -----------------------------------------------------------------------------
# Numbers by their last use, in a table of links: circular through node 0, number k is node k + 1.  A link holds a node
# and 1; 0: the number is not in the list.  An empty list has the links 1, 1 at node 0.


@compiled
def is_listed(lru: Table, number: int) -> bool:
    """Whether a number is in the list."""
    return lru[number + 1].older != 0


@compiled
def oldest(lru: Table) -> int:
    """The least recently used; there is one."""
    return lru[0].newer - 2


@compiled
def drop(lru: Table, number: int) -> None:
    """Take a number out of the list, which has it."""
    newer, older = lru[number + 1].newer, lru[number + 1].older
    lru[newer - 1].older = older
    lru[older - 1].newer = newer
    lru[number + 1].older = 0


@compiled
def enter(lru: Table, number: int) -> None:
    """Enter a number, which is not in the list, as the most recently used."""
    node, second = number + 1, lru[0].older
    lru[node].newer = 1
    lru[node].older = second
    lru[second - 1].newer = node + 1
    lru[0].older = node + 1
