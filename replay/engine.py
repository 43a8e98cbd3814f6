"""The engine of a recording for a simulator: its arguments, its ranks, and what of them is not simulated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import starmap
from typing import TYPE_CHECKING, Any

from blis_replay.base.arrays import Floats
from blis_replay.base.engine_packs import choose_pack
from blis_replay.base.errors import ReplayError, UnreplayableError, argument_not_known
from blis_replay.blis.latency.models import Latency, PaddedLatency
from blis_replay.blis.releases.fit import Outside, outside
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import (
    EngineConfig,
    KvCacheGroup,
    Offloading,
    release_arguments,
    why_not_grouped,
    why_not_offloaded,
)
from blis_replay.ingest.recording import UNKNOWN, Recording, Setting
from blis_replay.replay.mode import EngineValue, ReplayMode, captured_sizes

if TYPE_CHECKING:
    from blis_replay.blis.speculation import Speculation

# Models whose names say that each token is served by some of many experts.
_EXPERTS = re.compile(r"moe|mixtral|\d+x\d+b|-a\d+(\.\d+)?b|gpt-oss|deepseek-?(v[2-9]|r1)|kimi-k2|dbrx|llama-4|minimax")
# Models whose names say that their layers keep several kinds of KV cache: windows or states beside full attention.
_KINDS_OF_CACHE = re.compile(
    r"gpt-oss|gemma-?[234]n?(?![0-9a-z.])|llama-4|qwen3-next|qwen3\.5|nemotron-h|jamba|falcon-h1|granite-4\.0-h|bamba|zamba2|command-a"
    r"|command-r7b|minimax-(text-01|m1)|kimi-linear|ministral-8b|olmo-3|exaone-4|mimo-v2-flash"
)
# Groups of a model with an unknown number; more than Gemma 3 has, with five windows per full layer.
MOST_KINDS_OF_CACHE = 8
# Engine arguments that change a schedule and that not every simulator has: the value at which they do nothing, and what
# is done instead.
_NOT_SIMULATED: dict[str, tuple[object, str]] = {
    "data_parallel_size": (1, "its requests go to one engine"),
    "data_parallel_external_lb": (False, "vLLM's own balancer chooses the rank of each request"),
    "data_parallel_multi_port_external_lb": (False, "vLLM's own balancer chooses the rank of each request"),
    "data_parallel_rank": (None, "vLLM's own balancer chooses the rank of each request"),
    "data_parallel_hybrid_lb": (False, "vLLM's own balancer chooses among all ranks"),
    "data_parallel_start_rank": (None, "vLLM's own balancer chooses among all ranks"),
    "pipeline_parallel_size": (1, "one batch at a time passes through all stages"),
    "decode_context_parallel_size": (1, "each rank holds all of a context"),
    "prefill_context_parallel_size": (1, "each rank holds all of a context"),
    "speculative_config": (
        "None",
        "each step gives a request one token (simulated are ngram, eagle and mtp, if speculative_acceptance is known)",
    ),
    "enable_lora": (False, "no request has an adapter"),
    "kv_cache_groups": ("1", "every layer keeps all of a context"),
    "kv_transfer_config": ("None", "no KV block comes from or goes elsewhere (a pair with NIXL: validate --prefill)"),
    "kv_offloading_size": (
        "None",
        "no KV block comes from or goes elsewhere (simulated where kv_offloading_costs are known, on releases and with "
        "arguments with which it was compared)",
    ),
    "max_num_partial_prefills": (1, "prompts are computed in order"),
    "prefill_schedule_interval": (1, "prompts are taken up at every step"),
    "max_num_queued_reqs": (None, "no request is refused"),
    "max_num_queued_tokens": (None, "no request is refused"),
    "enable_dbo": (False, "a batch is computed whole"),
    "request_features": (
        None,
        "each request is one sequence of text that is free to share prefixes and waits for no grammar or encoder",
    ),
    "pause_state": (None, "requests are scheduled at all times"),
    "scheduler_cls": (None, "vLLM's own scheduler is simulated"),
}


@dataclass(frozen=True)
class ReplayedEngine:
    """The engine of a replay.

    ``recording``: the recording with the arguments that the mode puts in place of its own.  ``config``: what a
    simulator gets of them.  ``fitted_scheduling``: in words, where scheduling is that of the coefficients because the
    recording does not say; else empty.
    """

    recording: Recording
    config: EngineConfig
    fitted_scheduling: str = ""

    @property
    def basis(self) -> dict[str, str]:
        """What was not recorded or is simulated differently, in words."""
        recording, config = self.recording, self.config
        basis = {}
        if "max_model_len" not in recording.engine:
            basis["max_model_len"] = (
                f"not recorded; {config.max_model_len:,}, of the longest request, as the server took it"
            )
        if remarks := _release_remarks(recording, config):
            basis["scheduler"] = remarks
        if config.speculation is not None:
            basis["speculative decoding"] = config.speculation.in_words()
        if config.offloading is not None:
            basis["offload"] = config.offloading.in_words()
        if config.data_parallel_size > 1:
            basis["data parallelism"] = _ranks_basis(recording, config)
        return basis

    @property
    def captured_sizes(self) -> tuple[int, ...] | None:
        """Sizes of captured CUDA graphs, tokens; None if unknown."""
        sizes = self.recording.engine.get("cudagraph_capture_sizes")
        return None if sizes is None else captured_sizes(sizes.value)

    @property
    def captured_tokens(self) -> int:
        """The most tokens of a batch that a captured CUDA graph computes.

        If the sizes are unknown, vLLM's usual number: twice ``max_num_seqs``, at most 512.
        """
        eager = self.recording.engine.get("enforce_eager")
        if eager is not None and eager.value is True:
            return 0
        sizes = self.captured_sizes
        return min(2 * self.config.max_num_seqs, 512) if sizes is None else max(sizes, default=0)


def replayed_engine(recording: Recording, mode: ReplayMode, entry: ModelEntry | None = None) -> ReplayedEngine:
    """The engine of a recording with the arguments and the scheduling of the mode.

    ``entry``: coefficients, whose scheduling is used where neither recording nor mode says one.  An unknown
    ``max_model_len`` is that of the longest request: the server took it.  Raises ``ReplayError`` naming another
    argument that is not known and has no default.
    """
    if mode.engine:
        recording = with_engine(recording, dict(mode.engine), "replay")
    value = engine_values(recording)
    if "max_model_len" not in value and recording.requests.height:
        tokens = "max(prompt_tokens + greatest(coalesce(output_tokens, max_tokens, 1), 1))"
        if longest := recording.requests.aggregate(longest=tokens)["longest"]:
            value["max_model_len"] = longest
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "async_scheduling"):
        if name not in value:
            raise argument_not_known(recording.slug, name)
    asynchronous, fitted_scheduling = _scheduling(recording, mode, entry)
    blocks, fronts = value.get("num_gpu_blocks"), value.get("api_server_count")
    ranks = int(value.get("data_parallel_size", 1))
    policy = str(value.get("scheduling_policy", "fcfs"))
    if policy not in ("fcfs", "priority"):
        raise UnreplayableError(
            f"{recording.slug}: scheduling_policy is {policy!r}; the engine knows fcfs and priority"
        )
    config = EngineConfig(
        max_num_seqs=int(value["max_num_seqs"]),
        max_num_batched_tokens=int(value["max_num_batched_tokens"]),
        max_model_len=int(value["max_model_len"]),
        block_size=int(value["block_size"]),
        num_gpu_blocks=None if blocks is None else int(blocks),
        async_scheduling=asynchronous,
        enable_prefix_caching=bool(value.get("enable_prefix_caching", True)),
        enable_chunked_prefill=bool(value.get("enable_chunked_prefill", True)),
        long_prefill_token_threshold=int(value.get("long_prefill_token_threshold", 0)),
        scheduling_policy="priority" if policy == "priority" else "fcfs",
        speculation=_speculation(value),
        kv_cache_groups=cache_groups_of(recording),
        data_parallel_size=ranks,
        api_server_count=None if fronts is None else int(fronts),
        mixture_of_experts=_has_experts(recording) if ranks > 1 else bool(value.get("mixture_of_experts", False)),
        **release_arguments(value),
    )
    offloading, asked = _offloading(value), dict(mode.engine)
    if offloading is not None and not why_not_offloaded(config):
        config = replace(config, offloading=offloading)
        if "block_size" in asked and "kv_offloading_costs" not in asked:
            raise UnreplayableError(f"{recording.slug}: kv_offloading_costs are of blocks of another size; give both")
    elif asked.get("kv_offloading_size"):
        raise UnreplayableError(
            f"{recording.slug}: kv_offloading_size; in the replay {_NOT_SIMULATED['kv_offloading_size'][1]}"
        )
    elif "kv_offloading_costs" in asked:
        raise UnreplayableError(f"{recording.slug}: kv_offloading_costs without an offload; give kv_offloading_size")
    return ReplayedEngine(recording, config, fitted_scheduling)


def _scheduling(recording: Recording, mode: ReplayMode, entry: ModelEntry | None) -> tuple[bool, str]:
    """Whether scheduling is asynchronous, and in words why if it is that of the coefficients."""
    if mode.scheduling != "recorded":
        return mode.scheduling == "asynchronous", ""
    setting = recording.engine["async_scheduling"]
    if setting.source == UNKNOWN and entry is not None and entry.fit is not None:
        words = f"{entry.fit.scheduling}, as the coefficients were fitted; the recording does not say"
        return entry.fit.scheduling == "asynchronous", words
    return bool(setting.value), ""


def engine_values(recording: Recording) -> dict[str, Any]:
    """The values of the recorded engine arguments, by name."""
    return {name: setting.value for name, setting in recording.engine.items()}


def with_engine(recording: Recording, arguments: Mapping[str, EngineValue], source: str) -> Recording:
    """The recording with these engine arguments; ``source``: of their settings."""
    engine = {name: setting for name, setting in recording.engine.items() if name not in arguments}
    engine |= {name: Setting(value, source) for name, value in arguments.items() if value is not None}
    return replace(recording, engine=engine)


def _ranks_basis(recording: Recording, engine: EngineConfig) -> str:
    """What the ranks rest on, in words."""
    fronts = engine.api_server_count or engine.data_parallel_size
    said = "" if engine.api_server_count else ", as many as ranks (assumed: the default of vllm serve)"
    how = "each by itself"
    if engine.mixture_of_experts:
        how = "in lockstep, as the model has experts"
        how += "" if "mixture_of_experts" in recording.engine else " (by its name)"
    elif not engine.behaviours.dense_ranks_apart:
        how = "in lockstep, as that release does"
    return (
        f"{engine.data_parallel_size} ranks on devices of their own, {how}, behind vLLM's balancer with {fronts} "
        f"front ends{said}, which take requests in turn"
    )


def _has_experts(recording: Recording) -> bool:
    """Whether the model has experts: as was said, or by its name."""
    said = recording.engine.get("mixture_of_experts") or recording.engine.get("enable_expert_parallel")
    if said is not None and (said.value or "mixture_of_experts" in recording.engine):
        return bool(said.value)
    return _EXPERTS.search((recording.model or "").lower()) is not None


def _release_remarks(recording: Recording, engine: EngineConfig) -> str:
    """Where the simulated scheduler is not that of the recorded release, in words; empty if it is."""
    version = recording.engine.get("vllm_version")
    if version is None:
        return ""
    choice = choose_pack(str(version.value))
    differs = choice.pack.not_simulated(engine_values(recording) | {"async_scheduling": engine.async_scheduling})
    return "; ".join([*([choice.remark] if choice.remark else []), *(f"not simulated, {what}" for what in differs)])


def _simulated(name: str, arguments: Mapping[str, object]) -> bool:
    """Whether the embedded engine simulates what it is given of an argument that others may lack."""
    if name == "prefill_schedule_interval":  # of one engine: what the release makes of it
        return arguments.get("data_parallel_size", 1) == 1
    if name.startswith("data_parallel_") and name != "data_parallel_size":  # who chooses among ranks
        return arguments.get("data_parallel_size", 1) == 1
    if name == "kv_cache_groups":
        return bool(cache_groups(arguments))
    if name == "kv_offloading_size":
        return _offloading(arguments) is not None
    return name == "data_parallel_size" or (name == "speculative_config" and _speculation(arguments) is not None)


def _speculation(arguments: Mapping[str, object]) -> Speculation | None:
    """As ``speculation_of``; few servers draft."""
    if not arguments.get("speculative_config"):
        return None
    from blis_replay.blis.speculation import speculation_of

    return speculation_of(arguments)


def _offloading(arguments: Mapping[str, object]) -> Offloading | None:
    """The offload of KV blocks that the arguments ask for, if what it takes is known, and its release was compared."""
    choice = choose_pack(str(arguments.get("vllm_version", "")))
    compared = "vllm_version" in arguments and choice.release in choice.pack.offloading
    native = arguments.get("kv_offloading_backend", "native") == "native"
    if not (compared and native and arguments.get("kv_offloading_size")):
        return None
    from blis_replay.blis.offloading import offloading_of

    return offloading_of(arguments)


def cache_groups(arguments: Mapping[str, Any]) -> tuple[KvCacheGroup, ...]:
    """The groups of KV blocks that the layers keep, if they are known, and the release was compared with such ones.

    None where something else that the server used goes with one group only.
    """
    kinds, version = arguments.get("kv_cache_groups", "1"), arguments.get("vllm_version")
    if str(kinds) == "1" or version is None:
        return ()
    from blis_replay.ingest.readers.server.layers import groups_in_words

    choice, speculation = choose_pack(str(version)), _speculation(arguments)
    groups = tuple(starmap(KvCacheGroup, groups_in_words(str(kinds)) or ()))
    asked = {"windows"} | ({"states"} if KvCacheGroup("state") in groups else set())
    asked |= {"drafts"} if speculation is not None else set()
    prefixes = bool(arguments.get("enable_prefix_caching", True))
    compared = asked <= set(choice.pack.grouped.get(choice.release, ()))
    return groups if compared and not why_not_grouped(groups, speculation, prefixes) else ()


def cache_groups_of(recording: Recording) -> tuple[KvCacheGroup, ...]:
    """The groups of KV blocks that its replay has; none where all layers share their blocks, or it is replayed so."""
    return cache_groups(engine_values(recording) | {"kv_cache_groups": kinds_of_cache(recording) or "1"})


def layers_in_words(groups: tuple[KvCacheGroup, ...]) -> str:
    """What the layers of a replay attend to, as ``kv_cache_groups`` has it."""
    from blis_replay.ingest.readers.server.layers import in_words

    return in_words(f"{group.kind} {group.size}".removesuffix(" 0") for group in groups) or "full"


def kinds_of_cache(recording: Recording) -> str | None:
    """How many kinds of KV cache the layers keep, as was recorded or by the model's name; None for one kind."""
    said = recording.engine.get("kv_cache_groups")
    if said is not None:
        return None if str(said.value) == "1" else str(said.value)
    return "several (by its name)" if _KINDS_OF_CACHE.search((recording.model or "").lower()) else None


