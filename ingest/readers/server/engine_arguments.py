"""The engine arguments of vLLM that are known here, what each may be, and how a mistake in one is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.documents import MAX_TOKENS, finite, quoted, text, tokens, whole

_COUNTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_gpu_blocks",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "api_server_count",  # of vllm serve, not of its engine
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "max_num_partial_prefills",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "prefill_schedule_interval",
    "stream_interval",
)
# Of these 0 switches something off.
_MAY_BE_ZERO = (
    "long_prefill_token_threshold",
    "num_cpu_blocks",
    "cpu_fetch_us_per_block",
    "data_parallel_rank",  # who gives one to a server leaves the choice of the rank to another balancer
    "data_parallel_start_rank",
    "max_cudagraph_capture_size",
)
_SWITCHES = (
    "async_scheduling",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_multi_port_external_lb",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enable_expert_parallel",
    "enable_dbo",
    "enable_lora",
    "enforce_eager",
    "long_prefill_token_threshold_adaptive",
    "mixture_of_experts",  # no argument: of the model, where its name does not tell
    "scheduler_reserve_full_isl",
)
_WORDS = (
    "vllm_version",
    "scheduling_policy",
    "dtype",
    "kv_cache_dtype",
    "device",
    "performance_mode",
    "distributed_executor_backend",
    "scheduler_cls",
)
# Whatever is said, as text.
_ANYTHING = (
    "speculative_config",
    "kv_transfer_config",
    "kv_offloading_size",
    "kv_cache_groups",  # no argument: what the log or the recorder says of a model with several kinds of KV cache
    "cudagraph_mode",
    "cudagraph_capture_sizes",
)
# No arguments of vLLM: what its metrics say of speculative decoding, the share of drafts whose first, second, ... token
# is accepted, and how often anything is drafted.
_ACCEPTANCE = "speculative_acceptance"
_SHARES = ("watermark", "speculative_drafted_share")
ARGUMENTS = (*_COUNTS, *_MAY_BE_ZERO, *_SHARES, *_SWITCHES, *_WORDS, *_ANYTHING, _ACCEPTANCE)

# The other arguments of vllm.engine.arg_utils.EngineArgs, 0.11 to 0.32: they change no schedule, or only through those
# above (memory, say, through num_gpu_blocks).  Someone who writes down a command line may give them.
_OTHER_NAMES = """
additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization allowed_local_media_path
allowed_media_domains attention_backend attention_config aux_output_config calculate_kv_scales code_revision
collect_detailed_traces compilation_config config_format convert cp_kv_cache_interleave_size
cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params cuda_graph_sizes cudagraph_metrics
custom_histogram_buckets data_parallel_address data_parallel_backend data_parallel_rpc_port
data_parallel_size_local dbo_decode_token_threshold dbo_prefill_token_threshold
dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate default_mm_loras device_ids diffusion_config
disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
disable_log_stats disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization disable_sliding_window
distributed_timeout_seconds download_dir dp_sync_interval ec_manager_config ec_transfer_config
elastic_ep_max_dp_size enable_batch_sharded_sampling enable_bf16x3_router_gemm enable_cumem_allocator
enable_elastic_ep enable_ep_weight_filter enable_eplb enable_fault_tolerance enable_flashinfer_autotune
enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests enable_logging_iteration_details
enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
enable_multimodal_encoder_data_parallel enable_nccl_comm_suspend enable_prompt_embeds
enable_return_routed_experts enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora
enable_trace_replay engram_config eplb_config eplb_log_balancedness eplb_step_interval eplb_window_size
expert_placement_strategy fail_on_environ_validation fault_tolerance_config fully_sharded_loras
gdn_prefill_backend generation_config gpu_memory_utilization guided_decoding_backend
guided_decoding_disable_additional_properties guided_decoding_disable_any_whitespace
guided_decoding_disable_fallback hf_config_path hf_overrides hf_token ignore_patterns interleave_mm_strings
io_processor_plugin ir_op_priority jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend
kernel_config kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample
kv_events_config kv_offloading_backend kv_sharing_fast_prefill language_model_only limit_mm_per_prompt
linear_backend load_format log_config_file log_level logging_config logits_processor_pattern
logits_processors logprobs_mode lora_dtype lora_extra_vocab_size lora_target_modules mamba_backend
mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config
mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr master_port max_cpu_loras max_logprobs
max_long_partial_prefills max_lora_cls_labels max_lora_rank max_loras max_parallel_loading_workers
media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only
mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model
model_class_overrides model_impl model_loader_extra_config model_weights moe_backend nnodes node_rank
num_lookahead_slots num_redundant_experts numa_bind numa_bind_cpus numa_bind_nodes offload_backend
offload_group_size offload_num_in_group offload_params offload_prefetch_step optimization_level
otlp_traces_endpoint override_attention_dtype override_generation_config override_pooler_config
per_request_spec_decode_metrics pooler_config prefix_cache_retention_interval prefix_caching_hash_algo
prefix_match_unit profiler_config pt_load_map_location quantization quantization_config
ray_workers_use_nsight reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers
replayssm_buffer_len return_sampling_mask revision runner safetensors_load_strategy
safetensors_prefetch_block_size safetensors_prefetch_num_threads seed served_model_name
show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling skip_tokenizer_init
sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method
spec_model spec_tokens specialize_active_lora structured_outputs_config swa_bounded_replay swap_space task
tokenizer tokenizer_mode tokenizer_revision tokens_only trust_remote_code ubatch_size use_fp64_gumbel
use_replayssm use_tqdm_on_load video_pruning_method video_pruning_rate watermark_config
weight_transfer_config worker_cls worker_extension_cls
"""
_OTHERS = frozenset(_OTHER_NAMES.split())
# What vLLM calls the same in other places: its flags, its tools, its records.
_SAME = {
    "num_gpu_blocks_override": "num_gpu_blocks",
    "tensor_parallelism": "tensor_parallel_size",
    "vllm": "vllm_version",
    "policy": "scheduling_policy",
    "cache_dtype": "kv_cache_dtype",
    "max_seq_len": "max_model_len",
}

# vLLM's other names of a data type; "auto" is whatever the model's own files say.
_NUMBER = re.compile(r"[0-9]{1,3}(\.[0-9]{1,9})?", re.ASCII)
_MOST_POSITIONS = 64
_MEMBER = re.compile(r"<\w{1,80}\.(\w{1,80}): [^>]*>")
_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": None}


def argument_named(name: str) -> str:
    """The argument that a name means: ``--max-num-seqs`` and ``max_num_seqs`` are the same."""
    plain = name.strip().lstrip("-").replace("-", "_")
    return _SAME.get(plain, plain)


def checked_arguments(
    path: Path, given: Mapping[str, object], also: tuple[str, ...] = ()
) -> dict[str, int | float | bool | str]:
    """Values by argument that someone wrote down, those left out that change no schedule.

    Raises :class:`RecordingError` for an unknown name, with the nearest one (of the arguments, or ``also``), and for a
    value of the wrong kind.
    """
    arguments: dict[str, int | float | bool | str] = {}
    for written, raw in given.items():
        name = argument_named(written)
        if name in _OTHERS:
            continue
        if name not in ARGUMENTS:
            near = get_close_matches(name, [*also, *ARGUMENTS, *_OTHERS], 1)
            mend = f"did you mean {near[0]}?" if near else f"remove it, or use one of {', '.join(ARGUMENTS[:10])}, ..."
            raise RecordingError(path, f"field {written[:60]}", "not an engine argument of vLLM 0.11 to 0.32", mend)
        if name == "dtype" and raw == "auto":
            continue
        value = argument_value(name, raw)
        if value is None:
            raise RecordingError(path, f"field {written[:60]}", f"{quoted(raw)} is not usable", f"give {_wanted(name)}")
        if arguments.get(name, value) != value:
            problem = f"{name} is given twice, as {quoted(arguments[name])} and {quoted(value)}"
            raise RecordingError(path, f"field {written[:60]}", problem, "give it once")
        arguments[name] = value
    return arguments


def argument_value(name: str, raw: object) -> int | float | bool | str | None:
    """What an argument of :data:`ARGUMENTS` is, ``None`` if ``raw`` is nothing that it can be."""
    if name in _SWITCHES:
        return raw if isinstance(raw, bool) else None
    if name in ("dtype", "kv_cache_dtype"):
        return _dtype(name, raw)
    if name in _WORDS:
        return text(str(raw)) if isinstance(raw, str | float) else None
    if name in _SHARES:
        share = finite(raw)
        return share if share is not None and 0 <= share < 1 else None
    if name == _ACCEPTANCE:
        return _shares(raw)
    if name in _ANYTHING:
        return _printed(raw)
    return whole(raw) if name in _MAY_BE_ZERO else tokens(raw)


def _dtype(name: str, raw: object) -> str | None:
    """A data type as vLLM names it; of the weights, a quantization (``fp8``) where they have one."""
    said = (text(raw) or "auto").lower().removeprefix("torch.")
    return said if name == "kv_cache_dtype" else _DTYPES.get(said, said)


def _printed(raw: object) -> str | None:
    """A value of any kind in short: sizes as ``1 2 4 8..512/8``, a mapping as ``method=eagle3 ...``."""
    if isinstance(raw, Mapping):
        said = (f"{key}={value}" for key, value in raw.items() if value is not None and not isinstance(value, dict))
        return text(" ".join(said)) or "given"
    if isinstance(raw, list):
        numbers = sorted({number for number in map(whole, raw) if number is not None})
        return text(_runs(numbers) if len(numbers) == len(raw) else " ".join(map(str, raw))) or "none"
    if not isinstance(raw, str | int | float):
        return None
    member = _MEMBER.fullmatch(str(raw))
    return text(member[1] if member else str(raw))


def _runs(numbers: list[int]) -> str:
    """Ascending numbers, four and more with one gap as ``first..last/gap``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and (len(runs[-1]) == 1 or number - runs[-1][-1] == runs[-1][1] - runs[-1][0]):
            runs[-1].append(number)
        elif runs and len(runs[-1]) == 2:  # no gap yet
            runs[-1:] = [runs[-1][:1], [runs[-1][1], number]]
        else:
            runs.append([number])
    said = (f"{run[0]}..{run[-1]}/{run[1] - run[0]}" if len(run) > 3 else " ".join(map(str, run)) for run in runs)
    return " ".join(said)


def _shares(raw: object) -> str | None:
    """Shares from 0 to 1 by position, none above the one before, as text with blanks between them."""
    listed = raw.split() if isinstance(raw, str) else raw if isinstance(raw, list) else [raw]
    shares = [finite(float(str(item))) if _NUMBER.fullmatch(str(item)) else None for item in listed[:_MOST_POSITIONS]]
    known = [share for share in shares if share is not None and 0 <= share <= 1]
    falling = known == sorted(known, reverse=True)
    return " ".join(f"{share:g}" for share in known) if known and falling and len(known) == len(listed) else None


def _wanted(name: str) -> str:
    if name == _ACCEPTANCE:
        return "a share from 0 to 1 for each position, none above the one before: [0.7, 0.4]"
    if name in _SWITCHES:
        return "true or false"
    if name in _SHARES:
        return "a number from 0 to below 1"
    if name in _COUNTS:
        return f"a positive whole number below {MAX_TOKENS:,}"
    return "a whole number" if name in _MAY_BE_ZERO else "a text"
