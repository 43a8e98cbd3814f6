"""The free queue: section 4 of the semantics.

Blocks that are taken, cached, held and freed together make one entry, a piece, whose last
block is the first to be taken.  Blocks without contents to be found are all alike, so a
piece of them is a mere number; two such pieces never stand side by side.
"""

from __future__ import annotations

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.cpu_tier import store_block
from blis_replay.blis.kernel.state import (
    ALIKE,
    CPU_BLOCKS,
    DEPTH,
    FREE_BLOCKS,
    KEYS_AT,
    NONE,
    PIECE_BLOCKS,
    PIECES_USED,
    QUEUE_AFTER,
    QUEUE_BEFORE,
    QUEUE_HEAD,
    QUEUE_TAIL,
    SPARE_PIECE,
    TWIN,
    State,
    index,
)


@compiled
def new_piece(state: State) -> int:
    """A number for a piece; its row holds what an earlier one left."""
    piece = state.at[SPARE_PIECE]
    if piece == NONE:
        piece = state.at[PIECES_USED]
        state.at[PIECES_USED] += 1
    else:
        state.at[SPARE_PIECE] = state.piece[index(piece), QUEUE_AFTER]
    return piece


@compiled
def spare_piece(state: State, piece: int) -> None:
    """A piece has no blocks any more."""
    state.piece[index(piece), QUEUE_AFTER] = state.at[SPARE_PIECE]
    state.at[SPARE_PIECE] = piece


@compiled
def insert_before(state: State, piece: int, after: int) -> None:
    """Put a piece into the queue, nearer to the head than ``after`` (NONE: at its end)."""
    at, pieces, this = state.at, state.piece, index(piece)
    before = at[QUEUE_TAIL] if after == NONE else pieces[index(after), QUEUE_BEFORE]
    pieces[this, QUEUE_BEFORE] = before
    pieces[this, QUEUE_AFTER] = after
    if before == NONE:
        at[QUEUE_HEAD] = piece
    else:
        pieces[index(before), QUEUE_AFTER] = piece
    if after == NONE:
        at[QUEUE_TAIL] = piece
    else:
        pieces[index(after), QUEUE_BEFORE] = piece


@compiled
def unlink(state: State, piece: int) -> None:
    """Take a piece out of the queue; what stands side by side now and is all alike becomes one."""
    at, pieces, this = state.at, state.piece, index(piece)
    before, after = pieces[this, QUEUE_BEFORE], pieces[this, QUEUE_AFTER]
    if before == NONE:
        at[QUEUE_HEAD] = after
    else:
        pieces[index(before), QUEUE_AFTER] = after
    if after == NONE:
        at[QUEUE_TAIL] = before
    else:
        pieces[index(after), QUEUE_BEFORE] = before
        if before != NONE and is_alike(state, before) and is_alike(state, after):
            pieces[index(before), PIECE_BLOCKS] += pieces[index(after), PIECE_BLOCKS]
            unlink_last(state, before, after)


@compiled
def unlink_last(state: State, before: int, piece: int) -> None:
    """Take ``piece``, which stands behind ``before``, out of the queue for good."""
    after = state.piece[index(piece), QUEUE_AFTER]
    state.piece[index(before), QUEUE_AFTER] = after
    if after == NONE:
        state.at[QUEUE_TAIL] = before
    else:
        state.piece[index(after), QUEUE_BEFORE] = before
    spare_piece(state, piece)


@compiled
def is_alike(state: State, piece: int) -> bool:
    """Whether the blocks of a piece have no contents to be found."""
    return state.piece[index(piece), DEPTH] == ALIKE


@compiled
def append_alike(state: State, count: int) -> None:
    """Blocks without contents go to the end of the queue."""
    tail = state.at[QUEUE_TAIL]
    if tail != NONE and is_alike(state, tail):
        state.piece[index(tail), PIECE_BLOCKS] += count
        return
    piece = new_piece(state)
    state.piece[index(piece), PIECE_BLOCKS] = count
    state.piece[index(piece), DEPTH] = ALIKE
    insert_before(state, piece, NONE)


@compiled
def take_blocks(state: State, count: int) -> None:
    """Take blocks from the head of the queue; cached contents leave the cache at that moment."""
    state.at[FREE_BLOCKS] -= count
    while count > 0:
        piece = state.at[QUEUE_HEAD]
        this = index(piece)
        blocks = state.piece[this, PIECE_BLOCKS]
        taken = min(blocks, count)
        if state.piece[this, DEPTH] != ALIKE:
            for i in range(blocks - 1, blocks - 1 - taken, -1):
                leave_cache(state, piece, i)
        count -= taken
        state.piece[this, PIECE_BLOCKS] = blocks - taken
        if taken == blocks:
            unlink(state, piece)
            spare_piece(state, piece)


@compiled
def key_in_piece(state: State, piece: int, i: int) -> int:
    """Key of the i-th block of a piece."""
    keys_at = state.piece[index(piece), KEYS_AT]
    # Keys given at a preemption are consecutive numbers, of which the first is kept.
    return state.keys[index(keys_at + i)] if keys_at >= 0 else i - keys_at - 2


@compiled
def leave_cache(state: State, piece: int, i: int) -> None:
    """The contents of the i-th block of a piece are lost; a twin, if it has one, is found in its place.

    Without a twin they go to the CPU tier, if there is one.
    """
    key = index(key_in_piece(state, piece, i))
    this = index(piece)
    if state.piece[this, PIECE_BLOCKS] > 1 or state.found[key] == piece:
        state.found[key] = state.piece[this, TWIN]
        if state.config[CPU_BLOCKS] > 0 and state.piece[this, TWIN] == NONE:
            store_block(state, key_in_piece(state, piece, i))
        return
    before = index(state.found[key])
    while state.piece[before, TWIN] != piece:
        before = index(state.piece[before, TWIN])
    state.piece[before, TWIN] = state.piece[this, TWIN]
