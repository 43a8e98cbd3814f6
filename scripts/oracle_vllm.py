"""vLLM's own objects for the scheduler oracle: configuration, scheduler, requests. No weights, no GPU, no network."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

TOKEN_TAG_STRIDE = 8192
# What vLLM's model configuration needs to know about a model that is never loaded.
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 1048576,
    "torch_dtype": "float16",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class SpecError(ValueError):
    """A workload the scheduler could not finish or vLLM would refuse; the message says which request and why."""


class TooLongError(SpecError):
    """A workload that needs more steps than allowed: with few blocks the scheduler may preempt almost forever."""


def vllm_version() -> str:
    """The version of the installed vLLM."""
    _quiet_environment()
    import vllm

    return str(vllm.__version__)


def _quiet_environment() -> None:
    for name, value in {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)


def make_config(args: dict[str, Any]) -> Any:
    """vLLM's configuration for a scenario's engine_args. Raises SpecError where vLLM refuses them."""
    _quiet_environment()
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    with tempfile.TemporaryDirectory() as model_dir:
        (Path(model_dir) / "config.json").write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
        model = ModelConfig(model=model_dir, skip_tokenizer_init=True, max_model_len=args["max_model_len"])
    try:
        scheduling = SchedulerConfig(
            max_model_len=args["max_model_len"],
            is_encoder_decoder=False,
            max_num_seqs=args["max_num_seqs"],
            max_num_batched_tokens=args["max_num_batched_tokens"],
            enable_chunked_prefill=args["enable_chunked_prefill"],
            long_prefill_token_threshold=args["long_prefill_token_threshold"],
            policy=args["policy"],
            async_scheduling=args["async_scheduling"],
        )
    except ValueError as error:
        # The validation error's second line is the reason; the rest repeats the input.
        reason = str(error).splitlines()[:2][-1].strip()
        raise SpecError(f"engine_args: vLLM refuses them: {reason}") from error
    cache = CacheConfig(block_size=args["block_size"], enable_prefix_caching=args["enable_prefix_caching"])
    cache.num_gpu_blocks = args["num_gpu_blocks"]
    return VllmConfig(
        model_config=model, cache_config=cache, scheduler_config=scheduling, device_config=DeviceConfig(device="cpu")
    )


def make_scheduler(config: Any, args: dict[str, Any]) -> tuple[Any, Any]:
    """vLLM's Scheduler or AsyncScheduler with its KV cache manager, and the block hasher (None: caching off)."""
    import torch
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    attention = FullAttentionSpec(block_size=args["block_size"], num_kv_heads=4, head_size=16, dtype=torch.float16)
    blocks = KVCacheConfig(
        num_blocks=args["num_gpu_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(config),
        block_size=args["block_size"],
        log_stats=False,
    )
    _check_settings(scheduler, args)
    if not args["enable_prefix_caching"]:
        return scheduler, None
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return scheduler, get_request_block_hasher(args["block_size"], hash_function)


def _check_settings(scheduler: Any, args: dict[str, Any]) -> None:
    """vLLM's configuration objects may change settings; a recording must say what really ran."""
    settings = scheduler.scheduler_config
    actual = {name: getattr(settings, name) for name in ("max_num_seqs", "max_num_batched_tokens", "policy")}
    for name in ("enable_chunked_prefill", "long_prefill_token_threshold", "async_scheduling"):
        actual[name] = getattr(settings, name)
    actual["enable_prefix_caching"] = scheduler.cache_config.enable_prefix_caching
    actual["block_size"] = scheduler.cache_config.block_size
    actual["max_model_len"] = scheduler.max_model_len
    changed = {name: value for name, value in actual.items() if value != args[name]}
    if changed:
        raise SpecError(f"engine_args: vLLM turned them into {changed}; give these")


def make_request(spec: dict[str, Any], hasher: Any) -> Any:
    """vLLM's Request of one request of the workload; its arrival time is in microseconds, as only order matters."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    tokens = [tag * TOKEN_TAG_STRIDE + start + j for tag, start, n in spec["prompt"] for j in range(n)]
    return Request(
        request_id=spec["request_id"],
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=spec["output_tokens"], ignore_eos=True),
        pooling_params=None,
        eos_token_id=None,
        arrival_time=float(spec["arrival_us"]),
        priority=spec["priority"],
        block_hasher=hasher,
    )
