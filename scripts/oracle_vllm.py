"""vLLM's own objects for the scheduler oracle: configuration, engine core, requests. No weights, no GPU, no network.

One file for every release: what a release lacks or calls otherwise stands in the tables below, nowhere else.
"""

import contextlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from oracle_offload import transfer_config

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

# --- what differs from release to release --------------------------------------------------------------------------

# Arguments of a workload that only some releases know, each with the value at which it does nothing. A release that
# does not know one runs without it, and the recording's arguments are without it too.
RELEASE_ARGS: dict[str, Any] = {
    "scheduler_reserve_full_isl": None,
    "watermark": 0.0,
    "long_prefill_token_threshold_adaptive": False,
    "max_num_active_seqs": None,
    "max_num_scheduled_tokens": None,
    "prefill_schedule_interval": 1,
}
# The same of the cache.
CACHE_ARGS: dict[str, Any] = {"prefix_cache_retention_interval": None}
# Arguments of vLLM's calls that some releases want and others refuse; given where they are taken.
REQUEST_ARGS: dict[str, Any] = {"eos_token_id": None}
OUTPUT_ARGS: dict[str, Any] = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
# What the engine core asks of its workers when it starts; a release asks some of these.
WORKER_ANSWERS: dict[str, Any] = {
    "determine_available_memory": 1 << 40,
    "get_supported_kv_cache_layouts": ["NHD", "HND"],
    "compile_or_warm_up_model": 0.0,
}
# The scheduler of a configuration that says none: what vLLM itself makes of it when it starts.
DEFAULT_SCHEDULERS = {"vllm.core.scheduler.Scheduler": "vllm.v1.core.sched.scheduler.Scheduler"}
# Checks of the pool that are lifted, by what releases call them: vLLM refuses one that cannot hold a request of
# max_model_len, and a pool that is short for the requests there are shows more than one that is not.
LIFTED_CHECKS = ("_check_enough_kv_cache_memory", "check_enough_kv_cache_memory")
CHECKING_MODULES = ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning")


class SpecError(ValueError):
    """A workload the scheduler could not finish or vLLM would refuse; the message says which request and why."""


class RefusedError(SpecError):
    """A workload whose engine arguments this release refuses."""


class FailedError(SpecError):
    """A workload over which this release's own code falls."""


class TooLongError(SpecError):
    """A workload that needs more steps than allowed: with few blocks the scheduler may preempt almost forever."""


def vllm_version() -> str:
    """The version of the vLLM that is imported, without what its build added to it."""
    _prepare()
    import vllm._version

    return str(vllm._version.version).split("+", maxsplit=1)[0]


def _prepare() -> None:
    """Quiet, and on no platform: a CPU's build of vLLM is at hand, whose platform changes the scheduler's settings."""
    for name, value in {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }.items():
        os.environ.setdefault(name, value)
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    if not isinstance(vllm.platforms._current_platform, UnspecifiedPlatform):
        vllm.platforms._current_platform = UnspecifiedPlatform()


def _taken(call: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that a call of this release takes."""
    return {name: value for name, value in values.items() if name in _parameters(call)}


@cache
def _parameters(call: Callable[..., Any]) -> frozenset[str]:
    """Names of a call's parameters; looked up once, as it takes as long as a small step."""
    return frozenset(inspect.signature(call).parameters)


def known_args(args: dict[str, Any]) -> dict[str, Any]:
    """The engine arguments of a workload without those that this release does not know."""
    _prepare()
    from vllm.config import CacheConfig, SchedulerConfig

    known = _taken(SchedulerConfig, RELEASE_ARGS) | _taken(CacheConfig, CACHE_ARGS)
    newer = RELEASE_ARGS | CACHE_ARGS
    return {name: value for name, value in args.items() if name not in newer or name in known}


def make_config(args: dict[str, Any]) -> Any:
    """vLLM's configuration for a scenario's engine_args. Raises RefusedError where vLLM does."""
    _prepare()
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    with tempfile.TemporaryDirectory() as model_dir:
        (Path(model_dir) / "config.json").write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
        model = ModelConfig(model=model_dir, skip_tokenizer_init=True, max_model_len=args["max_model_len"])
    names = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold")
    given = {name: args[name] for name in (*names, "max_model_len", "policy")}
    # N-grams are drafted on the CPU, so vLLM refuses them with two batches in flight; which drafter it is comes later.
    given["async_scheduling"] = args["async_scheduling"] and not args.get("num_speculative_tokens")
    given |= {name: args[name] for name in RELEASE_ARGS if args.get(name) is not None}
    try:
        scheduling = SchedulerConfig(**given | _taken(SchedulerConfig, {"is_encoder_decoder": False}))
    except ValueError as error:
        # The validation error's second line is the reason; the rest repeats the input.
        reason = str(error).splitlines()[:2][-1].strip()
        raise RefusedError(f"engine_args: vLLM refuses them: {reason}") from error
    scheduling.scheduler_cls = DEFAULT_SCHEDULERS.get(str(scheduling.scheduler_cls), scheduling.scheduler_cls)
    cache = CacheConfig(
        block_size=args["block_size"],
        enable_prefix_caching=args["enable_prefix_caching"],
        num_gpu_blocks_override=args["num_gpu_blocks"],
        **{name: args[name] for name in CACHE_ARGS if name in args},
    )
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduling,
        device_config=DeviceConfig(device="cpu"),
        speculative_config=_speculation(args),
        kv_transfer_config=transfer_config(args),
    )
    # On no platform vLLM makes one group of all layers.
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    if config.speculative_config is not None:
        # The scheduler goes by the name and by the mode, and vLLM asks for a drafter's weights and for a GPU.
        config.speculative_config.method = args["speculative_method"]
        config.scheduler_config.async_scheduling = args["async_scheduling"]
    return config


