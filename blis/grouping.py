"""What a run needs whose layers keep several groups of KV blocks; loaded for such models only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.errors import TraceError
from blis_replay.blis.kernel import groups as g
from blis_replay.blis.kernel import state as k
from blis_replay.blis.trace import MOST_BLOCKS, MOST_TABLE_CELLS, EngineConfig, KvCacheGroup

Numbers = Floats | Int64s | float
_KINDS = {"full": g.FULL, "window": g.WINDOW, "chunk": g.CHUNK}


def grouped(state: k.State, engine: EngineConfig) -> k.State:
    """A state before the first arrival for the groups of an engine.

    Raises ``TraceError`` for a request that this engine can never admit.
    """
    config, at = state.config, state.at
    groups = [group for group in engine.kv_cache_groups if group.kind != "state"]
    count, width = len(groups), state.table.shape[1] // 2  # a run of blocks takes two cells, and each block may be one
    if (cells := engine.max_num_seqs * count * 2 * width) > MOST_TABLE_CELLS:
        raise TraceError(f"max_num_seqs and kv_cache_groups take a table of {cells} blocks; lower max_num_seqs")
    usable = int(at["free_blocks"][0])
    if engine.num_gpu_blocks is None:
        usable = min(usable * len(engine.kv_cache_groups), MOST_BLOCKS)
    table = np.zeros(count, k.GROUP)
    for i, group in enumerate(groups):
        first, most = groups.index(group), most_admitted(group, engine)
        alike = groups.count(group) if first == i else 0
        table[i] = (_KINDS[group.kind], group.size, most, first, alike, 2 * i * width)
    grouping = np.zeros(1, k.GROUPING)
    retention = engine.prefix_cache_retention_interval
    grouping["retention"] = g.DENSE if retention is None else retention
    # vLLM passes once over full attention and one other kind.
    grouping["once"] = len(set(groups)) == 2 and any(group.kind == "full" for group in groups)
    grouping["states"] = len(engine.kv_cache_groups) - count
    _refuse_unservable(state, engine, table, usable, int(grouping["states"][0]))
    config["groups_at"] = g.operate.address
    config["growing"] = count
    config["windowed"] = any(group.size for group in groups)
    config["frees_processed"] = engine.behaviours.windows_wait_for_flight
    config["num_blocks"] = at["free_blocks"] = at["free_before"] = usable
    # vLLM counts the reserved block here.
    config["watermark_blocks"] = int(engine.watermark * (usable + 1))
    config["keys_of_step"] = (engine.max_num_seqs + 1) * count * (width + 1)
    grouping["keys"] = at["keys_used"]
    at["keys_used"] *= count
    return state.replaced(
        extents=k.extents_of(usable),
        extent_of_key=np.full(int(at["keys_used"][0]) + 2 * int(config["keys_of_step"][0]), k.NONE, np.int32),
        table=np.zeros((engine.max_num_seqs, max(count, 1) * 2 * width), np.int32),
        grouping=grouping,
        groups=table,
        held=np.zeros(engine.max_num_seqs * count, k.HELD),
        leaving=np.zeros(len(state.facts), k.LEAVING),
        leave_head=np.full(engine.block_size, k.NONE, np.int32),
        widening_less=np.zeros(len(state.finish_head), np.int64),
        attended_less=np.zeros(len(state.finish_head), np.int64),
    )


def attended_by(groups: Sequence[KvCacheGroup], computed: Numbers, tokens: Numbers) -> Floats:
    """float64[n]: KV tokens that ``tokens`` tokens of a request attend to in a mean layer, themselves included.

    ``computed``: tokens before them.  Without groups every layer attends to all tokens.
    """
    last = np.asarray(computed, np.float64) + tokens
    layers = groups or (KvCacheGroup("full"),)
    attended = [_attended_through(each, last) - _attended_through(each, last - tokens) for each in layers]
    return np.asarray(np.mean(attended, axis=0), np.float64)


def _attended_through(group: KvCacheGroup, tokens: Floats) -> Floats:
    """float64[n]: what the first ``tokens`` tokens attend to; ``kernel.groups.attended_through`` of one group."""
    if group.kind == "state":
        return np.zeros_like(tokens)
    whole, rest = np.zeros_like(tokens), tokens
    if group.kind == "window":
        rest = np.minimum(tokens, group.size)
        whole = (tokens - rest) * group.size
    elif group.kind == "chunk":
        chunks, rest = np.divmod(tokens, group.size)
        whole = chunks * group.size * (group.size + 1) / 2
    return np.asarray(whole + rest * (rest + 1) / 2, np.float64)


def most_admitted(group: KvCacheGroup, engine: EngineConfig) -> int:
    """Blocks of a request that an admission counts at most, ``NONE``: all (``max_admission_blocks_per_request``)."""
    if group.kind == "full" or not engine.behaviours.window_admission_bounded:
        return k.NONE
    flights = 2 if engine.async_scheduling and engine.behaviours.windows_wait_for_flight else 1
    tokens = group.size + flights * engine.max_num_batched_tokens - (group.kind == "window")
    return -(-min(tokens, engine.max_model_len) // engine.block_size) + (group.kind == "window")


def _refuse_unservable(state: k.State, engine: EngineConfig, table: k.Table, usable: int, states: int) -> None:
    if not engine.scheduler_reserve_full_isl or engine.num_gpu_blocks is None:
        return
    prompts = state.facts["prompt_tokens"]
    needed = np.full(len(prompts), states, np.int64)
    blocks = -(-prompts // engine.block_size)
    for group in table:
        of, most, size = blocks, group["most_admitted"], group["window"]
        if group["kind"] != g.FULL and engine.enable_prefix_caching:  # all but one token may be cached
            left = np.maximum(prompts - size, 0) if group["kind"] == g.WINDOW else (prompts - 1) // size * size
            of = blocks - left // engine.block_size
        needed += of if most == k.NONE else np.minimum(of, most)
    if len(needed) and needed.max() > usable:
        i = int(np.argmax(needed))
        raise TraceError(
            f"request {i}: its prompt needs {needed[i]} KV blocks in all groups and the engine has {usable}; raise "
            "num_gpu_blocks or drop the request"
        )
