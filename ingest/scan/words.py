"""How the scans are compiled; and eight bytes of a text at once, with what can be asked of all of them together.

A word has the first letter in its lowest byte.  ``at``: the position of a byte; eight bytes from there on must exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.functions import cache_folder, decorators
from blis_replay.base.tables import word_at

_FOLDER = Path(__file__).parent

entry, compiled = decorators(_FOLDER)
_, inlined = decorators(_FOLDER, inline=True)  # small functions


def kept_in() -> Path | None:
    """The folder of the compiled scans, None where none can be written."""
    return cache_folder(_FOLDER)


Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]

ONES = np.uint64(0x0101010101010101)
HIGH = np.uint64(0x8080808080808080)
_PLACES = np.uint64(0x0001020304050607)


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


def word_of(text: str) -> np.uint64:
    """Up to eight letters as the word that they are in memory."""
    return np.uint64(int.from_bytes(text.encode(), "little"))


def words_of(texts: list[str]) -> tuple[Words, NDArray[np.int64]]:
    """Texts as uint64[n, w] with zeros behind them, and their lengths, for :func:`text_stands_at`."""
    widest = max(len(text) for text in texts) // 8 + 1
    flat = np.frombuffer(b"".join(text.encode().ljust(8 * widest, b"\0") for text in texts), np.uint64)
    return flat.reshape(-1, widest), np.array([len(text) for text in texts])


@inlined
def stands_at(text: Bytes, at: int, word: Any, length: int) -> bool:
    """Whether these letters stand at a position; ``length``: how many they are."""
    return (word_at(text, at) ^ word) << np.uint64(64 - 8 * length) == 0


@compiled
def text_stands_at(text: Bytes, at: int, texts: Words, lengths: Any, number: int) -> bool:
    """Whether a text of :func:`words_of` stands at a position; no word is read behind one that differs."""
    length = lengths[number]
    for place in range(length >> 3):
        if word_at(text, at + 8 * place) != texts[number, place]:
            return False
    rest = np.uint64(8 * (length & 7))
    last = word_at(text, at + (length & -8)) & ((np.uint64(1) << rest) - np.uint64(1))
    return rest == 0 or last == texts[number, length >> 3]
