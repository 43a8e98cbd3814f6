"""Blocks and prefix cache: sections 4 and 6 of the semantics.

A cached block is found by its key, a small number that stands for its tokens and all
before them.  Blocks that nobody can ever look up (generated tokens that no later
request repeats) have no key; when their request is preempted it may look them up itself,
and they get keys then.

Only a cached block has a name, a number.  Blocks without contents to be found are all
alike, so they are counted: a request holds so many, and in the free queue a run of n of
them is one entry, ``-(n + 1)``.  A named block that is held again from the middle of the
queue leaves NONE (-1) in its place.
"""

from __future__ import annotations

import numpy as np

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.state import (
    BLOCK_KEY,
    BLOCK_SIZE,
    BLOCKS_ENTERED,
    BLOCKS_HELD,
    DYNAMIC_KEY,
    FREE_BLOCKS,
    FREE_PLACE,
    HOLDERS,
    KEY_COUNT,
    KEY_START,
    KEYED,
    KEYS_USED,
    KNOWN,
    NONE,
    PREFIX_CACHING,
    QUEUE_HEAD,
    QUEUE_TAIL,
    SPARE_NAMES,
    TABLE_ROW,
    TOTAL_TOKENS,
    TWIN,
    State,
)


@compiled
def take_blocks(state: State, count: int) -> None:
    """Take blocks from the head of the free queue; cached contents leave the cache at that moment."""
    at = state.at
    at[FREE_BLOCKS] -= count
    head = at[QUEUE_HEAD]
    while count > 0:
        entry = state.free_queue[head]
        if entry < NONE:
            run = -entry - 1
            if run > count:
                state.free_queue[head] = entry + count
                break
            count -= run
        elif entry != NONE:
            leave_cache(state, entry)
            state.spare_names[at[SPARE_NAMES]] = entry
            at[SPARE_NAMES] += 1
            count -= 1
        head += 1
    at[QUEUE_HEAD] = head


@compiled
def release_blocks(state: State, request: int) -> None:
    """Give up all blocks of a request, last block first; the unheld go to the end of the queue."""
    at = state.at
    row, named = state.request[request, TABLE_ROW], state.request[request, BLOCKS_ENTERED]
    alike = state.request[request, BLOCKS_HELD] - named
    if at[QUEUE_TAIL] + named + 1 > len(state.free_queue):
        close_up(state)
    tail, freed = at[QUEUE_TAIL], alike
    if alike > 0:
        state.free_queue[tail] = -(alike + 1)
        tail += 1
    for i in range(named - 1, -1, -1):
        name = state.table[np.uint64(row), np.uint64(i)]
        block = np.uint64(name)
        holders = state.block[block, HOLDERS] - 1
        state.block[block, HOLDERS] = holders
        if holders == 0:
            state.block[block, FREE_PLACE] = tail
            state.free_queue[np.uint64(tail)] = name
            tail += 1
            freed += 1
    at[FREE_BLOCKS] += freed
    at[QUEUE_TAIL] = tail
    state.request[request, BLOCKS_HELD] = 0
    state.request[request, BLOCKS_ENTERED] = 0


@compiled
def close_up(state: State) -> None:
    """Move the free queue to the start of its array: no gaps, and runs next to each other made one."""
    at, tail = state.at, 0
    for i in range(at[QUEUE_HEAD], at[QUEUE_TAIL]):
        entry = state.free_queue[i]
        if entry >= 0:
            state.block[entry, FREE_PLACE] = tail
        if entry < NONE and tail > 0 and state.free_queue[tail - 1] < NONE:
            state.free_queue[tail - 1] += entry + 1
        elif entry != NONE:
            state.free_queue[tail] = entry
            tail += 1
    at[QUEUE_HEAD] = 0
    at[QUEUE_TAIL] = tail


@compiled
def blocks_for(state: State, tokens: int) -> int:
    """Blocks that this many tokens fill, the last one perhaps in part."""
    return (tokens + state.config[BLOCK_SIZE] - 1) // state.config[BLOCK_SIZE]


@compiled
def get_blocks(state: State, request: int, tokens: int) -> bool:
    """Hold blocks for ``tokens`` tokens; False, and nothing changed, if too few are free."""
    wanted = blocks_for(state, tokens) - state.request[request, BLOCKS_HELD]
    if wanted > state.at[FREE_BLOCKS]:
        return False
    if wanted > 0:
        take_blocks(state, wanted)
        state.request[request, BLOCKS_HELD] += wanted
    return True