def _speculation(args: dict[str, Any]) -> Any:
    """vLLM's settings of speculative decoding by n-grams, which needs no drafter; None without drafts."""
    if not args.get("num_speculative_tokens"):
        return None
    from vllm.config import SpeculativeConfig

    drafts = args["num_speculative_tokens"]
    return SpeculativeConfig(method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=3, prompt_lookup_min=1)


def make_core(args: dict[str, Any], run_batch: Callable[[Any], Any], take_drafts: Callable[[], Any]) -> Any:
    """vLLM's EngineCore over a device that only takes time.

    ``run_batch`` is given the scheduler's output of each batch and answers with a future of the model's output;
    ``take_drafts`` answers with the tokens that were drafted behind the last batch, by request.
    """
    config = make_config(args)
    from vllm.v1.engine.core import EngineCore

    for module in filter(None, map(sys.modules.get, CHECKING_MODULES)):
        for name in LIFTED_CHECKS:
            if hasattr(module, name):
                setattr(module, name, lambda *_: None)
    with contextlib.redirect_stderr(None):
        core = EngineCore(config, lambda given: Device(given, args, run_batch, take_drafts), log_stats=False)
    _check_settings(core, args)
    return core


class Device:
    """What the engine core takes for its executor: no workers, no model, and a pool of as many blocks as wanted."""

    def __init__(
        self, config: Any, args: dict[str, Any], run_batch: Callable[[Any], Any], take_drafts: Callable[[], Any]
    ) -> None:
        self.config, self.args, self.run_batch, self.take_drafts = config, args, run_batch, take_drafts
        # Releases that ask the executor, and not the configuration, how many batches may be in flight.
        self.max_concurrent_batches = 2 if args["async_scheduling"] else 1
        self.supported_tasks = ("generate",)
        self.sampling: Any = None

    def collective_rpc(self, method: str, *_: Any, **__: Any) -> list[Any]:
        return [WORKER_ANSWERS.get(method)]

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        groups = self.args.get("kv_cache_groups", [["full", 0]])
        return [{f"layer{i}": _layer(kind, size, self.args) for i, (kind, size) in enumerate(groups)}]

    def __getattr__(self, name: str) -> Any:
        """Any other question at the start goes to the one worker that there is not."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.collective_rpc(name, *args, **kwargs)

    def execute_model(self, output: Any, *_: Any, non_block: bool = False) -> Any:
        """Run a batch. Its tokens come from ``sample_tokens``, or from here in releases that know no second call."""
        future = self.run_batch(output)
        if output.total_num_scheduled_tokens == 0 or not _samples_apart():
            return future if non_block else future.result()
        self.sampling = future
        return _Nothing()

    def take_draft_token_ids(self) -> Any:
        from vllm.v1.outputs import DraftTokenIds

        drafts = self.take_drafts()
        return DraftTokenIds(list(drafts), list(drafts.values()))

    def sample_tokens(self, _: Any, non_block: bool = False) -> Any:
        return self.sampling if non_block else self.sampling.result()


def _layer(kind: str, size: int, args: dict[str, Any]) -> Any:
    """vLLM's description of a layer's KV cache; all pages are of one size."""
    import torch
    from vllm.v1 import kv_cache_interface as specs

    block_size = args["block_size"]
    if kind == "state":
        # As vllm/platforms/interface.py has it where no prefix is cached.
        page = ((2 * 4 * 16 * block_size,),)
        return specs.MambaSpec(shapes=page, dtypes=(torch.float16,), block_size=args["max_model_len"])
    name, own = {
        "full": ("FullAttentionSpec", {}),
        "window": ("SlidingWindowSpec", {"sliding_window": size}),
        "chunk": ("ChunkedLocalAttentionSpec", {"attention_chunk_size": size}),
    }[kind]
    spec = getattr(specs, name)
    shape = {"num_kv_heads": 4, "head_size": 16, "dtype": torch.float16}
    return spec(block_size=block_size, **shape, **own, **_taken(spec, {"use_mla": False}))


def _groups_of(core: Any) -> list[list[Any]]:
    """The groups that vLLM made of the layers, as a workload names them."""
    found = []
    for group in core.scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        kinds = {"FullAttentionSpec": "full", "SlidingWindowSpec": "window", "MambaSpec": "state"}
        kind = kinds.get(type(spec).__name__, "chunk")
        size = getattr(spec, {"window": "sliding_window", "chunk": "attention_chunk_size"}.get(kind, ""), 0)
        found.append([kind, size])
    return found


class _Nothing:
    """The future of a model that has run and not sampled yet."""

    def result(self) -> None:
        return None

    def done(self) -> bool:
        return True

    def add_done_callback(self, _: Any) -> None:
        return None


def _samples_apart() -> bool:
    from vllm.v1.executor.abstract import Executor

    return hasattr(Executor, "sample_tokens")


def _check_settings(core: Any, args: dict[str, Any]) -> None:
    """vLLM's configuration objects may change settings; a recording must say what really ran."""
    scheduler = core.scheduler
    settings = scheduler.scheduler_config
    names = ("max_num_seqs", "max_num_batched_tokens", "policy", "enable_chunked_prefill", "async_scheduling")
    actual = {name: getattr(settings, name) for name in (*names, "long_prefill_token_threshold")}
    actual |= {name: getattr(settings, name) for name in RELEASE_ARGS if args.get(name) is not None}
    for name in ("enable_prefix_caching", "block_size", "num_gpu_blocks"):
        actual[name] = getattr(scheduler.cache_config, name)
    actual["max_model_len"] = scheduler.max_model_len
    if "kv_cache_groups" in args:
        actual["kv_cache_groups"] = _groups_of(core)
    changed = {name: value for name, value in actual.items() if value != args[name]}
    if changed:
        raise RefusedError(f"engine_args: vLLM turned them into {changed}; give these")
    if (core.batch_queue is not None) != args["async_scheduling"]:
        raise SpecError("engine_args: vLLM keeps another number of batches in flight than async_scheduling says")


