"""The objects of a JSON file one by one, found by their brackets and strings alone."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ijson
import msgspec

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.documents import DECODE_ERRORS
from blis_replay.ingest.readers.files import RecordedFile, Tally, lines

# What lies between brackets and strings is taken in one run, and the end of the text matches
# too: no position is looked at twice.
_STRUCTURE = re.compile(rb'[^"{}\[\]]*+("[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]|\Z)', re.DOTALL)


def json_objects(file: RecordedFile, limit_bytes: int) -> Iterator[tuple[int, bytes]]:
    """``(ordinal from 1, text)`` of each object of a JSON array, or of objects one after the other.

    An array in the place of an object is passed on for the decoder to refuse.  Only brackets and strings are looked at,
    so a malformed object costs itself, not its neighbours.  Text that belongs to no object, an object that the file
    cuts off and one beyond the limit are rejected.
    """
    scan = ObjectScan(file.tally, limit_bytes)
    held, held_bytes = [], 0
    for chunk in file.chunks():
        held.append(chunk)
        held_bytes += len(chunk)
        # Growing in proportion keeps the copying linear in the size of a large object.
        if held_bytes * 2 >= len(scan.buffer):
            yield from scan.feed(b"".join(held))
            held, held_bytes = [], 0
            if len(scan.buffer) > limit_bytes:  # of an object that has no end yet
                problem = f"a record of more than {limit_bytes} bytes"
                raise RecordingError(file.path, scan.place(), problem, "check that the file is whole")
    yield from scan.feed(b"".join(held))
    scan.finish(file.damage)


def decoded_records(
    file: RecordedFile, raws: Iterable[tuple[str, bytes]], decoder: msgspec.json.Decoder[Any], expected: str = ""
) -> Iterator[tuple[str, Any]]:
    """Place and content of each record that is not blank; one that cannot be decoded is rejected.

    Where nothing follows such a record, the file is cut off there.  ``expected``: what was wanted, before the reason.
    """
    broken: tuple[str, str] | None = None
    for place, raw in raws:
        if not raw.strip():
            continue
        if broken:
            file.tally.reject(*broken)
            broken = None
        try:
            record = decoder.decode(raw)
        except DECODE_ERRORS as error:
            broken = place, f"{expected} ({error})" if expected else str(error)
            continue
        yield place, record
    if broken:
        file.tally.cut_off(*broken)


def numbered_lines(file: RecordedFile, limit_bytes: int) -> Iterator[tuple[str, bytes]]:
    """The lines of a file, each with its place in words."""
    return ((f"line {number}", line) for number, line in lines(file, limit_bytes))


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
            # Not the text itself: it may be of a prompt.
            self.tally.reject(f"before {self.place()}", f"{len(between)} bytes of text that are not a record")
        self.free = until

    def finish(self, damage: str) -> None:
        """Reject what is left at the end of the content; ``damage``: why that is early, if it is."""
        if self.start is not None:
            self.tally.cut_off(self.place(), damage or "the file ends inside this record")
            return
        self._junk(len(self.buffer))
        if self.base is None and not self.buffer.strip():
            self.tally.reject("whole file", damage or "empty")
        elif damage or (self.base == 1 and self.depth > 0):
            self.tally.cut_off("end of file", damage or "the closing bracket is missing")


MAX_LINE_BYTES = 1 << 20
# Beyond it an unclosed quote has swallowed the rows that follow.
_MAX_CELL_CHARS = 1 << 17


def named_rows(
    file: RecordedFile, required: Sequence[str], mend: str, separator: str = ","
) -> Iterator[tuple[str, dict[str, str]]]:
    """Each data row with its place: its cells by column name.

    Raises :class:`RecordingError`, with ``mend``, if a ``required`` column is missing.  Malformed rows, and rows with
    another number of cells than the header, are rejected and counted by line.  Empty lines are skipped.
    """
    reader = csv.reader((text for _number, text in text_lines(file, MAX_LINE_BYTES)), delimiter=separator)
    header = _next_row(file, reader)
    if header is None:
        raise RecordingError(file.path, "line 1", "no header line", "copy the file again")
    missing = [name for name in required if name not in header]
    if missing:
        raise RecordingError(file.path, "line 1", f"columns {', '.join(missing)} are missing", mend)
    while (cells := _next_row(file, reader)) is not None:
        place = f"line {reader.line_num}"
        if len(cells) == len(header):
            yield place, dict(zip(header, cells, strict=True))
        elif cells:
            file.tally.reject(place, f"{len(cells)} columns where the header has {len(header)}")


def text_lines(file: RecordedFile, limit_bytes: int) -> Iterator[tuple[int, str]]:
    """``(line number from 1, line as text that ends in a newline)``; longer lines are rejected."""
    for number, line in lines(file, limit_bytes):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        # A lone carriage return inside a line is data damage, not a line end of ours.
        yield number, text.decode("utf-8", "replace").rstrip("\r").replace("\r", " ") + "\n"


def cells_of(line: str, separator: str = ",") -> list[str]:
    """The cells of a row that is one line, of whatever length; raises ``csv.Error``."""
    # The limit is the process's, so it is raised for no longer than a row.
    limit = csv.field_size_limit(len(line) + 1)
    try:
        return next(csv.reader([line], delimiter=separator), [])
    finally:
        csv.field_size_limit(limit)


def _next_row(file: RecordedFile, reader: Any) -> list[str] | None:
    while True:
        limit = csv.field_size_limit(_MAX_CELL_CHARS)
        try:
            return next(reader, None)
        except csv.Error as error:
            file.tally.reject(f"line {reader.line_num}", f"no valid CSV ({error})")
        finally:
            csv.field_size_limit(limit)


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
    path: list[str | int] = [0]
    builder: ijson.ObjectBuilder | None = None
    depth = events = 0  # of the value being built
    source = _Bounded(file)
    try:
        for event, value in ijson.basic_parse(source, use_float=True, multiple_values=True):
            source.since_token = 0
            begins, ends = event in ("start_map", "start_array"), event in ("end_map", "end_array")
            if builder is None and event == "map_key":
                path[-1] = value
                continue
            if builder is None and not ends and wanted(tuple(path)):
                builder, depth, events = ijson.ObjectBuilder(), 0, 0
            _check_size(file, path, depth + begins, events)
            if builder is not None:
                builder.event(event, value)
                depth, events = depth + begins - ends, events + 1
                if depth:
                    continue
                yield tuple(path), builder.value
                builder = None
            elif begins:
                path.append("" if event == "start_map" else 0)
                continue
            elif ends:
                path.pop()
            if isinstance(path[-1], int):
                path[-1] += 1
    except (ijson.JSONError, ValueError, OverflowError) as error:
        file.tally.cut_off(place_of(tuple(path)), file.damage or f"no valid JSON ({_problem(error)})")
        return
    if file.damage:
        file.tally.cut_off(place_of(tuple(path)), file.damage)


def _check_size(file: RecordedFile, path: list[str | int], depth: int, events: int) -> None:
    problem = ""
    if depth + len(path) > MAX_DEPTH:
        problem = f"nested deeper than {MAX_DEPTH} levels"
    elif events >= MAX_VALUE_EVENTS:
        problem = f"a record of more than {MAX_VALUE_EVENTS} values"
    if problem:
        raise RecordingError(file.path, place_of(tuple(path)), problem, "check that the file is what its name says")


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


# A text (to its end, or that of the bytes), or a number that Python writes and JSON does not have.
_TEXT_OR_NOT_FINITE = re.compile(rb'"(?:[^"\\]|\\.)*"?|-?\bInfinity\b|\bNaN\b', re.DOTALL)
_ESCAPED = re.compile(rb"\\.", re.DOTALL)


class _Bounded:
    """The file for ijson: small reads, an end to a token that never ends, and numbers that are not finite as texts."""

    def __init__(self, file: RecordedFile) -> None:
        self.file, self.since_token = file, 0
        self.chunks = file.chunks()
        self.held = memoryview(b"")
        self.rest, self.in_text = b"", False

    def read(self, size: int) -> bytes:
        if size == 0:
            return b""
        piece, read = b"", b"more"
        while read and not piece:
            if not self.held:
                self.held = memoryview(next(self.chunks, b""))
            read, self.held = bytes(self.held[:_READ_BYTES]), self.held[_READ_BYTES:]
            piece = self._finite(self.rest + read, last=not read)
        self.since_token += len(piece)
        if self.since_token > MAX_TOKEN_BYTES:
            problem = f"a text of more than {MAX_TOKEN_BYTES >> 20} MB in it"
            raise RecordingError(self.file.path, "", problem, "check that it is whole")
        return piece

    def _finite(self, content: bytes, last: bool) -> bytes:
        """The bytes up to their last comma, where no token is cut in two, with numbers that are not finite as texts."""
        end = len(content) if last else content.rfind(b",") + 1 or len(content.rstrip(b"\\"))
        piece, self.rest = content[:end], content[end:]
        before = b'"' if self.in_text else b""
        quotes = (_ESCAPED.sub(b"", piece) if b"\\" in piece else piece).count(b'"')
        self.in_text ^= bool(quotes % 2)
        if b"Infinity" not in piece and b"NaN" not in piece:
            return piece
        plain = _TEXT_OR_NOT_FINITE.sub(lambda one: one[0] if one[0][:1] == b'"' else b'"%b"' % one[0], before + piece)
        return plain[len(before) :]
