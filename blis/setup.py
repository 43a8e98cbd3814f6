"""From requests and engine arguments to the kernel's state, and room for its results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.errors import TraceError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency import Lifecycle
from blis_replay.blis.trace import EngineConfig, Int64s, RequestTrace

# Blocks of an engine whose number is not known.
_MOST_BLOCKS = 1_000_000
_STEPS_AT_FIRST = 4_096
# The recorded workloads take 4 to 21; room that is not used takes no memory.
_STEPS_PER_REQUEST = 24


def queueing_times(trace: RequestTrace, lifecycle: Lifecycle) -> Int64s:
    """int64[n]: when each request reaches the waiting queue, us, in the order of the trace.

    The delay before the queue is truncated to whole microseconds, as BLIS does; an observed
    one takes its place, and never leads back before the start of the run.
    """
    if trace.pre_queue_us is not None:
        observed_us: Int64s = np.maximum(trace.arrival_us + trace.pre_queue_us, 0)
        return observed_us
    delay_us = lifecycle.pre_queue_us + lifecycle.pre_queue_per_prompt_token_us * trace.prompt_tokens
    queued_us: Int64s = trace.arrival_us + np.trunc(delay_us).astype(np.int64)
    return queued_us


def looked_at_times(trace: RequestTrace, queued_us: Int64s) -> Int64s:
    """int64[n]: from when on the scheduler looks at each request, us: once it is queued, and not held back."""
    return queued_us if trace.held_us is None else queued_us + trace.held_us


def new_state(trace: RequestTrace, engine: EngineConfig, looked_at_us: Int64s, order: Int64s) -> k.State:
    """The state before the first arrival; requests are numbered in the order in which the scheduler meets them.

    Raises ``TraceError`` for a request that this engine can never serve.
    """
    prompt, total = trace.prompt_tokens[order], _total_tokens(trace, engine)[order]
    blocks_each = -(-np.maximum(total - 1, 1) // engine.block_size)
    usable = _usable_blocks(engine, blocks_each)
    _refuse_unservable(trace, engine, order, prompt, blocks_each, usable)
    n = len(trace)
    ring = 1 << int((total - prompt).max(initial=1) + 1).bit_length()
    width = int(blocks_each.max(initial=1)) + 1
    key_start, key_count, keys = _keys(trace, engine, order, total)
    rank, by_rank, urgency = _waiting_order(trace, engine, order)
    abort_us = trace.abort_us[order]
    static_keys = int(keys.max(initial=-1)) + 1
    found = _links(static_keys + (engine.max_num_seqs + 2) * (2 * width + 1))
    cpu_tier = _empty_list(len(found) if engine.num_cpu_blocks else 0)
    request = np.empty((n, k.REQUEST_COLUMNS), np.int32, order="F")
    request[:] = _new_request()
    request[:, k.PROMPT_TOKENS] = request[:, k.KNOWN] = prompt
    request[:, k.TOTAL_TOKENS] = total
    request[:, k.GIVEN_HIT] = prompt - trace.prefill_tokens[order]
    request[:, k.RANK] = rank
    request[:, k.URGENCY] = urgency
    request[:, k.KEY_START] = key_start
    request[:, k.KEY_COUNT] = key_count
    request[:, k.KEYED] = key_count > prompt // engine.block_size
    return k.State(
        config=_config(engine, ring, usable),
        at=_at(n, usable, engine.max_num_seqs, static_keys),
        batch=np.zeros(k.BATCH_SIZE, np.int64),
        flight=np.zeros((2, 2), np.int64),
        request=request,
        queued_us=looked_at_us[order],
        abort_us=abort_us,
        scheduled_us=np.full(n, k.NONE, np.int64),
        link=_links(n, k.LINK_COLUMNS),
        abort_order=np.argsort(abort_us, kind="stable"),
        by_rank=by_rank,
        heap=np.zeros(n, np.int64),
        growth_head=_links(engine.block_size),
        growth_count=np.zeros(engine.block_size, np.int64),
        finish_head=_links(ring),
        keys=keys,
        piece=_pieces(usable),
        found=found,
        cpu_newer=cpu_tier,
        cpu_older=cpu_tier.copy(),
        table=np.zeros((engine.max_num_seqs, 2 * width), np.int32),
        free_rows=np.arange(engine.max_num_seqs, dtype=np.int64),
        steps=np.empty(max(_STEPS_AT_FIRST, _STEPS_PER_REQUEST * n), k.STEP_DTYPE),
        segments=np.empty((n + 2 * engine.max_num_seqs + 2, 3), np.int64),
    )


def with_room(state: k.State) -> k.State:
    """The same state with the arrays that are nearly full made longer by half."""
    at, found = state.at, state.found
    if at[k.ROWS] >= len(state.steps):
        return state._replace(steps=_longer(state.steps))
    if at[k.SEGMENTS] + 2 * state.config[k.MAX_NUM_SEQS] + 2 > len(state.segments):
        return state._replace(segments=_longer(state.segments))
    state = state._replace(found=np.concatenate([found, _links(len(found))]))
    if state.config[k.CPU_BLOCKS] == 0:
        return state
    none = np.zeros(len(found), np.int32)
    return state._replace(
        cpu_newer=np.concatenate([state.cpu_newer, none]), cpu_older=np.concatenate([state.cpu_older, none])
    )


def _longer(table: NDArray[Any]) -> NDArray[Any]:
    """A longer table with the same rows; the new ones take no memory until they are written."""
    longer = np.empty((len(table) + len(table) // 2 + 1, *table.shape[1:]), table.dtype)
    longer[: len(table)] = table
    return longer


def _total_tokens(trace: RequestTrace, engine: EngineConfig) -> Int64s:
    """Prompt and output tokens; outputs end at ``max_model_len``."""
    total: Int64s = np.minimum(trace.prompt_tokens + trace.output_tokens, engine.max_model_len)
    return total


def _usable_blocks(engine: EngineConfig, blocks_each: Int64s) -> int:
    if engine.num_gpu_blocks is not None:
        return engine.num_gpu_blocks - 1
    return int(min(max(int(blocks_each.sum()), 1), _MOST_BLOCKS))


def _refuse_unservable(
    trace: RequestTrace, engine: EngineConfig, order: Int64s, prompt: Int64s, blocks_each: Int64s, usable: int
) -> None:
    too_long = prompt >= engine.max_model_len
    if too_long.any():
        i = int(np.argmax(too_long))
        raise TraceError(
            f"request {order[i]}: a prompt of {prompt[i]} tokens leaves no room in max_model_len "
            f"{engine.max_model_len}; raise it or drop the request"
        )
    if (blocks_each > usable).any():
        i = int(np.argmax(blocks_each))
        raise TraceError(
            f"request {order[i]}: it needs {blocks_each[i]} KV blocks and the engine has {usable}; "
            "raise num_gpu_blocks or drop the request"
        )
    if not engine.enable_chunked_prefill and engine.max_num_batched_tokens < engine.max_model_len:
        raise TraceError(
            f"without chunked prefill max_num_batched_tokens ({engine.max_num_batched_tokens}) must be at least "
            f"max_model_len ({engine.max_model_len}); vLLM refuses that too"
        )


def _waiting_order(trace: RequestTrace, engine: EngineConfig, order: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Rank of each request in the waiting order, the request of each rank, and who is preempted first."""
    n = len(order)
    if engine.scheduling_policy == "fcfs":
        places = np.arange(n)
        return places, places.copy(), places.copy()
    arrival_us = trace.arrival_us[order]
    if engine.scheduling_policy == "sjf":
        priority = trace.prompt_tokens[order]
    else:
        priority = (np.zeros(n, np.int64) if trace.priority is None else trace.priority)[order]
    by_rank = np.lexsort((order, arrival_us, priority))
    rank = np.empty(n, np.int64)
    rank[by_rank] = np.arange(n)
    _, urgency = np.unique(np.column_stack([priority, arrival_us]), axis=0, return_inverse=True)
    return rank, by_rank.astype(np.int64), urgency.reshape(-1).astype(np.int64)


