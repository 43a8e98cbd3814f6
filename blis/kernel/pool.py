"""Blocks and prefix cache: sections 4 and 6 of the semantics.

A cached block is found by its key, a small number that stands for its tokens and all
before them.  Blocks that nobody can ever look up (generated tokens that no later
request repeats) have no key and need no bookkeeping; when their request is preempted
it may look them up itself, and they get keys then.
"""

from __future__ import annotations

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.state import (
    BLOCK_KEY,
    BLOCK_SIZE,
    BLOCKS_ENTERED,
    BLOCKS_HELD,
    DYNAMIC_KEY,
    FREE_BLOCKS,
    FREE_HEAD,
    FREE_NEXT,
    FREE_PREV,
    FREE_TAIL,
    GROWTH_NEXT,
    HOLDERS,
    KEY_COUNT,
    KEY_START,
    KEYED,
    KEYS_USED,
    KNOWN,
    NONE,
    PREFIX_CACHING,
    TABLE_ROW,
    TOTAL_TOKENS,
    State,
)


@compiled
def take_block(state: State) -> int:
    """Take the head of the free queue; a hash it carries leaves the cache at that moment."""
    at = state.at
    block = at[FREE_HEAD]
    after = state.block[block, FREE_NEXT]
    at[FREE_HEAD] = after
    if after == NONE:
        at[FREE_TAIL] = NONE
    else:
        state.block[after, FREE_PREV] = NONE
    at[FREE_BLOCKS] -= 1
    if state.block[block, BLOCK_KEY] != NONE:
        leave_cache(state, block)
    return block


@compiled
def take_a_block_each(state: State, request: int) -> None:
    """A new block for each decode of a growth bucket, from ``request`` on; enough are free."""
    at = state.at
    block, taken = at[FREE_HEAD], 0
    while request != NONE:
        held = state.request[request, BLOCKS_HELD]
        state.table[state.request[request, TABLE_ROW], held] = block
        state.request[request, BLOCKS_HELD] = held + 1
        state.block[block, HOLDERS] = 1
        if state.block[block, BLOCK_KEY] != NONE:
            leave_cache(state, block)
        taken += 1
        block = state.block[block, FREE_NEXT]
        request = state.link[request, GROWTH_NEXT]
    if taken > 0:
        at[FREE_BLOCKS] -= taken
        at[FREE_HEAD] = block
        if block == NONE:
            at[FREE_TAIL] = NONE
        else:
            state.block[block, FREE_PREV] = NONE


@compiled
def hold_cached_blocks(state: State, request: int, hits: int) -> None:
    """Share the first ``hits`` blocks of the request's table row; the unheld leave the free queue."""
    at, blocks = state.at, state.block
    row = state.request[request, TABLE_ROW]
    head, tail, taken = at[FREE_HEAD], at[FREE_TAIL], 0
    for i in range(hits):
        block = state.table[row, i]
        holders = blocks[block, HOLDERS]
        blocks[block, HOLDERS] = holders + 1
        if holders == 0:
            before, after = blocks[block, FREE_PREV], blocks[block, FREE_NEXT]
            if before == NONE:
                head = after
            else:
                blocks[before, FREE_NEXT] = after
            if after == NONE:
                tail = before
            else:
                blocks[after, FREE_PREV] = before
            taken += 1
    at[FREE_HEAD] = head
    at[FREE_TAIL] = tail
    at[FREE_BLOCKS] -= taken
    state.request[request, BLOCKS_HELD] = hits
    state.request[request, BLOCKS_ENTERED] = hits


@compiled
def release_blocks(state: State, request: int) -> None:
    """Give up all blocks of a request, last block first; the unheld go to the end of the queue."""
    at = state.at
    row = state.request[request, TABLE_ROW]
    tail = at[FREE_TAIL]
    released = 0
    for i in range(state.request[request, BLOCKS_HELD] - 1, -1, -1):
        block = state.table[row, i]
        state.block[block, HOLDERS] -= 1
        if state.block[block, HOLDERS] == 0:
            state.block[block, FREE_PREV] = tail
            if tail == NONE:
                at[FREE_HEAD] = block
            else:
                state.block[tail, FREE_NEXT] = block
            tail = block
            released += 1
    if released > 0:
        state.block[tail, FREE_NEXT] = NONE
        at[FREE_TAIL] = tail
        at[FREE_BLOCKS] += released
    state.request[request, BLOCKS_HELD] = 0


