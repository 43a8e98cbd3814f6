"""Frames of a collector's segments: a length, a message, and behind it the message's checksum as a field of it.

The checksum stands in a field that no message of OTLP has, the last number there is: whoever reads protobuf passes it
over, as the OpenTelemetry Collector does, whose frames these otherwise are.  Its tag is five bytes that tell where a
frame ends when its length is damaged.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from mmap import mmap
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
    return content[-4:] == zlib.crc32(memoryview(content)[:-SEAL_BYTES]).to_bytes(4, "little")


@dataclass(frozen=True)
class Stretch:
    """A part of a segment, from byte ``begin`` to ``end``.

    ``frame``: whole and sound; ``wrong length``: a frame whose message is sound; ``torn``: the beginning of a frame,
    without a checksum, or zeros, at the end of a file that has checksums; ``damaged``: anything else.
    """

    begin: int
    end: int
    kind: Literal["frame", "wrong length", "torn", "damaged"]


def stretches(segment: bytes | mmap) -> Iterator[Stretch]:
    """The parts of a segment, in order and without gaps; frames without a checksum are taken as they are.

    In a segment with checksums damage ends where a sound frame begins, or the file does.
    """
    frames, at = _Frames(segment, segment.find(TAG) >= 0), 0
    while at < len(segment):
        end = frames.end(at)
        kind: Literal["frame", "wrong length", "torn", "damaged"] = "frame"
        if end == 0:
            end = frames.next(at) if frames.checked else len(segment)
            kind = "damaged"
            if is_sound(segment[at + LENGTH_BYTES : end]):
                kind = "wrong length"
            elif frames.checked and end == len(segment) and _is_torn(segment, at):
                kind = "torn"
        yield Stretch(at, end, kind)
        at = end


# Who sends a message chooses what stands in it, and so where frames seem to begin in a damaged one: a search for the
# next sound frame makes checksums of so many bytes at most, and each look counts for some.
_SEARCHED_BYTES, _LOOK_BYTES = 1 << 30, 512


@dataclass
class _Frames:
    """The frames of a segment; ``checked``: whether they have checksums; ``left``: bytes that are still searched."""

    segment: bytes | mmap
    checked: bool
    left: int = field(default=_SEARCHED_BYTES)

    def end(self, at: int) -> int:
        """Where the frame at ``at`` ends; 0: there is no sound one."""
        end = self._said_end(at)
        return end if not self.checked or is_sound(self.segment[at + LENGTH_BYTES : end]) else 0

    def next(self, at: int) -> int:
        """Where the next sound frame begins behind a damaged one at ``at``, or the file ends.

        After a search that is too long: where the damaged one's own length says, if one begins there, or the file ends.
        """
        said = at + LENGTH_BYTES + int.from_bytes(self.segment[at : at + LENGTH_BYTES], "big")
        own = said if self._goes_on(said) else len(self.segment)
        place = self.segment.find(TAG, at)
        while place >= 0 and self.left > 0 and not self._goes_on(place + SEAL_BYTES):
            place = self.segment.find(TAG, place + 1)
        return min(own, place + SEAL_BYTES) if place >= 0 and self.left > 0 else own

    def _said_end(self, at: int) -> int:
        """Where a frame at ``at`` ends by its length, 0 if none can, or one with a checksum does not."""
        length = int.from_bytes(self.segment[at : at + LENGTH_BYTES], "big")
        end = at + LENGTH_BYTES + length
        # No message is empty: zeros are a tail that was never written.
        if at + LENGTH_BYTES > len(self.segment) or length == 0 or end > len(self.segment):
            return 0
        return 0 if self.checked and not is_sealed(self.segment[max(end - SEAL_BYTES, at) : end]) else end

    def _goes_on(self, at: int) -> bool:
        """Whether a sound frame begins at ``at``, or the file ends there."""
        if at >= len(self.segment):
            return at == len(self.segment)
        self.left -= max(self._said_end(at) - at, _LOOK_BYTES)
        return self.end(at) > 0


def _is_torn(segment: bytes | mmap, at: int) -> bool:
    """Whether the file ends as a writer leaves it that was killed: within a frame, before its checksum, or in zeros."""
    length = int.from_bytes(segment[at : at + LENGTH_BYTES], "big")
    rest = len(segment) - at
    if not length:
        return not any(segment[at:])
    return rest < LENGTH_BYTES + length and segment.find(TAG, at) < 0
