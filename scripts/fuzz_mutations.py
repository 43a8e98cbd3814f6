"""Mutators that keep the outer form of an input, so that what is odd in it gets past the first check.

Each takes the bytes, a random generator, and returns other bytes; bytes that have not
the form of its own it leaves to :func:`mutated_bytes`.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import random
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

sys.path.append(str(Path(__file__).parent.parent / "tests/ingest/readers"))
from mutations import ODD_VALUES, paths_of

Mutator = Callable[[bytes, random.Random], bytes]

# Where integers of files end: those of 32 and 64 bits, exact doubles, times in ns, us and s, and what is too long.
_EDGES = [
    *(edge + nudge for power in (31, 32, 53, 61, 62, 63, 64) for edge in (1 << power,) for nudge in (-1, 0, 1)),
    *(-(1 << 63), -(1 << 63) - 1, -1, 0, 1, 10**18, 10**19, 10**25, 10**400, 1_771_430_000_140_574_000),
]
_FLOATS = [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 1e19, 9.3e12, 2.4e12, -2.4e12, 1e-9, 0.1]
_WORDS = [
    *("\x00", "\ud800", "\ufeff", "\x1b[31m", "\u202e", "a\nb", "NaN", "-0", "1e999", "９", " 7 "),
    *("x" * 600, "=" * 4),
]
_CELLS = [
    *map(str, _EDGES[:20]),
    *("", '"', '""', '"a', "a\nb", "nan", "inf", "1e30", "-0.0", "0x10"),
    *("[1, 2]", "[", "\x00", "\x1b[31m", "é", "9" * 400),
]
_PIECES = [
    *(b"\xef\xbb\xbf", b"\r", b"\n", b"\x00", b"\xff", b'"', b"\\u", b"\\ud800"),
    *(b"[", b"]", b"{", b"}", b",", b":"),
]
_MAGICS = [b"\x28\xb5\x2f\xfd", b"\x1f\x8b", b"\xff\xff\xff\xff", b"\x20\x00\x00\x00", b"PAR1", b"\x50\x2a\x4d\x18"]


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with a stretch of them cut out, put in again elsewhere, or overwritten."""
    begin = rng.randrange(len(data) + 1)
    end = min(len(data), begin + rng.choice([0, 1, 2, 8, 64, 1 << 12]))
    at = rng.randrange(len(data) + 1)
    return rng.choice(
        [
            data[:begin] + data[end:],
            data[:begin],
            data[:at] + data[begin:end] + data[at:],
            data[:begin] + rng.choice([*_PIECES, *_MAGICS]) + data[end:],
            data[:begin] + rng.randbytes(end - begin) + data[end:],
            data[:begin] + data[begin:end] * rng.choice([2, 9, 200]) + data[end:],
        ]
    )


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON text, or one of the lines of JSON, with values replaced, moved, doubled or taken out."""
    lines = data.split(b"\n")
    for place in (None, rng.randrange(len(lines))):
        try:
            document = json.loads(data if place is None else lines[place])
        except (ValueError, RecursionError):
            continue
        for _ in range(rng.randint(1, 3)):
            document = _changed(document, rng)
        text = _with_double_key(_written(document, rng), rng)
        if place is None:
            return text
        lines[place : place + rng.randint(0, 1)] = [text]
        return b"\n".join(lines)
    return mutated_bytes(data, rng)


def _changed(document: Any, rng: random.Random) -> Any:
    paths = paths_of(document)
    if not paths or rng.random() < 0.02:
        return _odd(document, rng)
    *parents, last = rng.choice(paths)
    container = document
    for key in parents:
        container = container[key]
    action = rng.choice(["odd", "odd", "nudge", "delete", "copy", "repeat", "nest"])
    if action == "delete":
        del container[last]
    elif action == "copy":
        other = document
        for key in rng.choice(paths):
            other = other[key] if isinstance(other, dict | list) and _has(other, key) else other
        container[last] = json.loads(json.dumps(other))
    elif action == "repeat" and isinstance(container, list):
        container[last:last] = [container[last]] * rng.choice([1, 3, 50])
    elif action == "nest":
        for _ in range(rng.choice([1, 2, 70])):
            container[last] = rng.choice([[container[last]], {"a": container[last]}])
    else:
        container[last] = _odd(container[last], rng)
    return document


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else isinstance(key, int) and key < len(container)


def _odd(value: Any, rng: random.Random) -> Any:
    among: list[Any] = [*ODD_VALUES, *_EDGES, *_FLOATS, *_WORDS, *map(str, _EDGES)]
    if isinstance(value, int | float) and rng.random() < 0.5:
        return rng.choice([value + 1, -value, value * 1000, str(value), float(value) if abs(value) < 1e300 else 0])
    return copy.deepcopy(rng.choice(among))


def _written(document: Any, rng: random.Random) -> bytes:
    style: dict[str, Any] = {"separators": (",", ":")} if rng.random() < 0.5 else {}
    if rng.random() < 0.1:
        style = {"indent": 1}
    text = json.dumps(document, ensure_ascii=rng.random() < 0.8, **style)
    return text.encode("utf-8", "surrogatepass")


def _with_double_key(text: bytes, rng: random.Random) -> bytes:
    """The text, at times with a member once more, in front of a member."""
    if rng.random() < 0.9:
        return text
    places = [at for at in range(len(text)) if text[at : at + 2] == b'{"']
    if not places:
        return text
    at = rng.choice(places) + 1
    key = text[at : text.find(b'"', at + 1) + 1]
    return text[:at] + key + b":" + json.dumps(_odd(None, rng)).encode() + b"," + text[at:]


def mutated_rows(data: bytes, rng: random.Random) -> bytes:
    """A table in text with a cell replaced, or a row or a column moved or doubled."""
    rows = [row.split(b",") for row in data.split(b"\n")]
    row = rng.choice(rows)
    place = rng.randrange(len(row))
    action = rng.choice(["cell", "cell", "cell", "row", "cut", "bytes"])
    if action == "cell":
        row[place] = rng.choice(_CELLS).encode()
    elif action == "row":
        rows.insert(rng.randrange(len(rows) + 1), list(row))
    elif action == "cut":
        del row[place]
    else:
        return mutated_bytes(data, rng)
    return b"\n".join(b",".join(row) for row in rows)


# Of a message: (field number, wire type, value), where a value of wire type 2 may be such a list again.
_Fields = list[tuple[int, int, Any]]


def mutated_protobuf(data: bytes, rng: random.Random) -> bytes:
    """A protobuf message with fields changed, doubled, renumbered or left out at any depth."""
    fields = _fields(data, 0)
    if fields is None or rng.random() < 0.1:
        return mutated_bytes(data, rng)
    _change_fields(fields, rng)
    return _message(fields, rng)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes, depth: int) -> _Fields | None:
    fields: _Fields = []
    at = 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            kind, value = key & 7, None
            if kind == 0:
                value, at = _varint(data, at)
            elif kind in (1, 2, 5):
                size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
                value, at = data[at : at + size], at + size
            if value is None or at > len(data) or not key >> 3:
                return None
            inner = _fields(value, depth + 1) if kind == 2 and value and depth < 8 else None
            fields.append((key >> 3, kind, value if inner is None else inner))
    except IndexError:
        return None
    return fields


def _message(fields: _Fields, rng: random.Random) -> bytes:
    parts = []
    for number, kind, value in fields:
        content = _message(value, rng) if isinstance(value, list) else value
        if kind == 0:
            content = _as_varint(content)
        elif kind == 2:
            size = (
                len(content) if rng.random() < 0.999 else rng.choice([0, 1, 1 << 31, (1 << 64) - 1, len(content) + 1])
            )
            content = _as_varint(size) + content
        parts.append(_as_varint(number << 3 | kind) + content)
    return b"".join(parts)


def _as_varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _change_fields(fields: _Fields, rng: random.Random) -> None:
    if not fields:
        return
    place = rng.randrange(len(fields))
    number, kind, value = fields[place]
    if isinstance(value, list) and rng.random() < 0.85:
        _change_fields(value, rng)
        return
    action = rng.choice(["value", "value", "repeat", "delete", "number", "nest"])
    if action == "repeat":
        fields[place:place] = [fields[place]] * rng.choice([1, 2, 100])
    elif action == "delete":
        del fields[place]
    elif action == "number":
        fields[place] = (rng.choice([1, 2, 3, 7, 8, 9, 11, 15, 1 << 28]), kind, value)
    elif action == "nest" and kind == 2:
        fields[place] = (number, kind, [(number, kind, value)])
    elif kind == 0:
        fields[place] = (number, kind, rng.choice([abs(edge) & (1 << 64) - 1 for edge in _EDGES]))
    elif kind == 2:
        fields[place] = (number, kind, rng.choice([b"", b"\xff", b"\x00", b"\x0a", rng.randbytes(16), b"x" * 300]))
    else:
        size = 8 if kind == 1 else 4
        edge = (rng.choice(_EDGES) & (1 << 8 * size) - 1).to_bytes(size, "little")
        fields[place] = (number, kind, rng.choice([edge, b"\xff" * size, b"\x00" * (size - 2) + b"\xf0\x7f"]))


def mutated_message(data: bytes, rng: random.Random) -> bytes:
    """An OTLP message of either encoding."""
    return (mutated_json if data.lstrip()[:1] in (b"{", b"[") else mutated_protobuf)(data, rng)


def mutated_file(data: bytes, rng: random.Random) -> bytes:
    """A file with something wrong in its compression, its framing or what is inside; wrapped otherwise at times."""
    if rng.random() < 0.15:
        return mutated_bytes(data, rng)
    if rng.random() < 0.1:
        return _wrapped(data, rng)
    for magic, unpack, pack in (
        (b"\x1f\x8b", gzip.decompress, lambda content: gzip.compress(content, 1)),
        (b"\x28\xb5\x2f\xfd", _unzstd, zstandard.ZstdCompressor(level=1).compress),
    ):
        if data.startswith(magic):
            try:
                return pack(mutated_file(unpack(data), rng))
            except (OSError, EOFError, zlib.error, zstandard.ZstdError):
                return mutated_bytes(data, rng)
    size = int.from_bytes(data[:4], "big")
    if 0 < size <= len(data) - 4:
        first = mutated_file(data[4 : 4 + size], rng)
        claimed = len(first) if rng.random() < 0.95 else rng.choice([0, 1, (1 << 32) - 1, 1 << 31, len(first) + 1])
        return claimed.to_bytes(4, "big") + first + data[4 + size :]
    return mutated_message(data, rng)


def _unzstd(data: bytes) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as stream:
        return bytes(stream.read(1 << 20))


def _wrapped(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        [
            gzip.compress(data, 1),
            zstandard.ZstdCompressor(level=1).compress(data),
            zstandard.ZstdCompressor(level=1, write_content_size=False).compress(data) * 2,
            len(data).to_bytes(4, "big") + data,
            b"[" + data.replace(b"\n", b",") + b"]",
            data + b"\n" + data,
            b"\xef\xbb\xbf" + data,
            b"\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00" * rng.choice([1, 300]) + data,  # empty frames
            b"\x50\x2a\x4d\x18\xff\xff\xff\xff" + data,  # a skippable frame of 4 GB
        ]
    )


def mutated_table(data: bytes, rng: random.Random) -> bytes:
    """A Parquet table with a column of another type or with odd values; its bytes changed at times."""
    try:
        table = pq.read_table(io.BytesIO(data))
        names = table.column_names
    except (pa.ArrowException, OSError, ValueError):  # ValueError: also a name that is no UTF-8
        return mutated_bytes(data, rng)
    if rng.random() < 0.2 or not table.num_columns or table.num_rows > 1000:
        return mutated_bytes(data, rng)
    place, rows = rng.randrange(table.num_columns), table.num_rows
    kind = rng.choice([pa.int64(), pa.uint64(), pa.float64(), pa.string(), pa.binary(), pa.bool_(), pa.timestamp("ns")])
    odd: dict[Any, list[Any]] = {
        pa.string(): ["", "ok", "\x00", "\x1b[31m", "7"],
        pa.binary(): [b"\xff", b""],
        pa.bool_(): [True, False],
        pa.float64(): [*_FLOATS, 0.0, 5.0],
    }
    among = odd.get(kind, [0, 1, -1, (1 << 61), (1 << 62), (1 << 63) - 1])
    among = [abs(value) for value in among] if kind == pa.uint64() else among
    values = [rng.choice([*among, None]) for _ in range(rows)]
    column = pa.array(values, kind)
    if rng.random() < 0.2:
        column = pa.array([[value] for value in values], pa.list_(kind))
    name = rng.choice(names)
    written = io.BytesIO()
    pq.write_table(table.set_column(place, name, column), written)
    return written.getvalue()
