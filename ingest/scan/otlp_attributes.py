"""Attributes of spans and events, from JSON text into a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from blis_replay.ingest.readers.otlp_columns import (
    EVENT_FLOATS,
    EVENT_INTEGERS,
    EVENT_STRINGS,
    SPAN_FLOATS,
    SPAN_INTEGERS,
    SPAN_STRINGS,
)
from blis_replay.ingest.scan.compiled import compiled, inlined
from blis_replay.ingest.scan.json_text import (
    CLOSE_BRACE,
    CLOSE_BRACKET,
    COMMA,
    EXPONENTS,
    MINUS,
    NINE,
    NULL_LETTER,
    OPEN_BRACE,
    OPEN_BRACKET,
    PLUS,
    POINT,
    QUOTE,
    UNUSUAL,
    ZERO,
    Bytes,
    Words,
    after_colon,
    after_null,
    after_number,
    after_plain_text,
    after_space,
    after_value,
    name_at,
    names_of,
    next_member,
)
from blis_replay.ingest.scan.otlp_rows import (
    EVENT_COUNTS,
    NULL,
    SPAN_COUNTS,
    TEXT_BYTES,
    Int64s,
    event_field,
    span_field,
)

FULL = -2  # a position, as UNUSUAL is: there is no room for another row or text
OF_SPAN, OF_EVENT = 0, 1

_INTEGER, _DOUBLE, _STRING, _KEY, _VALUE = range(5)
_ATTRIBUTES = [*SPAN_INTEGERS, *SPAN_FLOATS, *SPAN_STRINGS, *EVENT_INTEGERS, *EVENT_FLOATS, *EVENT_STRINGS]
_KNOWN = list(dict.fromkeys(["intValue", "doubleValue", "stringValue", "key", "value", *_ATTRIBUTES]))
_NAMES, _LENGTHS, _TABLE = names_of(_KNOWN)
# By whose attribute it is and its name (the last one: any other): where its value goes, and the kinds it can have.
_FIELD = np.full((2, len(_KNOWN) + 1), -1)
_KINDS = np.zeros_like(_FIELD)
for _whose, _place, _tables in (
    (OF_SPAN, span_field, (SPAN_INTEGERS, SPAN_FLOATS, SPAN_STRINGS)),
    (OF_EVENT, event_field, (EVENT_INTEGERS, EVENT_FLOATS, EVENT_STRINGS)),
):
    for _table, _kinds in zip(_tables, (1 << _INTEGER, 1 << _INTEGER | 1 << _DOUBLE, 1 << _STRING), strict=True):
        for _name, _column in _table.items():
            _FIELD[_whose, _KNOWN.index(_name)] = _place(_column)
            _KINDS[_whose, _KNOWN.index(_name)] = _kinds
_FIRST_TEXT = np.array([len(SPAN_COUNTS), len(EVENT_COUNTS)])
_LARGEST = np.uint64((1 << 63) - 1)
_MOST_DIGITS = 19  # fewer than 2^64
_LONGEST_DOUBLE = 40  # one is printed with 25 at most


@compiled
def after_attributes(text: Bytes, words: Words, at: int, whose: int, row: Any, state: Int64s, texts: Bytes) -> int:
    """The end of a list of attributes or ``null``; the values of those that have a column are in ``row``."""
    if text[at] != OPEN_BRACKET:
        return after_null(text, at)
    at = after_space(text, at + 1)
    while text[at] != CLOSE_BRACKET:
        at = _after_name(text, words, at, OPEN_BRACE, _KEY)
        if at < 0 or text[at] != QUOTE:
            return UNUSUAL
        name, at = name_at(words, at + 1, _NAMES, _LENGTHS, _TABLE)
        if at < 0:
            return UNUSUAL
        at = _after_name(text, words, after_space(text, at), COMMA, _VALUE)
        if at < 0:
            return UNUSUAL
        field = _FIELD[whose, name]
        if field < 0:
            at = after_value(text, words, at)
        elif text[at] == NULL_LETTER:
            row[field] = NULL
            at = after_null(text, at)
        else:
            as_text = field >= _FIRST_TEXT[whose]
            at = _after_scalar(text, words, at, _KINDS[whose, name], as_text, row, field, state, texts)
        if at < 0:
            return at
        at = after_space(text, at)
        if text[at] != CLOSE_BRACE:
            return UNUSUAL
        at = next_member(text, at + 1, CLOSE_BRACKET)
        if at < 0:
            return UNUSUAL
    return at + 1


@inlined
def _after_name(text: Bytes, words: Words, at: int, opening: int, wanted: int) -> int:
    """Where the value of the wanted member starts, which is behind a brace or a comma."""
    if text[at] != opening:
        return UNUSUAL
    at = after_space(text, at + 1)
    if text[at] != QUOTE:
        return UNUSUAL
    name, at = name_at(words, at + 1, _NAMES, _LENGTHS, _TABLE)
    return after_colon(text, at) if name == wanted else UNUSUAL


@inlined
def _after_scalar(
    text: Bytes, words: Words, at: int, kinds: int, as_text: bool, row: Any, field: int, state: Int64s, texts: Bytes
) -> int:
    """The end of a value of one of the kinds, which is in ``row``."""
    if text[at] != OPEN_BRACE:
        return UNUSUAL
    at = after_space(text, at + 1)
    if text[at] != QUOTE:
        return UNUSUAL
    kind, at = name_at(words, at + 1, _NAMES, _LENGTHS, _TABLE)
    if kind < 0 or not kinds >> kind & 1:
        return UNUSUAL
    at = after_colon(text, at)
    if at < 0:
        return UNUSUAL
    quoted = text[at] == QUOTE
    begin = at + quoted
    value = np.uint64(0)
    if kind == _INTEGER:
        value, at = whole(text, at)
    elif kind == _DOUBLE:
        at = _after_double(text, at)
    else:
        at = after_plain_text(text, at + 1) if quoted else UNUSUAL
    if at < 0:
        return UNUSUAL
    if not as_text:
        row[field] = np.int64(value)
    elif not keep_text(text, begin, at - quoted, row, field, state, texts):
        return FULL
    at = after_space(text, at)
    return at + 1 if text[at] == CLOSE_BRACE else UNUSUAL


@compiled
def keep_text(text: Bytes, begin: int, end: int, row: Any, field: int, state: Int64s, texts: Bytes) -> bool:
    """Whether there was room to copy a text behind the others; where it is then stands in ``row``."""
    first = state[TEXT_BYTES]
    if first + end - begin > len(texts):
        return False
    for place in range(end - begin):
        texts[first + place] = text[begin + place]
    row[field], row[field + 1] = first, first + end - begin
    state[TEXT_BYTES] = row[field + 1]
    return True


@compiled
def whole(text: Bytes, at: int) -> tuple[Any, int]:
    """``(value, end)`` of a whole number below 2^63 without sign, as a number or in quotes."""
    quoted = text[at] == QUOTE
    at += quoted
    begin, value = at, np.uint64(0)
    while ZERO <= text[at] <= NINE:
        value = value * np.uint64(10) + np.uint64(text[at] - ZERO)
        at += 1
    digits = at - begin
    plain = 0 < digits <= _MOST_DIGITS and (digits == 1 or text[begin] != ZERO) and value <= _LARGEST
    if not plain or text[at] == POINT or text[at] in EXPONENTS or (quoted and text[at] != QUOTE):
        return np.uint64(0), UNUSUAL
    return value, at + quoted


@compiled
def _after_double(text: Bytes, at: int) -> int:
    """The end of a number that no exponent of three digits and no great length can make larger than a double."""
    end = after_number(text, at)
    if end - at > _LONGEST_DOUBLE:
        return UNUSUAL
    while at < end and text[at] not in EXPONENTS:
        at += 1
    signed = text[at + 1] in (MINUS, PLUS)
    return end if end - at - 1 - signed <= 2 else UNUSUAL
