"""Mooncake's trace format: a JSON object a line, prompts as ids of 512-token blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from blis_replay.blis.trace import RequestTrace
from blis_replay.ingest.recording import PrefixBlocks, Recording
from blis_replay.replay.export_arrivals import lost_of_arrivals
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import request_trace
from blis_replay.replay.prefix import with_block_size

COLUMNS = ("arrival_us", "prompt_tokens", "output_tokens")
BLOCK_TOKENS = 512


def write(recording: Recording, folder: Path) -> list[str]:
    """Write ``requests.jsonl``; returns what was lost beside whole columns, in words.

    Timestamps are whole ms where arrivals are, and have decimals where they are not.  Ids of
    512-token blocks are written as recorded, others are made of the identities that there are.
    Raises ``ReplayError`` as ``request_trace`` does.
    """
    trace, _basis = request_trace(with_block_size(recording, BLOCK_TOKENS), ReplayMode())
    prefix = recording.prefix
    verbatim = prefix is not None and prefix.block_tokens == BLOCK_TOKENS
    ids = _recorded_ids(prefix, len(trace)) if prefix is not None and verbatim else _made_ids(trace)
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as file:
        for i, hash_ids in enumerate(ids):
            whole, part = divmod(int(trace.arrival_us[i]), 1000)
            line: dict[str, object] = {
                "timestamp": whole + part / 1000 if part else whole,
                "input_length": int(trace.prompt_tokens[i]),
                "output_length": int(trace.output_tokens[i]),
            }
            file.write(json.dumps(line | ({"hash_ids": hash_ids} if hash_ids else {})) + "\n")
    lost = lost_of_arrivals(recording, trace)
    if trace.block_keys is not None and not verbatim:
        lost.append(f"prefixes that end within a block of {BLOCK_TOKENS} tokens")
    return lost


def _recorded_ids(prefix: PrefixBlocks, requests: int) -> Iterator[list[int]]:
    owned = dict(prefix.blocks.group_by("request_index", maintain_order=True).agg("block_key").iter_rows())
    return (owned.get(i, []) for i in range(requests))


def _made_ids(trace: RequestTrace) -> Iterator[list[int]]:
    """An id for each block of a prompt, the last and partial one too; what has no key is like nothing else."""
    keys = trace.block_keys
    if keys is None:
        yield from ([] for _ in range(len(trace)))
        return
    fresh = count(int(keys.keys.max(initial=-1)) + 1)
    for i, prompt_tokens in enumerate(trace.prompt_tokens.tolist()):
        known = keys.keys[keys.start[i] : keys.start[i] + keys.count[i]].tolist()
        blocks = -(-prompt_tokens // BLOCK_TOKENS)
        yield [*known, *(next(fresh) for _ in range(blocks - len(known)))]
