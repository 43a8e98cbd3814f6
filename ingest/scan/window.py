"""The part of a stream that a compiled scan is working on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from blis_replay.ingest.scan.json_text import PADDING_BYTES, Bytes
from blis_replay.ingest.scan.words import Words

# Small enough to stay in a processor's cache from the reading to the scanning.
_USUAL_BYTES = 2 << 20


class Window:
    """Bytes of a stream from ``at`` to ``end`` in ``text``, with zeros behind them; ``words`` is the same memory."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self.text: Bytes
        self.words: Words
        self.at = self.end = 0
        self._resize(_USUAL_BYTES)

    def refill(self) -> bool:
        """Fill up behind what is not used yet; False if nothing is left to fill up with.

        What is not used yet moves to the front; a window that is still half full of it doubles.
        """
        unused = self.end - self.at
        self.text[:unused] = self.text[self.at : self.end].copy()
        self.at, self.end = 0, unused
        usual = max(_USUAL_BYTES, 2 * unused)
        while self.end < usual and (chunk := next(self._chunks, b"")):
            if self.end + len(chunk) > self._room:
                self._resize(max(usual, self.end + len(chunk)))
            self.text[self.end : self.end + len(chunk)] = np.frombuffer(chunk, np.uint8)
            self.end += len(chunk)
        self.text[self.end : self.end + PADDING_BYTES] = 0
        return self.end > unused

    def take(self, begin: int, end: int) -> bytes:
        """The bytes between two positions."""
        return self.text[begin:end].tobytes()

    def rest(self) -> Iterator[bytes]:
        """What is not used yet, and the chunks that follow."""
        yield self.take(self.at, self.end)
        yield from self._chunks

    def _resize(self, room: int) -> None:
        self._room = room
        words = np.zeros((room + PADDING_BYTES) // 8 + 1, np.uint64)
        text = words.view(np.uint8)
        if self.end:
            text[: self.end] = self.text[: self.end]
        self.text, self.words = text, words
