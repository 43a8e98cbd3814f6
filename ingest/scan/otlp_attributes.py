"""Attributes of spans and events, from JSON text into a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.tables import word_at
from blis_replay.ingest.scan import json_text as js
from blis_replay.ingest.scan import otlp_rows as out
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
        for name in out.ATTRIBUTES
        for kind in ("intValue", "doubleValue", "stringValue")
    ]
)
_BETWEEN = word_of("}},{")
_ANY_OTHER, _START = len(out.ATTRIBUTES), len(out.ATTRIBUTES) + 1  # in the place of a name


@compiled
def after_attributes(
    text: js.Bytes, words: Words, at: int, whose: int, rows: Int64s, first: int, state: Int64s, texts: js.Bytes
) -> int:
    """The end of a list of attributes or ``null``; the values that have a column are in the row from ``first`` on.

    Lists of one writer are alike: how the attribute began that came next the last time is looked for as a whole.
    """
    if text[at] != js.OPEN_BRACKET:
        return js.after_null(text, at)
    at = js.after_space(text, at + 1)
    name = _START
    while text[at] != js.CLOSE_BRACKET:
        follower = out.FOLLOWERS + out.FOLLOWERS_EACH * whose + name
        opening = state[follower]
        if opening >= 0 and text_stands_at(words, at, _OPENINGS, _OPENING_LENGTHS, opening):
            name, kind = opening // len(out.ALL_KINDS), opening % len(out.ALL_KINDS)
            at += _OPENING_LENGTHS[opening]
        else:
            name, kind, at = _after_opening(text, words, at, whose)
            if at < 0:
                return js.UNUSUAL
            if kind >= 0:
                state[follower] = len(out.ALL_KINDS) * name + kind
        field = out.FIELD_OF[whose, name]
        if kind >= 0:
            as_text = field >= out.FIRST_TEXT[whose]
            at = _after_scalar(text, words, at, kind, as_text, rows, first + field, state, texts)
            if at < 0:
                return at
            if stands_at(words, at, _BETWEEN, 4):
                at += 3
                continue
            at = js.after_space(text, at)
            if text[at] != js.CLOSE_BRACE:
                return js.UNUSUAL
            at += 1
        elif field < 0:
            at = js.after_value(text, words, at)
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
def _after_opening(text: js.Bytes, words: Words, at: int, whose: int) -> tuple[int, int, int]:
    """``(name, kind, at)`` of an attribute up to its scalar, or up to a value that is null or has no column."""
    wrong = 0, _NULL_OR_NOT_READ, js.UNUSUAL
    if text[at] != js.OPEN_BRACE:
        return wrong
    at = js.after_space(text, at + 1)
    if not stands_at(words, at, _KEY, 5):
        return wrong
    at = js.after_colon(text, at + 5)
    if at < 0 or text[at] != js.QUOTE:
        return wrong
    known, at = js.name_at(words, at + 1, out.ATTRIBUTE_NAMES, out.ATTRIBUTE_LENGTHS, out.ATTRIBUTE_TABLE)
    if at < 0:
        return wrong
    name = known if known >= 0 else _ANY_OTHER
    at = js.after_space(text, at)
    if text[at] != js.COMMA:
        return wrong
    at = js.after_space(text, at + 1)
    if not stands_at(words, at, _VALUE, 7):
        return wrong
    at = js.after_colon(text, at + 7)
    if at < 0:
        return wrong
    if out.FIELD_OF[whose, name] < 0 or text[at] == js.NULL_LETTER:
        return name, _NULL_OR_NOT_READ, at
    if text[at] != js.OPEN_BRACE:
        return wrong
    at = js.after_space(text, at + 1)
    kind, at = _kind_at(words, at)
    if kind < 0 or not out.KINDS_OF[whose, name] >> kind & 1:
        return wrong
    return name, kind, js.after_colon(text, at)


@inlined
def _kind_at(words: Words, at: int) -> tuple[int, int]:
    """``(kind, end)`` of the name of a value's one member, which is left to the decoder if it is of another kind."""
    if stands_at(words, at, _INT_VALU, 8) and stands_at(words, at + 8, _E, 2):
        return out.INTEGER, at + 10
    if stands_at(words, at, _DOUBLE_, 8) and stands_at(words, at + 8, _ALUE, 5):
        return out.DOUBLE, at + 13
    if stands_at(words, at, _STRING_, 8) and stands_at(words, at + 8, _ALUE, 5):
        return out.STRING, at + 13
    return -1, js.UNUSUAL


@inlined
def _after_scalar(
    text: js.Bytes,
    words: Words,
    at: int,
    kind: int,
    as_text: bool,
    rows: Int64s,
    place: int,
    state: Int64s,
    texts: js.Bytes,
) -> int:
    """The end of a scalar of a kind, which is at ``place`` of the rows."""
    quoted = text[at] == js.QUOTE
    begin = at + quoted
    value = np.uint64(0)
    if kind == out.INTEGER:
        value, at = whole(text, words, at)
    elif kind == out.DOUBLE:
        at = _after_double(text, at)
    else:
        at = js.after_plain_text(text, at + 1) if quoted else js.UNUSUAL
    if at < 0:
        return js.UNUSUAL
    if not as_text:
        rows[place] = np.int64(value)
    elif not out.keep_text(text, begin, at - quoted, rows, place, state, texts):
        return out.FULL
    return at


@compiled
def whole(text: js.Bytes, words: Words, at: int) -> tuple[Any, int]:
    """``(value, end)`` of a whole number below 2^63 without sign, as a number or in quotes."""
    quoted = text[at] == js.QUOTE
    at += quoted
    begin, value = at, np.uint64(0)
    eight = word_at(words, at)
    while are_digits(eight) and at - begin <= _MOST_DIGITS:
        value = value * np.uint64(100_000_000) + eight_digits(eight)
        at += 8
        eight = word_at(words, at)
    while js.ZERO <= text[at] <= js.NINE:
        value = value * np.uint64(10) + np.uint64(text[at] - js.ZERO)
        at += 1
    digits = at - begin
    plain = 0 < digits <= _MOST_DIGITS and (digits == 1 or text[begin] != js.ZERO) and value <= _LARGEST
    if not plain or text[at] == js.POINT or js.is_exponent(text[at]) or (quoted and text[at] != js.QUOTE):
        return np.uint64(0), js.UNUSUAL
    return value, at + quoted


@compiled
def _after_double(text: js.Bytes, at: int) -> int:
    """The end of a number that no exponent of three digits and no great length can make larger than a double."""
    end = js.after_number(text, at)
    if end - at > _LONGEST_DOUBLE:
        return js.UNUSUAL
    while at < end and not js.is_exponent(text[at]):
        at += 1
    signed = text[at + 1] == js.MINUS or text[at + 1] == js.PLUS
    return end if end - at - 1 - signed <= 2 else js.UNUSUAL
