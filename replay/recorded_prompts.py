"""Recorded prompt identities as blocks of the engine's size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from blis_replay.blis.trace import BlockKeys, Int32s, Int64s
from blis_replay.ingest.recording import PromptTree
from blis_replay.replay.errors import ReplayError


def engine_block_keys(tree: PromptTree, prompt_tokens: Int64s, block_size: int) -> BlockKeys:
    """Keys for the full blocks of every request's prompt, as far as they are known.

    A block is shared if it ends within what two prompts share.  Raises ``ReplayError`` beyond 2^31 blocks.
    """
    keys = recorded_block_keys(tree, len(prompt_tokens), block_size)
    return replace(keys, count=np.minimum(prompt_tokens // block_size, keys.count))


def recorded_block_keys(tree: PromptTree, requests: int, block_size: int) -> BlockKeys:
    """Keys as far as recorded identities reach, which may be a block of theirs beyond the prompt's end.

    Raises ``ReplayError`` beyond 2^31 blocks.
    """
    start, count, keys = _prompt_rows(tree, block_size)
    request, prompt = (tree.requests[column].to_numpy() for column in ("request_index", "prompt"))
    own_start, own_count = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
    own_start[request], own_count[request] = start[prompt], count[prompt]
    return BlockKeys(own_start, own_count, keys, block_size)


def _prompt_rows(tree: PromptTree, block_size: int) -> tuple[Int64s, Int64s, Int32s]:
    """``(start, count, keys)``: prompt p has ``keys[start[p] : start[p] + count[p]]``, equal where shared."""
    count = tree.prompts["tokens"].to_numpy() // block_size
    shared = np.minimum(tree.prompts["shared_tokens"].to_numpy() // block_size, count)
    start = np.cumsum(count) - count
    own = count - shared
    if int(own.sum()) >= 1 << 31:
        raise ReplayError("the recorded prompts have more than 2^31 different blocks; replay a part of them")
    first_own = (np.cumsum(own) - own).tolist()
    keys = np.empty(int(count.sum()), np.int32)
    parents = tree.prompts["parent"].to_list()
    rows = zip(start.tolist(), count.tolist(), shared.tolist(), strict=True)
    for prompt, (begin, length, of_parent) in enumerate(rows):
        if of_parent:
            from_parent = int(start[parents[prompt]])
            keys[begin : begin + of_parent] = keys[from_parent : from_parent + of_parent]
        first = first_own[prompt]
        keys[begin + of_parent : begin + length] = np.arange(first, first + length - of_parent)
    return start, count, keys


def cached_tokens(keys: BlockKeys, prompt_tokens: Int64s) -> Int64s:
    """int64[n]: prompt tokens of each request that earlier ones had, in a cache that never forgets.

    Whole blocks only, and never the last token, which is always computed (vLLM ``get_computed_blocks``).
    """
    seen = np.zeros(int(keys.keys.max(initial=-1)) + 1, np.bool_)
    found = np.zeros(len(prompt_tokens), np.int64)
    for i, (start, count) in enumerate(zip(keys.start.tolist(), keys.count.tolist(), strict=True)):
        row = keys.keys[start : start + count]
        found[i] = np.count_nonzero(seen[row])  # where a block was seen, all before it were
        seen[row] = True
    cached: Int64s = np.minimum(found, np.maximum(prompt_tokens - 1, 0) // keys.block_size) * keys.block_size
    return cached
