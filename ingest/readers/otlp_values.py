"""OTLP attributes in JSON: integers as numbers or decimal strings, 64 bits exact."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

# What a decoder can raise over bytes that are no such JSON.
DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
# A time in ns beyond this is damage; epoch stamps stay below it until 2116.
MAX_NS = 1 << 62

Scalar = int | float | str | None


class Value(Struct, gc=False):
    """An ``AnyValue``; arrays, maps, bytes and booleans are not needed here."""

    intValue: int | None = None
    doubleValue: float | None = None
    stringValue: str | None = None


class Attribute(Struct, gc=False):
    """A key and its value."""

    key: str
    value: Value


def scalars(attributes: Iterable[Attribute]) -> dict[str, Scalar]:
    """The attributes by key, each as the one scalar that it holds."""
    return {attribute.key: _scalar(attribute.value) for attribute in attributes}


def _scalar(value: Value) -> Scalar:
    if value.intValue is not None:
        return value.intValue
    return value.doubleValue if value.doubleValue is not None else value.stringValue
