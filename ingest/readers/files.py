"""Recorded files as bounded streams: plain, gzip or zstd, hashed while read, every loss counted.

Nothing here trusts a file.  Compression is recognised by content, and what it expands to is bounded.
Lines and records have a largest size.  Unusable records are counted with their place and reason.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO

from blis_replay.base.errors import RecordingError, printable
from blis_replay.ingest.recording import CUT_OFF, SourceFile

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 64 << 10  # of the content: by these a file is recognised
MAX_EXPANDED_BYTES = 64 << 30
# Telemetry compresses 10 to 50 times; deflate can do 1,032.  Small files may do as they like.
MAX_EXPANSION_RATIO = 300
FREE_EXPANSION_BYTES = 64 << 20
# Of records, and of empty lines: each costs its reader time, and packed they take a byte in a thousand.
MOST_REJECTIONS = 1_000_000
KEPT_REJECTIONS = 20
LARGE_BYTES = 32 << 20
_USUAL_EXPANSION = 10
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# What is lost of a stream that breaks: the piece in which it does.
ZSTD_PIECE_BYTES = 64 << 10
_ZSTD_HEAD_PIECE_BYTES = 4 << 10
# Nothing comes out of a zstd frame before its first block is whole.
_MAX_ZSTD_BLOCK_BYTES = 128 << 10

Progress = Callable[[str, int, int], None]


@dataclass
class Tally:
    """What became of the records of one file: used, and rejected with place and reason."""

    records: int = 0
    rejected_count: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)

    def reject(self, place: str, reason: str) -> None:
        """Count a record that cannot be used; the first 20 are kept in words."""
        self.rejected_count += 1
        if len(self.rejected) < KEPT_REJECTIONS:
            self.rejected.append(_in_words(place, reason))

    def cut_off(self, place: str, reason: str) -> None:
        """Count what a file ends in, with all that would have followed lost; always kept in words, as the first."""
        self.rejected_count += 1
        self.rejected[KEPT_REJECTIONS - 1 :] = []
        self.rejected.insert(0, _in_words(place, f"{CUT_OFF}{reason}"))


def _in_words(place: str, reason: str) -> tuple[str, str]:
    return printable(place[:300]), printable(" ".join(reason[:2000].split()))[:300]


@dataclass
class RecordedFile:
    """A file of a recording while it is read: its path, its name inside the recording, its tally.

    ``damage``: why the stream ended early, ``""`` if it did not.  ``columns``: of a table, what the user says of them.
    ``point``: of a table of load levels, the one that is read, from 1; 0: the only one.
    """

    path: Path
    name: str
    progress: Progress | None = None
    columns: str = ""
    point: int = 0
    tally: Tally = field(default_factory=Tally)
    damage: str = ""
    bytes_read: int = 0
    _sha256: str = ""

    def chunks(self) -> Iterator[bytes]:
        """The content in pieces of at most a few MB, decompressed if it is gzip or zstd.

        Raises :class:`RecordingError` if the file cannot be read or expands beyond bounds.
        A compressed stream that breaks ends the iteration and sets ``damage``.
        """
        raw = self._raw()
        first = next(raw, b"")
        if first.startswith(ZSTD_MAGIC):
            yield from self._unzstd(chain((first,), raw))
        elif first.startswith(GZIP_MAGIC):
            yield from self._gunzip(chain((first,), raw))
        elif first:
            yield first
            yield from raw
        for _ in raw:  # what a reader left over is still part of the hash
            pass

    def head(self, limit_bytes: int) -> bytes:
        """The first bytes of the content, decompressed; ``b""`` of a file that cannot be unpacked."""
        try:
            with self.path.open("rb") as stream:
                packed = stream.read(limit_bytes + _MAX_ZSTD_BLOCK_BYTES)
        except OSError as error:
            raise self._unreadable(error) from error
        if packed.startswith(GZIP_MAGIC):
            try:
                return zlib.decompressobj(wbits=31).decompress(packed, limit_bytes)
            except zlib.error:
                return b""
        return (zstd_head(packed, limit_bytes) if packed.startswith(ZSTD_MAGIC) else packed)[:limit_bytes]

    def content(self, limit_bytes: int) -> bytes:
        """The whole content; :class:`RecordingError` beyond ``limit_bytes`` or if the stream is damaged."""
        parts: list[bytes] = []
        size = 0
        for chunk in self.chunks():
            parts.append(chunk)
            size += len(chunk)
            if size > limit_bytes:
                problem = f"larger than the {limit_bytes:,} bytes such a file can have"
                raise RecordingError(self.path, "", problem, "check that it is what its name says")
        if self.damage:
            raise RecordingError(self.path, f"byte {size}", self.damage, "copy the file again")
        return b"".join(parts)

    def sha256(self) -> str:
        """The SHA-256 of the file as it lies on disk; reads it if nobody has."""
        if not self._sha256:
            for _ in self._raw():
                pass
        return self._sha256

    def source(self, kind: str) -> SourceFile:
        """What is kept about this file, under the name of its format."""
        tally, sha256 = self.tally, self.sha256()
        rejected = tally.rejected_count, tuple(tally.rejected)
        return SourceFile(self.name, kind, self.bytes_read, sha256, tally.records, *rejected)

    def _raw(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        done = 0
        try:
            total = self.path.stat().st_size
            with self.path.open("rb") as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    digest.update(chunk)
                    done += len(chunk)
                    if self.progress is not None:
                        self.progress(self.name, done, max(total, done))
                    yield chunk
        except OSError as error:
            raise self._unreadable(error) from error
        self.bytes_read, self._sha256 = done, digest.hexdigest()

    def _unreadable(self, error: OSError) -> RecordingError:
        problem = f"cannot be read ({error.strerror or error})"
        return RecordingError(self.path, "", problem, "check the path and its permissions")

    def _gunzip(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        packed, expanded_bytes = Pieces(raw), 0
        try:
            with gzip.GzipFile(fileobj=io.BufferedReader(packed)) as stream:
                while piece := stream.read1(4 * CHUNK_BYTES):
                    expanded_bytes += len(piece)
                    self._check_expansion(packed.given_bytes, expanded_bytes)
                    yield piece
        except EOFError:
            self.damage = f"the gzip stream ends early, after {expanded_bytes} bytes of content"
        except (zlib.error, gzip.BadGzipFile):
            self.damage = f"the gzip stream is broken after {expanded_bytes} bytes of content"

    def _unzstd(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        packed, expanded_bytes = Pieces(raw), 0
        try:
            for piece in zstd_pieces(io.BufferedReader(packed)):
                expanded_bytes += len(piece)
                self._check_expansion(packed.given_bytes, expanded_bytes)
                yield piece
        except OSError as error:
            self.damage = f"the zstd stream is broken after {expanded_bytes} bytes of content ({error})"

    def _check_expansion(self, packed_bytes: int, expanded_bytes: int) -> None:
        ratio_broken = expanded_bytes > max(FREE_EXPANSION_BYTES, MAX_EXPANSION_RATIO * packed_bytes)
        if ratio_broken or expanded_bytes > MAX_EXPANDED_BYTES:
            most = f"more than {MAX_EXPANSION_RATIO} times its size or {MAX_EXPANDED_BYTES >> 30} GB"
            raise RecordingError(self.path, "", f"its content is {most}", "unpack it yourself if you trust it")


def is_large(file: RecordedFile) -> bool:
    """Whether compiled code reads this file sooner, although it has to be loaded (and compiled the first time)."""
    try:
        with file.path.open("rb") as stream:
            packed = stream.read(4).startswith((GZIP_MAGIC, ZSTD_MAGIC))
            size = stream.seek(0, os.SEEK_END)
    except OSError:
        return False  # whoever reads it says why
    return size * (_USUAL_EXPANSION if packed else 1) >= LARGE_BYTES


def begins_with(bracket: bytes, *keys: str, in_first_line: bool = False) -> Callable[[bytes], bool]:
    """Whether a file that begins like its argument is JSON with this bracket first and all of these keys."""

    def recognises(head: bytes) -> bool:
        start = head.lstrip()
        text = start.partition(b"\n")[0] if in_first_line else start
        return text[:1] == bracket and all(f'"{key}"'.encode() in text for key in keys)

    return recognises


class Pieces(io.RawIOBase):
    """Pieces of bytes as a binary file; ``given_bytes``: how many were read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__()
        self._pieces, self._rest, self.given_bytes = pieces, b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._rest = self._rest or next(self._pieces, b"")
        given = self._rest[: len(buffer)]
        buffer[: len(given)] = given
        self._rest = self._rest[len(given) :]
        self.given_bytes += len(given)
        return len(given)


