"""Hashes of a prompt's text, whole and piece by piece, for compiled scans."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.scan.compiled import compiled, entry
from blis_replay.ingest.scan.json_text import digest, rotated_product
from blis_replay.ingest.scan.words import Words, word_at

Int64s = NDArray[np.int64]
Hashes = NDArray[np.uint32]

_LOW_HALF = np.uint64(0xFFFFFFFF)


@compiled
def prompt_hashes(words: Words, spans: Any, hashes: Any, place: int) -> int:
    """A hash of a prompt; those of all up to each whole 16 bytes of its text go to ``hashes`` from ``place``.

    ``spans``: where the text begins and ends, and the same of all else that sets prompts apart
    (negative: there is no such thing).
    """
    other = np.uint64(0)
    for span in range(2, len(spans), 2):
        other = rotated_product(other ^ np.uint64(span))
        if spans[span] >= 0:
            other = rotated_product(other ^ np.uint64(digest(words, spans[span], spans[span + 1])))
    begin, end = spans[0], spans[1]
    so_far, at = other, begin
    for _ in range((end - begin) >> 4):
        so_far = rotated_product(rotated_product(so_far ^ word_at(words, at)) ^ word_at(words, at + 8))
        hashes[place] = so_far & _LOW_HALF  # which the rotation has made of the high bits: all others bear on them
        at += 16
        place += 1
    whole: Any = np.int64(rotated_product(np.uint64(digest(words, begin, end)) ^ other))
    return whole


@entry
def hashes_of(words: Words, spans: Int64s, hashes: Hashes) -> int:
    """``prompt_hashes`` from place 0."""
    return prompt_hashes(words, spans, hashes, 0)
