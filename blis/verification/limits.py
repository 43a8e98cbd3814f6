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


def block_faults(state: k.State) -> list[str]:
    """Where block accounts disagree with a recount from the block tables and the free queue.

    The holders of each block are the running requests whose tables list it; the free queue
    lists exactly the unheld blocks, each once and where the block says it stands; tables
    cover the computed tokens and no more; the prefix cache finds what has a key.
    """
    running = running_requests(state)
    holders = _holders(state, running)
    free = free_queue(state)
    faults = []
    if (holders != state.block[:, k.HOLDERS]).any():
        block = int(np.argmax(holders != state.block[:, k.HOLDERS]))
        faults.append(f"block {block} is in {holders[block]} tables and says {state.block[block, k.HOLDERS]}")
    if sorted(free) != np.flatnonzero(holders == 0).tolist():
        faults.append(f"{len(free)} blocks in the free queue, {int((holders == 0).sum())} in no table")
    if len(free) != state.at[k.FREE_BLOCKS]:
        faults.append(f"{len(free)} blocks in the free queue, counted {int(state.at[k.FREE_BLOCKS])}")
    if any(not 0 <= block < len(state.block) for block in free):
        return [*faults, "the free queue lists what is no block"]
    if (state.free_queue[state.block[free, k.FREE_PLACE]] != free).any():
        faults.append("a block of the free queue does not stand where it says")
    if len(free) + int((holders > 0).sum()) != len(state.block):
        faults.append(f"{len(free)} free and {int((holders > 0).sum())} held are not {len(state.block)} blocks")
    return faults + _idle_holder_faults(state, running) + _cover_faults(state, running) + _cache_faults(state)


def free_queue(state: k.State) -> list[int]:
    """Blocks of the free queue in the order in which they will be taken."""
    queue = state.free_queue[state.at[k.QUEUE_HEAD] : state.at[k.QUEUE_TAIL]]
    return [int(block) for block in queue if block != k.NONE]


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
            blocks += [f"{where}: {text}" for text in block_faults(engine.state)]
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
    """int64[blocks]: in how many tables of running requests each block is."""
    parts = [
        state.table[state.request[request, k.TABLE_ROW], : state.request[request, k.BLOCKS_HELD]] for request in running
    ]
    listed = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return np.bincount(listed, minlength=len(state.block)).astype(np.int64)


def _idle_holder_faults(state: k.State, running: Sequence[int]) -> list[str]:
    """Requests outside the running list that still hold blocks."""
    idle = np.ones(len(state.request), np.bool_)
    idle[running] = False
    holding = np.flatnonzero(idle & (state.request[:, k.BLOCKS_HELD] > 0))
    return [f"request {holding[0]} does not run and holds blocks"] if len(holding) else []


def _cover_faults(state: k.State, running: Sequence[int]) -> list[str]:
    """Running requests whose blocks are too few for their computed tokens, or more than the next token needs."""
    request, size = state.request[running], state.config[k.BLOCK_SIZE]
    decoding = request[:, k.STATUS] == k.DECODING
    computed = np.where(decoding, state.at[k.STEP] - request[:, k.BASE], request[:, k.COMPUTED])
    too_few = request[:, k.BLOCKS_HELD] * size < computed
    too_many = decoding & (request[:, k.BLOCKS_HELD] > -(-(computed + 1) // size))
    wrong = (request[:, k.STATUS] != k.LAST_IN_FLIGHT) & (too_few | too_many)
    if not wrong.any():
        return []
    i = int(np.argmax(wrong))
    held, tokens = int(request[i, k.BLOCKS_HELD]), int(computed[i])
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
