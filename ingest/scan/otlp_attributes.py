"""Attributes of spans and events, from JSON text into a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.ingest.scan import json_text as js
from blis_replay.ingest.scan import otlp_rows as out
from blis_replay.ingest.scan.words import (
    Bytes,
    compiled,
    inlined,
    stands_at,
    text_stands_at,
    word_of,
    words_of,
)

_NULL_OR_NOT_READ = -1
_LARGEST = np.uint64((1 << 63) - 1)
_MOST_DIGITS = 19  # fewer than 2^64
_KEY, _VALUE = word_of('"key"'), word_of('"value"')
_KINDS, _KIND_LENGTHS = words_of(['"intValue"', '"doubleValue"', '"stringValue"'])  # in the order of ``out.ALL_KINDS``
_LONGEST_DOUBLE = 40  # one is printed with 25 at most
_ANY_OTHER = len(out.ATTRIBUTES)  # in the place of a name


@compiled
def after_attributes(scan: out.Scan, at: int, whose: int) -> int:
    """The end of a list of attributes or ``null``; the values that have a column are in the row that was begun."""
    text, (rows, first) = scan.text, out.begun(scan, whose)
    if text[at] != js.OPEN_BRACKET:
        return js.after_null(text, at)
    at = js.after_space(text, at + 1)
    while text[at] != js.CLOSE_BRACKET:
        name, kind, at = _after_opening(text, at, whose)
        if at < 0:
            return js.UNUSUAL
        field = out.FIELD_OF[whose, name]
        if kind >= 0:
            as_text = out.KINDS_OF[whose, name] != 1 << out.INTEGER
            at = _after_scalar(scan, at, kind, as_text, rows, first + field)
            if at < 0:
                return at
            at = js.after_space(text, at)
            if text[at] != js.CLOSE_BRACE:
                return js.UNUSUAL
            at += 1
        elif field < 0:
            at = js.after_value(text, at)
        else:
            rows[first + field] = out.NULL
            at = js.after_null(text, at)
        if at < 0:
            return js.UNUSUAL
        at = js.after_space(text, at)
        if text[at] != js.CLOSE_BRACE:
            return js.UNUSUAL
        at = js.next_member(text, at + 1, js.CLOSE_BRACKET)
        if at < 0:
            return js.UNUSUAL
    return at + 1


@compiled
def _after_opening(text: Bytes, at: int, whose: int) -> tuple[int, int, int]:
    """``(name, kind, at)`` of an attribute up to its scalar, or up to a value that is null or has no column."""
    wrong = 0, _NULL_OR_NOT_READ, js.UNUSUAL
    if text[at] != js.OPEN_BRACE:
        return wrong
    at = js.after_space(text, at + 1)
    if not stands_at(text, at, _KEY, 5):
        return wrong
    at = js.after_colon(text, at + 5)
    if at < 0 or text[at] != js.QUOTE:
        return wrong
    known, at = js.name_at(text, at + 1, out.ATTRIBUTE_NAMES, out.ATTRIBUTE_LENGTHS, out.ATTRIBUTE_TABLE)
    if at < 0:
        return wrong
    name = known if known >= 0 else _ANY_OTHER
    at = js.after_space(text, at)
    if text[at] != js.COMMA:
        return wrong
    at = js.after_space(text, at + 1)
    if not stands_at(text, at, _VALUE, 7):
        return wrong
    at = js.after_colon(text, at + 7)
    if at < 0:
        return wrong
    if out.FIELD_OF[whose, name] < 0 or text[at] == js.NULL_LETTER:
        return name, _NULL_OR_NOT_READ, at
    if text[at] != js.OPEN_BRACE:
        return wrong
    at = js.after_space(text, at + 1)
    kind, at = _kind_at(text, at)
    if kind < 0 or not out.KINDS_OF[whose, name] >> kind & 1:
        return wrong
    return name, kind, js.after_colon(text, at)


@inlined
def _kind_at(text: Bytes, at: int) -> tuple[int, int]:
    """``(kind, end)`` of the name of a value's one member, which is left to the decoder if it is of another kind."""
    for kind in range(len(_KIND_LENGTHS)):
        if text_stands_at(text, at, _KINDS, _KIND_LENGTHS, kind):
            return kind, at + _KIND_LENGTHS[kind]
    return -1, js.UNUSUAL


@inlined
def _after_scalar(scan: out.Scan, at: int, kind: int, as_text: bool, rows: Int64s, place: int) -> int:
    """The end of a scalar of a kind, which is at ``place`` of the rows."""
    text = scan.text
    quoted = text[at] == js.QUOTE
    begin = at + quoted
    value = np.uint64(0)
    if kind == out.INTEGER:
        value, at = whole(text, at)
    elif kind == out.DOUBLE:
        at = _after_double(text, at)
    else:
        at = js.after_plain_text(text, at + 1) if quoted else js.UNUSUAL
    if at < 0:
        return js.UNUSUAL
    if not as_text:
        rows[place] = np.int64(value)
    elif not out.keep_text(scan, begin, at - quoted, rows, place):
        return out.FULL
    return at


@compiled
def whole(text: Bytes, at: int) -> tuple[Any, int]:
    """``(value, end)`` of a whole number below 2^63 without sign, as a number or in quotes."""
    quoted = text[at] == js.QUOTE
    at += quoted
    begin, value = at, np.uint64(0)
    while js.ZERO <= text[at] <= js.NINE:
        value = value * np.uint64(10) + np.uint64(text[at] - js.ZERO)
        at += 1
    digits = at - begin
    plain = 0 < digits <= _MOST_DIGITS and (digits == 1 or text[begin] != js.ZERO) and value <= _LARGEST
    if not plain or text[at] == js.POINT or js.is_exponent(text[at]) or (quoted and text[at] != js.QUOTE):
        return np.uint64(0), js.UNUSUAL
    return value, at + quoted


@compiled
def _after_double(text: Bytes, at: int) -> int:
    """The end of a number that no exponent of three digits and no great length can make larger than a double."""
    end = js.after_number(text, at)
    if end - at > _LONGEST_DOUBLE:
        return js.UNUSUAL
    while at < end and not js.is_exponent(text[at]):
        at += 1
    signed = text[at + 1] == js.MINUS or text[at + 1] == js.PLUS
    return end if end - at - 1 - signed <= 2 else js.UNUSUAL
