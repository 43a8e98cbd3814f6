"""JSON text, byte by byte, for compiled scans: every function goes from one position to another.

``text``: uint8[n], with at least 16 zero bytes after its content, at which everything stops;
``words``: the same memory as uint64.  A position of -1 says that the text is not plain: it is
no JSON, or JSON in a form that is left to a decoder.  What these functions accept is valid
JSON (RFC 8259), except that UTF-8 inside strings is not looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.scan.compiled import compiled, inlined
from blis_replay.ingest.scan.words import HIGH, Words, first_marked, has_zero_byte, word_at

Bytes = NDArray[np.uint8]

UNUSUAL = -1
PADDING_BYTES = 16

QUOTE, BACKSLASH, COMMA, COLON, MINUS, POINT, ZERO, NINE = (ord(c) for c in '"\\,:-.09')
OPEN_BRACE, CLOSE_BRACE, OPEN_BRACKET, CLOSE_BRACKET = (ord(c) for c in "{}[]")
SPACE, TAB, NEWLINE, RETURN = (ord(c) for c in " \t\n\r")
BEYOND_ASCII = 0x80
_EITHER = 0x20  # which sets a brace off from a bracket, and a small letter from a capital one
PLUS, NULL_LETTER = ord("+"), ord("n")
_T, _R, _U, _E, _F, _A, _L, _S = (ord(c) for c in "truefals")

_DEEPEST = 64
_FIRST_HALF, _SECOND_HALF = 0xD800 >> 10, 0xDC00 >> 10  # of a letter beyond 16 bits
QUOTES = np.uint64(0x2222222222222222)
BACKSLASHES = np.uint64(0x5C5C5C5C5C5C5C5C)
SPACES = np.uint64(0x2020202020202020)
_NEWLINES = np.uint64(0x0A0A0A0A0A0A0A0A)
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, as in Fibonacci hashing
_TENS = 10.0 ** np.arange(23)  # all of them exact
_WHOLE_TENS = 10 ** np.arange(19)
_EXACT = 1 << 53
_MOST_DIGITS = 18
# Which bytes may follow a backslash, but for u.
_SIMPLE_ESCAPES = np.zeros(256, np.bool_)
_SIMPLE_ESCAPES[[ord(c) for c in '"\\/bfnrt']] = True
_HEX = np.full(256, -1, np.int64)
for _digits, _first in (("0123456789", 0), ("abcdef", 10), ("ABCDEF", 10)):
    for _place, _digit in enumerate(_digits):
        _HEX[ord(_digit)] = _first + _place


@compiled
def after_space(text: Bytes, at: int) -> int:
    """The first position from ``at`` that is no white space."""
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
def put_escaped(text: Bytes, at: int, out: Any, place: int) -> tuple[int, int]:
    r"""``(where it ends in out, where in text)``: the letter of a valid escape ``\uXXXX``, or of two, as UTF-8."""
    code, at = escaped_code(text, at), at + 6
    if code >> 10 == _FIRST_HALF:
        code, at = 0x10000 + ((code & 0x3FF) << 10) + (escaped_code(text, at) & 0x3FF), at + 6
    followers = (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)
    # As many high bits as there are bytes, if more than one; each that follows carries six bits.
    out[place] = (code >> 6 * followers) | ((0xF00 >> (followers + 1)) & 0xF0 if followers else 0)
    for follower in range(1, followers + 1):
        out[place + follower] = BEYOND_ASCII | ((code >> 6 * (followers - follower)) & 0x3F)
    return place + followers + 1, at


@compiled
def after_string(text: Bytes, words: Words, at: int) -> int:
    """The end of a string, behind its closing quote; ``at``: behind its opening one."""
    while True:
        word = word_at(words, at)
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
def after_true(text: Bytes, at: int) -> int:
    """The end of the word ``true``."""
    word = text[at] == _T and text[at + 1] == _R and text[at + 2] == _U and text[at + 3] == _E
    return at + 4 if word else UNUSUAL


@compiled
def after_false(text: Bytes, at: int) -> int:
    """The end of the word ``false``."""
    word = text[at] == _F and text[at + 1] == _A and text[at + 2] == _L and text[at + 3] == _S and text[at + 4] == _E
    return at + 5 if word else UNUSUAL


@compiled
def _after_plain(text: Bytes, words: Words, at: int) -> int:
    """The end of a value that is no object or array."""
    byte = text[at]
    if byte == QUOTE:
        return after_string(text, words, at + 1)
    if byte == MINUS or ZERO <= byte <= NINE:
        return after_number(text, at)
    if byte == NULL_LETTER:
        return after_null(text, at)
    return after_true(text, at) if byte == _T else after_false(text, at)


@compiled
def after_key(text: Bytes, words: Words, at: int) -> int:
    """Where the value of any key starts; ``at``: before the key."""
    at = after_space(text, at)
    if text[at] != QUOTE:
        return UNUSUAL
    at = after_string(text, words, at + 1)
    return after_colon(text, at) if at >= 0 else UNUSUAL


@compiled
def after_colon(text: Bytes, at: int) -> int:
    """Where a value starts; ``at``: behind its key."""
    at = after_space(text, at)
    return after_space(text, at + 1) if text[at] == COLON else UNUSUAL


@compiled
def after_value(text: Bytes, words: Words, at: int) -> int:
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
                at = after_key(text, words, inside) if byte == OPEN_BRACE else inside
                if at < 0:
                    return UNUSUAL
                continue
            at = inside + 1
        else:
            at = _after_plain(text, words, at)
            if at < 0:
                return UNUSUAL
        while depth > 0:
            at = after_space(text, at)
            is_object = kinds & np.uint64(1) == 1
            if text[at] == COMMA:
                at = after_key(text, words, at + 1) if is_object else after_space(text, at + 1)
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
def after_brackets(text: Bytes, at: int, end: int) -> int:
    """The end of what starts with the bracket at ``at``, by brackets and strings alone; -1 if it goes on at ``end``."""
    depth = 0
    while at < end:
        byte = text[at]
        at += 1
        if byte == QUOTE:
            while at < end and text[at] != QUOTE:
                at += 2 if text[at] == BACKSLASH else 1
            at += 1
        elif byte | _EITHER == OPEN_BRACE:
            depth += 1
        elif byte | _EITHER == CLOSE_BRACE:
            depth -= 1
            if depth == 0:
                return at
    return UNUSUAL


@compiled
def digest(words: Words, begin: int, end: int) -> int:
    """A 64-bit hash of the bytes from ``begin`` to ``end``, wherever in the memory they stand."""
    length = end - begin
    first = np.uint64(length)
    second = FACTOR
    at = begin
    for _ in range(length >> 4):
        first = (first ^ word_at(words, at)) * FACTOR
        second = (second ^ word_at(words, at + 8)) * FACTOR
        first = (first << np.uint64(31)) | (first >> np.uint64(33))
        second = (second << np.uint64(29)) | (second >> np.uint64(35))
        at += 16
    for rest in (length & 15, (length & 15) - 8):
        if rest > 0:
            last = word_at(words, at)
            if rest < 8:
                last &= (np.uint64(1) << np.uint64(8 * rest)) - np.uint64(1)
            first = (first ^ last) * FACTOR
            first = (first << np.uint64(31)) | (first >> np.uint64(33))
            at += 8
    mixed = (first ^ (second >> np.uint64(32))) * FACTOR ^ second
    digest: Any = np.int64((mixed ^ (mixed >> np.uint64(29))) * FACTOR)
    return digest


@inlined
def rotated_product(value: Any) -> Any:
    """A step of a multiplicative hash: one to one, and it carries what is high back to what is low."""
    product = value * FACTOR
    return (product << np.uint64(31)) | (product >> np.uint64(33))


@compiled
def after_newline(text: Bytes, words: Words, at: int, end: int) -> int:
    """The position behind the next newline; -1 if there is none before ``end``."""
    while at < end:
        newlines = has_zero_byte(word_at(words, at) ^ _NEWLINES)
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


@compiled
def decimal(text: Bytes, at: int) -> tuple[int, int, int]:
    """``(mantissa, decimals, end)`` of a number without sign and exponent, of up to 18 digits."""
    begin, mantissa, decimals = at, 0, 0
    while ZERO <= text[at] <= NINE:
        mantissa = mantissa * 10 + (text[at] - ZERO)
        at += 1
    digits = at - begin
    if digits == 0 or (digits > 1 and text[begin] == ZERO):
        return 0, 0, UNUSUAL
    if text[at] == POINT:
        begin = at + 1
        at = begin
        while ZERO <= text[at] <= NINE:
            mantissa = mantissa * 10 + (text[at] - ZERO)
            at += 1
        decimals = at - begin
        if decimals == 0:
            return 0, 0, UNUSUAL
    if digits + decimals > _MOST_DIGITS or is_exponent(text[at]):
        return 0, 0, UNUSUAL
    return mantissa, decimals, at


@compiled
def as_double(mantissa: int, decimals: int) -> float:
    """The double nearest to ``mantissa / 10**decimals``, as ``float`` would give it; NaN where that is not known here.

    Below 2^53 both are exact, and so is one division (Clinger 1990, "How to read floating point
    numbers accurately").  Beyond, for up to nine decimals, the quotient is worked out to 54 bits
    and a remainder, and rounded half to even.
    """
    if mantissa < _EXACT:
        return mantissa / _TENS[decimals]
    ten = _WHOLE_TENS[decimals]
    whole = mantissa // ten
    if decimals == 0 or decimals > 9 or whole >= 1 << 50:
        return np.nan
    bits = 0
    while whole >> bits:
        bits += 1
    shift = 54 - bits  # whole has 24 bits or more, so what is shifted stays below 2^60
    rest = (mantissa - whole * ten) << shift
    quotient = (whole << shift) | (rest // ten)
    rounded = quotient >> 1
    if quotient & 1 and (rest % ten or rounded & 1):
        rounded += 1
    return rounded / float(1 << (shift - 1))


@compiled
def integer(text: Bytes, at: int) -> tuple[int, int]:
    """``(value, end)`` of a whole number without sign; ``null`` has the value -1."""
    if text[at] == NULL_LETTER:
        return -1, after_null(text, at)
    value, decimals, at = decimal(text, at)
    return value, UNUSUAL if decimals else at


@inlined
def is_plain_word(words: Words, at: int) -> bool:
    """Whether none of the eight bytes from here is a backslash or beyond ASCII."""
    word = word_at(words, at)
    return has_zero_byte(word ^ BACKSLASHES) | (word & HIGH) == 0
