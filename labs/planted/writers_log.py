"""``vllm.log``: what a server says at its start, and of its load every ten seconds, as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay_labs.planted.experiment import SyntheticTruth

VERSION = "0.15.1"
INTERVAL_US = 10_000_000
# Requests in the window of the prefix cache hit rate.
WINDOW_REQUESTS = 1_000
# Server start, relative to the first request.
_START_US = -90_000_000
_OF_THE_ENGINE = ("core.py:96", "kv_cache_utils.py:1305")


def server_log(truth: SyntheticTruth) -> bytes:
    """Version, arguments, configuration, scheduling and cache size, then the throughput lines."""
    lines = [f"{_prefix(truth, at_us, source)} {message}\n" for at_us, source, message in _messages(truth)]
    return "".join(lines).encode()


def _prefix(truth: SyntheticTruth, at_us: int, source: str) -> str:
    """vLLM's own: neither a year nor fractions of a second."""
    at = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=truth.epoch_ns(at_us) // 1000)
    process = "EngineCore_DP0 pid=412" if source in _OF_THE_ENGINE else "APIServer pid=301"
    return f"({process}) INFO {at:%m-%d %H:%M:%S} [{source}]"


def _messages(truth: SyntheticTruth) -> Iterator[tuple[int, str, str]]:
    spec, engine = truth.spec, truth.spec.engine
    yield _START_US, "api_server.py:1272", f"vLLM API server version {VERSION}"
    yield _START_US, "utils.py:325", f"non-default args: {_arguments(truth)!r}"
    if engine.enable_chunked_prefill:
        chunked = f"Chunked prefill is enabled with max_num_batched_tokens={engine.max_num_batched_tokens}."
        yield _START_US, "scheduler.py:229", chunked
    switched = "enabled" if engine.async_scheduling else "disabled"
    yield _START_US, "vllm.py:632", f"Asynchronous scheduling is {switched}."
    config = (
        f"model={spec.model!r}, speculative_config=None, dtype=torch.bfloat16, max_seq_len={engine.max_model_len}, "
        f"tensor_parallel_size={spec.tensor_parallelism}, pipeline_parallel_size=1, data_parallel_size=1, "
        f"quantization=None, enforce_eager=False, kv_cache_dtype=auto, "
        f"enable_prefix_caching={spec.prefix_caching}, enable_chunked_prefill={engine.enable_chunked_prefill}"
    )
    yield _START_US, "core.py:96", f"Initializing a V1 LLM engine (v{VERSION}) with config: {config}"
    if engine.num_gpu_blocks is not None:
        tokens = engine.num_gpu_blocks * engine.block_size
        yield _START_US, "kv_cache_utils.py:1305", f"GPU KV cache size: {tokens:,} tokens"
    yield from _throughput(truth)


def _arguments(truth: SyntheticTruth) -> dict[str, object]:
    """Those that differ from vLLM's defaults, under its names."""
    spec, engine = truth.spec, truth.spec.engine
    given: dict[str, object] = {
        "model_tag": spec.model,
        "model": spec.model,
        "max_model_len": engine.max_model_len,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_num_seqs": engine.max_num_seqs,
    }
    others: dict[str, tuple[object, object]] = {
        "tensor_parallel_size": (spec.tensor_parallelism, 1),
        "block_size": (engine.block_size, 16),
        "enable_prefix_caching": (spec.prefix_caching, True),
        "enable_chunked_prefill": (engine.enable_chunked_prefill, True),
        "long_prefill_token_threshold": (engine.long_prefill_token_threshold, 0),
        "scheduling_policy": (engine.scheduling_policy, "fcfs"),
    }
    return given | {name: value for name, (value, default) in others.items() if value != default}


def _throughput(truth: SyntheticTruth) -> Iterator[tuple[int, str, str]]:
    """A line for each interval in which the engine did something."""
    steps, ends_us = truth.result.steps, truth.result.step_end_us
    tokens = _tokens_of_steps(truth)
    interval = ends_us // INTERVAL_US
    for number in np.unique(interval).tolist():
        members = np.flatnonzero(interval == number)
        at_us, last = (number + 1) * INTERVAL_US, members[-1]
        answered = np.isin(truth.result.first_step, members)
        prompt_rate = int(truth.trace.prompt_tokens[answered].sum()) / (INTERVAL_US / 1e6)
        rate = int(tokens[members].sum()) / (INTERVAL_US / 1e6)
        message = (
            f"Engine 000: Avg prompt throughput: {prompt_rate:.1f} tokens/s, "
            f"Avg generation throughput: {rate:.1f} tokens/s, Running: {steps['running_depth'][last]} reqs, "
            f"Waiting: {steps['waiting_depth'][last]} reqs, GPU KV cache usage: {100 * _usage(truth, last):.1f}%, "
            f"Prefix cache hit rate: {100 * hit_rate(truth, at_us):.1f}%"
        )
        yield at_us, "loggers.py:257", message


def hit_rate(truth: SyntheticTruth, at_us: int) -> float:
    """0..1: prompt tokens of the last requests scheduled until then that were in the prefix cache."""
    scheduled_us = truth.result.scheduled_us
    scheduled = np.flatnonzero((scheduled_us >= 0) & (scheduled_us < at_us))
    recent = scheduled[np.argsort(scheduled_us[scheduled], kind="stable")][-WINDOW_REQUESTS:]
    queried = int(truth.trace.prompt_tokens[recent].sum())
    return int(truth.cached_prompt_tokens[recent].sum()) / queried if queried else 0.0


def _usage(truth: SyntheticTruth, step: int) -> float:
    blocks = (truth.spec.engine.num_gpu_blocks or 1) - 1
    return 1 - int(truth.result.steps["free_blocks"][step]) / blocks if blocks else 0.0


def _tokens_of_steps(truth: SyntheticTruth) -> Int64s:
    """int64[steps]: output tokens that each step gave."""
    _, first, rows = truth.result.segments.T
    steps = len(truth.result.steps)
    change = np.bincount(first, minlength=steps + 1) - np.bincount(first + rows, minlength=steps + 1)
    return np.cumsum(change)[:steps]
