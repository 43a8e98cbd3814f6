"""The rows that the scan of OTLP lines fills: which count or text of which span or event is where.

A row is int64: counts, then for each text where its copy begins and ends among all texts.  What
is null is :data:`NULL`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.readers.otlp.columns import (
    EVENT_FLOATS,
    EVENT_INTEGERS,
    EVENT_STRINGS,
    SPAN_FLOATS,
    SPAN_INTEGERS,
    SPAN_STRINGS,
)

Int64s = NDArray[np.int64]

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
