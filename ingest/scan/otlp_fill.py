"""How the scans of OTLP traces fill the rows of spans and events, and from these rows to columns."""

from __future__ import annotations

import numpy as np

from blis_replay.compiled.arrays import Int64s
from blis_replay.ingest.scan.compiled import compiled, entry
from blis_replay.ingest.scan.json_text import Bytes
from blis_replay.ingest.scan.otlp_rows import (
    EVENT_NUMBER,
    EVENT_WIDTH,
    EVENTS,
    NULL,
    SCOPE_BEGIN,
    SCOPE_END,
    SPAN_NUMBER,
    SPAN_WIDTH,
    SPANS,
    TEXT_BYTES,
    event_field,
    span_field,
)
from blis_replay.ingest.scan.words import Words

_RECORD, _NUMBER, _SCOPE, _NAME = (span_field(column) for column in ("record", "span", "scope", "name"))
_STATUS_CODE, _DROPPED, _OTHERS = (span_field(column) for column in ("status_code", "dropped_events", "other_events"))
_SPAN_ROW, _EVENT_NUMBER = event_field("span_row"), event_field("event")


@compiled
def begin_span(record: int, is_read: bool, state: Int64s, spans: Int64s) -> bool:
    """Whether there was room for the row of another span of a record, of which nothing is known yet but its scope."""
    row = state[SPANS] * SPAN_WIDTH
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
        spans[row + _STATUS_CODE], spans[row + _DROPPED], spans[row + _OTHERS] = 0, 0, 0
    return True


@compiled
def begin_event(state: Int64s, events: Int64s) -> bool:
    """Whether there was room for the row of another event of the span."""
    row = state[EVENTS] * EVENT_WIDTH
    if row == len(events):
        return False
    for place in range(row, row + EVENT_WIDTH):
        events[place] = NULL
    state[EVENT_NUMBER] += 1
    events[row + _SPAN_ROW], events[row + _EVENT_NUMBER] = state[SPANS], state[EVENT_NUMBER]
    return True


@compiled
def keep_text(text: Bytes, begin: int, end: int, rows: Int64s, place: int, state: Int64s, texts: Bytes) -> bool:
    """Whether there was room to copy a text behind the others; where it is then stands at ``place``."""
    first = state[TEXT_BYTES]
    if first + end - begin > len(texts):
        return False
    for letter in range(end - begin):
        texts[first + letter] = text[begin + letter]
    rows[place], rows[place + 1] = first, first + end - begin
    state[TEXT_BYTES] = first + end - begin
    return True


# -- From rows to columns ---------------------------------------------------------------------

_FIRST_LETTERS, _INLINE_LETTERS = 4, 12


@entry
def turn_rows(rows: Int64s, chosen: Int64s, fields: Int64s, columns: Int64s, known: Int64s) -> None:
    """Fill ``columns`` (int64[fields, chosen]) with some fields of some rows, and count what is not null (from 0)."""
    for place in range(len(chosen)):
        row = chosen[place]
        for column in range(len(fields)):
            value = rows[row, fields[column]]
            columns[column, place] = value
            known[column] += value != NULL


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
