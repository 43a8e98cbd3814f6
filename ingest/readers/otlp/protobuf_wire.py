"""The outside of protobuf messages: field numbers and bytes, without a schema."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10
_MAX_FIELD = (1 << 29) - 1


class WireError(ValueError):
    """These bytes are no protobuf message, or not all of one."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at ``at`` and where it ends; raises :class:`WireError` if it does not end."""
    value = 0
    for count, byte in enumerate(data[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at + count + 1
    raise WireError("a number that does not end")


def messages(data: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """``(field number, content, whole)`` of each length-delimited field of a message; other fields are passed over.

    ``whole`` is false for a last one that the data cuts off.  Raises :class:`WireError`
    where the bytes are no message or end inside a number.
    """
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if not 0 < number <= _MAX_FIELD:
            raise WireError(f"field number {number}")
        if kind == _LENGTH:
            size, at = varint(data, at)
            yield number, data[at : at + size], at + size <= len(data)
            at += size
        elif kind == _VARINT:
            _value, at = varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
            if at > len(data):
                raise WireError("a number that does not end")
        else:
            raise WireError(f"wire type {kind}")
