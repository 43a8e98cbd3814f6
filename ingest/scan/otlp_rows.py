"""The rows that the scans of OTLP traces fill: which count or text of which span or event is where.

A row is int64: counts, then for each text where its copy begins and ends among all texts.  What
is null is :data:`NULL`.
"""

from __future__ import annotations

import numpy as np

from blis_replay.compiled.arrays import Int64s
from blis_replay.ingest.scan.json_text import names_of
from blis_replay.ingest.scan.otlp_columns import (
    EVENT_FLOATS,
    EVENT_INTEGERS,
    EVENT_STRINGS,
    SPAN_FLOATS,
    SPAN_INTEGERS,
    SPAN_STRINGS,
)

FULL = -2  # a position, as ``UNUSUAL`` is: there is no room for another row or text
NULL = np.iinfo(np.int64).min  # no count that is taken is negative


def _columns(*tables: dict[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(column for table in tables for column in table.values()))


_SPAN_COUNTS = ("record", "span", "start_ns", "end_ns", "status_code", "dropped_events", "other_events")
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
# How the next attribute began last time (of a span, of an event) after each of these, any other, and at the start.
FOLLOWERS = SEEN + 16
FOLLOWERS_EACH = len(ATTRIBUTES) + 2


def new_state() -> Int64s:
    """What is known before the first line."""
    state = np.zeros(FOLLOWERS + 2 * FOLLOWERS_EACH, np.int64)
    state[FOLLOWERS:] = -1
    return state


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
