"""Distinct prompts of a file by hashes of their text: which are repeated, and how far others begin alike.

No tokenizer is at hand, so what two texts share is turned into tokens at the ratio of text to tokens of the prompts
that share it.  The text is that of the request's body, in JSON: of a chat, its messages.  Prompts for different models,
with different tools or salts, share nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.ingest.readers.requests import NONE, RawPrompts, shared_units

# Texts are compared in pieces of this many bytes, some four tokens.
PIECE_BYTES = 16
# Part of a hash that is kept.  Two texts with equal ones by chance part at the next piece.
HASH = np.uint32
Hashes = NDArray[np.uint32]

# Prompts that show how far the ratio of text to tokens scatters.
_FEWEST_PROMPTS = 10
# Standard errors that hold 99.7 % of a normal distribution.
_STANDARD_ERRORS = 3


@dataclass
class PromptTexts:
    """The distinct prompts so far; the chained hashes of their pieces are appended to the flat file ``stream``."""

    stream: BinaryIO
    numbers: dict[int, int] = field(default_factory=dict)
    text_bytes: array[int] = field(default_factory=lambda: array("q"))

    def number(self, digest: int, text_bytes: int, hashes: memoryview) -> int:
        """The number of the prompt with that digest; ``hashes``: the memory of those of all up to each whole piece."""
        known = self.numbers.setdefault(digest, len(self.numbers))
        if known == len(self.text_bytes):
            self.text_bytes.append(text_bytes)
            self.stream.write(hashes)
        return known


def raw_prompts(texts: PromptTexts, path: Path, prompt: Int64s, prompt_tokens: Int64s) -> RawPrompts | None:
    """The prompts as a tree; None without prompts, or without any length.

    ``path``: the file of ``texts.stream``, closed; ``prompt``, ``prompt_tokens``: int64[n] of
    the requests, the prompt or ``NONE``, the tokens or 0 where they are not known.
    """
    prompt, order = _by_first_use(prompt)
    every = np.array(texts.text_bytes, np.int64)
    text = every[order]
    named = prompt != NONE
    tokens = np.zeros(len(text), np.int64)
    np.maximum.at(tokens, prompt[named], prompt_tokens[named])
    if not tokens.any():
        return None
    known = tokens > 0
    bytes_per_token = float(text[known].sum() / tokens[known].sum())
    tokens[~known] = np.maximum(text[~known] / bytes_per_token, 1).astype(np.int64)
    pieces = text // PIECE_BYTES
    hashes = np.asarray(np.memmap(path, HASH, "r")) if pieces.any() else np.empty(0, HASH)
    offsets = np.cumsum(every // PIECE_BYTES) - every // PIECE_BYTES
    parent, shared = shared_units(offsets[order], pieces, hashes)
    estimate, error = _shared_tokens(parent, shared, text, tokens)
    source = (
        f"prompt texts, {len(text):,} distinct ones of {bytes_per_token:.2f} bytes a token: "
        f"repeated ones are exact, {_how_sure(estimate, error, known)}"
    )
    return RawPrompts(source, prompt, parent, estimate, tokens)


def _by_first_use(prompt: Int64s) -> tuple[Int64s, Int64s]:
    """The prompts of requests numbered in the order of their first use, and the numbers that these had."""
    used, first, inverse = np.unique(prompt, return_index=True, return_inverse=True)
    first[used == NONE] = len(prompt)
    order = np.argsort(first, kind="stable")[: np.count_nonzero(used != NONE)]
    numbers = np.full(len(used), NONE, np.int64)
    numbers[order] = np.arange(len(order))
    return numbers[inverse.reshape(-1)], used[order]


def _shared_tokens(parent: Int64s, shared: Int64s, text: Int64s, tokens: Int64s) -> tuple[Int64s, Floats]:
    """Tokens that each prompt shares with its parent, and their standard error.

    Those that share the same text are taken together with their parent.  Let the bytes of a
    token scatter about ``ratio`` with some variance, each token by itself.  The T shared
    tokens are estimated twice, weighted by variance.  The shared text has T times the variance; the n - T tokens
    that the m prompts have beyond it on average have (n - T) / m times.
    """
    children = np.flatnonzero(parent != NONE)
    estimate, error = np.zeros(len(parent), np.int64), np.zeros(len(parent))
    if not len(children):
        return estimate, error
    groups, group = np.unique(np.column_stack([parent, shared])[children], axis=0, return_inverse=True)
    group = group.reshape(-1)
    members = np.bincount(group) + 1
    mean_tokens = (np.bincount(group, tokens[children]) + tokens[groups[:, 0]]) / members
    mean_text = (np.bincount(group, text[children]) + text[groups[:, 0]]) / members
    # Texts part somewhere in the piece after the last one that they share.
    same = np.minimum(groups[:, 1] * PIECE_BYTES + PIECE_BYTES / 2, mean_text)
    roughly = np.maximum(same * mean_tokens / mean_text, 1)
    ratio = _bytes_per_token(text, tokens, children, same[group], roughly[group])
    variance = float(np.sum((text - ratio * tokens) ** 2) / tokens.sum()) / ratio**2
    by_shared, by_own = 1 / roughly, members / np.maximum(mean_tokens - roughly, 1)
    beyond = mean_tokens - (mean_text - same) / ratio
    exact = (by_shared * same / ratio + by_own * beyond) / (by_shared + by_own)
    most = np.minimum(tokens[children], tokens[parent[children]])
    estimate[children] = np.clip(exact[group], 0, most).astype(np.int64)
    error[children] = np.sqrt(variance / (by_shared + by_own) + (PIECE_BYTES / ratio) ** 2 / 12)[group]
    return estimate, error


def _bytes_per_token(text: Int64s, tokens: Int64s, children: Int64s, shared_text: Floats, shared: Floats) -> float:
    """Bytes of a token, over texts without what they share with their parent."""
    own_text, own_tokens = text.astype(np.float64), tokens.astype(np.float64)
    own_text[children] -= shared_text
    own_tokens[children] -= shared
    return float(own_text.sum() / own_tokens.sum())


def _how_sure(estimate: Int64s, error: Floats, known: Bools) -> str:
    if not estimate.any():
        return "no two others begin alike"
    if np.count_nonzero(known) < _FEWEST_PROMPTS:
        return "how exact shared beginnings are is not known"
    return f"shared beginnings to {np.ceil(_STANDARD_ERRORS * error.max()):.0f} tokens"
