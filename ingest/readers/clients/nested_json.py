"""Values at chosen places of a JSON document of any size, without holding the document.

For results that are one object with the records deep inside it, or with one array a
column; flat records are read with ``json_records.json_objects``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ijson

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.files import RecordedFile

MAX_DEPTH = 64
# One wanted value, and the text between two tokens: a record of a request, a returned text.
MAX_VALUE_EVENTS = 1 << 22
MAX_TOKEN_BYTES = 256 << 20
_READ_BYTES = 64 << 10

# Ordinal of the document in the file (from 0), then keys and places in arrays.
JsonPath = tuple[str | int, ...]


def wanted_values(file: RecordedFile, wanted: Callable[[JsonPath], bool]) -> Iterator[tuple[JsonPath, Any]]:
    """``(path, value)`` of every value whose path is ``wanted``, in file order; documents may follow each other.

    What lies inside a wanted value is not asked for again.  Where the text stops being
    JSON, or is cut off, the place is rejected and the values before it stand.  Raises
    :class:`RecordingError` if a value is larger than any that such a file can have.
    """
    walk = _Walk(file, wanted)
    source = _Bounded(file)
    try:
        for event, value in ijson.basic_parse(source, use_float=True, multiple_values=True):
            source.since_token = 0
            if walk.feed(event, value):
                yield walk.taken
    except (ijson.JSONError, ValueError, OverflowError) as error:
        file.tally.reject(walk.place(), file.damage or f"no valid JSON ({_problem(error)})")
        return
    if file.damage:
        file.tally.reject(walk.place(), file.damage)


def place_of(path: JsonPath) -> str:
    """A path in words: ``benchmarks[0].requests.successful[3]``; later documents of a file by their number."""
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:60]}" for part in path[1:]).lstrip(".")
    document = f"document {int(path[0]) + 1}"
    return words if path[0] == 0 and words else ", ".join(filter(None, (document, words)))


def _problem(error: Exception) -> str:
    said = error.args[0] if error.args else ""
    words = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    # What follows quotes the file, prompts included.
    return words.strip().partition("\n")[0]


class _Bounded:
    """The file for ijson: small reads, and an end to a token that never ends."""

    def __init__(self, file: RecordedFile) -> None:
        self.file, self.since_token = file, 0
        self.chunks = file.chunks()
        self.held = memoryview(b"")

    def read(self, size: int) -> bytes:
        if size == 0:
            return b""
        if not self.held:
            self.held = memoryview(next(self.chunks, b""))
        piece, self.held = bytes(self.held[:_READ_BYTES]), self.held[_READ_BYTES:]
        self.since_token += len(piece)
        if self.since_token > MAX_TOKEN_BYTES:
            raise RecordingError(
                self.file.path, "", f"a text of more than {MAX_TOKEN_BYTES >> 20} MB in it", "check that it is whole"
            )
        return piece


class _Walk:
    """The place in the document, and the value that is being taken out of it."""

    def __init__(self, file: RecordedFile, wanted: Callable[[JsonPath], bool]) -> None:
        self.file, self.wanted = file, wanted
        self.path: list[str | int] = [0]
        self.builder: ijson.ObjectBuilder | None = None
        self.depth = self.events = 0  # of the value being built
        self.taken: tuple[JsonPath, Any] = ((), None)

    def place(self) -> str:
        return place_of(tuple(self.path))

    def feed(self, event: str, value: Any) -> bool:
        """Take one event; true if a wanted value is complete (``taken``)."""
        if self.builder is not None:
            return self._build(self.builder, event, value)
        if event == "map_key":
            self.path[-1] = value
            return False
        if event in ("end_map", "end_array"):
            self.path.pop()
            self._next()
            return False
        if self.wanted(tuple(self.path)):
            self.builder, self.depth, self.events = ijson.ObjectBuilder(), 0, 0
            return self._build(self.builder, event, value)
        if event in ("start_map", "start_array"):
            self._bounded(len(self.path) < MAX_DEPTH, f"nested deeper than {MAX_DEPTH} levels")
            self.path.append("" if event == "start_map" else 0)
        else:
            self._next()
        return False

    def _build(self, builder: ijson.ObjectBuilder, event: str, value: Any) -> bool:
        self.events += 1
        self.depth += (event in ("start_map", "start_array")) - (event in ("end_map", "end_array"))
        self._bounded(self.depth + len(self.path) < MAX_DEPTH, f"nested deeper than {MAX_DEPTH} levels")
        self._bounded(self.events < MAX_VALUE_EVENTS, f"a record of more than {MAX_VALUE_EVENTS} values")
        builder.event(event, value)
        if self.depth:
            return False
        self.taken = (tuple(self.path), builder.value)
        self.builder = None
        self._next()
        return True

    def _next(self) -> None:
        if isinstance(self.path[-1], int):
            self.path[-1] += 1

    def _bounded(self, within: bool, problem: str) -> None:
        if not within:
            raise RecordingError(self.file.path, self.place(), problem, "check that the file is what its name says")
