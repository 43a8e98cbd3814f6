"""The objects of a JSON file one by one, found by their brackets and strings alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.files import RecordedFile, Tally

# What lies between brackets and strings is taken in one run, and the end of the text matches
# too: no position is looked at twice.
_STRUCTURE = re.compile(rb'[^"{}\[\]]*+("[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]|\Z)', re.DOTALL)


def json_objects(file: RecordedFile, limit_bytes: int) -> Iterator[tuple[int, bytes]]:
    """``(ordinal from 1, text)`` of each object of a JSON array, or of objects one after the other.

    An array in the place of an object is passed on for the decoder to refuse.  Only brackets
    and strings are looked at, so a malformed object costs itself, not its neighbours.  Text
    that belongs to no object, an object that the file cuts off and one beyond the limit
    are rejected.
    """
    return objects_of(file, file.chunks(), ObjectScan(file.tally, limit_bytes))


def objects_of(file: RecordedFile, chunks: Iterable[bytes], scan: ObjectScan) -> Iterator[tuple[int, bytes]]:
    """The objects that a scan finds in the chunks of a file, from where it stands to the end."""
    held: list[bytes] = []
    held_bytes = 0
    for chunk in chunks:
        held.append(chunk)
        held_bytes += len(chunk)
        # Growing in proportion keeps the copying linear in the size of a large object.
        if held_bytes * 2 >= len(scan.buffer):
            yield from scan.feed(b"".join(held))
            held, held_bytes = [], 0
            scan.check_size(file, len(scan.buffer))
    yield from scan.feed(b"".join(held))
    scan.finish(file.damage)


class ObjectScan:
    """Finds the objects in a growing buffer; the state between two feeds."""

    def __init__(self, tally: Tally, limit_bytes: int) -> None:
        self.tally, self.limit_bytes = tally, limit_bytes
        self.buffer = b""
        self.position = 0  # scanned up to here
        self.free = 0  # end of the last object or bracket that was dealt with
        self.start: int | None = None
        self.depth = 0
        self.base: int | None = None  # depth at which records stand: 1 inside an array, else 0
        self.count = 0

    def resume(self, *, inside_array: bool) -> None:
        """Stand between two objects, of an array or of none."""
        self.base = self.depth = int(inside_array)

    def check_size(self, file: RecordedFile, size: int) -> None:
        """:class:`RecordingError` if an object that has ``size`` bytes and no end yet is beyond the limit."""
        if size > self.limit_bytes:
            raise RecordingError(
                file.path,
                self.place(),
                f"a record of more than {self.limit_bytes} bytes",
                "check that the file is whole",
            )

    def place(self) -> str:
        """The place of the object that is next, for a rejection."""
        return f"record {self.count + 1}"

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The objects that end in these next bytes."""
        keep = self.start if self.start is not None else min(self.free, self.position)
        self.buffer = self.buffer[keep:] + data
        self.position -= keep
        self.free -= keep
        self.start = None if self.start is None else 0
        for token in _STRUCTURE.finditer(self.buffer, self.position):
            text = token[1]
            if text == b'"':  # a string that goes on in the next piece
                self.position = token.start(1)
                return
            self.position = token.end()
            if len(text) == 1:
                yield from self._bracket(text, token.start(1), token.end())
        self.position = len(self.buffer)

    def _bracket(self, text: bytes, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        if self.base is None:
            self.base = 1 if text == b"[" else 0
            if text == b"[":
                self._junk(begin)
                self.depth, self.free = 1, end
                return
        if text in b"{[":
            if self.depth == self.base and self.start is None:
                self._junk(begin)
                self.start = begin
            self.depth += 1
            return
        was_inside = self.depth > 0
        self.depth = max(0, self.depth - 1)
        if self.start is not None and self.depth <= self.base:
            self.count += 1
            yield self.count, self.buffer[self.start : end]
            self.start, self.free = None, end
        elif self.start is None:
            closes_the_array = text == b"]" and was_inside and self.base == 1
            self._junk(begin if closes_the_array else end)
            self.free = end

    def _junk(self, until: int) -> None:
        between = self.buffer[self.free : until].strip(b" \t\r\n,")
        if between and between != b"\xef\xbb\xbf":
            self.tally.reject(f"before {self.place()}", f"text that is no record: {between[:60]!r}")
        self.free = until

    def finish(self, damage: str) -> None:
        """Reject what is left at the end of the content; ``damage``: why that is early, if it is."""
        if self.start is not None:
            self.tally.reject(self.place(), damage or "the file ends inside this record")
            return
        self._junk(len(self.buffer))
        if self.base is None and not self.buffer.strip():
            self.tally.reject("whole file", damage or "empty")
        elif damage or (self.base == 1 and self.depth > 0):
            self.tally.reject("end of file", damage or "the closing bracket is missing: the file is cut off")
