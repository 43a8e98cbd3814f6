"""Frames of a collector's segments: a length, a message, and behind it the message's checksum as a field of it.

The checksum stands in a field that no message of OTLP has, the last number there is: whoever reads protobuf passes it
over, as the OpenTelemetry Collector does, whose frames these otherwise are.  Its tag is five bytes that tell where a
frame ends when its length is damaged.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
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
    expected = zlib.crc32(memoryview(content)[:-SEAL_BYTES]).to_bytes(4, "little")
    return is_sealed(content) and content[-4:] == expected


@dataclass(frozen=True)
class Stretch:
    """A part of a segment, from byte ``begin`` to ``end``.

    ``frame``: whole and sound; ``wrong length``: a frame whose message is sound; ``torn``: the beginning of a frame,
    or zeros, at the end of a file that has checksums; ``damaged``: anything else.
    """

    begin: int
    end: int
    kind: Literal["frame", "wrong length", "torn", "damaged"]


def stretches(segment: bytes | mmap) -> Iterator[Stretch]:
    """The parts of a segment, in order and without gaps; frames without a checksum are taken as they are.

    In a segment with checksums damage ends where a sound frame begins, or the file does.
    """
    checked, at = segment.find(TAG) >= 0, 0
    while at < len(segment):
        end = _frame_end(segment, at, checked)
        kind: Literal["frame", "wrong length", "torn", "damaged"] = "frame"
        if end == 0:
            end = _next_frame(segment, at) if checked else len(segment)
            kind = "damaged"
            if is_sound(segment[at + LENGTH_BYTES : end]):
                kind = "wrong length"
            elif checked and end == len(segment) and _is_torn(segment, at):
                kind = "torn"
        yield Stretch(at, end, kind)
        at = end


def _frame_end(segment: bytes | mmap, at: int, checked: bool) -> int:
    """Where the frame at ``at`` ends; 0: there is no sound one."""
    length = int.from_bytes(segment[at : at + LENGTH_BYTES], "big")
    end = at + LENGTH_BYTES + length
    # No message is empty: zeros are a tail that was never written.
    if at + LENGTH_BYTES > len(segment) or length == 0 or end > len(segment):
        return 0
    return end if not checked or is_sound(segment[at + LENGTH_BYTES : end]) else 0


def _next_frame(segment: bytes | mmap, at: int) -> int:
    """Where the next sound frame begins behind a damaged one at ``at``, or the file ends."""
    said = at + LENGTH_BYTES + int.from_bytes(segment[at : at + LENGTH_BYTES], "big")
    place = segment.find(TAG, at)
    while place >= 0 and not _goes_on(segment, place + SEAL_BYTES):
        place = segment.find(TAG, place + 1)
    sealed = place + SEAL_BYTES if place >= 0 else len(segment)
    return min(said if _goes_on(segment, said) else len(segment), sealed, len(segment))


def _goes_on(segment: bytes | mmap, at: int) -> bool:
    return at == len(segment) or (at < len(segment) and _frame_end(segment, at, checked=True) > 0)


def _is_torn(segment: bytes | mmap, at: int) -> bool:
    """Whether the file ends as a writer leaves it that was killed: within a frame, or in zeros."""
    length = int.from_bytes(segment[at : at + LENGTH_BYTES], "big")
    rest = len(segment) - at
    return rest < LENGTH_BYTES + length if length else not any(segment[at:])
