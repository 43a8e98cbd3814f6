"""Attributes of spans and events, from JSON text into a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.tables import word_at
from blis_replay.ingest.scan.json_text import (
    CLOSE_BRACE,
    CLOSE_BRACKET,
    COMMA,
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
    after_colon,
    after_null,
    after_number,
    after_plain_text,
    after_space,
    after_value,
    is_exponent,
    name_at,
    next_member,
)
from blis_replay.ingest.scan.otlp_rows import (
    ALL_KINDS,
    ATTRIBUTE_LENGTHS,
    ATTRIBUTE_NAMES,
    ATTRIBUTE_TABLE,
    ATTRIBUTES,
    DOUBLE,
    FIELD_OF,
    FIRST_TEXT,
    FOLLOWERS,
    FOLLOWERS_EACH,
    FULL,
    INTEGER,
    KINDS_OF,
    NULL,
    STRING,
    keep_text,
)
from blis_replay.ingest.scan.words import (
    Words,
    are_digits,
    compiled,
    eight_digits,
    inlined,
    stands_at,
    text_stands_at,
    word_of,
    words_of,
)

_NULL_OR_NOT_READ = -1
_LARGEST = np.uint64((1 << 63) - 1)
_MOST_DIGITS = 19  # fewer than 2^64
_KEY, _VALUE, _INT_VALU, _E, _DOUBLE_, _STRING_, _ALUE = (
    word_of(name) for name in ('"key"', '"value"', '"intValu', 'e"', '"doubleV', '"stringV', 'alue"')
)
_LONGEST_DOUBLE = 40  # one is printed with 25 at most
# An attribute up to its scalar, as writers without white space write it, by its name and kind.
_OPENINGS, _OPENING_LENGTHS = words_of(
    [
        f'{{"key":"{name}","value":{{"{kind}":'
        for name in ATTRIBUTES
        for kind in ("intValue", "doubleValue", "stringValue")
    ]
)
_BETWEEN = word_of("}},{")
_ANY_OTHER, _START = len(ATTRIBUTES), len(ATTRIBUTES) + 1  # in the place of a name


@compiled
def after_attributes(
    text: Bytes, words: Words, at: int, whose: int, rows: Int64s, first: int, state: Int64s, texts: Bytes
) -> int:
    """The end of a list of attributes or ``null``; the values that have a column are in the row from ``first`` on.

    Lists of one writer are alike: how the attribute began that came next the last time is looked for as a whole.
    """
    if text[at] != OPEN_BRACKET:
        return after_null(text, at)
    at = after_space(text, at + 1)
    name = _START
    while text[at] != CLOSE_BRACKET:
        follower = FOLLOWERS + FOLLOWERS_EACH * whose + name
        opening = state[follower]
        if opening >= 0 and text_stands_at(words, at, _OPENINGS, _OPENING_LENGTHS, opening):
            name, kind = opening // len(ALL_KINDS), opening % len(ALL_KINDS)
            at += _OPENING_LENGTHS[opening]
        else:
            name, kind, at = _after_opening(text, words, at, whose)
            if at < 0:
                return UNUSUAL
            if kind >= 0:
                state[follower] = len(ALL_KINDS) * name + kind
        field = FIELD_OF[whose, name]
        if kind >= 0:
            as_text = field >= FIRST_TEXT[whose]
            at = _after_scalar(text, words, at, kind, as_text, rows, first + field, state, texts)
            if at < 0:
                return at
            if stands_at(words, at, _BETWEEN, 4):
                at += 3
                continue
            at = after_space(text, at)
            if text[at] != CLOSE_BRACE:
                return UNUSUAL
            at += 1
        elif field < 0:
            at = after_value(text, words, at)
        else:
            rows[first + field] = NULL
            at = after_null(text, at)
        if at < 0:
            return UNUSUAL
        at = after_space(text, at)
        if text[at] != CLOSE_BRACE:
            return UNUSUAL
        at = next_member(text, at + 1, CLOSE_BRACKET)
        if at < 0:
            return UNUSUAL
    return at + 1


@compiled
def _after_opening(text: Bytes, words: Words, at: int, whose: int) -> tuple[int, int, int]:
    """``(name, kind, at)`` of an attribute up to its scalar, or up to a value that is null or has no column."""
    wrong = 0, _NULL_OR_NOT_READ, UNUSUAL
    if text[at] != OPEN_BRACE:
        return wrong
    at = after_space(text, at + 1)
    if not stands_at(words, at, _KEY, 5):
        return wrong
    at = after_colon(text, at + 5)
    if at < 0 or text[at] != QUOTE:
        return wrong
    known, at = name_at(words, at + 1, ATTRIBUTE_NAMES, ATTRIBUTE_LENGTHS, ATTRIBUTE_TABLE)
    if at < 0:
        return wrong
    name = known if known >= 0 else _ANY_OTHER
    at = after_space(text, at)
    if text[at] != COMMA:
        return wrong
    at = after_space(text, at + 1)
    if not stands_at(words, at, _VALUE, 7):
        return wrong
    at = after_colon(text, at + 7)
    if at < 0:
        return wrong
    if FIELD_OF[whose, name] < 0 or text[at] == NULL_LETTER:
        return name, _NULL_OR_NOT_READ, at
    if text[at] != OPEN_BRACE:
        return wrong
    at = after_space(text, at + 1)
    kind, at = _kind_at(words, at)
    if kind < 0 or not KINDS_OF[whose, name] >> kind & 1:
        return wrong
    return name, kind, after_colon(text, at)


@inlined
def _kind_at(words: Words, at: int) -> tuple[int, int]:
    """``(kind, end)`` of the name of a value's one member, which is left to the decoder if it is of another kind."""
    if stands_at(words, at, _INT_VALU, 8) and stands_at(words, at + 8, _E, 2):
        return INTEGER, at + 10
    if stands_at(words, at, _DOUBLE_, 8) and stands_at(words, at + 8, _ALUE, 5):
        return DOUBLE, at + 13
    if stands_at(words, at, _STRING_, 8) and stands_at(words, at + 8, _ALUE, 5):
        return STRING, at + 13
    return -1, UNUSUAL