def left_out(
    recording: Recording, config: EngineConfig, embedded: bool = True, *, alike: bool = False
) -> tuple[str, ...]:
    """What changed the recorded schedule and is not simulated with this engine, one sentence each.

    ``alike``: groups of KV blocks would have given the same schedule as one.
    """
    arguments, kinds = engine_values(recording), kinds_of_cache(recording)
    arguments.pop("kv_cache_groups", None)
    if config.offloading is not None and config.offloading.cpu_blocks == 0:  # with the other server
        arguments.pop("kv_transfer_config", None)
    if config.offloading is None:  # beside what it is not simulated with
        arguments.pop("kv_offloading_costs", None)
    if not arguments.get("kv_offloading_size"):
        arguments.pop("kv_offloading_size", None)
    if kinds is not None and not alike and not (embedded and config.kv_cache_groups):
        arguments["kv_cache_groups"] = kinds
    return not_simulated(arguments, embedded)


def not_simulated(arguments: Mapping[str, object], embedded: bool = True) -> tuple[str, ...]:
    """Of engine arguments those that change a schedule and are not simulated; ``embedded``: by an engine with ranks."""
    return tuple(
        f"{name} {str(arguments[name])[:80]}; in the replay {instead}"
        for name, (neutral, instead) in _NOT_SIMULATED.items()
        if arguments.get(name, neutral) != neutral and not (embedded and _simulated(name, arguments))
    )


