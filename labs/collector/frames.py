"""Frames of a collector's segments: a length, a message, and behind it the message's checksum as a field of it.

The checksum stands in a field that no message of OTLP has, the last number there is: whoever reads protobuf passes it
over, as the OpenTelemetry Collector does, whose frames these otherwise are.  Its tag is five bytes that tell where a
frame ends when its length is damaged.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

LENGTH_BYTES = 4
# Field 2^29 - 1 of wire type 5 (four bytes, little-endian), as a varint.
TAG = b"\xfd\xff\xff\xff\x0f"
SEAL_BYTES = len(TAG) + 4


def framed(message: bytes) -> bytes:
    """The message with its checksum, behind the length of both (4 bytes, big-endian)."""
    seal = TAG + zlib.crc32(message).to_bytes(4, "little")
    return (len(message) + SEAL_BYTES).to_bytes(LENGTH_BYTES, "big") + message + seal


def is_sealed(content: bytes) -> bool:
    """Whether the content of a frame ends with a checksum."""
    return content[-SEAL_BYTES:-4] == TAG


def is_sound(content: bytes) -> bool:
    """Whether the content of a frame has the checksum of what stands before it."""
    if not is_sealed(content):
        return False
    return content[-4:] == _checksum([memoryview(content)[:-SEAL_BYTES]])


def _checksum(pieces: Iterable[bytes | memoryview]) -> bytes:
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value.to_bytes(4, "little")


_PIECE_BYTES = 1 << 20


class Segment:
    """The bytes of an open file, read as they are asked for.

    Were it mapped, a look at it would end the process when the file becomes shorter; this is an ``OSError``.
    """

    def __init__(self, handle: int) -> None:
        self.handle, self.size = handle, os.fstat(handle).st_size
        # Where the last search was: the next one, and what it finds, is often close.
        self._window, self._window_at = b"", 0

    def read(self, begin: int, end: int) -> bytes:
        """The bytes between two positions, as far as the file goes."""
        end, at = min(end, self.size), begin - self._window_at
        if at >= 0 and end - self._window_at <= len(self._window):
            return self._window[at : end - self._window_at]
        content = os.pread(self.handle, max(end - begin, 0), begin)
        if len(content) < end - begin:
            raise OSError(errno.EIO, "it became shorter while it was read")
        return content

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        """The bytes between two positions, some at a time."""
        for at in range(begin, min(end, self.size), _PIECE_BYTES):
            yield self.read(at, min(at + _PIECE_BYTES, end))

    def find(self, what: bytes, begin: int = 0) -> int:
        """Where some bytes stand at the earliest from ``begin`` on; -1: nowhere."""
        while begin + len(what) <= self.size:
            if begin < self._window_at or begin + len(what) > self._window_at + len(self._window):
                self._window, self._window_at = self.read(begin, begin + _PIECE_BYTES), begin
            place = self._window.find(what, begin - self._window_at)
            if place >= 0:
                return self._window_at + place
            begin = self._window_at + len(self._window) - len(what) + 1
        return -1

    def is_sound(self, begin: int, end: int) -> bool:
        """Whether the content of a frame between two positions has the checksum of what stands before it."""
        seal = self.read(max(end - SEAL_BYTES, begin), end)
        return is_sealed(seal) and seal[-4:] == _checksum(self.pieces(begin, end - SEAL_BYTES))


@contextmanager
def opened(path: Path) -> Iterator[Segment]:
    """The bytes of a segment; ``OSError``."""
    with path.open("rb") as file:
        yield Segment(file.fileno())


def frame_spans(path: Path) -> Iterator[tuple[int, int]]:
    """``(offset of the message, its length)`` of each sound frame of a segment, in order; ``OSError``."""
    with opened(path) as segment:
        for stretch in stretches(segment):
            if stretch.kind == "frame":
                begin = stretch.begin + LENGTH_BYTES
                seal = SEAL_BYTES if is_sealed(segment.read(max(stretch.end - SEAL_BYTES, begin), stretch.end)) else 0
                yield begin, stretch.end - begin - seal


@dataclass(frozen=True)
class Stretch:
    """A part of a segment, from byte ``begin`` to ``end``.

    ``frame``: whole and sound; ``wrong length``: a frame whose message is sound; ``torn``: the beginning of a frame,
    without a checksum, or zeros, at the end of a file that has checksums; ``damaged``: anything else.
    """

    begin: int
    end: int
    kind: Literal["frame", "wrong length", "torn", "damaged"]


def stretches(segment: Segment) -> Iterator[Stretch]:
    """The parts of a segment, in order and without gaps; frames without a checksum are taken as they are.

    In a segment with checksums damage ends where a sound frame begins, or the file does.
    """
    frames, at = _Frames(segment, segment.find(TAG) >= 0), 0
    while at < segment.size:
        end = frames.end(at)
        kind: Literal["frame", "wrong length", "torn", "damaged"] = "frame"
        if end == 0:
            end = frames.next(at) if frames.checked else segment.size
            kind = "damaged"
            if segment.is_sound(at + LENGTH_BYTES, end):
                kind = "wrong length"
            elif frames.checked and end == segment.size and _is_torn(segment, at):
                kind = "torn"
        yield Stretch(at, end, kind)
        at = end


# Who sends a message chooses what stands in it, and so where frames seem to begin in a damaged one: a search for the
# next sound frame makes checksums of so many bytes at most, and each look counts for some.
_SEARCHED_BYTES, _LOOK_BYTES = 1 << 30, 512


@dataclass
class _Frames:
    """The frames of a segment; ``checked``: whether they have checksums; ``left``: bytes that are still searched."""

    segment: Segment
    checked: bool
    left: int = field(default=_SEARCHED_BYTES)

    def end(self, at: int) -> int:
        """Where the frame at ``at`` ends; 0: there is no sound one."""
        end = self._said_end(at)
        return end if not self.checked or self.segment.is_sound(at + LENGTH_BYTES, end) else 0

    def next(self, at: int) -> int:
        """Where the next sound frame begins behind a damaged one at ``at``, or the file ends.

        After a search that is too long: where the damaged one's own length says, if one begins there, or the file ends.
        """
        said = at + LENGTH_BYTES + int.from_bytes(self.segment.read(at, at + LENGTH_BYTES), "big")
        own = said if self._goes_on(said) else self.segment.size
        place = self.segment.find(TAG, at)
        while place >= 0 and self.left > 0 and not self._goes_on(place + SEAL_BYTES):
            place = self.segment.find(TAG, place + 1)
        return min(own, place + SEAL_BYTES) if place >= 0 and self.left > 0 else own

    def _said_end(self, at: int) -> int:
        """Where a frame at ``at`` ends by its length, 0 if none can, or one with a checksum does not."""
        length = int.from_bytes(self.segment.read(at, at + LENGTH_BYTES), "big")
        end = at + LENGTH_BYTES + length
        # No message is empty: zeros are a tail that was never written.
        if at + LENGTH_BYTES > self.segment.size or length == 0 or end > self.segment.size:
            return 0
        return 0 if self.checked and not is_sealed(self.segment.read(max(end - SEAL_BYTES, at), end)) else end

    def _goes_on(self, at: int) -> bool:
        """Whether a sound frame begins at ``at``, or the file ends there."""
        if at >= self.segment.size:
            return at == self.segment.size
        self.left -= max(self._said_end(at) - at, _LOOK_BYTES)
        return self.end(at) > 0


def _is_torn(segment: Segment, at: int) -> bool:
    """Whether the file ends as a writer leaves it that was killed: within a frame, before its checksum, or in zeros."""
    length = int.from_bytes(segment.read(at, at + LENGTH_BYTES), "big")
    rest = segment.size - at
    if not length:
        return not any(map(any, segment.pieces(at, segment.size)))
    return rest < LENGTH_BYTES + length and segment.find(TAG, at) < 0
