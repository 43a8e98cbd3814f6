"""From requests and engine arguments to the kernel's state, and room for its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.arrays import Int32s, Int64s
from blis_replay.base.errors import TraceError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency.models import Lifecycle
from blis_replay.blis.trace import MOST_STEPS, MOST_TABLE_CELLS, MOST_TOKENS, EngineConfig, RequestTrace

# Blocks of an engine whose number is not known.
_MOST_BLOCKS = 1_000_000
_STEPS_AT_FIRST = 4_096
# The recorded workloads take 4 to 21, where requests hardly overlap one for each token; room that is not used takes no
# memory, and what has to grow is copied.
_STEPS_PER_REQUEST, _MOST_STEPS_FOR_TOKENS = 24, 1 << 17


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


def eligible_times(trace: RequestTrace, queued_us: Int64s) -> Int64s:
    """int64[n]: from when on the scheduler looks at each request, us: once it is queued, and not held back."""
    return queued_us if trace.held_us is None else queued_us + trace.held_us


def new_state(trace: RequestTrace, engine: EngineConfig, eligible_us: Int64s, order: Int64s) -> k.State:
    """The state before the first arrival; requests are numbered in the order in which the scheduler meets them.

    Raises ``TraceError`` for a request that this engine can never serve.
    """
    apart = next((name for name in ("external_tokens", "fetched_us") if getattr(trace, name) is not None), None)
    if apart and (engine.offloading is None or engine.offloading.cpu_blocks > 0):
        raise TraceError(f"{apart}: give offloading with cpu_blocks 0, which says how long a load takes")
    if engine.offloading is not None:
        from blis_replay.blis.offloading import offloaded, with_keys

        trace = with_keys(trace, engine)
    state, facts = state_and_facts(trace, engine, eligible_us, order, np.zeros, len(trace))
    enter(state, facts, 0, len(trace))
    if engine.kv_cache_groups:
        from blis_replay.blis.grouping import grouped  # its rules are compiled only where there are groups

        state = grouped(state, engine)
    return state if engine.offloading is None else offloaded(state, engine)


# (rows, dtype) -> a table of zeros.
MakeTable = Callable[[int, "np.dtype[Any]"], k.Table]


def state_and_facts(
    trace: RequestTrace,
    engine: EngineConfig,
    eligible_us: Int64s,
    order: Int64s,
    table: MakeTable,
    segments: int,
) -> tuple[k.State, dict[str, Int64s]]:
    """The state without its requests, and what is known of them by field of ``Facts``; ``segments``: room for these."""
    # Mostly they are met in the order of the trace, and nothing has to be gathered.
    met = slice(None) if (order[1:] > order[:-1]).all() else order
    prompt, total = trace.prompt_tokens[met], _total_tokens(trace, engine)[met]
    blocks_each = -(-np.maximum(total - 1, 1) // engine.block_size)
    usable = _usable_blocks(engine, blocks_each)
    _refuse_unservable(engine, order, prompt, total, blocks_each, usable)
    n = len(trace)
    ring = 1 << int((total - prompt).max(initial=1) + 1).bit_length()
    width = int(blocks_each.max(initial=1)) + 1
    key_start, key_count, keys = _keys(trace, engine, met, total)
    rank, by_rank, urgency = _waiting_order(trace, engine, order)
    abort_us = trace.abort_us[met]
    facts = {
        "queued_us": eligible_us[met],
        "abort_us": abort_us,
        "prompt_tokens": prompt,
        "total_tokens": total,
        "given_hit": prompt - trace.prefill_tokens[met],
        "key_start": key_start,
        "key_count": key_count,
        "rank": rank,
        "urgency": urgency,
    }
    static_keys = int(keys.max(initial=-1)) + 1
    extent_of_key = _none(static_keys + (engine.max_num_seqs + 2) * (2 * width + 1))
    state = k.State(
        config=_config(engine, ring, usable, 2 * width),
        at=_progress(n, usable, engine.max_num_seqs, static_keys),
        batch=np.zeros(1, k.BATCH),
        flight=np.zeros(4, np.int64),
        facts=table(n, k.FACTS),
        requests=table(n, k.REQUEST),
        outcomes=table(n, k.OUTCOME),
        links=table(n, k.LINKS),
        abort_order=np.argsort(abort_us, kind="stable"),
        by_rank=by_rank,
        heap=np.zeros(n, np.int64),
        growth_head=_none(engine.block_size),
        growth_count=np.zeros(engine.block_size, np.int64),
        finish_head=_none(ring),
        keys=keys,
        extents=k.extents_of(usable),
        extent_of_key=extent_of_key,
        table=np.zeros((engine.max_num_seqs, 2 * width), np.int32),
        free_rows=np.arange(engine.max_num_seqs, dtype=np.int64),
        steps=np.empty(_steps_at_first(total - prompt), k.STEP),
        segments=np.empty((segments + _segments_of_step(engine), 3), np.int64),
        grouping=np.zeros(1, k.GROUPING),
        groups=np.zeros(0, k.GROUP),
        held=np.zeros(0, k.HELD),
        leaving=np.zeros(0, k.LEAVING),
        leave_head=np.zeros(0, np.int32),
        widening_less=np.zeros(0, np.int64),
        attended_less=np.zeros(0, np.int64),
        taken=np.zeros(0, np.int32),
    )
    return state, facts


def enter(state: k.State, facts: dict[str, Int64s], first: int, last: int) -> None:
    """The rows of the requests from ``first`` to ``last`` - 1."""
    for name, values in facts.items():
        state.facts[name][first:last] = values[first:last]
    for name in ("scheduled_us", "scheduled_step", "first_step", "last_step"):
        state.outcomes[name][first:last] = k.NONE
    state.links[first:last].view(np.int32)[:] = k.NONE


def _segments_of_step(engine: EngineConfig) -> int:
    """Segments that one step may end: those that go on, those that begin, and one for each token of several."""
    tokens = 0 if engine.speculation is None else engine.speculation.num_speculative_tokens + 1
    return (2 + tokens) * engine.max_num_seqs + 2


def _steps_at_first(outputs: Int64s) -> int:
    tokens = int(outputs.sum()) + 2 * len(outputs)
    return max(_STEPS_AT_FIRST, _STEPS_PER_REQUEST * len(outputs), min(tokens, _MOST_STEPS_FOR_TOKENS))


def with_room(state: k.State) -> k.State:
    """The same state with the arrays that are nearly full made longer by half."""
    at, config, keys = state.at[0], state.config[0], len(state.extent_of_key)
    if at.rows >= len(state.steps):
        if at.rows >= MOST_STEPS:
            raise TraceError(f"more than {MOST_STEPS} steps, at {at.now_us / 1e6:.0f} s; simulate a part of the load")
        return state.replaced(steps=_longer(state.steps))
    if at.segments + config.segments_of_step > len(state.segments):
        return state.replaced(segments=_longer(state.segments))
    return state.replaced(extent_of_key=np.concatenate([state.extent_of_key, _none(keys)]))


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
    drafts = 0 if engine.speculation is None else engine.speculation.num_speculative_tokens + 1
    # Two batches in flight, and the room that a drafter is given.
    blocks_of_drafts = -(-3 * drafts // engine.block_size) * len(blocks_each)
    return int(min(max(int(blocks_each.sum()) + blocks_of_drafts, 1), _MOST_BLOCKS))


def _refuse_unservable(
    engine: EngineConfig, order: Int64s, prompt: Int64s, total: Int64s, blocks_each: Int64s, usable: int
) -> None:
    if total.max(initial=0) > MOST_TOKENS:
        i = int(np.argmax(total))
        raise TraceError(
            f"request {order[i]}: {total[i]} tokens; at most {MOST_TOKENS} of a request can be simulated: correct the "
            "number, or lower max_model_len"
        )
    most_blocks = int(blocks_each.max(initial=1))
    if (cells := engine.max_num_seqs * 2 * (most_blocks + 1)) > MOST_TABLE_CELLS:
        raise TraceError(
            f"max_num_seqs ({engine.max_num_seqs}) requests as long as the longest take a table of {cells} blocks; at "
            f"most {MOST_TABLE_CELLS} can be simulated: lower max_num_seqs, or raise block_size"
        )
    if prompt.max(initial=0) >= engine.max_model_len:
        i = int(np.argmax(prompt >= engine.max_model_len))
        raise TraceError(
            f"request {order[i]}: a prompt of {prompt[i]} tokens leaves no room in max_model_len "
            f"{engine.max_model_len}; raise it or drop the request"
        )
    keeps_all = not engine.kv_cache_groups or any(group.kind == "full" for group in engine.kv_cache_groups)
    if most_blocks > usable and keeps_all:
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
        return places, places, places
    arrival_us = trace.arrival_us[order]
    priority = (np.zeros(n, np.int64) if trace.priority is None else trace.priority)[order]
    by_rank = np.lexsort((order, arrival_us, priority))
    rank = np.empty(n, np.int64)
    rank[by_rank] = np.arange(n)
    _, urgency = np.unique(np.column_stack([priority, arrival_us]), axis=0, return_inverse=True)
    return rank, by_rank.astype(np.int64), urgency.reshape(-1).astype(np.int64)


def _keys(
    trace: RequestTrace, engine: EngineConfig, met: Int64s | slice, total: Int64s
) -> tuple[Int64s, Int64s, Int32s]:
    blocks = trace.block_keys
    if blocks is None or not engine.enable_prefix_caching:
        zeros = np.zeros(len(total), np.int64)
        return zeros, zeros, np.zeros(0, np.int32)
    if blocks.block_size != engine.block_size:
        raise TraceError(
            f"block keys are of blocks of {blocks.block_size} tokens and the engine has {engine.block_size}; "
            "make them again for this block size"
        )
    # The last token is never computed, so a block that it would fill is never cached.
    count = np.minimum(blocks.count[met], (total - 1) // engine.block_size)
    return blocks.start[met], count, blocks.keys


def _config(engine: EngineConfig, ring: int, usable_blocks: int, table_width: int) -> k.Table:
    config = np.zeros(1, k.CONFIG)
    config["max_num_seqs"] = engine.max_num_seqs
    config["max_active_seqs"] = engine.max_num_active_seqs or engine.max_num_seqs
    config["max_num_batched_tokens"] = engine.max_num_batched_tokens
    config["token_budget"] = min(engine.max_num_batched_tokens, engine.max_num_scheduled_tokens or k.NEVER)
    config["max_model_len"] = engine.max_model_len
    config["block_size"] = size = engine.block_size
    config["block_shift"] = size.bit_length() - 1 if size & (size - 1) == 0 else -1
    config["long_prefill_threshold"] = engine.long_prefill_token_threshold
    config["chunked_prefill"] = engine.enable_chunked_prefill
    config["prefix_caching"] = engine.enable_prefix_caching
    config["priority_policy"] = engine.scheduling_policy == "priority"
    config["batches_in_flight"] = 2 if engine.async_scheduling else 1
    # A prompt may take a turn a token; nothing that will end goes longer without a token.
    config["max_steps_without_token"] = max(10_000, 4 * engine.max_model_len)
    config["num_blocks"] = usable_blocks
    # vLLM counts the reserved block here.
    config["watermark_blocks"] = int(engine.watermark * (usable_blocks + 1))
    config["prefill_interval"] = engine.prefill_schedule_interval
    config["adaptive_threshold"] = engine.long_prefill_token_threshold_adaptive
    config["full_prompt_admission"] = engine.scheduler_reserve_full_isl
    behaviours = engine.behaviours
    config["aborts_before_tokens"] = behaviours.aborts_before_tokens
    config["lone_prefill_uncapped"] = behaviours.lone_prefill_uncapped
    if engine.enable_prefix_caching:
        everywhere, of_windows = behaviours.uncached_blocks_first, behaviours.windows_free_uncached_first
        config["uncached_blocks_first"] = k.EVERYWHERE if everywhere else k.OF_WINDOWS if of_windows else 0
    config["exact_preemption_cursor"] = behaviours.exact_preemption_cursor
    outlives = behaviours.priority_pass_outlives_preemption and engine.scheduling_policy == "priority"
    config["pass_outlives_preemption"] = outlives
    config["segments_of_step"] = _segments_of_step(engine)
    config["keys_of_step"] = (engine.max_num_seqs + 1) * (table_width + 1)
    config["ring_mask"] = ring - 1
    config["growing"] = 1
    return config


def _progress(requests: int, usable_blocks: int, rows: int, static_keys: int) -> k.Table:
    at = np.zeros(1, k.PROGRESS)
    at["submitted"] = requests
    at["free_blocks"] = at["free_before"] = usable_blocks
    at["extents_used"] = 1  # the blocks that were never used, at the head and the tail of the queue
    at["spare_extent"] = k.NONE
    at["running"] = at["prefilling"] = (k.NONE, k.NONE)
    at["last_prefill_step"] = -k.NEVER
    at["free_rows"] = rows
    at["keys_used"] = static_keys
    return at


def _none(count: int) -> Int32s:
    none = np.empty(count, np.int32)
    none.fill(k.NONE)  # half the time that ``np.full`` takes for a few
    return none
