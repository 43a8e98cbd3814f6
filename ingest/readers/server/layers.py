"""The groups of KV blocks that vLLM makes of a model's layers, as the argument ``kv_cache_groups`` has them.

``window 512 x5, full``: five groups with a window of 512 tokens each, and one of full attention, in vLLM's order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby

from blis_replay.ingest.readers.documents import section, text, whole

SEVERAL = "several"  # groups that are not distinguished
_GROUP = re.compile(r"(full|window|chunk|state)(?: (\d{1,9}))?(?: x ?(\d{1,2}))?")
_ATTENTION = {"full_attention": "full", "sliding_attention": "window", "linear_attention": "state"}
# vLLM's description of a layer's cache -> its kind, and where it has the size of a window or chunk.
_SPECS: dict[str, tuple[str, str | None]] = {
    "FullAttentionSpec": ("full", None),
    "SlidingWindowSpec": ("window", "sliding_window"),
    "ChunkedLocalAttentionSpec": ("chunk", "attention_chunk_size"),
}
# Of layers whose numbers are within these factors of each other, releases make one or more groups a kind.
_PADDED, _SPLIT = 1.25, 1.5
# Layers of other sizes, or without a cache of their own: how they are grouped depends on more than their kinds.
_UNLIKE = ("global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers")


def groups_of_model(config: Mapping[str, object]) -> str:
    """The groups of a model's ``config.json``, ``1`` of one kind of layer, ``several`` where it does not tell.

    vllm/v1/core/kv_cache_utils.py (_get_kv_cache_groups_uniform_page_size): layers of a kind are split into groups as
    large as those of the rarer kind, or all of a kind are one group if the kinds are about as frequent.
    """
    inner = section(config, "text_config")
    config = inner or config
    kinds = _kinds(config)
    if not kinds:
        return "1"
    window = whole(config.get("sliding_window"))
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    if len(counts) == 1 and "full" in counts:
        return "1"
    ratio = max(counts.values()) / min(counts.values())
    known = set(counts) <= set(_ATTENTION.values()) and not any(config.get(name) for name in _UNLIKE)
    if not known or ("window" in counts and not window) or _PADDED <= ratio < _SPLIT:
        return SEVERAL
    size = max(counts.values()) if ratio < _PADDED else min(counts.values())
    names = {"full": "full", "window": f"window {window}", "state": "state"}
    return in_words(names[kind] for kind, count in counts.items() for _ in range(-(-count // size)))


def _kinds(config: Mapping[str, object]) -> list[str]:
    """What each layer attends to; empty where nothing tells a difference."""
    said, layers = config.get("layer_types"), whole(config.get("num_hidden_layers")) or 0
    if isinstance(said, list):
        return [_ATTENTION.get(str(kind), str(kind)) for kind in said]
    # Gemma 3 before it had layer_types: every sixth layer is of full attention.
    every = whole(config.get("sliding_window_pattern"))
    if every is None and text(config.get("model_type")) in ("gemma3", "gemma3_text"):
        every = 6
    return ["window" if (i + 1) % every else "full" for i in range(layers)] if every else []


def groups_of_specs(specs: object, block_size: int | None) -> str:
    """The groups that a recorder found in a server, each with its kind and sizes."""
    names: list[str] = []
    for spec in specs if isinstance(specs, list) else ():
        kind = section({"spec": spec}, "spec").get("kind")
        if kind == "MambaSpec" and spec.get("mamba_cache_mode") == "none":
            names.append("state")
            continue
        name, size = _SPECS.get(str(kind), ("", None))
        tokens = None if size is None else whole(spec.get(size))
        if spec.get("block_size") != block_size or not name or (size is not None and tokens is None):
            return SEVERAL
        names.append(name if tokens is None else f"{name} {tokens}")
    return in_words(names) or SEVERAL


def in_words(names: Iterable[str]) -> str:
    """The names of groups, those that follow each other counted."""
    counted = ((name, len(list(alike))) for name, alike in groupby(names))
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counted)


def groups_in_words(said: str) -> list[tuple[str, int]] | None:
    """The kind and the tokens of each group that a text names, 0 for none; None if it is not of that form."""
    groups: list[tuple[str, int]] = []
    for part in said.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None or (match[2] is not None) != (match[1] in ("window", "chunk")):
            return None
        groups += [(match[1], int(match[2] or 0))] * int(match[3] or 1)
    return groups


def blocks_of_tokens(said: str, kv_tokens: int, longest: int, block_size: int, in_flight: int) -> int | None:
    """KV blocks of a server whose log has this many tokens of KV cache; None where the groups do not tell.

    The log has the blocks over those of a request of ``longest`` tokens, times ``longest``
    (vllm/v1/core/kv_cache_utils.py, get_kv_cache_capacity).  ``in_flight``: tokens of all steps that run at once.
    """
    each = 0
    for kind, size in groups_in_words(said) or [("", 0)]:
        if kind not in ("full", "window"):
            return None
        window = kind == "window"
        held = min(size - 1 + in_flight, longest) if window else longest
        each += -(-held // block_size) + window
    return -(-kv_tokens * each // longest)