def zstd_pieces(packed: IO[bytes], piece_bytes: int = ZSTD_PIECE_BYTES) -> Iterator[bytes]:
    """The content of zstd frames in pieces of ``piece_bytes``; ``OSError`` where they are broken or end early."""
    import pyarrow as pa

    with pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), "zstd") as stream:
        while piece := stream.read(piece_bytes):
            yield piece


def zstd_head(packed: bytes, limit_bytes: int) -> bytes:
    """The first bytes of the content of zstd frames that may be cut off, as far as they can be unpacked."""
    parts: list[bytes] = []
    pieces = zstd_pieces(io.BytesIO(packed), _ZSTD_HEAD_PIECE_BYTES)
    try:
        while len(parts) * _ZSTD_HEAD_PIECE_BYTES < limit_bytes and (piece := next(pieces, b"")):
            parts.append(piece)
    except OSError:
        pass  # cut off or damaged: what came before is all there is
    return b"".join(parts)[:limit_bytes]


def lines(file: RecordedFile, limit_bytes: int) -> Iterator[tuple[int, bytes]]:
    """``(line number from 1, line without its newline)``; longer lines than the limit are rejected.

    The cut last line of a damaged stream is rejected with the damage as reason.
    """
    return lines_of(file, file.chunks(), limit_bytes, 1)


def lines_of(file: RecordedFile, chunks: Iterable[bytes], limit_bytes: int, number: int) -> Iterator[tuple[int, bytes]]:
    """The lines in the chunks of a file from line ``number`` to its end, as :func:`lines` has them."""
    pending: list[bytes] = []
    pending_bytes = empty = 0
    for chunk in chunks:
        empty += chunk.count(b"\n\n") + chunk.count(b"\n\r\n")
        for count, what in ((empty, "empty lines"), (file.tally.rejected_count, "records that cannot be used")):
            if count > MOST_REJECTIONS:
                raise RecordingError(
                    file.path, f"line {number}", f"more than {MOST_REJECTIONS:,} {what}", "check what wrote it"
                )
        head, *rest = chunk.split(b"\n")
        pending_bytes += len(head)
        pending = [*pending, head] if pending_bytes <= limit_bytes else []
        for following in rest:
            if pending_bytes <= limit_bytes:
                yield number, b"".join(pending)
            else:
                file.tally.reject(f"line {number}", f"longer than {limit_bytes} bytes")
            number += 1
            pending, pending_bytes = [following], len(following)
    if file.damage:
        file.tally.cut_off(f"line {number}", file.damage)
    elif pending_bytes > limit_bytes:
        file.tally.reject(f"line {number}", f"longer than {limit_bytes} bytes")
    elif pending_bytes:
        yield number, b"".join(pending)