@inlined
def _after_scalar(
    text: Bytes,
    words: Words,
    at: int,
    kind: int,
    as_text: bool,
    rows: Int64s,
    place: int,
    state: Int64s,
    texts: Bytes,
) -> int:
    """The end of a scalar of a kind, which is at ``place`` of the rows."""
    quoted = text[at] == QUOTE
    begin = at + quoted
    value = np.uint64(0)
    if kind == INTEGER:
        value, at = whole(text, words, at)
    elif kind == DOUBLE:
        at = _after_double(text, at)
    else:
        at = after_plain_text(text, at + 1) if quoted else UNUSUAL
    if at < 0:
        return UNUSUAL
    if not as_text:
        rows[place] = np.int64(value)
    elif not keep_text(text, begin, at - quoted, rows, place, state, texts):
        return FULL
    return at


@compiled
def whole(text: Bytes, words: Words, at: int) -> tuple[Any, int]:
    """``(value, end)`` of a whole number below 2^63 without sign, as a number or in quotes."""
    quoted = text[at] == QUOTE
    at += quoted
    begin, value = at, np.uint64(0)
    eight = word_at(words, at)
    while are_digits(eight) and at - begin <= _MOST_DIGITS:
        value = value * np.uint64(100_000_000) + eight_digits(eight)
        at += 8
        eight = word_at(words, at)
    while ZERO <= text[at] <= NINE:
        value = value * np.uint64(10) + np.uint64(text[at] - ZERO)
        at += 1
    digits = at - begin
    plain = 0 < digits <= _MOST_DIGITS and (digits == 1 or text[begin] != ZERO) and value <= _LARGEST
    if not plain or text[at] == POINT or is_exponent(text[at]) or (quoted and text[at] != QUOTE):
        return np.uint64(0), UNUSUAL
    return value, at + quoted


@compiled
def _after_double(text: Bytes, at: int) -> int:
    """The end of a number that no exponent of three digits and no great length can make larger than a double."""
    end = after_number(text, at)
    if end - at > _LONGEST_DOUBLE:
        return UNUSUAL
    while at < end and not is_exponent(text[at]):
        at += 1
    signed = text[at + 1] == MINUS or text[at + 1] == PLUS
    return end if end - at - 1 - signed <= 2 else UNUSUAL
