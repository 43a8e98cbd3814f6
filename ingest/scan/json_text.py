"""JSON text, byte by byte, for compiled scans: every function goes from one position to another.

``text``: uint8[n], with at least 16 zero bytes after its content, at which everything stops.  A position of -1 says
that the text is not JSON, or JSON in a form that is left to a decoder.  What these functions accept is valid JSON
(RFC 8259), except that UTF-8 inside strings is not looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.base.tables import word_at
from blis_replay.ingest.scan.words import (
    HIGH,
    Bytes,
    Words,
    compiled,
    first_marked,
    has_zero_byte,
    inlined,
    stands_at,
    text_stands_at,
    word_of,
    words_of,
)

UNUSUAL = -1
PADDING_BYTES = 16

QUOTE, BACKSLASH, COMMA, COLON, MINUS, POINT, ZERO, NINE = (ord(c) for c in '"\\,:-.09')
OPEN_BRACE, CLOSE_BRACE, OPEN_BRACKET, CLOSE_BRACKET = (ord(c) for c in "{}[]")
SPACE, TAB, NEWLINE, RETURN = (ord(c) for c in " \t\n\r")
BEYOND_ASCII = 0x80
_EITHER = 0x20  # which sets a brace off from a bracket, and a small letter from a capital one
PLUS, NULL_LETTER = ord("+"), ord("n")
_U, _L, _E = (ord(c) for c in "ule")
_TRUE, _FALSE = word_of("true"), word_of("false")

_DEEPEST = 64
_FIRST_HALF, _SECOND_HALF = 0xD800 >> 10, 0xDC00 >> 10  # of a letter beyond 16 bits
QUOTES = np.uint64(0x2222222222222222)
BACKSLASHES = np.uint64(0x5C5C5C5C5C5C5C5C)
SPACES = np.uint64(0x2020202020202020)
_NEWLINES = np.uint64(0x0A0A0A0A0A0A0A0A)
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, as in Fibonacci hashing
# Which bytes may follow a backslash, but for u.
_SIMPLE_ESCAPES = np.zeros(256, np.bool_)
_SIMPLE_ESCAPES[[ord(c) for c in '"\\/bfnrt']] = True
_HEX = np.full(256, -1, np.int64)
for _digits, _first in (("0123456789", 0), ("abcdef", 10), ("ABCDEF", 10)):
    for _place, _digit in enumerate(_digits):
        _HEX[ord(_digit)] = _first + _place


@compiled
def after_space(text: Bytes, at: int) -> int:
    """The first position from ``at`` without white space."""
    while text[at] == SPACE or text[at] == NEWLINE or text[at] == RETURN or text[at] == TAB:
        at += 1
    return at


@compiled
def after_escape(text: Bytes, at: int) -> int:
    """The end of the escape whose backslash is at ``at``."""
    if _SIMPLE_ESCAPES[text[at + 1]]:
        return at + 2
    if text[at + 1] != _U:
        return UNUSUAL
    code = escaped_code(text, at)
    if code < 0 or code >> 10 == _SECOND_HALF:
        return UNUSUAL
    at += 6
    if code >> 10 == _FIRST_HALF:
        if text[at] != BACKSLASH or text[at + 1] != _U or escaped_code(text, at) >> 10 != _SECOND_HALF:
            return UNUSUAL
        at += 6
    return at


@compiled
def escaped_code(text: Bytes, at: int) -> int:
    r"""The UTF-16 code of the escape ``\uXXXX`` whose backslash is at ``at``; -1 if it has other digits."""
    code = 0
    for place in range(at + 2, at + 6):
        digit = _HEX[text[place]]
        if digit < 0:
            return UNUSUAL
        code = code * 16 + digit
    return code


@compiled
def after_string(text: Bytes, at: int) -> int:
    """The end of a string, behind its closing quote; ``at``: behind its opening one."""
    while True:
        word = word_at(text, at)
        special = has_zero_byte(word ^ QUOTES) | has_zero_byte(word ^ BACKSLASHES)
        special |= (word - SPACES) & ~word & HIGH  # a byte is below 32 if subtracting 32 borrows from its top bit
        if special == 0:
            at += 8
            continue
        _bit, place = first_marked(special)
        at += place
        if text[at] == QUOTE:
            return at + 1
        if text[at] != BACKSLASH:
            return UNUSUAL
        at = after_escape(text, at)
        if at < 0:
            return UNUSUAL


@compiled
def _after_digits(text: Bytes, at: int) -> int:
    begin = at
    while ZERO <= text[at] <= NINE:
        at += 1
    return at if at > begin else UNUSUAL


@compiled
def after_number(text: Bytes, at: int) -> int:
    """The end of any number."""
    if text[at] == MINUS:
        at += 1
    at = at + 1 if text[at] == ZERO else _after_digits(text, at)
    if at >= 0 and text[at] == POINT:
        at = _after_digits(text, at + 1)
    if at >= 0 and is_exponent(text[at]):
        at += 1
        if text[at] == PLUS or text[at] == MINUS:
            at += 1
        at = _after_digits(text, at)
    return at


@inlined
def is_exponent(byte: int) -> bool:
    """Whether this letter stands before an exponent."""
    return byte | _EITHER == _E


@compiled
def after_null(text: Bytes, at: int) -> int:
    """The end of the word ``null``."""
    word = text[at] == NULL_LETTER and text[at + 1] == _U and text[at + 2] == _L and text[at + 3] == _L
    return at + 4 if word else UNUSUAL


@compiled
def _after_plain(text: Bytes, at: int) -> int:
    """The end of a string, number or word."""
    byte = text[at]
    if byte == QUOTE:
        return after_string(text, at + 1)
    if byte == MINUS or ZERO <= byte <= NINE:
        return after_number(text, at)
    if stands_at(text, at, _TRUE, 4):
        return at + 4
    return at + 5 if stands_at(text, at, _FALSE, 5) else after_null(text, at)


@compiled
def after_key(text: Bytes, at: int) -> int:
    """Where the value of any key starts; ``at``: before the key."""
    at = after_space(text, at)
    if text[at] != QUOTE:
        return UNUSUAL
    at = after_string(text, at + 1)
    return after_colon(text, at) if at >= 0 else UNUSUAL


@compiled
def after_colon(text: Bytes, at: int) -> int:
    """Where a value starts; ``at``: behind its key."""
    at = after_space(text, at)
    return after_space(text, at + 1) if text[at] == COLON else UNUSUAL


@compiled
def after_value(text: Bytes, at: int) -> int:
    """The end of any value, nested up to 64 deep; ``at``: its first byte."""
    depth, kinds = 0, np.uint64(0)  # a bit for each open bracket, 1 for an object
    while True:
        byte = text[at]
        if byte | _EITHER == OPEN_BRACE:
            inside = after_space(text, at + 1)
            if text[inside] != byte + 2:  # the closing one of either
                if depth == _DEEPEST:
                    return UNUSUAL
                depth += 1
                kinds = (kinds << np.uint64(1)) | np.uint64(byte == OPEN_BRACE)
                at = after_key(text, inside) if byte == OPEN_BRACE else inside
                if at < 0:
                    return UNUSUAL
                continue
            at = inside + 1
        else:
            at = _after_plain(text, at)
            if at < 0:
                return UNUSUAL
        while depth > 0:
            at = after_space(text, at)
            is_object = kinds & np.uint64(1) == 1
            if text[at] == COMMA:
                at = after_key(text, at + 1) if is_object else after_space(text, at + 1)
                if at < 0:
                    return UNUSUAL
                break
            if text[at] != (CLOSE_BRACE if is_object else CLOSE_BRACKET):
                return UNUSUAL
            at += 1
            depth -= 1
            kinds >>= np.uint64(1)
        if depth == 0:
            return at


@compiled
def after_newline(text: Bytes, at: int, end: int) -> int:
    """The position behind the next newline; -1 without one before ``end``."""
    while at < end:
        newlines = has_zero_byte(word_at(text, at) ^ _NEWLINES)
        if newlines:
            _bit, place = first_marked(newlines)
            return at + place + 1 if at + place < end else UNUSUAL
        at += 8
    return UNUSUAL


@compiled
def after_plain_text(text: Bytes, at: int) -> int:
    """The end of a string of ASCII without escapes; ``at``: behind its opening quote."""
    while text[at] != QUOTE:
        if text[at] == BACKSLASH or text[at] < SPACE or text[at] >= BEYOND_ASCII:
            return UNUSUAL
        at += 1
    return at + 1


@compiled
def next_member(text: Bytes, at: int, closing: int) -> int:
    """From behind a member: where the next one starts, or at the closing bracket."""
    at = after_space(text, at)
    if text[at] == closing:
        return at
    if text[at] != COMMA:
        return UNUSUAL
    at = after_space(text, at + 1)
    return UNUSUAL if text[at] == closing else at


# -- Names: a string is one of those that a scan knows, or none -----------------------------------

_TABLE_BITS = 9


def names_of(names: list[str]) -> tuple[Words, NDArray[np.int64], NDArray[np.int64]]:
    """Names of ASCII, numbered in their order, for :func:`name_at`, as constants of compiled code.

    Their words and lengths (``words_of``), and int64[512]: their numbers by their hash, -1 for empty places.
    """
    words, lengths = words_of(names)
    table = np.full(1 << _TABLE_BITS, -1, np.int64)
    for number, name in enumerate(names):
        place = _place_of(words[number, : len(name) // 8 + 1])
        while table[place] >= 0:
            place = (place + 1) % len(table)
        table[place] = number
    return words, lengths, table


def _place_of(words: Words) -> int:
    """What :func:`name_at` makes of the words of a name."""
    code = 0
    for word in words.tolist():
        code = ((code ^ word) * int(FACTOR)) % (1 << 64)
        code ^= code >> 32
    return code >> (64 - _TABLE_BITS)


@compiled
def name_at(text: Bytes, at: int, names: Words, lengths: Any, table: Any) -> tuple[int, int]:
    """``(number, end)`` of the string whose first letter is ``at``; number -1: not one of the names.

    A string with an escape is left to the decoder, as it could be any name, and so is one beyond ASCII.
    """
    begin, code = at, np.uint64(0)
    while True:
        word = word_at(text, at)
        special = has_zero_byte(word ^ QUOTES) | has_zero_byte(word ^ BACKSLASHES)
        special |= ((word - SPACES) | word) & HIGH
        if special:
            # The lowest byte that is marked is what it seems.
            first, before = first_marked(special)
            word &= first - np.uint64(1)
            at += before
        code = (code ^ word) * FACTOR
        code ^= code >> np.uint64(32)
        if special:
            break
        at += 8
    if text[at] != QUOTE:
        return -1, UNUSUAL
    return _number_of(text, begin, at, code, names, lengths, table), at + 1


@compiled
def _number_of(text: Bytes, begin: int, end: int, code: Any, names: Words, lengths: Any, table: Any) -> int:
    place = np.int64(code >> np.uint64(64 - _TABLE_BITS))
    while table[place] >= 0:
        number: int = table[place]
        if lengths[number] == end - begin and text_stands_at(text, begin, names, lengths, number):
            return number
        place = (place + 1) & ((1 << _TABLE_BITS) - 1)
    return -1