def _keys(trace: RequestTrace, engine: EngineConfig, order: Int64s, total: Int64s) -> tuple[Int64s, Int64s, k.Int32s]:
    blocks = trace.block_keys
    if blocks is None or not engine.enable_prefix_caching:
        zeros = np.zeros(len(order), np.int64)
        return zeros, zeros.copy(), np.zeros(0, np.int32)
    if blocks.block_size != engine.block_size:
        raise TraceError(
            f"block keys are of blocks of {blocks.block_size} tokens and the engine has {engine.block_size}; "
            "make them again for this block size"
        )
    # The last token is never computed, so a block that it would fill is never cached.
    count = np.minimum(blocks.count[order], (total - 1) // engine.block_size)
    return blocks.start[order], count, blocks.keys


def _new_request() -> k.Int32s:
    """The row of a request that has not queued yet, without what is known of it."""
    row = np.full(k.REQUEST_COLUMNS, k.NONE, np.int32)
    row[k.STATUS] = k.NEW
    row[[k.COMPUTED, k.CHUNK, k.BLOCKS_HELD, k.BLOCKS_ENTERED, k.PIECES_HELD]] = 0
    row[[k.PREEMPTIONS, k.CACHED_TOKENS, k.RESUME_CACHED_TOKENS]] = 0
    return row


def _config(engine: EngineConfig, ring: int, usable_blocks: int) -> Int64s:
    config = np.zeros(k.CONFIG_SIZE, np.int64)
    config[k.MAX_NUM_SEQS] = engine.max_num_seqs
    config[k.MAX_NUM_BATCHED_TOKENS] = engine.max_num_batched_tokens
    config[k.MAX_MODEL_LEN] = engine.max_model_len
    config[k.BLOCK_SIZE] = engine.block_size
    config[k.LONG_PREFILL_THRESHOLD] = engine.long_prefill_token_threshold
    config[k.CHUNKED_PREFILL] = engine.enable_chunked_prefill
    config[k.PREFIX_CACHING] = engine.enable_prefix_caching
    config[k.PRIORITY_POLICY] = engine.scheduling_policy == "priority"
    config[k.BATCHES_IN_FLIGHT] = 2 if engine.async_scheduling else 1
    # A prompt may take a turn a token; nothing that will end goes longer without a token.
    config[k.PATIENCE] = max(10_000, 4 * engine.max_model_len)
    config[k.NUM_BLOCKS] = usable_blocks
    config[k.RING_MASK] = ring - 1
    config[k.CPU_BLOCKS] = engine.num_cpu_blocks
    config[k.FETCH_US] = engine.cpu_fetch_us_per_block
    return config


def _at(requests: int, usable_blocks: int, rows: int, static_keys: int) -> Int64s:
    at = np.zeros(k.AT_SIZE, np.int64)
    at[k.SUBMITTED] = requests
    at[k.FREE_BLOCKS] = at[k.FREE_BEFORE] = usable_blocks
    at[k.PIECES_USED] = 1  # the blocks that were never used, at the head and the tail of the queue
    at[k.SPARE_PIECE] = k.NONE
    at[[k.RUN_HEAD, k.RUN_TAIL, k.PREFILL_HEAD, k.PREFILL_TAIL]] = k.NONE
    at[k.FREE_ROWS] = rows
    at[k.KEYS_USED] = static_keys
    return at


def _pieces(usable: int) -> k.Int32s:
    """A row for each piece that there can be: a cached one a block, and between two of them blocks without contents.

    The first is all blocks, alike.  The others take no memory until they are used.
    """
    piece = np.empty((2 * usable + 2, k.PIECE_COLUMNS), np.int32)
    piece[0] = k.NONE
    piece[0, k.DEPTH], piece[0, k.PIECE_BLOCKS] = k.ALIKE, usable
    return piece


def _links(*shape: int) -> k.Int32s:
    return np.full(shape, k.NONE, np.int32)


def _empty_list(keys: int) -> k.Int32s:
    """The links of ``kernel.recency`` for keys below a number, none of them in the list."""
    links = np.zeros(keys + 1, np.int32)
    links[0] = 1
    return links
