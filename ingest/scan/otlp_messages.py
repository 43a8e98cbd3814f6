"""A compiled scan of OTLP traces in protobuf: the spans and events of one message, into rows and copies of their texts.

What it takes is a ``TracesData`` as the libraries serialise it: fields that are there once, a scope before its
spans, texts of ASCII.  All else (links, attributes of lists, numbers that are negative or of another kind than their
column, what is cut off) is left to the decoder as a whole message.  Floats are kept by their bits.  Field numbers are
those of opentelemetry-proto 1.x, ``trace.proto`` and ``common.proto``.

``text``: uint8[n] with at least 16 zero bytes behind the message.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blis_replay.compiled.arrays import Int64s
from blis_replay.ingest.scan.json_text import UNUSUAL, Bytes, name_within, names_of
from blis_replay.ingest.scan.otlp_columns import EVENTS as EVENT_NAMES
from blis_replay.ingest.scan.otlp_columns import MAX_SPAN_BYTES, SCOPES
from blis_replay.ingest.scan.otlp_rows import (
    ATTRIBUTE_LENGTHS,
    ATTRIBUTE_NAMES,
    ATTRIBUTE_TABLE,
    DOUBLE,
    EVENT_WIDTH,
    EVENTS,
    FIELD_OF,
    FIRST_TEXT,
    FULL,
    INTEGER,
    IS_READ,
    KINDS_OF,
    LARGEST_DROPPED,
    NULL,
    OF_EVENT,
    OF_SPAN,
    SCOPE_BEGIN,
    SCOPE_END,
    SPAN_NUMBER,
    SPAN_WIDTH,
    SPANS,
    STRING,
    TEXT_BYTES,
    begin_event,
    begin_span,
    event_field,
    keep_text,
    span_field,
)
from blis_replay.ingest.scan.words import HIGH, compiled, entry, word_at

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_LARGEST_TAG_BYTES = 5
_LARGEST_FIELD = (1 << 29) - 1
_LARGEST_CODE = (1 << 31) - 1

# Fields of the messages, by their numbers.
_RESOURCE_SPANS, _SCOPE_SPANS, _SCOPE, _SPAN, _SCOPE_NAME = 1, 2, 1, 2, 1
_TRACE_ID, _SPAN_ID, _TRACE_STATE, _PARENT_SPAN_ID, _NAME, _START, _END = 1, 2, 3, 4, 5, 7, 8
_ATTRIBUTE, _EVENT, _DROPPED, _LINK, _STATUS = 9, 11, 12, 13, 15
_STATUS_MESSAGE, _STATUS_CODE = 2, 3
_EVENT_TIME, _EVENT_NAME, _EVENT_ATTRIBUTE = 1, 2, 3
_KEY, _VALUE = 1, 2
_STRING_VALUE, _BOOL_VALUE, _INT_VALUE, _DOUBLE_VALUE, _BYTES_VALUE = 1, 2, 3, 4, 7

# How each field of a span is encoded, and where it goes; -1: it has no one column.
_SPAN_KINDS = np.full(16, -1)
_SPAN_FIELDS = np.full(16, -1)
for _number, _kind, _column in (
    (_TRACE_ID, _LENGTH, "trace_id"),
    (_SPAN_ID, _LENGTH, "span_id"),
    (_TRACE_STATE, _LENGTH, ""),
    (_PARENT_SPAN_ID, _LENGTH, "parent_span_id"),
    (_NAME, _LENGTH, "name"),
    (_START, _FIXED64, "start_ns"),
    (_END, _FIXED64, "end_ns"),
    (_ATTRIBUTE, _LENGTH, ""),
    (_EVENT, _LENGTH, ""),
    (_DROPPED, _VARINT, "dropped_events"),
    (_LINK, _LENGTH, ""),
    (_STATUS, _LENGTH, ""),
):
    _SPAN_KINDS[_number] = _kind
    _SPAN_FIELDS[_number] = span_field(_column) if _column else -1
_CODE_FIELD, _MESSAGE_FIELD, _OTHERS_FIELD = (
    span_field(column) for column in ("status_code", "status_message", "other_events")
)
_NAME_FIELD = span_field("name")
_EVENT_NAME_FIELD, _TIME_FIELD = event_field("name"), event_field("time_ns")
_NAMES, _LENGTHS, _TABLE = names_of([*SCOPES, *EVENT_NAMES])
_LOWER_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


@entry
def scan_message(text: Bytes, end: int, record: int, state: Int64s, spans: Int64s, events: Int64s, texts: Bytes) -> int:
    """The end of the message that is ``text`` up to ``end``, whose spans and events are now in the rows.

    Negative, with the rows as they were, if it is left to the decoder (``UNUSUAL``) or if there is no room (``FULL``).
    ``state``: that of ``new_state``, or as the last scan left it.  ``spans`` and ``events``: rows one behind the other.
    """
    filled = state[SPANS], state[EVENTS], state[TEXT_BYTES]
    state[SPAN_NUMBER] = 0
    at = 0
    while 0 <= at < end:
        number, kind, begin, at = _field(text, at, end)
        if at >= 0 and kind == _LENGTH and number == _RESOURCE_SPANS:
            at = _resource_spans(text, begin, at, record, state, spans, events, texts)
    if at < 0:
        state[SPANS], state[EVENTS], state[TEXT_BYTES] = filled
    return at


@compiled
def _varint(text: Bytes, at: int, end: int) -> tuple[Any, int]:
    """``(value, end)`` of a number below 2^63."""
    value = np.uint64(0)
    for place in range(9):
        if at >= end:
            break
        byte = text[at]
        at += 1
        value |= np.uint64(byte & 0x7F) << np.uint64(7 * place)
        if byte < 0x80:
            return np.int64(value), at
    return np.int64(0), UNUSUAL


@compiled
def _field(text: Bytes, at: int, end: int) -> tuple[int, int, int, int]:
    """``(number, kind, begin, end)``: the next field of a message, and where its value stands."""
    tag, begin = _varint(text, at, end)
    number, kind = tag >> 3, tag & 7
    if begin < 0 or begin - at > _LARGEST_TAG_BYTES or not 0 < number <= _LARGEST_FIELD:
        return 0, 0, 0, UNUSUAL
    if kind == _LENGTH:
        length, begin = _varint(text, begin, end)
        stop = begin + length if begin >= 0 and length <= end - begin else UNUSUAL
    elif kind == _VARINT:
        _value, stop = _varint(text, begin, end)
    elif kind == _FIXED64:
        stop = begin + 8
    else:
        stop = begin + 4 if kind == _FIXED32 else UNUSUAL
    return number, kind, begin, stop if stop <= end else UNUSUAL


@compiled
def _is_ascii(text: Bytes, begin: int, end: int) -> bool:
    for at in range(begin, end, 8):
        beyond = word_at(text, at) & HIGH
        if end - at < 8:
            beyond &= (np.uint64(1) << np.uint64(8 * (end - at))) - np.uint64(1)
        if beyond:
            return False
    return True


@compiled
def _resource_spans(
    text: Bytes, at: int, end: int, record: int, state: Int64s, spans: Int64s, events: Int64s, texts: Bytes
) -> int:
    while 0 <= at < end:
        number, kind, begin, at = _field(text, at, end)
        if at >= 0 and kind == _LENGTH and number == _SCOPE_SPANS:
            at = _scope_spans(text, begin, at, record, state, spans, events, texts)
    return at


@compiled
def _scope_spans(
    text: Bytes, at: int, end: int, record: int, state: Int64s, spans: Int64s, events: Int64s, texts: Bytes
) -> int:
    state[SCOPE_BEGIN], state[SCOPE_END], state[IS_READ] = 0, 0, 0
    begun = False  # the scope is told, or taken as none
    while 0 <= at < end:
        number, kind, begin, at = _field(text, at, end)
        if at < 0 or kind != _LENGTH:
            continue
        if number == _SCOPE:
            if begun:
                return UNUSUAL
            at = _scope(text, begin, at, state, texts)
        elif number == _SPAN:
            at = _span(text, begin, at, record, state, spans, events, texts)
        begun = begun or number in (_SCOPE, _SPAN)
    return at


@compiled
def _scope(text: Bytes, at: int, end: int, state: Int64s, texts: Bytes) -> int:
    seen = False
    while 0 <= at < end:
        number, kind, begin, at = _field(text, at, end)
        if at >= 0 and kind == _LENGTH and number == _SCOPE_NAME:
            if seen or not _is_ascii(text, begin, at):
                return UNUSUAL
            seen = True
            if not keep_text(text, begin, at, state, SCOPE_BEGIN, state, texts):
                return FULL
            known = name_within(text, begin, at, _NAMES, _LENGTHS, _TABLE)
            state[IS_READ] = 0 <= known < len(SCOPES)
    return at


@compiled
def _span(
    text: Bytes, at: int, end: int, record: int, state: Int64s, spans: Int64s, events: Int64s, texts: Bytes
) -> int:
    is_read = state[IS_READ] != 0
    if end - at > MAX_SPAN_BYTES:
        return UNUSUAL
    if not begin_span(record, True, state, spans):
        return FULL
    row, first_event = state[SPANS] * SPAN_WIDTH, state[EVENTS]
    seen = 0
    while 0 <= at < end:
        number, kind, begin, at = _field(text, at, end)
        if at < 0:
            return UNUSUAL
        if number >= len(_SPAN_KINDS) or _SPAN_KINDS[number] < 0:
            continue
        if kind != _SPAN_KINDS[number] or number == _LINK:
            return UNUSUAL
        if number == _EVENT:
            at = _event(text, begin, at, row, state, spans, events, texts)
        elif number == _ATTRIBUTE:
            at = _attribute(text, begin, at, OF_SPAN, spans, row, state, texts)
        elif seen >> number & 1:
            return UNUSUAL
        elif number == _STATUS:
            at = _status(text, begin, at, row, state, spans, texts)
        else:
            at = _span_value(text, begin, at, number, row, state, spans, texts)
        seen |= 1 << number
    if at >= 0 and not is_read:
        # Of a span of another scope nothing is kept but its place, scope and name.
        named = spans[row + _NAME_FIELD], spans[row + _NAME_FIELD + 1]
        state[EVENTS] = first_event
        state[SPAN_NUMBER] -= 1
        begin_span(record, is_read, state, spans)
        spans[row + _NAME_FIELD], spans[row + _NAME_FIELD + 1] = named
    if at >= 0:
        state[SPANS] += 1
    return at


@compiled
def _span_value(
    text: Bytes, begin: int, end: int, number: int, row: int, state: Int64s, spans: Int64s, texts: Bytes
) -> int:
    """The end of an id, a text, a time or a count of a span, which is in its row unless it is 0."""
    place = row + _SPAN_FIELDS[number]
    if number in (_START, _END):
        return _keep_time(text, begin, end, spans, place)
    if number == _DROPPED:
        value, _ = _varint(text, begin, end)
        if value > LARGEST_DROPPED:
            return UNUSUAL
        spans[place] = value
        return end
    if number in (_NAME, _TRACE_STATE):
        if not _is_ascii(text, begin, end):
            return UNUSUAL
        return end if number != _NAME or keep_text(text, begin, end, spans, place, state, texts) else FULL
    return end if _keep_hex(text, begin, end, spans, place, state, texts) else FULL


@compiled
def _keep_time(text: Bytes, begin: int, end: int, rows: Int64s, place: int) -> int:
    """A time of 0 is null."""
    time_ns = np.int64(word_at(text, begin))
    if time_ns < 0:
        return UNUSUAL
    if time_ns > 0:
        rows[place] = time_ns
    return end


@compiled
def _keep_hex(text: Bytes, begin: int, end: int, rows: Int64s, place: int, state: Int64s, texts: Bytes) -> bool:
    """``keep_text`` of bytes as lower-case hex."""
    first = state[TEXT_BYTES]
    after = first + 2 * (end - begin)
    if after > len(texts):
        return False
    for at in range(end - begin):
        texts[first + 2 * at] = _LOWER_HEX[text[begin + at] >> 4]
        texts[first + 2 * at + 1] = _LOWER_HEX[text[begin + at] & 15]
    rows[place], rows[place + 1] = first, after
    state[TEXT_BYTES] = after
    return True


@compiled
def _status(text: Bytes, at: int, end: int, row: int, state: Int64s, spans: Int64s, texts: Bytes) -> int:
    seen = 0
    while 0 <= at < end:
        number, kind, begin, at = _field(text, at, end)
        if at < 0 or number not in (_STATUS_MESSAGE, _STATUS_CODE):
            continue
        if seen >> number & 1 or kind != (_LENGTH if number == _STATUS_MESSAGE else _VARINT):
            return UNUSUAL
        seen |= 1 << number
        if number == _STATUS_CODE:
            code, _ = _varint(text, begin, at)
            if code > _LARGEST_CODE:
                return UNUSUAL
            spans[row + _CODE_FIELD] = code
        elif not _is_ascii(text, begin, at):
            return UNUSUAL
        elif not keep_text(text, begin, at, spans, row + _MESSAGE_FIELD, state, texts):
            return FULL
    return at


@compiled
def _event(
    text: Bytes, at: int, end: int, span: int, state: Int64s, spans: Int64s, events: Int64s, texts: Bytes
) -> int:
    if not begin_event(state, events):
        return FULL
    row = state[EVENTS] * EVENT_WIDTH
    code, seen = -1, 0
    while 0 <= at < end:
        number, kind, begin, at = _field(text, at, end)
        if at < 0:
            return UNUSUAL
        if number > _EVENT_ATTRIBUTE:
            continue
        if kind != (_FIXED64 if number == _EVENT_TIME else _LENGTH):
            return UNUSUAL
        if number == _EVENT_ATTRIBUTE:
            at = _attribute(text, begin, at, OF_EVENT, events, row, state, texts)
            continue
        if seen >> number & 1:
            return UNUSUAL
        seen |= 1 << number
        if number == _EVENT_TIME:
            at = _keep_time(text, begin, at, events, row + _TIME_FIELD)
        elif _is_ascii(text, begin, at):
            code = name_within(text, begin, at, _NAMES, _LENGTHS, _TABLE) - len(SCOPES)
        else:
            return UNUSUAL
    if at >= 0 and code >= 0:
        events[row + _EVENT_NAME_FIELD] = code
        state[EVENTS] += 1
    elif at >= 0:
        spans[span + _OTHERS_FIELD] += 1
    return at


@compiled
def _attribute(
    text: Bytes, at: int, end: int, whose: int, rows: Int64s, first: int, state: Int64s, texts: Bytes
) -> int:
    """The end of an attribute, whose value is in the row from ``first`` on if it has a column."""
    name, value, value_end, seen = -1, 0, 0, 0
    while 0 <= at < end:
        number, kind, begin, at = _field(text, at, end)
        if at < 0 or kind != _LENGTH or number > _VALUE or seen >> number & 1:
            return UNUSUAL
        seen |= 1 << number
        if number == _VALUE:
            value, value_end = begin, at
        elif _is_ascii(text, begin, at):
            name = name_within(text, begin, at, ATTRIBUTE_NAMES, ATTRIBUTE_LENGTHS, ATTRIBUTE_TABLE)
        else:
            return UNUSUAL
    field = FIELD_OF[whose, name]
    if value == value_end:
        if field >= 0:
            rows[first + field] = NULL
        return at
    number, kind, begin, stop = _field(text, value, value_end)
    if stop != value_end:
        return UNUSUAL
    if number == _STRING_VALUE and kind == _LENGTH and _is_ascii(text, begin, stop):
        given = STRING
    elif number == _INT_VALUE and kind == _VARINT:
        given = INTEGER
    elif number == _DOUBLE_VALUE and kind == _FIXED64:
        given = DOUBLE
    else:
        return at if _is_unread(number, kind) and field < 0 else UNUSUAL
    if field < 0:
        return at
    if not KINDS_OF[whose, name] >> given & 1:
        return UNUSUAL
    if given == STRING:
        return at if keep_text(text, begin, stop, rows, first + field, state, texts) else FULL
    if given == INTEGER and field >= FIRST_TEXT[whose]:
        return UNUSUAL  # a count in the column of a float
    bits, _ = _varint(text, begin, stop) if given == INTEGER else (np.int64(word_at(text, begin)), 0)
    if bits == NULL:
        return UNUSUAL  # the bits of -0.0
    rows[first + field] = bits
    return at


@compiled
def _is_unread(number: int, kind: int) -> bool:
    """Whether this is a value of a kind that no column takes, and that holds no text."""
    return (number == _BOOL_VALUE and kind == _VARINT) or (number == _BYTES_VALUE and kind == _LENGTH)