def make_request(spec: dict[str, Any], core: Any) -> Any:
    """vLLM's Request of one request of the workload; its arrival time is in microseconds, as only order matters."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    given = {name: spec[name] for name in ("external_tokens", "fetched_us") if name in spec}
    tokens = [tag * TOKEN_TAG_STRIDE + start + j for tag, start, n in spec["prompt"] for j in range(n)]
    return Request(
        request_id=spec["request_id"],
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(
            max_tokens=spec["output_tokens"], ignore_eos=True, extra_args={"kv_transfer_params": given}
        ),
        pooling_params=None,
        arrival_time=float(spec["arrival_us"]),
        priority=spec["priority"],
        block_hasher=core.request_block_hasher,
        **_taken(Request, REQUEST_ARGS),
    )


def model_output(sampled: dict[str, list[int]], transfers: Any = None) -> Any:
    """vLLM's output of a step: the tokens sampled for each request of the batch, in its order."""
    from vllm.v1.outputs import ModelRunnerOutput

    tokens: list[Any] = list(sampled.values())
    if "ndarray" in str(ModelRunnerOutput.__annotations__["sampled_token_ids"]):
        import numpy as np

        tokens = [np.array(ids, np.int64) for ids in tokens]
    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={rid: i for i, rid in enumerate(sampled)},
        sampled_token_ids=tokens,
        kv_connector_output=transfers,
        **_taken(ModelRunnerOutput, OUTPUT_ARGS),
    )
