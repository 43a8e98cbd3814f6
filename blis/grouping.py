"""What a run needs whose layers keep several groups of KV blocks; loaded for such models only."""

from __future__ import annotations

import numpy as np

from blis_replay.base.errors import TraceError
from blis_replay.blis.kernel import flight as f
from blis_replay.blis.kernel import state as k
from blis_replay.blis.trace import MOST_BLOCKS, MOST_TABLE_CELLS, EngineConfig, KvCacheGroup

# A state is one block of as many tokens as there can be.
_KINDS = {"full": f.FULL, "window": f.WINDOW, "chunk": f.CHUNK, "state": f.FULL}


def grouped(state: k.State, flight: f.Flight, engine: EngineConfig) -> tuple[k.State, f.Flight]:
    """A state before the first arrival, and what goes with it, for the groups of an engine.

    Raises ``TraceError`` for a request that this engine can never admit.
    """
    groups, config, at = engine.kv_cache_groups, state.config, state.at
    count, width = len(groups), state.table.shape[1] // 2
    if (cells := engine.max_num_seqs * count * width) > MOST_TABLE_CELLS:
        raise TraceError(f"max_num_seqs and kv_cache_groups take a table of {cells} blocks; lower max_num_seqs")
    usable = int(at["free_blocks"][0])
    if engine.num_gpu_blocks is None:
        usable = min(usable * count, MOST_BLOCKS)
    table = np.zeros(count, f.GROUP)
    for i, group in enumerate(groups):
        most = most_admitted(group, engine)
        size = engine.max_model_len if group.kind == "state" else engine.block_size
        table[i] = (_KINDS[group.kind], size, group.size, most, groups.index(group), i * width)
    _refuse_unservable(state, engine, table, usable)
    config["num_blocks"] = at["free_blocks"] = at["free_before"] = usable
    # vLLM counts the reserved block here.
    config["watermark_blocks"] = int(engine.watermark * (usable + 1))
    config["keys_of_step"] = (engine.max_num_seqs + 1) * count * (width + 1)
    at["keys_used"] *= count
    at["free_queue"] = (1, usable)
    keys = np.full(int(at["keys_used"][0]) + 2 * int(config["keys_of_step"][0]), k.NONE, np.int32)
    lookups = {groups.index(group) for group in groups}
    grouping = np.zeros(1, f.GROUPING)
    grouping["alignment"] = engine.block_size
    retention = engine.prefix_cache_retention_interval
    grouping["retention"] = f.DENSE if retention is None else retention
    # vLLM passes once over full attention and one other kind.
    grouping["once"] = len(lookups) == 2 and any(group.kind == "full" for group in groups)
    state = state.replaced(
        extents=_blocks(usable),
        extent_of_key=keys,
        table=np.zeros((engine.max_num_seqs, count * width), np.int32),
    )
    held = np.zeros(engine.max_num_seqs * count, f.HELD)
    return state, flight.replaced(grouping=grouping, groups=table, held=held)


def most_admitted(group: KvCacheGroup, engine: EngineConfig) -> int:
    """Blocks of a request that an admission counts at most, ``NONE``: all (``max_admission_blocks_per_request``)."""
    if group.kind in ("full", "state") or not engine.behaviours.window_admission_bounded:
        return k.NONE
    flights = 2 if engine.async_scheduling and engine.behaviours.windows_wait_for_flight else 1
    tokens = group.size + flights * engine.max_num_batched_tokens - (group.kind == "window")
    return -(-min(tokens, engine.max_model_len) // engine.block_size) + (group.kind == "window")


def _blocks(usable: int) -> k.Table:
    """A row a block, all free, in the order of their numbers from 1."""
    blocks = np.zeros(usable + 1, k.EXTENT)
    numbers = np.arange(usable + 1)
    blocks["blocks"] = 1
    blocks["keys_at"] = blocks["rest"] = blocks["twin"] = k.NONE
    blocks["queue_before"], blocks["queue_after"] = numbers - 1, numbers + 1
    blocks["queue_before"][min(1, usable)] = blocks["queue_after"][usable] = k.NONE
    return blocks


def _refuse_unservable(state: k.State, engine: EngineConfig, table: k.Table, usable: int) -> None:
    if not engine.scheduler_reserve_full_isl or engine.num_gpu_blocks is None:
        return
    prompts = state.facts["prompt_tokens"]
    needed = np.zeros(len(prompts), np.int64)
    for group in table:
        blocks = -(-prompts // group["block_size"])
        needed += blocks if group["most_admitted"] == k.NONE else np.minimum(blocks, group["most_admitted"])
    if len(needed) and needed.max() > usable:
        i = int(np.argmax(needed))
        raise TraceError(
            f"request {i}: its prompt needs {needed[i]} KV blocks in all groups and the engine has {usable}; raise "
            "num_gpu_blocks or drop the request"
        )
