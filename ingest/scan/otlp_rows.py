"""The rows that the scan of OTLP traces fills, a field for each column of ``SPAN_SCHEMA`` and of ``EVENT_SCHEMA``.

A row is int64: counts, and of texts (floats among them) their numbers among all texts.  What is null is :data:`NULL`.
"""

from __future__ import annotations

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.tables import Tables, reader
from blis_replay.ingest.scan.json_text import names_of
from blis_replay.ingest.scan.otlp_columns import (
    EVENT_FLOATS,
    EVENT_INTEGERS,
    EVENT_SCHEMA,
    EVENT_STRINGS,
    SPAN_FLOATS,
    SPAN_INTEGERS,
    SPAN_SCHEMA,
    SPAN_STRINGS,
)
from blis_replay.ingest.scan.words import Bytes, compiled

FULL = -2  # a position, like ``UNUSUAL``: another row or text does not fit
NULL = np.iinfo(np.int64).min  # no count that is taken is negative


SPAN_COLUMNS, EVENT_COLUMNS = list(SPAN_SCHEMA), list(EVENT_SCHEMA)
SPAN_WIDTH, EVENT_WIDTH = len(SPAN_COLUMNS), len(EVENT_COLUMNS)
ATTRIBUTES = list(
    dict.fromkeys([*SPAN_INTEGERS, *SPAN_FLOATS, *SPAN_STRINGS, *EVENT_INTEGERS, *EVENT_FLOATS, *EVENT_STRINGS])
)
# Of a field in the place of a text's number: one that is empty.
EMPTY_TEXT = 0


# What is known between two places of a line: how much of the rows and of the texts is filled, ...
SPANS, EVENTS, TEXTS, TEXT_BYTES = range(4)
LINE_END = 4  # ... what is behind the newline of the line at which the scan ended, and what the scan itself needs
SCOPE, IS_READ, SPAN_NUMBER, EVENT_NUMBER, SEEN = range(5, 10)
STATE_WORDS = SEEN + 16


class Scan(Tables):
    """What a scan reads and fills.

    ``text``: JSON lines with zeros behind them.  ``state``: zeros, or as the last scan left it.  ``spans``,
    ``events``: rows one behind the other.  ``texts``: copies of their texts; ``offsets``: where each begins, and the
    last one ends.  The first, from 0 to 0, is empty.
    """

    text: Bytes
    state: Int64s
    spans: Int64s
    events: Int64s
    texts: Bytes
    offsets: Int64s


scan_of = reader(Scan)


# -- Attributes that the scans know -----------------------------------------------------------

OF_SPAN, OF_EVENT = 0, 1
ALL_KINDS = INTEGER, DOUBLE, STRING = 0, 1, 2
LARGEST_DROPPED = (1 << 32) - 1  # the count of dropped events has 32 bits
ATTRIBUTE_NAMES, ATTRIBUTE_LENGTHS, ATTRIBUTE_TABLE = names_of(ATTRIBUTES)
# By whose attribute it is and its name (the last one: any other): where its value goes, and the kinds it can have.
FIELD_OF = np.full((2, len(ATTRIBUTES) + 1), -1)
KINDS_OF = np.zeros_like(FIELD_OF)
for _whose, _columns, _tables in (
    (OF_SPAN, SPAN_COLUMNS, (SPAN_INTEGERS, SPAN_FLOATS, SPAN_STRINGS)),
    (OF_EVENT, EVENT_COLUMNS, (EVENT_INTEGERS, EVENT_FLOATS, EVENT_STRINGS)),
):
    for _table, _kinds in zip(_tables, (1 << INTEGER, 1 << INTEGER | 1 << DOUBLE, 1 << STRING), strict=True):
        for _name, _column in _table.items():
            FIELD_OF[_whose, ATTRIBUTES.index(_name)] = _columns.index(_column)
            KINDS_OF[_whose, ATTRIBUTES.index(_name)] = _kinds


_RECORD, _NUMBER, _SCOPE, _NAME = map(SPAN_COLUMNS.index, ("record", "span", "scope", "name"))
_DROPPED, _OTHERS = map(SPAN_COLUMNS.index, ("dropped_events", "other_events"))
_SPAN_ROW, _EVENT_NUMBER = map(EVENT_COLUMNS.index, ("span_row", "event"))


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
    spans[row + _SCOPE], spans[row + _NAME] = state[SCOPE], EMPTY_TEXT  # a name that is missing is empty
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
    """Copy a text behind the others and put its number at ``place`` of rows; False if it does not fit."""
    text, texts, offsets, state = scan.text, scan.texts, scan.offsets, scan.state
    number, first = state[TEXTS] + 1, state[TEXT_BYTES]
    last = first + end - begin
    if last > len(texts) or number + 1 == len(offsets):
        return False
    for letter in range(end - begin):
        texts[first + letter] = text[begin + letter]
    rows[place], offsets[number + 1] = number, last
    state[TEXTS], state[TEXT_BYTES] = number, last
    return True
