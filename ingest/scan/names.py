"""Names that a compiled scan knows: a string of JSON is one of them, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.scan.compiled import compiled
from blis_replay.ingest.scan.json_text import BACKSLASHES, FACTOR, QUOTE, QUOTES, SPACES, UNUSUAL
from blis_replay.ingest.scan.words import (
    HIGH,
    Words,
    byte_at,
    first_marked,
    has_zero_byte,
    text_stands_at,
    word_at,
    words_of,
)

_TABLE_BITS = 9


def names_of(names: list[str]) -> tuple[Words, NDArray[np.int64], NDArray[np.int64]]:
    """Names of ASCII, numbered in their order, for :func:`name_at`, as constants of compiled code.

    Their words and lengths (``words_of``), and int64[512]: their numbers by their hash, -1 where there is none.
    """
    words, lengths = words_of(names)
    table = np.full(1 << _TABLE_BITS, -1, np.int64)
    for number, name in enumerate(names):
        place = _place_of(words[number, : len(name) // 8 + 1])
        while table[place] >= 0:
            place = (place + 1) % len(table)
        table[place] = number
    return words, lengths, table


def _place_of(words: Words) -> int:
    """What :func:`name_at` makes of the words of a name."""
    code = 0
    for word in words.tolist():
        code = ((code ^ word) * int(FACTOR)) % (1 << 64)
        code ^= code >> 32
    return code >> (64 - _TABLE_BITS)


@compiled
def name_at(words: Words, at: int, names: Words, lengths: Any, table: Any) -> tuple[int, int]:
    """``(number, end)`` of the string behind whose opening quote ``at`` is; -1 if it is none of the names.

    A string with an escape is left to the decoder, as it could be any name, and so is one beyond ASCII.
    """
    begin, code = at, np.uint64(0)
    while True:
        word = word_at(words, at)
        special = has_zero_byte(word ^ QUOTES) | has_zero_byte(word ^ BACKSLASHES)
        special |= ((word - SPACES) | word) & HIGH
        if special:
            # The lowest byte that is marked is what it seems.
            first, before = first_marked(special)
            word &= first - np.uint64(1)
            at += before
        code = (code ^ word) * FACTOR
        code ^= code >> np.uint64(32)
        if special:
            break
        at += 8
    if byte_at(words, at) != QUOTE:
        return -1, UNUSUAL
    return _number_of(words, begin, at, code, names, lengths, table), at + 1


@compiled
def name_within(text: NDArray[Any], begin: int, end: int, names: Words, lengths: Any, table: Any) -> int:
    """The number of the name that stands between two positions, -1 if it is none of the names."""
    code = np.uint64(0)
    for place in range(begin, end + 1, 8):
        word = word_at(text, place)
        if end - place < 8:
            word &= (np.uint64(1) << np.uint64(8 * (end - place))) - np.uint64(1)
        code = (code ^ word) * FACTOR
        code ^= code >> np.uint64(32)
    return _number_of(text, begin, end, code, names, lengths, table)


@compiled
def _number_of(text: NDArray[Any], begin: int, end: int, code: Any, names: Words, lengths: Any, table: Any) -> int:
    place = np.int64(code >> np.uint64(64 - _TABLE_BITS))
    while table[place] >= 0:
        number: int = table[place]
        if lengths[number] == end - begin and text_stands_at(text, begin, names, lengths, number):
            return number
        place = (place + 1) & ((1 << _TABLE_BITS) - 1)
    return -1
