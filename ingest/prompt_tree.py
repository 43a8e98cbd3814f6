"""Which prompts begin alike, as a tree: each prompt hangs on an earlier one whose beginning it shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.compiled.arrays import Int64s
from blis_replay.ingest.recording import PROMPT_SCHEMA, REQUEST_PROMPT_SCHEMA, PromptTree

NONE = -1


def shared_units(offsets: Int64s, counts: Int64s, units: NDArray[Any]) -> tuple[Int64s, Int64s]:
    """For each sequence the first that shares the most leading units with it, and how many these are.

    Sequence i has ``counts[i]`` of ``units`` from ``offsets[i]``; only sequences before it are
    looked at, and the first has none (``NONE``, 0).  All sequences are followed unit by
    unit for as long as they share them, so memory is that of a few numbers a sequence.
    """
    parent, shared = np.full(len(counts), NONE, np.int64), np.zeros(len(counts), np.int64)
    active = np.flatnonzero(counts > 0)
    group = np.zeros(len(active), np.int64)
    depth = 0
    while len(active):
        unit = units[offsets[active] + depth]
        order = np.lexsort((active, unit, group))
        active, unit, group = active[order], unit[order], group[order]
        first = np.append(True, (unit[1:] != unit[:-1]) | (group[1:] != group[:-1]))
        starts = np.flatnonzero(first)
        sizes = np.diff(np.append(starts, len(active)))
        group = np.repeat(active[starts], sizes)
        later = active[~first]
        depth += 1
        parent[later], shared[later] = group[~first], depth
        going_on = np.repeat(sizes > 1, sizes) & (counts[active] > depth)
        active, group = active[going_on], group[going_on]
    return parent, shared


def tree_of_blocks(source: str, block_tokens: int, counts: Int64s, keys: Int64s) -> PromptTree:
    """The tree of requests that each own the next ``counts[i]`` of ``keys``, one for ``block_tokens`` tokens.

    Equal keys are equal blocks if those before them are; requests without keys are not known.
    """
    starts = np.cumsum(counts) - counts
    numbers: dict[bytes, int] = {}
    prompt = np.full(len(counts), NONE, np.int64)
    first: list[int] = []
    for i in np.flatnonzero(counts).tolist():
        own = keys[starts[i] : starts[i] + counts[i]].tobytes()
        prompt[i] = numbers.setdefault(own, len(numbers))
        if prompt[i] == len(first):
            first.append(i)
    offsets, owned = starts[first], counts[first]
    parent, shared = shared_units(offsets, owned, keys)
    return prompt_tree(source, prompt, parent, shared * block_tokens, owned * block_tokens)


def prompt_tree(source: str, prompt: Int64s, parent: Int64s, shared_tokens: Int64s, tokens: Int64s) -> PromptTree:
    """A tree from the prompt of each request, in send order, and what is known of prompt 0, 1, ..."""
    columns = {"prompt": np.arange(len(parent)), "parent": parent, "shared_tokens": shared_tokens, "tokens": tokens}
    prompts = pl.DataFrame(columns, schema=PROMPT_SCHEMA).with_columns(_null_if_none("parent"))
    requests = pl.DataFrame({"request_index": np.arange(len(prompt)), "prompt": prompt}, schema=REQUEST_PROMPT_SCHEMA)
    return PromptTree(source, prompts, requests.filter(pl.col("prompt") != NONE))


def _null_if_none(column: str) -> pl.Expr:
    return pl.when(pl.col(column) != NONE).then(column).alias(column)
