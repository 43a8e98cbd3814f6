"""At every step: the token budget, the number of sequences, and the accounts of KV blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency import BatchFeatures
from blis_replay.blis.trace import EngineConfig, Int64s
from blis_replay.blis.verification.conservation import running_requests
from blis_replay.blis.verification.row import VerificationRow, row_of_faults
from blis_replay.blis.verification.workloads import Scenario, SlowLatency


def batch_faults(engine: EngineConfig, batch: BatchFeatures) -> list[str]:
    """Limits of the engine that a batch breaks."""
    tokens = batch.prefill_tokens + batch.decode_tokens
    faults = []
    if tokens > engine.max_num_batched_tokens:
        faults.append(f"{tokens} tokens in a batch of at most {engine.max_num_batched_tokens}")
    if max(batch.running, batch.prefill_requests + batch.decode_tokens) > engine.max_num_seqs:
        faults.append(f"{batch.running} requests run, at most {engine.max_num_seqs} may")
    if batch.prefill_tokens < batch.prefill_requests:
        faults.append(f"{batch.prefill_requests} requests share {batch.prefill_tokens} prompt tokens")
    return faults


def block_faults(state: k.State, scheduled: bool = False) -> list[str]:
    """Where block accounts disagree with a recount from the tables of requests and the free queue.

    Cached pieces: the holders of each are the running requests whose tables list it, whole;
    those that nobody holds are in the free queue, each once.  All blocks: free and held ones
    are as many as there are; blocks held cover the computed tokens and no more; the prefix
    cache finds what has a key.  ``scheduled``: the state is between ``schedule`` and ``run``.
    """
    running = running_requests(state)
    queue, faults = free_queue(state)
    if faults:
        return faults
    holders = _holders(state, running)
    cached_free = [piece for piece in queue if state.piece[piece, k.DEPTH] != k.ALIKE]
    for piece, count in sorted(holders.items()):
        if state.piece[piece, k.HOLDERS] != count:
            said = int(state.piece[piece, k.HOLDERS])
            faults.append(f"piece {piece} is in {count} tables and says {said}")
    if any(state.piece[piece, k.HOLDERS] != 0 or piece in holders for piece in cached_free):
        faults.append("a piece of the free queue is held")
    free = int(state.piece[queue, k.PIECE_BLOCKS].sum())
    if free != state.at[k.FREE_BLOCKS]:
        faults.append(f"{free} blocks in the free queue, counted {int(state.at[k.FREE_BLOCKS])}")
    alike_held = int((_blocks_held(state, running, scheduled) - state.request[running, k.BLOCKS_ENTERED]).sum())
    cached_held = int(state.piece[list(holders), k.PIECE_BLOCKS].sum()) if holders else 0
    if free + alike_held + cached_held != state.config[k.NUM_BLOCKS]:
        faults.append(
            f"{free} free, {alike_held} held and {cached_held} held and cached are not "
            f"{int(state.config[k.NUM_BLOCKS])} blocks"
        )
    faults += _idle_holder_faults(state, running) + _cover_faults(state, running)
    return faults + _cache_faults(state, sorted(holders) + cached_free)


def free_queue(state: k.State) -> tuple[list[int], list[str]]:
    """Pieces of the free queue in the order in which they will be taken, and what is wrong with its links."""
    queue: list[int] = []
    piece, before = int(state.at[k.QUEUE_HEAD]), k.NONE
    while piece != k.NONE:
        if not 0 <= piece < state.at[k.PIECES_USED] or state.piece[piece, k.QUEUE_BEFORE] != before:
            return queue, [f"the free queue is broken at piece {piece}"]
        if state.piece[piece, k.PIECE_BLOCKS] < 1:
            return queue, [f"piece {piece} of the free queue has no blocks"]
        queue.append(piece)
        before, piece = piece, int(state.piece[piece, k.QUEUE_AFTER])
    if before != state.at[k.QUEUE_TAIL]:
        return queue, [f"the free queue ends with piece {before}, not {int(state.at[k.QUEUE_TAIL])}"]
    alike = state.piece[queue, k.DEPTH] == k.ALIKE
    return queue, ["blocks without contents stand side by side"] if (alike[1:] & alike[:-1]).any() else []


def check_limits(chosen: Sequence[Scenario]) -> list[VerificationRow]:
    """Drive every workload a step at a time and recount after each ``schedule()`` and each step."""
    limits: list[str] = []
    blocks: list[str] = []
    steps = 0
    for scenario in chosen:
        engine, latency = scenario.start(), SlowLatency()
        while (batch := engine.schedule()) is not None:
            where = f"{scenario.name}, step {steps}"
            limits += [f"{where}: {text}" for text in batch_faults(scenario.engine, batch)]
            blocks += [f"{where}: {text}" for text in block_faults(engine.state, scheduled=True)]
            engine.run(max(int(latency.step_time(batch)), 1))
            blocks += [f"{where}, its end: {text}" for text in block_faults(engine.state)]
            steps += 1
        if engine.state.at[k.FREE_BLOCKS] != engine.state.config[k.NUM_BLOCKS]:
            blocks.append(f"{scenario.name}: blocks are held at the end")
    configuration = f"{len(chosen)} workloads"
    return [
        row_of_faults("token budget and sequences", configuration, limits, f"{steps:,} batches"),
        row_of_faults("KV block accounts", configuration, blocks, f"{2 * steps:,} recounts"),
    ]


def _holders(state: k.State, running: Sequence[int]) -> Counter[int]:
    """In how many tables of running requests each cached piece is."""
    holders: Counter[int] = Counter()
    for request in running:
        row = state.table[state.request[request, k.TABLE_ROW], : 2 * state.request[request, k.PIECES_HELD]]
        for first, blocks in row.reshape(-1, 2).tolist():
            piece, left = first, blocks
            while left > 0:  # what was cut off the piece since
                holders[piece] += 1
                left -= int(state.piece[piece, k.PIECE_BLOCKS])
                piece = int(state.piece[piece, k.REST])
    return holders


def _blocks_held(state: k.State, running: Sequence[int], scheduled: bool) -> Int64s:
    """int64[running]: blocks of each; of a decoding request those that its computed tokens fill."""
    request = state.request[running]
    computed = state.at[k.STEP] + int(scheduled) - request[:, k.BASE]
    held: Int64s = -(-computed // state.config[k.BLOCK_SIZE])
    return np.where(request[:, k.STATUS] == k.DECODING, held, request[:, k.BLOCKS_HELD])


def _idle_holder_faults(state: k.State, running: Sequence[int]) -> list[str]:
    """Requests outside the running list that still hold blocks."""
    idle = np.ones(len(state.request), np.bool_)
    idle[running] = False
    holding = np.flatnonzero(idle & (state.request[:, k.BLOCKS_HELD] > 0))
    return [f"request {holding[0]} does not run and holds blocks"] if len(holding) else []


def _cover_faults(state: k.State, running: Sequence[int]) -> list[str]:
    """Requests in prefill whose blocks are too few for their computed tokens."""
    request, size = state.request[running], state.config[k.BLOCK_SIZE]
    too_few = (request[:, k.STATUS] == k.PREFILLING) & (request[:, k.BLOCKS_HELD] * size < request[:, k.COMPUTED])
    if not too_few.any():
        return []
    i = int(np.argmax(too_few))
    held, tokens = int(request[i, k.BLOCKS_HELD]), int(request[i, k.COMPUTED])
    return [f"request {running[i]} has {tokens} tokens computed and holds {held} blocks of {size}"]


def _cache_faults(state: k.State, cached: Sequence[int]) -> list[str]:
    """Cached blocks that are not found under their keys, and keys under which there is nothing."""
    blocks = state.piece[cached, k.PIECE_BLOCKS].astype(np.int64)
    piece = np.repeat(np.asarray(cached, np.int64), blocks)
    place = np.arange(len(piece)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    key, depth = _keys(state, piece, place), state.piece[piece, k.DEPTH] + place
    lost = np.flatnonzero(~_is_found(state, piece, key, depth))
    faults = [f"block {place[i]} of piece {piece[i]} is not found under its key" for i in lost[:1]]
    stale = sorted(set(np.flatnonzero(state.found != k.NONE).tolist()) - set(key.tolist()))
    return faults + [f"under key {other} something is found that is not cached" for other in stale[:1]]


def _keys(state: k.State, piece: Int64s, place: Int64s) -> Int64s:
    """int64[n]: the key of each block, given by its piece and its place in it."""
    where = state.piece[piece, k.KEYS_AT].astype(np.int64)
    keys: Int64s = -where - 2 + place
    listed = where >= 0
    keys[listed] = state.keys[where[listed] + place[listed]]
    return keys


def _is_found(state: k.State, piece: Int64s, key: Int64s, depth: Int64s) -> NDArray[np.bool_]:
    """bool[n]: whether the way from ``found`` along what was cut off, and along twins, leads to the block."""
    at = state.found[key].astype(np.int64)
    for _ in range(len(state.piece)):
        lost = at == k.NONE
        row = state.piece[at]
        beyond = depth >= row[:, k.DEPTH] + row[:, k.PIECE_BLOCKS]
        on = ~lost & (beyond | (at != piece))
        if not on.any():
            break
        at = np.where(on, np.where(beyond, row[:, k.REST], row[:, k.TWIN]), at)
    found: NDArray[np.bool_] = at == piece
    return found