@compiled
def key_of(state: State, request: int, i: int) -> int:
    """Key of the i-th full block of a request, NONE if nobody can look it up."""
    if i < state.request[request, KEY_COUNT]:
        return state.keys[state.request[request, KEY_START] + i]
    if state.request[request, DYNAMIC_KEY] == NONE:
        return NONE
    return state.request[request, DYNAMIC_KEY] + i - state.request[request, KEY_COUNT]


@compiled
def hold_cached_blocks(state: State, request: int, row: int) -> int:
    """Hold the leading blocks that the cache has, in a free row of the table; how many they are.

    The last known token is always computed, so a block that holds it cannot hit.  A block
    that nobody held leaves the free queue, where its place is kept for ``let_go``.
    """
    if state.config[PREFIX_CACHING] == 0:
        return 0
    most = (state.request[request, KNOWN] - 1) // state.config[BLOCK_SIZE]
    start, given = state.request[request, KEY_START], state.request[request, KEY_COUNT]
    further = state.request[request, DYNAMIC_KEY]
    table_row = state.table[row]
    found = 0
    unheld = 0
    while found < most:
        if found < given:
            key = state.keys[np.uint64(start + found)]
        elif further != NONE:
            key = further + found - given
        else:
            break
        name = state.cached_block[np.uint64(key)]
        if name == NONE:
            break
        table_row[found] = name
        found += 1
        # Unsigned, an index needs no test for counting from the end.
        block = np.uint64(name)
        holders = state.block[block, HOLDERS]
        state.block[block, HOLDERS] = holders + 1
        if holders == 0:
            state.free_queue[np.uint64(state.block[block, FREE_PLACE])] = NONE
            unheld += 1
    state.at[FREE_BLOCKS] -= unheld
    return found


@compiled
def let_go(state: State, row: int, hits: int) -> None:
    """Undo ``hold_cached_blocks`` for an admission that failed: nothing of it stays."""
    for i in range(hits):
        block = state.table[row, i]
        state.block[block, HOLDERS] -= 1
        if state.block[block, HOLDERS] == 0:
            state.free_queue[state.block[block, FREE_PLACE]] = block
            state.at[FREE_BLOCKS] += 1


@compiled
def enter_cache(state: State, request: int, tokens: int) -> None:
    """Enter the request's blocks that its first ``tokens`` tokens fill, if they have keys."""
    full = tokens // state.config[BLOCK_SIZE]
    row = state.request[request, TABLE_ROW]
    for i in range(state.request[request, BLOCKS_ENTERED], full):
        key = key_of(state, request, i)
        if key == NONE:
            return
        state.at[SPARE_NAMES] -= 1
        block = state.spare_names[state.at[SPARE_NAMES]]
        state.table[row, i] = block
        state.block[block, HOLDERS] = 1
        state.request[request, BLOCKS_ENTERED] = i + 1
        state.block[block, BLOCK_KEY] = key
        state.block[block, TWIN] = NONE
        last = state.cached_block[key]
        if last == NONE:
            state.cached_block[key] = block
        else:
            # A twin: two requests computed the same block.  The first entered is found.
            while state.block[last, TWIN] != NONE:
                last = state.block[last, TWIN]
            state.block[last, TWIN] = block


@compiled
def leave_cache(state: State, block: int) -> None:
    """Take a block out of the cache."""
    key = state.block[block, BLOCK_KEY]
    state.block[block, BLOCK_KEY] = NONE
    other = state.cached_block[key]
    if other == block:
        state.cached_block[key] = state.block[block, TWIN]
        return
    while state.block[other, TWIN] != block:
        other = state.block[other, TWIN]
    state.block[other, TWIN] = state.block[block, TWIN]


@compiled
def give_keys(state: State, request: int) -> None:
    """Let a request that is preempted find its own generated blocks again."""
    if state.config[PREFIX_CACHING] == 0 or state.request[request, DYNAMIC_KEY] != NONE:
        return
    state.request[request, DYNAMIC_KEY] = state.at[KEYS_USED]
    state.request[request, KEYED] = 1
    full = state.request[request, TOTAL_TOKENS] // state.config[BLOCK_SIZE] + 1
    state.at[KEYS_USED] += max(full - state.request[request, KEY_COUNT], 0)
