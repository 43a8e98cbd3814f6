"""OTLP files cut into records, whatever wrote them (trace-formats 0.3).

A record is one JSON object with ``resourceSpans``.  Records stand in lines, in an array, one after the other, or behind
their length (4 bytes, big-endian), each compressed with zstd (``otelcol``'s file exporter with ``compression: zstd``).
Protobuf, behind a length or as one message, becomes JSON.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator

from blis_replay.ingest.readers import files
from blis_replay.ingest.readers.otlp.protobuf import begins_like_traces, json_of, resources_of
from blis_replay.ingest.readers.records import json_objects

# Cut out, copied and decoded, a record takes five times its size.
MAX_RECORD_BYTES = 128 << 20
_LENGTH_BYTES = 4
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSON_START = re.compile(rb'\{\s*+"resourceSpans"\s*+:')
_BEFORE_JSON = b" \t\r\n\f\v[,"


def recognises(head: bytes) -> bool:
    """Whether a file whose (decompressed) content starts with ``head`` holds OTLP traces; never raises."""
    if _begins_a_line(head[: files.HEAD_BYTES].removeprefix(_BYTE_ORDER_MARK)):
        return True
    return _begins_with_json(framed := _first_framed(head)) or begins_like_traces(framed) or begins_like_traces(head)


def records(file: files.RecordedFile) -> tuple[str, Iterator[tuple[int, bytes]]]:
    """What a record of an OTLP file is called (``line``, ``object``, ...), and ``(number from 1, content)`` of each.

    JSON lines where nothing speaks for another framing.  What the file cuts off, and what is longer than 128 MB, is
    rejected with its place; the rest is used.
    """
    head = file.head(files.HEAD_BYTES)
    if _first_framed(head):
        return "frame", _framed(file)
    if begins_like_traces(head):
        resources = enumerate(resources_of(file.content(MAX_RECORD_BYTES)), 1)
        return "resource", (one for at, raw in resources for one in _as_json(file, at, raw, "resource"))
    text = head.removeprefix(_BYTE_ORDER_MARK).lstrip()
    if _spans_lines(text):
        return "object", json_objects(file, MAX_RECORD_BYTES)
    return "line", records_in_lines(files.lines(file, MAX_RECORD_BYTES))


def records_in_lines(numbered: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The content of lines that are not blank."""
    for number, line in numbered:
        content = (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).strip()
        if content:
            yield number, content


def _begins_with_json(content: bytes) -> bool:
    return _JSON_START.match(content.lstrip(_BEFORE_JSON)) is not None


def _begins_a_line(text: bytes) -> bool:
    """Whether a JSON record stands at the beginning of a line, or of the text.

    Looked for from the record backwards: blank lines cost a pattern that begins at each of them their square.
    """
    for match in _JSON_START.finditer(text):
        before = text[: match.start()]
        kept = len(before.rstrip(_BEFORE_JSON))
        if not kept or b"\n" in before[kept:]:
            return True
    return False


def _spans_lines(text: bytes) -> bool:
    """Whether the file starts with an array, or with an object spread over indented lines."""
    first, newline, rest = text.partition(b"\n")
    spread = newline and first.rstrip()[-1:] in (b"{", b"[", b",", b":") and rest[:1] in (b" ", b"\t", b"\r", b"\n")
    return text.startswith(b"[") or bool(spread)


def _first_framed(head: bytes) -> bytes:
    """How the content of a first length-framed message begins, ``b""`` if the file does not start with one."""
    size, content = int.from_bytes(head[:_LENGTH_BYTES], "big"), head[_LENGTH_BYTES:]
    if not 0 < size <= MAX_RECORD_BYTES:
        return b""
    if content.startswith(files.ZSTD_MAGIC):
        # Framed it is, even if nothing can be unpacked.
        return files.zstd_head(content[:size], files.HEAD_BYTES) or files.ZSTD_MAGIC
    framed = content[:size]
    return framed if _begins_with_json(framed) or begins_like_traces(framed) else b""


def _framed(file: files.RecordedFile) -> Iterator[tuple[int, bytes]]:
    source = io.BufferedReader(files.Pieces(file.chunks()))
    number = 1
    while size_bytes := source.read(_LENGTH_BYTES):
        size = int.from_bytes(size_bytes, "big")
        if len(size_bytes) == _LENGTH_BYTES and size > MAX_RECORD_BYTES:
            file.tally.reject(f"frame {number}", f"its length says {size} bytes: nothing after it can be found")
            while source.read(files.CHUNK_BYTES):  # the file's hash is of all of it
                pass
            return
        content = source.read(size)
        if len(size_bytes) < _LENGTH_BYTES or len(content) < size:
            file.tally.reject(f"frame {number}", file.damage or "the file ends inside this frame")
            return
        yield from _unpacked(file, number, content)
        number += 1
    if file.damage:
        file.tally.reject(f"frame {number}", file.damage)


def _unpacked(file: files.RecordedFile, number: int, content: bytes) -> Iterator[tuple[int, bytes]]:
    """The content of a frame as JSON, decompressed if need be."""
    if not content.startswith(files.ZSTD_MAGIC):
        yield from _as_json(file, number, content)
        return
    limit_bytes = min(MAX_RECORD_BYTES, max(files.FREE_EXPANSION_BYTES, files.MAX_EXPANSION_RATIO * len(content)))
    unpacked = bytearray()
    try:
        for piece in files.zstd_pieces(io.BytesIO(content)):
            unpacked += piece
            if len(unpacked) > limit_bytes:
                file.tally.reject(f"frame {number}", f"its zstd content is more than {limit_bytes} bytes")
                return
    except OSError as error:
        file.tally.reject(f"frame {number}", f"its zstd content is broken ({error})")
        return
    yield from _as_json(file, number, bytes(unpacked))


def _as_json(file: files.RecordedFile, number: int, content: bytes, unit: str = "frame") -> Iterator[tuple[int, bytes]]:
    """A record, from protobuf if it is not JSON already; what is neither is rejected."""
    text = content if content.lstrip(_BEFORE_JSON)[:1] == b"{" else json_of(content) if content else b""
    if text:
        yield number, text
    elif text is None:
        file.tally.reject(f"{unit} {number}", file.damage or "no OTLP message: it is damaged, or cut off")
