"""Mooncake's trace format: a JSON object a line, prompts as ids of 512-token blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from blis_replay.blis.trace import BlockKeys, RequestTrace
from blis_replay.ingest.recording import PromptTree, Recording
from blis_replay.replay.engine_overrides import with_engine
from blis_replay.replay.export_arrivals import lost_of_arrivals
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import request_trace
from blis_replay.replay.recorded_prompts import recorded_block_keys

COLUMNS = ("arrival_us", "prompt_tokens", "output_tokens")
BLOCK_TOKENS = 512


def write(recording: Recording, folder: Path) -> list[str]:
    """Write ``requests.jsonl``; returns what was lost beside whole columns, in words.

    Timestamps are whole ms where arrivals are, and have decimals where they are not.  Ids are
    numbered from 0 on, equal where blocks of 512 tokens are; where no identities are
    known there are none.
    Raises ``ReplayError`` as ``request_trace`` does.
    """
    trace, _basis = request_trace(with_engine(recording, {"block_size": BLOCK_TOKENS}, "file"), ReplayMode())
    identities = recording.prefix
    keys = trace.block_keys if identities is None else recorded_block_keys(identities, len(trace), BLOCK_TOKENS)
    ids = ([] for _ in range(len(trace))) if keys is None else _ids(keys, trace)
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
    if keys is not None and not (identities and _in_blocks(identities)):
        lost.append(f"prefixes that end within a block of {BLOCK_TOKENS} tokens")
    return lost


def _in_blocks(tree: PromptTree) -> bool:
    """Whether what prompts share ends with a block of this format."""
    return bool((tree.prompts.select("shared_tokens", "tokens").to_numpy() % BLOCK_TOKENS == 0).all())


def _ids(keys: BlockKeys, trace: RequestTrace) -> Iterator[list[int]]:
    """An id for each block of a prompt, the last and partial one too: beyond its keys one like no other.

    A prompt without any key has no ids.
    """
    fresh = count(int(keys.keys.max(initial=-1)) + 1)
    for i, prompt_tokens in enumerate(trace.prompt_tokens.tolist()):
        blocks = -(-prompt_tokens // BLOCK_TOKENS) if keys.count[i] else 0
        known = keys.keys[keys.start[i] : keys.start[i] + min(keys.count[i], blocks)].tolist()
        yield [*known, *(next(fresh) for _ in range(blocks - len(known)))]
