"""The free queue: section 4 of the semantics.

Blocks that are taken, cached, held and freed together make one entry, an extent, whose last
block is the first to be taken.  Blocks without contents to be found are all alike, so a
extent of them is a mere number; two such extents never stand side by side.
"""

from __future__ import annotations

from blis_replay.base.tables import column
from blis_replay.blis.kernel.state import NONE, UNKEYED, State, compiled, insert, remove


@compiled
def new_extent(state: State) -> int:
    """A number for an extent; its row holds what an earlier one left."""
    extent = state.at.spare_extent
    if extent == NONE:
        extent = state.at.extents_used
        state.at.extents_used += 1
    else:
        state.at.spare_extent = state.extents[extent].queue.next
    return extent


@compiled
def recycle_extent(state: State, extent: int) -> None:
    """An extent has no blocks any more."""
    state.extents[extent].queue.next = state.at.spare_extent
    state.at.spare_extent = extent


@compiled
def insert_before(state: State, extent: int, after: int) -> None:
    """Put an extent into the queue, nearer to the head than ``after`` (NONE: at its end)."""
    links, ends = column(state.extents, "queue"), state.at.free_queue
    insert(links, ends, extent, ends.tail if after == NONE else links[after].previous)


@compiled
def unlink(state: State, extent: int) -> None:
    """Take an extent out of the queue; what stands side by side now and is all alike becomes one."""
    links, ends = column(state.extents, "queue"), state.at.free_queue
    before, after = links[extent].previous, links[extent].next
    remove(links, ends, extent)
    if before != NONE and after != NONE and is_unkeyed(state, before) and is_unkeyed(state, after):
        state.extents[before].blocks += state.extents[after].blocks
        remove(links, ends, after)
        recycle_extent(state, after)


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
            if state.config.offloads == 1:
                state.taken[extent] = state.at.step
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
    """The contents of the i-th block of an extent are lost; a twin, if it has one, is found in its place."""
    key = key_in_extent(state, extent, i)
    this = state.extents[extent]
    if this.blocks > 1 or state.extent_of_key[key] == extent:
        state.extent_of_key[key] = this.twin
        return
    before = state.extent_of_key[key]
    while state.extents[before].twin != extent:
        before = state.extents[before].twin
    state.extents[before].twin = this.twin
