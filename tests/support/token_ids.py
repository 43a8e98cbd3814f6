"""Token ids of the prompts and answers of a synthetic experiment."""

from __future__ import annotations

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay_labs.planted.experiment import SyntheticTruth

VOCABULARY = 32_000


def prompt_token_ids(truth: SyntheticTruth, request: int) -> Int64s:
    """int64[prompt tokens]: the system prompt of the request's group, then the question of its prompt."""
    group, prompt = int(truth.group[request]), int(truth.prompt[request])
    length, system_tokens = int(truth.trace.prompt_tokens[request]), truth.spec.shared_prefix.system_prompt_tokens
    return np.concatenate([_text(truth, 2, group, system_tokens), _text(truth, 3, prompt, length)])[:length]


def answer_token_ids(truth: SyntheticTruth, request: int) -> Int64s:
    """int64[tokens asked for]: like those of no other request."""
    return _text(truth, 4, request, int(truth.trace.output_tokens[request]))


def block_chains(token_ids: Int64s, block_tokens: int, *, partial: bool = False) -> list[bytes]:
    """For each full block what it and all before it hold; ``partial``: for the rest behind them too."""
    end = len(token_ids) + block_tokens if partial else len(token_ids) + 1
    return [token_ids[:stop].tobytes() for stop in range(block_tokens, end, block_tokens)]


def _text(truth: SyntheticTruth, kind: int, number: int, length: int) -> Int64s:
    """Tokens at random, but two texts of a kind differ in their first."""
    random = np.random.Generator(np.random.PCG64([truth.spec.seed, kind, number]))
    tokens: Int64s = random.integers(0, VOCABULARY, length)
    tokens[:1] = number
    return tokens
