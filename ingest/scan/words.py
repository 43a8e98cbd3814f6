"""How the scans are compiled; and eight bytes of a text at once, with what can be asked of all of them together.

``words``: the memory of the text as uint64 (little-endian: the first letter in the lowest byte), or as uint8 where the
type allows it.  ``at``: the position of a byte; eight bytes from there on must exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.files import cache_folder
from blis_replay.base.functions import decorators
from blis_replay.base.tables import word_at

_FOLDER = Path(__file__).parent

entry, compiled = decorators(_FOLDER)
_, inlined = decorators(_FOLDER, inline=True)  # small functions


def kept_in() -> Path | None:
    """The folder of the compiled scans, None where none can be written."""
    return cache_folder(_FOLDER)


Words = NDArray[np.uint64]

ONES = np.uint64(0x0101010101010101)
HIGH = np.uint64(0x8080808080808080)
_ZEROS = np.uint64(0x3030303030303030)  # the digit
_UPPER_HALVES = np.uint64(0xF0F0F0F0F0F0F0F0)
_TO_BEYOND_NINE = np.uint64(0x0606060606060606)  # which takes 9 to the last code with the upper half of a digit
_PLACES = np.uint64(0x0001020304050607)


@inlined
def byte_at(words: Words, at: int) -> Any:
    """The byte at any position."""
    return word_at(words, at) & np.uint64(0xFF)


@inlined
def has_zero_byte(word: Any) -> Any:
    """A high bit at the first byte that is 0 (and maybe at later ones), 0 if none is: subtracting 1 borrows from it."""
    return (word - ONES) & ~word & HIGH


@inlined
def first_marked(marks: Any) -> tuple[Any, Any]:
    """``(bit, place)`` of the first byte whose high bit is set: 1 in that byte, and how many are before it."""
    # The place is read off a multiplication.
    first = (marks & (~marks + np.uint64(1))) >> np.uint64(7)
    return first, np.int64((first * _PLACES) >> np.uint64(56))


@inlined
def are_digits(word: Any) -> bool:
    """Whether all eight bytes are digits."""
    return (word & _UPPER_HALVES) == _ZEROS and ((word + _TO_BEYOND_NINE) & _UPPER_HALVES) == _ZEROS


@inlined
def eight_digits(word: Any) -> Any:
    """The number whose eight digits these are: neighbours are joined to pairs, pairs to fours, and these to eight."""
    pairs = ((word - _ZEROS) * np.uint64(10 * (1 << 8) + 1) >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    fours = (pairs * np.uint64(100 * (1 << 16) + 1) >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    return fours * np.uint64(10_000 * (1 << 32) + 1) >> np.uint64(32)


def word_of(text: str) -> np.uint64:
    """Up to eight letters as the word that they are in memory."""
    return np.uint64(int.from_bytes(text.encode(), "little"))


def words_of(texts: list[str]) -> tuple[Words, NDArray[np.int64]]:
    """Texts as uint64[n, w] with zeros behind them, and their lengths, for :func:`text_stands_at`."""
    widest = max(len(text) for text in texts) // 8 + 1
    flat = np.frombuffer(b"".join(text.encode().ljust(8 * widest, b"\0") for text in texts), np.uint64)
    return flat.reshape(-1, widest), np.array([len(text) for text in texts])


@inlined
def stands_at(words: Words, at: int, word: Any, length: int) -> bool:
    """Whether these letters stand at a position; ``length``: how many they are."""
    return (word_at(words, at) ^ word) << np.uint64(64 - 8 * length) == 0


@compiled
def text_stands_at(words: NDArray[Any], at: int, texts: Words, lengths: Any, number: int) -> bool:
    """Whether a text of :func:`words_of` stands at a position; no word is read behind one that differs."""
    length = lengths[number]
    for place in range(length >> 3):
        if word_at(words, at + 8 * place) != texts[number, place]:
            return False
    rest = np.uint64(8 * (length & 7))
    last = word_at(words, at + (length & -8)) & ((np.uint64(1) << rest) - np.uint64(1))
    return rest == 0 or last == texts[number, length >> 3]
