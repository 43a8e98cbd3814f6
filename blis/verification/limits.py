"""At every step: the token budget, the number of sequences, and the accounts of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    """Where block accounts disagree with a recount from the block tables and the free queue.

    Named blocks: the holders of each are the running requests whose tables list it; those
    that nobody holds are in the free queue, each once and where the block says it stands;
    names that no block has are spare.  All blocks: free and held ones are as many as there
    are; blocks held cover the computed tokens and no more; the prefix cache finds what has
    a key.  ``scheduled``: the state is between ``schedule`` and ``run``.
    """
    running = running_requests(state)
    holders = _holders(state, running)
    named_free, alike_free = free_queue(state)
    named = state.block[:, k.BLOCK_KEY] != k.NONE
    faults = []
    if (holders != state.block[:, k.HOLDERS]).any():
        block = int(np.argmax(holders != state.block[:, k.HOLDERS]))
        faults.append(f"block {block} is in {holders[block]} tables and says {state.block[block, k.HOLDERS]}")
    if sorted(named_free) != np.flatnonzero(named & (holders == 0)).tolist():
        faults.append(
            f"{len(named_free)} cached blocks in the free queue, {int((named & (holders == 0)).sum())} unheld"
        )
    elif (state.free_queue[state.block[named_free, k.FREE_PLACE]] != named_free).any():
        faults.append("a block of the free queue does not stand where it says")
    if sorted(state.spare_names[: state.at[k.SPARE_NAMES]].tolist()) != np.flatnonzero(~named).tolist():
        faults.append("the spare names are not those that no block has")
    if len(named_free) + alike_free != state.at[k.FREE_BLOCKS]:
        faults.append(
            f"{len(named_free) + alike_free} blocks in the free queue, counted {int(state.at[k.FREE_BLOCKS])}"
        )
    alike_held = int((_blocks_held(state, running, scheduled) - state.request[running, k.BLOCKS_ENTERED]).sum())
    if alike_free + alike_held + int(named.sum()) != len(state.block):
        faults.append(
            f"{alike_free} free, {alike_held} held and {int(named.sum())} cached are not {len(state.block)} blocks"
        )
    return faults + _idle_holder_faults(state, running) + _cover_faults(state, running) + _cache_faults(state)


def free_queue(state: k.State) -> tuple[list[int], int]:
    """Cached blocks of the free queue in the order in which they will be taken, and how many others are in it."""
    queue = state.free_queue[state.at[k.QUEUE_HEAD] : state.at[k.QUEUE_TAIL]]
    return [int(entry) for entry in queue if entry >= 0], int(sum(-entry - 1 for entry in queue if entry < k.NONE))


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
        if int(engine.state.at[k.FREE_BLOCKS]) != len(engine.state.block):
            blocks.append(f"{scenario.name}: blocks are held at the end")
    configuration = f"{len(chosen)} workloads"
    return [
        row_of_faults("token budget and sequences", configuration, limits, f"{steps:,} batches"),
        row_of_faults("KV block accounts", configuration, blocks, f"{2 * steps:,} recounts"),
    ]


def _holders(state: k.State, running: Sequence[int]) -> Int64s:
    """int64[blocks]: in how many tables of running requests each named block is."""
    parts = [
        state.table[state.request[request, k.TABLE_ROW], : state.request[request, k.BLOCKS_ENTERED]]
        for request in running
    ]
    listed = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return np.bincount(listed, minlength=len(state.block)).astype(np.int64)


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


def _cache_faults(state: k.State) -> list[str]:
    """Blocks with a key under which nothing is found, and keys under which another block is found."""
    key_of = state.block[:, k.BLOCK_KEY]
    keyed = np.flatnonzero(key_of != k.NONE)
    lost = keyed[state.cached_block[key_of[keyed]] == k.NONE]
    keys = np.flatnonzero(state.cached_block != k.NONE)
    stale = keys[key_of[state.cached_block[keys]] != keys]
    faults = [f"block {lost[0]} has a key and cannot be found under it"] if len(lost) else []
    return faults + ([f"under key {stale[0]} a block with another key is found"] if len(stale) else [])
