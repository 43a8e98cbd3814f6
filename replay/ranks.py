"""Data parallelism of a recording: what the engine is told of its ranks, and what that rests on."""

from __future__ import annotations

import re
from typing import Any

from blis_replay.blis.trace import EngineConfig
from blis_replay.ingest.recording import Recording

# Models whose names say that each token is served by some of many experts.
_EXPERTS = re.compile(r"moe|mixtral|\d+x\d+b|-a\d+(\.\d+)?b|gpt-oss|deepseek-?(v[2-9]|r1)|kimi-k2|dbrx|llama-4|minimax")


def rank_arguments(recording: Recording) -> dict[str, Any]:
    """What ``EngineConfig`` takes of the ranks of a recording."""
    value = {name: setting.value for name, setting in recording.engine.items()}
    ranks = int(value.get("data_parallel_size", 1))
    fronts = int(value["api_server_count"]) if "api_server_count" in value else None
    experts = _has_experts(recording) if ranks > 1 else bool(value.get("mixture_of_experts", False))
    return {"data_parallel_size": ranks, "api_server_count": fronts, "mixture_of_experts": experts}


def ranks_basis(recording: Recording, engine: EngineConfig) -> str:
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
        f"{engine.data_parallel_size} ranks, {how}, behind vLLM's balancer with {fronts} front ends{said}, "
        "which take requests in turn"
    )


def _has_experts(recording: Recording) -> bool:
    """Whether the model has experts: as was said, or by its name."""
    said = recording.engine.get("mixture_of_experts") or recording.engine.get("enable_expert_parallel")
    if said is not None and (said.value or "mixture_of_experts" in recording.engine):
        return bool(said.value)
    return _EXPERTS.search((recording.model or "").lower()) is not None