def outside_of(entry: ModelEntry | None, result: SimResult | None, groups: tuple[KvCacheGroup, ...]) -> Outside | None:
    """Steps of a run beyond those that its coefficients were fitted on; ``groups``: of KV blocks.  None if unknown."""
    if result is None or entry is None or not entry.fit or not entry.fit.steps:
        return None
    return outside(result.steps, entry.fit.steps, entry.latency, *([_attends(groups)] if groups else []))


def _attends(groups: tuple[KvCacheGroup, ...]) -> Callable[[Floats], Floats]:
    from blis_replay.blis.grouping import attended_by  # few models have groups

    return lambda context: attended_by(groups, context - 1, 1)


def with_captured_sizes(latency: Latency, sizes: tuple[int, ...] | None) -> Latency:
    """Operator times of a server that captured CUDA graphs of these sizes; None if unknown."""
    return latency.with_captured(sizes) if sizes and isinstance(latency, PaddedLatency) else latency


def refuse_sizes(recording: Recording, mode: ReplayMode, entry: ModelEntry | None, by: str) -> None:
    """Raise ``ReplayError`` if other sizes of captured graphs would change nothing; ``entry``: what ``by`` has."""
    padded = entry is not None and isinstance(entry.latency, PaddedLatency)
    if "cudagraph_capture_sizes" in dict(mode.engine) and not padded:
        raise ReplayError(
            f"{recording.alias}: {by} has no times of padded batches, so other cudagraph_capture_sizes change nothing; "
            "use a release of `blis-replay coefficients make --operators`"
        )
