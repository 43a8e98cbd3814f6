"""Blocks of requests and the prefix cache: sections 4 and 6 of the semantics.

A cached block is found by its key, a small number that stands for its tokens and all
before them: equal keys have equal keys before them.  Blocks that nobody can ever look up
(generated tokens that no later request repeats) have no key; when their request is
preempted it may look them up itself, and they get keys then.

Cached blocks that were entered together and are held by the same requests are one piece
(``State.piece``): holding, releasing and queueing it costs the same however long it is.  A
piece is split where requests begin to differ, or where one block gets a twin (two requests
computed the same block; the first entered is found).  What a split cuts off a piece is
linked to it (REST), so whoever held the whole finds all its parts.

In one piece the later blocks never outlive the earlier ones: who holds a block holds
those before it, and the last is freed and taken first.  So ``State.found`` may name, for
a key, a piece that the block was cut off from: the way to it is the chain of REST.
"""

from __future__ import annotations

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.cpu_tier import fetch_block, is_stored
from blis_replay.blis.kernel.free_queue import append_alike, insert_before, key_in_piece, new_piece, take_blocks, unlink
from blis_replay.blis.kernel.state import (
    BLOCK_SIZE,
    BLOCKS_ENTERED,
    BLOCKS_HELD,
    DEPTH,
    DYNAMIC_KEY,
    FREE_BLOCKS,
    HOLDERS,
    KEY_COUNT,
    KEY_START,
    KEYED,
    KEYS_AT,
    KEYS_USED,
    KNOWN,
    NONE,
    PIECE_BLOCKS,
    PIECES_HELD,
    PREFIX_CACHING,
    REST,
    TABLE_ROW,
    TOTAL_TOKENS,
    TWIN,
    State,
    index,
)

# -- Blocks of a request ------------------------------------------------------------------


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
def release_blocks(state: State, request: int) -> None:
    """Give up all blocks of a request, last block first; the unheld go to the end of the queue."""
    row = index(state.request[request, TABLE_ROW])
    freed = state.request[request, BLOCKS_HELD] - state.request[request, BLOCKS_ENTERED]
    if freed > 0:
        append_alike(state, freed)
    for i in range(state.request[request, PIECES_HELD] - 1, -1, -1):
        freed += release_piece(state, state.table[row, index(2 * i)], state.table[row, index(2 * i + 1)])
    state.at[FREE_BLOCKS] += freed
    state.request[request, BLOCKS_HELD] = 0
    state.request[request, BLOCKS_ENTERED] = 0
    state.request[request, PIECES_HELD] = 0


@compiled
def release_piece(state: State, piece: int, blocks: int) -> int:
    """Give up the first ``blocks`` blocks of what was one piece when it was held; how many nobody holds now."""
    freed = 0
    while blocks > 0:
        last, before = piece, 0
        while before + state.piece[index(last), PIECE_BLOCKS] < blocks:
            before += state.piece[index(last), PIECE_BLOCKS]
            last = state.piece[index(last), REST]
        this = index(last)
        state.piece[this, HOLDERS] -= 1
        if state.piece[this, HOLDERS] == 0:
            insert_before(state, last, NONE)
            freed += blocks - before
        blocks = before
    return freed


# -- Keys ---------------------------------------------------------------------------------


@compiled
def keys_at(state: State, request: int, i: int) -> int:
    """Where the keys of a request's full blocks from the i-th on are, as in a piece; NONE if it has none."""
    given = state.request[request, KEY_COUNT]
    if i < given:
        return state.request[request, KEY_START] + i
    if state.request[request, DYNAMIC_KEY] == NONE:
        return NONE
    return -(state.request[request, DYNAMIC_KEY] + i - given) - 2


@compiled
def key_of(state: State, request: int, i: int) -> int:
    """Key of the i-th full block of a request, which has one."""
    where = keys_at(state, request, i)
    return state.keys[index(where)] if where >= 0 else -where - 2


