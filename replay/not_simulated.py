"""Engine arguments whose effect on a schedule is not simulated."""

from __future__ import annotations

from collections.abc import Mapping

from blis_replay.blis.speculation import speculation_of

# Engine arguments that change a schedule and that not every simulator has: the value at which they do nothing, and what
# is done instead.
_NOT_SIMULATED: dict[str, tuple[object, str]] = {
    "data_parallel_size": (1, "its requests go to one engine"),
    "pipeline_parallel_size": (1, "one batch at a time passes through all stages"),
    "decode_context_parallel_size": (1, "each rank holds all of a context"),
    "prefill_context_parallel_size": (1, "each rank holds all of a context"),
    "speculative_config": (
        "None",
        "each step gives a request one token (simulated are ngram, eagle and mtp, if speculative_acceptance is known)",
    ),
    "enable_lora": (False, "no request has an adapter"),
    "kv_cache_groups": ("1", "every layer keeps all of a context"),
    "kv_transfer_config": ("None", "no KV block comes from or goes elsewhere"),
    "kv_offloading_size": ("None", "no KV block comes from or goes elsewhere"),
    "stream_interval": (1, "every token is sent by itself"),
    "max_num_partial_prefills": (1, "prompts are computed in order"),
    "prefill_schedule_interval": (1, "prompts are taken up at every step"),
    "max_num_queued_reqs": (None, "no request is refused"),
    "max_num_queued_tokens": (None, "no request is refused"),
    "enable_dbo": (False, "a batch is computed whole"),
    "scheduler_cls": (None, "vLLM's own scheduler is simulated"),
}


def _simulated(name: str, arguments: Mapping[str, object]) -> bool:
    """Whether the embedded engine simulates what it is given of an argument that others may lack."""
    if name == "prefill_schedule_interval":  # of one engine: what the release makes of it
        return arguments.get("data_parallel_size", 1) == 1
    return name == "data_parallel_size" or (name == "speculative_config" and speculation_of(arguments) is not None)


def not_simulated(arguments: Mapping[str, object], embedded: bool = True) -> tuple[str, ...]:
    """Of engine arguments those that change a schedule and are not simulated; ``embedded``: by an engine with ranks."""
    return tuple(
        f"{name} {str(arguments[name])[:80]}; in the replay {instead}"
        for name, (neutral, instead) in _NOT_SIMULATED.items()
        if arguments.get(name, neutral) != neutral and not (embedded and _simulated(name, arguments))
    )
