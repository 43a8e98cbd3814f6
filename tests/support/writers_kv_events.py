"""``kv_events.jsonl``: what a server publishes of its KV cache, as bytes."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from token_ids import answer_token_ids, block_chains, prompt_token_ids

from blis_replay_labs.planted.experiment import SyntheticTruth


@dataclass(frozen=True)
class _Fill:
    """Blocks ``first`` to ``last`` (exclusive) of a request were filled by a step (a row of ``steps``)."""

    step: int
    request: int
    first: int
    last: int


def kv_events(truth: SyntheticTruth) -> bytes:
    """One batch per step with events, stamped with the step's end; none where prefix caching is off."""
    if not truth.spec.prefix_caching:
        return b""
    cache = _Cache(truth)
    batches: dict[int, list[list[Any]]] = defaultdict(list)
    for fill in sorted((f for r in range(len(truth)) for f in _fills(truth, r)), key=lambda f: (f.step, f.request)):
        batches[fill.step] += cache.events(fill)
    ends_us = truth.result.step_end_us
    lines = (
        json.dumps([truth.epoch_ns(ends_us[step]) / 1e9, events, 0, None], separators=(",", ":"))
        for step, events in batches.items()
        if events
    )
    return "".join(f"{line}\n" for line in lines).encode()


def _fills(truth: SyntheticTruth, request: int) -> list[_Fill]:
    """The last token of an answer is never computed, so it fills no block."""
    steps = truth.token_steps(request)
    full = (int(truth.trace.prompt_tokens[request]) + np.arange(len(steps))) // truth.spec.engine.block_size
    before = np.concatenate([np.zeros(1, np.int64), full])[:-1]
    grown = np.flatnonzero(full > before)
    return [_Fill(int(steps[i]), request, int(before[i]), int(full[i])) for i in grown]


class _Cache:
    """Blocks that are stored, by hash."""

    def __init__(self, truth: SyntheticTruth) -> None:
        self.truth = truth
        self.stored: set[int] = set()
        self.answers: dict[int, int] = {}  # hash -> step after which its request needs it no longer, oldest first
        self.hashes: dict[int, list[int]] = {}  # of the blocks of a request

    def events(self, fill: _Fill) -> list[list[Any]]:
        """What is published when a step fills some blocks: removals, then the blocks that are new."""
        truth, block_size = self.truth, self.truth.spec.engine.block_size
        tokens = np.concatenate([prompt_token_ids(truth, fill.request), answer_token_ids(truth, fill.request)])
        if fill.request not in self.hashes:
            self.hashes[fill.request] = [
                int.from_bytes(hashlib.blake2b(chain, digest_size=8).digest(), "big")
                for chain in block_chains(tokens, block_size)
            ]
        hashes = self.hashes[fill.request]
        new = [block for block in range(fill.first, fill.last) if hashes[block] not in self.stored]
        if not new:
            return []
        first = new[0]
        added, parent = hashes[first : fill.last], hashes[first - 1] if first else None
        removed = self._removed(fill.step, len(added))
        self.stored |= set(added)
        in_prompt = int(truth.trace.prompt_tokens[fill.request]) // block_size
        last_step = int(truth.result.last_step[fill.request])
        self.answers |= {hashes[block]: last_step for block in new if block >= in_prompt}
        ids = tokens[first * block_size : fill.last * block_size].tolist()
        stored = ["BlockStored", added, parent, ids, block_size, None, "GPU", None]
        return [["BlockRemoved", removed, "GPU"], stored] if removed else [stored]

    def _removed(self, step: int, wanted: int) -> list[int]:
        """Hashes of the blocks that make room for as many."""
        pool = self.truth.spec.engine.num_gpu_blocks
        surplus = 0 if pool is None else max(0, len(self.stored) + wanted - (pool - 1))
        removed = [key for key, last_step in self.answers.items() if last_step < step][:surplus]
        self.stored -= set(removed)
        for key in removed:
            del self.answers[key]
        return removed