@compiled
def give_keys(state: State, request: int) -> None:
    """Let a request that is preempted find its own generated blocks again."""
    if state.config[PREFIX_CACHING] == 0 or state.request[request, DYNAMIC_KEY] != NONE:
        return
    state.request[request, DYNAMIC_KEY] = state.at[KEYS_USED]
    state.request[request, KEYED] = 1
    full = state.request[request, TOTAL_TOKENS] // state.config[BLOCK_SIZE] + 1
    state.at[KEYS_USED] += max(full - state.request[request, KEY_COUNT], 0)


# -- Finding cached blocks ----------------------------------------------------------------


@compiled
def find_cached_blocks(state: State, request: int, row: int) -> tuple[int, int, int]:
    """The leading blocks of a request that the cache has: how many, how many of them are free, and their pieces.

    The pieces, and how many blocks of each, are noted in a row of the table; nothing is
    held yet.
    """
    found, free, pieces = 0, 0, 0
    if state.config[PREFIX_CACHING] == 0:
        return found, free, pieces
    most = most_to_find(state, request)
    while found < most:
        piece = state.found[index(key_of(state, request, found))]
        if piece == NONE:
            break
        blocks = common_blocks(state, request, found, piece, most - found)
        state.table[index(row), index(2 * pieces)] = piece
        state.table[index(row), index(2 * pieces + 1)] = blocks
        pieces += 1
        found += blocks
        if state.piece[index(piece), HOLDERS] == 0:
            free += blocks
    return found, free, pieces


@compiled
def most_to_find(state: State, request: int) -> int:
    """Leading blocks of a request that may be found somewhere; the last known token is always computed."""
    most = (state.request[request, KNOWN] - 1) // state.config[BLOCK_SIZE]
    if state.request[request, DYNAMIC_KEY] == NONE:
        most = min(most, state.request[request, KEY_COUNT])
    return most


@compiled
def find_stored_blocks(state: State, request: int, found: int) -> int:
    """How many blocks of a request that follow its ``found`` cached ones the CPU tier has."""
    stored, most = 0, most_to_find(state, request) - found
    if state.config[PREFIX_CACHING] == 0:
        return stored
    while stored < most and is_stored(state, key_of(state, request, found + stored)):
        stored += 1
    return stored


@compiled
def fetch_blocks(state: State, request: int, found: int, stored: int) -> None:
    """Copy those blocks to the GPU; the first is the last to make room in the tier."""
    for i in range(found + stored - 1, found - 1, -1):
        fetch_block(state, key_of(state, request, i))


