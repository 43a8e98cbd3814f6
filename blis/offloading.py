"""What a run needs that offloads KV blocks to CPU memory; loaded for such engines only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import TraceError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel import transfers as t
from blis_replay.blis.trace import MOST_TABLE_CELLS, BlockKeys, EngineConfig, Offloading, RequestTrace

# A block of CPU memory begins at a multiple of the page size.
_PAGE_BYTES = 4_096


def offloading_of(arguments: Mapping[str, object]) -> Offloading | None:
    """An offload from engine arguments; None without one, or if what it takes is not known.

    Reads ``kv_offloading_size`` (GiB) and ``kv_offloading_costs``, such as ``block_bytes=2097152 load_us=100
    load_block_us=40 store_us=100 store_block_us=60``; ``block_bytes``: of a KV block on all GPUs together.
    """
    size, costs = arguments.get("kv_offloading_size"), str(arguments.get("kv_offloading_costs", ""))
    words = {
        name: int(value) for name, _, value in (word.partition("=") for word in costs.split()) if value.isdecimal()
    }
    block_bytes = words.pop("block_bytes", 0)
    try:
        blocks = int(float(str(size)) * 2**30) // (-(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        return Offloading(cpu_blocks=blocks, **words)
    except (TypeError, ValueError, ZeroDivisionError):
        return None


def with_keys(trace: RequestTrace, engine: EngineConfig) -> RequestTrace:
    """The requests with a key for each full block of their prompts, and a row of keys for each request.

    Raises ``TraceError`` where cached prompt tokens are known as a number only.
    """
    if (trace.prefill_tokens != trace.prompt_tokens).any():
        raise TraceError("an offload of KV blocks needs block_keys instead of prefill_tokens below prompt_tokens")
    size, given = engine.block_size, trace.block_keys
    blocks = trace.prompt_tokens // size
    known = np.zeros_like(blocks) if given is None else given.count
    count = np.maximum(blocks, known)
    start = np.cumsum(count) - count
    keys = np.arange(int(count.sum()), dtype=np.int32)
    if given is not None:
        keys += int(given.keys.max(initial=-1)) + 1
        depth = np.arange(int(known.sum())) - np.repeat(np.cumsum(known) - known, known)
        keys[np.repeat(start, known) + depth] = given.keys[np.repeat(given.start, known) + depth]
    return replace(trace, block_keys=BlockKeys(start, count, keys, size))


def offloaded(state: k.State, engine: EngineConfig) -> k.State:
    """A state before the first arrival for an engine that offloads; a parked request has a row of the table too."""
    requests, usable = len(state.facts), int(state.config["num_blocks"].item())
    rows = min(requests, 2 * engine.max_num_seqs + usable)
    rows = max(rows, engine.max_num_seqs)
    width = state.table.shape[1]
    if rows * width > MOST_TABLE_CELLS:
        raise TraceError(
            f"{rows} requests that may hold KV blocks take a table of {rows * width} blocks; at most "
            f"{MOST_TABLE_CELLS} can be simulated: offload with fewer requests or a larger block_size"
        )
    state.config["offloads"] = 1
    state.at["free_rows"] = rows
    by_rank = state.by_rank
    if engine.scheduling_policy == "fcfs":  # room before all, for those that are preempted
        state.facts["rank"] += _FIRST_RANK
        by_rank = np.concatenate([np.zeros(_FIRST_RANK, np.int64), by_rank])
    return state.replaced(
        by_rank=by_rank,
        table=np.zeros((rows, width), np.int32),
        free_rows=np.arange(rows, dtype=np.int64),
        taken=np.full(len(state.extents), k.NONE, np.int32),
    )


# Ranks before that of the first request: a preempted request takes the one before all that wait.
_FIRST_RANK = 1 << 20


def new_offload(
    state: k.State, engine: EngineConfig, offloading: Offloading, trace: RequestTrace, order: Int64s
) -> t.Offload:
    """What the kernel needs beside its state before the first arrival; ``order``: requests as the state has them."""
    requests, keys = len(state.facts), int(state.keys.max(initial=-1)) + 1
    most = min(offloading.cpu_blocks, keys) + requests
    at = np.zeros(1, t.PROGRESS)
    table = np.zeros(requests, t.OFFLOADED)
    table["fetched_us"] = table["loaded_us"] = k.NONE
    for name, values in (("remote", trace.external_tokens), ("fetched_us", trace.fetched_us)):
        if values is not None:
            table[name] = values[order]
    at["blocks"] = offloading.cpu_blocks
    at["by_request"] = engine.behaviours.offload_follows_requests
    at["by_use"] = at["parked"] = (k.NONE, k.NONE)
    ways = np.zeros(2, t.WAY)
    ways["fixed_us"] = offloading.store_us, offloading.load_us
    ways["block_us"] = offloading.store_block_us, offloading.load_block_us
    return t.Offload(
        at=at,
        ways=ways,
        transfers=np.zeros((2, 1 << most.bit_length()), t.TRANSFER),
        seen=np.zeros((2, 2), np.int64),
        requests=table,
        refs=np.full(keys, t.ABSENT, np.int32),
        by_use=np.zeros(keys, k.LINK),
        used=np.zeros(keys, np.int64),
        offer=np.zeros(keys, np.int64),
        writer=np.full(keys, k.NONE, np.int64),
        loading=np.zeros(keys, np.int8),
        source=np.zeros(len(state.keys), np.int32),
        accessed=np.zeros(len(state.keys), np.int8),
        skipped=np.zeros(requests, np.int64),
        ended=np.zeros(requests, np.int64),
        fenced=np.zeros((requests, 2), np.int64),
        fetched=np.zeros((requests, 2), np.int64),
    )
