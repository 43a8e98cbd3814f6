"""The outside of protobuf messages: field numbers and bytes, without a schema."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10


class WireError(ValueError):
    """These bytes are no protobuf message."""


def varint(data: bytes, at: int) -> tuple[int, int] | None:
    """The varint at ``at`` and where it ends; ``None`` if the data ends inside it.

    Raises :class:`WireError` if it is longer than a varint can be.
    """
    value = 0
    for count in range(MAX_VARINT_BYTES):
        if at + count >= len(data):
            return None
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at + count + 1
    raise WireError(f"a number of more than {MAX_VARINT_BYTES} bytes")


def messages(data: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """``(field number, content, whole)`` of each length-delimited field of a message; other fields are passed over.

    ``whole`` is false for a last one that the data cuts off.  Raises :class:`WireError`
    where the bytes are no message.
    """
    at = 0
    while at < len(data):
        tag = varint(data, at)
        if tag is None:
            return
        number, kind, at = tag[0] >> 3, tag[0] & 7, tag[1]
        if not 0 < number < 1 << 29:
            raise WireError(f"field number {number}")
        if kind == _LENGTH:
            size = varint(data, at)
            if size is None:
                return
            begin, end = size[1], size[1] + size[0]
            yield number, data[begin:end], end <= len(data)
            at = end
        else:
            at = _end_of_number(data, at, kind)


def _end_of_number(data: bytes, at: int, kind: int) -> int:
    if kind == _VARINT:
        number = varint(data, at)
        return len(data) if number is None else number[1]
    if kind == _FIXED64:
        return at + 8
    if kind == _FIXED32:
        return at + 4
    raise WireError(f"wire type {kind}")