@compiled
def common_blocks(state: State, request: int, first: int, piece: int, most: int) -> int:
    """How many blocks of a piece are those of the request from its ``first`` on; the first one is."""
    most = min(most, state.piece[index(piece), PIECE_BLOCKS])
    if keys_at(state, request, first) == state.piece[index(piece), KEYS_AT]:
        given = state.request[request, KEY_COUNT]
        if first + most <= given or first >= given:
            return most
    # Equal keys have equal keys before them, so halving finds where they part.
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if key_of(state, request, first + middle - 1) == key_in_piece(state, piece, middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def hold_found_blocks(state: State, request: int, pieces: int) -> None:
    """Hold what ``find_cached_blocks`` noted in the request's row of the table."""
    row = index(state.request[request, TABLE_ROW])
    for i in range(pieces):
        piece = state.table[row, index(2 * i)]
        blocks = state.table[row, index(2 * i + 1)]
        this = index(piece)
        if blocks < state.piece[this, PIECE_BLOCKS]:
            split(state, piece, blocks)
        if state.piece[this, HOLDERS] == 0:
            unlink(state, piece)
            state.at[FREE_BLOCKS] -= blocks
        state.piece[this, HOLDERS] += 1
    state.request[request, PIECES_HELD] = pieces


@compiled
def split(state: State, piece: int, blocks: int) -> int:
    """Cut a piece behind its first ``blocks`` blocks; the new piece with the others.

    Free, the others are taken first, so they stand nearer to the head of the queue.
    """
    rest = new_piece(state)
    this, other = index(piece), index(rest)
    state.piece[other, HOLDERS] = state.piece[this, HOLDERS]
    state.piece[other, PIECE_BLOCKS] = state.piece[this, PIECE_BLOCKS] - blocks
    state.piece[other, DEPTH] = state.piece[this, DEPTH] + blocks
    where = state.piece[this, KEYS_AT]
    state.piece[other, KEYS_AT] = where + blocks if where >= 0 else where - blocks
    state.piece[other, REST] = state.piece[this, REST]
    state.piece[other, TWIN] = NONE
    state.piece[this, REST] = rest
    state.piece[this, PIECE_BLOCKS] = blocks
    state.found[index(key_in_piece(state, rest, 0))] = rest
    if state.piece[this, HOLDERS] == 0:
        insert_before(state, rest, piece)
    return rest


# -- Entering the cache -------------------------------------------------------------------


@compiled
def enter_cache(state: State, request: int, tokens: int) -> None:
    """Enter the request's blocks that its first ``tokens`` tokens fill, if they have keys."""
    full = tokens // state.config[BLOCK_SIZE]
    i = state.request[request, BLOCKS_ENTERED]
    if i >= full:
        return
    if state.request[request, DYNAMIC_KEY] == NONE:
        full = min(full, state.request[request, KEY_COUNT])
    while i < full:
        key = index(key_of(state, request, i))
        if state.found[key] == NONE:
            piece = piece_of_request(state, request, i)
            end = full if i >= state.request[request, KEY_COUNT] else min(full, state.request[request, KEY_COUNT])
            blocks = 0
            while i < end and state.found[index(key_of(state, request, i))] == NONE:
                state.found[index(key_of(state, request, i))] = piece
                blocks += 1
                i += 1
        else:
            first = alone(state, state.found[key], i)
            piece = piece_of_request(state, request, i)
            while state.piece[index(first), TWIN] != NONE:
                first = state.piece[index(first), TWIN]
            state.piece[index(first), TWIN] = piece
            blocks = 1
            i += 1
        state.piece[index(piece), PIECE_BLOCKS] = blocks
        note_piece(state, request, piece, blocks)


@compiled
def piece_of_request(state: State, request: int, i: int) -> int:
    """A new piece that begins with the i-th block of the request, which holds it."""
    piece = new_piece(state)
    this = index(piece)
    state.piece[this, HOLDERS] = 1
    state.piece[this, DEPTH] = i
    state.piece[this, KEYS_AT] = keys_at(state, request, i)
    state.piece[this, REST] = NONE
    state.piece[this, TWIN] = NONE
    return piece


@compiled
def note_piece(state: State, request: int, piece: int, blocks: int) -> None:
    """The request has entered a piece into the cache."""
    row, count = index(state.request[request, TABLE_ROW]), state.request[request, PIECES_HELD]
    state.table[row, index(2 * count)] = piece
    state.table[row, index(2 * count + 1)] = blocks
    state.request[request, PIECES_HELD] = count + 1
    state.request[request, BLOCKS_ENTERED] += blocks


@compiled
def alone(state: State, piece: int, depth: int) -> int:
    """Make the cached block at this depth, found by way of ``piece``, a piece of its own."""
    while depth >= state.piece[index(piece), DEPTH] + state.piece[index(piece), PIECE_BLOCKS]:
        piece = state.piece[index(piece), REST]
    if depth > state.piece[index(piece), DEPTH]:
        piece = split(state, piece, depth - state.piece[index(piece), DEPTH])
    if state.piece[index(piece), PIECE_BLOCKS] > 1:
        split(state, piece, 1)
    return piece