@compiled
def blocks_for(state: State, tokens: int) -> int:
    """Blocks that this many tokens fill, the last one perhaps in part."""
    return (tokens + state.config[BLOCK_SIZE] - 1) // state.config[BLOCK_SIZE]


@compiled
def get_blocks(state: State, request: int, tokens: int) -> bool:
    """Hold blocks for ``tokens`` tokens; False, and nothing changed, if too few are free."""
    wanted = blocks_for(state, tokens)
    held = state.request[request, BLOCKS_HELD]
    if wanted - held > state.at[FREE_BLOCKS]:
        return False
    row = state.request[request, TABLE_ROW]
    for i in range(held, wanted):
        block = take_block(state)
        state.block[block, HOLDERS] = 1
        state.table[row, i] = block
    if wanted > held:
        state.request[request, BLOCKS_HELD] = wanted
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
def find_cached_blocks(state: State, request: int, row: int) -> tuple[int, int]:
    """Leading blocks found in the cache, noted in a free row of the table, and how many of them nobody holds.

    The last known token is always computed, so a block that holds it cannot hit.
    """
    if state.config[PREFIX_CACHING] == 0:
        return 0, 0
    most = (state.request[request, KNOWN] - 1) // state.config[BLOCK_SIZE]
    start, given = state.request[request, KEY_START], state.request[request, KEY_COUNT]
    further = state.request[request, DYNAMIC_KEY]
    found = 0
    unheld = 0
    while found < most:
        if found < given:
            key = state.keys[start + found]
        elif further != NONE:
            key = further + found - given
        else:
            break
        block = state.cached_block[key]
        if block == NONE:
            break
        state.table[row, found] = block
        found += 1
        if state.block[block, HOLDERS] == 0:
            unheld += 1
    return found, unheld


@compiled
def enter_cache(state: State, request: int, tokens: int) -> None:
    """Enter the request's blocks that its first ``tokens`` tokens fill, if they have keys."""
    full = tokens // state.config[BLOCK_SIZE]
    row = state.request[request, TABLE_ROW]
    for i in range(state.request[request, BLOCKS_ENTERED], full):
        key = key_of(state, request, i)
        if key == NONE:
            return
        block = state.table[row, i]
        state.request[request, BLOCKS_ENTERED] = i + 1
        state.block[block, BLOCK_KEY] = key
        state.twin[block] = NONE
        last = state.cached_block[key]
        if last == NONE:
            state.cached_block[key] = block
        else:
            # A twin: two requests computed the same block.  The first entered is found.
            while state.twin[last] != NONE:
                last = state.twin[last]
            state.twin[last] = block


@compiled
def leave_cache(state: State, block: int) -> None:
    """Take a block out of the cache."""
    key = state.block[block, BLOCK_KEY]
    state.block[block, BLOCK_KEY] = NONE
    other = state.cached_block[key]
    if other == block:
        state.cached_block[key] = state.twin[block]
        return
    while state.twin[other] != block:
        other = state.twin[other]
    state.twin[other] = state.twin[block]


@compiled
def give_keys(state: State, request: int) -> None:
    """Let a request that is preempted find its own generated blocks again."""
    if state.config[PREFIX_CACHING] == 0 or state.request[request, DYNAMIC_KEY] != NONE:
        return
    state.request[request, DYNAMIC_KEY] = state.at[KEYS_USED]
    state.request[request, KEYED] = 1
    full = state.request[request, TOTAL_TOKENS] // state.config[BLOCK_SIZE] + 1
    state.at[KEYS_USED] += max(full - state.request[request, KEY_COUNT], 0)
