"""What a scheduler says of its engine: version, arguments as they were resolved, and which facts this version lacks.

Attributes differ between versions, so each is looked up by itself, and what is absent is named.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Any

# Version of the form of the file.
FORM = 1
_MOST_TEXT = 300
# Engine argument -> where the configuration has it.
_SETTINGS = {
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "max_model_len": "model_config.max_model_len",
    "async_scheduling": "scheduler_config.async_scheduling",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "scheduling_policy": "scheduler_config.policy",
    "long_prefill_token_threshold": "scheduler_config.long_prefill_token_threshold",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "kv_cache_dtype": "cache_config.cache_dtype",
}
_CONFIGURATIONS = ("scheduler_config", "cache_config", "parallel_config", "speculative_config")


def facts_of(scheduler: Any) -> dict[str, Any]:
    """The header of a file, as JSON has it: see ``docs/recorder.md``."""
    config = getattr(scheduler, "vllm_config", None)
    pool = _at(scheduler, "kv_cache_manager.block_pool")
    found = {name: _plain(_at(config, place)) for name, place in _SETTINGS.items()}
    settings = {
        **{name: value for name, value in found.items() if value is not None},
        "block_size": _plain(getattr(scheduler, "block_size", None)),
        "num_gpu_blocks": _plain(getattr(pool, "num_gpu_blocks", None)),
    }
    return {
        "vllm": _version(),
        "python": platform.python_version(),
        "pid": os.getpid(),
        "engine": _engine_index(config),
        "scheduler": f"{type(scheduler).__module__}.{type(scheduler).__qualname__}",
        "model": _plain(_at(config, "model_config.model")),
        "settings": settings,
        "hash_block_size": _plain(getattr(scheduler, "hash_block_size", None)) or settings["block_size"],
        "kv_cache_groups": _groups(scheduler),
        "speculative_tokens": _plain(getattr(scheduler, "num_spec_tokens", 0)) or 0,
        "config": {name: dict(_fields(getattr(config, name, None))) for name in _CONFIGURATIONS},
        "absent": sorted(_absent(scheduler)),
    }


def queue_depths_of(scheduler: Any) -> tuple[int, int]:
    """Requests in the running list, and in the waiting queues."""
    count = getattr(scheduler, "get_request_counts", None)
    if count is None:
        return len(scheduler.running), len(scheduler.waiting)
    running, waiting = count()
    return running, waiting


def free_blocks_of(scheduler: Any) -> int:
    """Free blocks of the KV cache, with those that hold a cached prefix nobody uses; -1 if they cannot be counted."""
    pool = getattr(scheduler.kv_cache_manager, "block_pool", None)
    return -1 if pool is None else int(pool.get_num_free_blocks())


def _absent(scheduler: Any) -> Iterator[str]:
    """What is recorded of other versions and not of this one."""
    if not hasattr(scheduler, "get_request_counts"):
        yield "Scheduler.get_request_counts"
    if not hasattr(scheduler, "_free_request"):
        yield "Scheduler._free_request"
    if _at(scheduler, "kv_cache_manager.block_pool") is None:
        yield "KVCacheManager.block_pool"
    try:
        from vllm.v1.core.sched import output  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.request import Request  # type: ignore[import-not-found,unused-ignore]
    except Exception:
        yield "vllm.v1.core.sched.output"
        return
    for owner, name in (("SchedulerOutput", "preempted_req_ids"), ("CachedRequestData", "resumed_req_ids")):
        if name not in getattr(getattr(output, owner, None), "__dataclass_fields__", {}):
            yield f"{owner}.{name}"
    named = getattr(getattr(Request, "__init__", None), "__code__", None)
    for name in ("num_preemptions", "block_hashes"):
        if named is not None and name not in named.co_names:
            yield f"Request.{name}"


def _at(value: Any, place: str) -> Any:
    for name in place.split("."):
        value = getattr(value, name, None)
    return value


def _plain(value: Any) -> Any:
    """A number, a switch or a short text: what JSON holds."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(getattr(value, "value", value))[:_MOST_TEXT]


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(getattr(config, "__dict__", {}).items()):
        if not name.startswith("_") and not callable(value):
            yield name, _plain(value)


def _groups(scheduler: Any) -> list[str]:
    """The kind of each group of layers that has blocks of its own; more than one is a hybrid model."""
    groups = _at(scheduler, "kv_cache_config.kv_cache_groups") or ()
    return [type(getattr(group, "kv_cache_spec", None)).__name__ for group in groups][:64]


def _engine_index(config: Any) -> int:
    parallel = getattr(config, "parallel_config", None)
    for name in ("data_parallel_index", "data_parallel_rank"):
        index = getattr(parallel, name, None)
        if isinstance(index, int):
            return index
    return 0


def _version() -> str:
    try:
        from vllm.version import __version__  # type: ignore[import-not-found,unused-ignore]
    except Exception:
        return "unknown"
    return str(__version__)
