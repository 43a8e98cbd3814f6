"""The rows that the scan of OTLP traces fills: the place of each count and text of spans and events.

A row is int64: counts, then for each text where its copy begins and ends among all texts.  What
is null is :data:`NULL`.
"""

from __future__ import annotations

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.tables import Tables, reader
from blis_replay.ingest.scan.json_text import names_of
from blis_replay.ingest.scan.otlp_columns import (
    EVENT_FLOATS,
    EVENT_INTEGERS,
    EVENT_STRINGS,
    SPAN_FLOATS,
    SPAN_INTEGERS,
    SPAN_STRINGS,
)
from blis_replay.ingest.scan.words import Bytes, Words, compiled, entry

FULL = -2  # a position, like ``UNUSUAL``: another row or text does not fit
NULL = np.iinfo(np.int64).min  # no count that is taken is negative


def _columns(*tables: dict[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(column for table in tables for column in table.values()))


_SPAN_COUNTS = ("record", "span", "start_ns", "dropped_events", "other_events")
_SPAN_TEXTS = ("scope", "name", "trace_id", "span_id", "parent_span_id", "status_message")
SPAN_COUNTS = (*_SPAN_COUNTS, *_columns(SPAN_INTEGERS))
SPAN_TEXTS = (*_SPAN_TEXTS, *_columns(SPAN_FLOATS, SPAN_STRINGS))
EVENT_COUNTS = ("span_row", "event", "name", "time_ns", *_columns(EVENT_INTEGERS))
EVENT_TEXTS = _columns(EVENT_FLOATS, EVENT_STRINGS)
ATTRIBUTES = list(
    dict.fromkeys([*SPAN_INTEGERS, *SPAN_FLOATS, *SPAN_STRINGS, *EVENT_INTEGERS, *EVENT_FLOATS, *EVENT_STRINGS])
)
SPAN_WIDTH = len(SPAN_COUNTS) + 2 * len(SPAN_TEXTS)
EVENT_WIDTH = len(EVENT_COUNTS) + 2 * len(EVENT_TEXTS)


def span_field(column: str) -> int:
    """The place of a column of ``SPAN_SCHEMA`` in a span's row."""
    return _place(SPAN_COUNTS, SPAN_TEXTS, column)


def event_field(column: str) -> int:
    """The place of a column of ``EVENT_SCHEMA`` in an event's row."""
    return _place(EVENT_COUNTS, EVENT_TEXTS, column)


def _place(counts: tuple[str, ...], texts: tuple[str, ...], column: str) -> int:
    return counts.index(column) if column in counts else len(counts) + 2 * texts.index(column)


# What is known between two places of a line: how much of the rows and of the texts is filled, ...
SPANS, EVENTS, TEXT_BYTES = range(3)
LINE_END = 3  # ... what is behind the newline of the line at which the scan ended, and what the scan itself needs
SCOPE_BEGIN, SCOPE_END, IS_READ, SPAN_NUMBER, EVENT_NUMBER, SEEN = range(4, 10)
STATE_WORDS = SEEN + 16


class Scan(Tables):
    """What a scan reads and fills.

    ``text``: JSON lines with zeros behind them.  ``state``: zeros, or as the last scan left it.  ``spans``,
    ``events``: rows one behind the other; ``texts``: copies of their texts.
    """

    text: Bytes
    state: Int64s
    spans: Int64s
    events: Int64s
    texts: Bytes


scan_of = reader(Scan)


# -- Attributes that the scans know -----------------------------------------------------------

OF_SPAN, OF_EVENT = 0, 1
ALL_KINDS = INTEGER, DOUBLE, STRING = 0, 1, 2
LARGEST_DROPPED = (1 << 32) - 1  # the count of dropped events has 32 bits
ATTRIBUTE_NAMES, ATTRIBUTE_LENGTHS, ATTRIBUTE_TABLE = names_of(ATTRIBUTES)
# By whose attribute it is and its name (the last one: any other): where its value goes, and the kinds it can have.
FIELD_OF = np.full((2, len(ATTRIBUTES) + 1), -1)
KINDS_OF = np.zeros_like(FIELD_OF)
for _whose, _field_of, _tables in (
    (OF_SPAN, span_field, (SPAN_INTEGERS, SPAN_FLOATS, SPAN_STRINGS)),
    (OF_EVENT, event_field, (EVENT_INTEGERS, EVENT_FLOATS, EVENT_STRINGS)),
):
    for _table, _kinds in zip(_tables, (1 << INTEGER, 1 << INTEGER | 1 << DOUBLE, 1 << STRING), strict=True):
        for _name, _column in _table.items():
            FIELD_OF[_whose, ATTRIBUTES.index(_name)] = _field_of(_column)
            KINDS_OF[_whose, ATTRIBUTES.index(_name)] = _kinds
FIRST_TEXT = np.array([len(SPAN_COUNTS), len(EVENT_COUNTS)])


_RECORD, _NUMBER, _SCOPE, _NAME = (span_field(column) for column in ("record", "span", "scope", "name"))
_DROPPED, _OTHERS = (span_field(column) for column in ("dropped_events", "other_events"))
_SPAN_ROW, _EVENT_NUMBER = event_field("span_row"), event_field("event")


@compiled
def begun(scan: Scan, whose: int) -> tuple[Int64s, int]:
    """The rows of spans or of events, and where the one that is being filled begins."""
    if whose == OF_SPAN:
        return scan.spans, scan.state[SPANS] * SPAN_WIDTH
    return scan.events, scan.state[EVENTS] * EVENT_WIDTH


@compiled
def begin_span(scan: Scan, record: int, is_read: bool) -> bool:
    """Begin the row of another span of a record, with its scope; False if it does not fit."""
    state, (spans, row) = scan.state, begun(scan, OF_SPAN)
    if row == len(spans):
        return False
    for place in range(row, row + SPAN_WIDTH):
        spans[place] = NULL
    state[SPAN_NUMBER] += 1
    state[EVENT_NUMBER] = 0
    spans[row + _RECORD], spans[row + _NUMBER] = record, state[SPAN_NUMBER]
    spans[row + _SCOPE], spans[row + _SCOPE + 1] = state[SCOPE_BEGIN], state[SCOPE_END]
    spans[row + _NAME], spans[row + _NAME + 1] = 0, 0  # one that is missing is empty
    if is_read:
        spans[row + _DROPPED], spans[row + _OTHERS] = 0, 0
    return True


@compiled
def begin_event(scan: Scan) -> bool:
    """Begin the row of another event of the span; False if it does not fit."""
    state, (events, row) = scan.state, begun(scan, OF_EVENT)
    if row == len(events):
        return False
    for place in range(row, row + EVENT_WIDTH):
        events[place] = NULL
    state[EVENT_NUMBER] += 1
    events[row + _SPAN_ROW], events[row + _EVENT_NUMBER] = state[SPANS], state[EVENT_NUMBER]
    return True


@compiled
def keep_text(scan: Scan, begin: int, end: int, rows: Int64s, place: int) -> bool:
    """Copy a text behind the others and put its begin and end at ``place`` of rows; False if it does not fit."""
    text, texts, first = scan.text, scan.texts, scan.state[TEXT_BYTES]
    if first + end - begin > len(texts):
        return False
    for letter in range(end - begin):
        texts[first + letter] = text[begin + letter]
    rows[place], rows[place + 1] = first, first + end - begin
    scan.state[TEXT_BYTES] = first + end - begin
    return True


# -- From rows to columns ---------------------------------------------------------------------

_FIRST_LETTERS, _INLINE_LETTERS = 4, 12


@entry
def view_texts(begins: Int64s, ends: Int64s, texts: Bytes, views: Words) -> None:
    """Fill ``views`` (uint64[n, 2]) with Arrow's views of the texts between these positions, 0 for no text.

    A view is the length (32 bits) and up to 12 letters, or the first 4 letters, buffer 0 and the position (32 bits
    each).
    """
    for row in range(len(begins)):
        begin = begins[row]
        first = second = np.uint64(0)
        if begin != NULL:
            length = ends[row] - begin
            first = np.uint64(length)
            for place in range(min(length, _FIRST_LETTERS)):
                first |= np.uint64(texts[begin + place]) << np.uint64(32 + 8 * place)
            if length > _INLINE_LETTERS:
                second = np.uint64(begin) << np.uint64(32)
            else:
                for place in range(length - _FIRST_LETTERS):
                    second |= np.uint64(texts[begin + _FIRST_LETTERS + place]) << np.uint64(8 * place)
        views[row, 0], views[row, 1] = first, second
