"""A compiled scan of OTLP traces in JSON lines: spans and events, into rows and copies of their texts.

It reads lines as the collector's file exporter writes them, with any white space and any order of keys.  But a scope
must come before its spans, and the key of an attribute before its value.  All else (negative or
fractional counts, escapes and letters beyond ASCII in texts that matter, keys given twice) is left to
the decoder as a whole line.  Floats are kept as texts, for a library to read.
"""

from __future__ import annotations

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.ingest.scan import json_text as js
from blis_replay.ingest.scan import otlp_columns
from blis_replay.ingest.scan import otlp_rows as out
from blis_replay.ingest.scan.otlp_attributes import after_attributes, whole
from blis_replay.ingest.scan.otlp_columns import SCOPES
from blis_replay.ingest.scan.words import Bytes, compiled, entry

_NAME, _DROPPED, _OTHERS = map(out.SPAN_COLUMNS.index, ("name", "dropped_events", "other_events"))
_EVENT_NAME = out.EVENT_COLUMNS.index("name")

# Objects of a line, each in the one that _PARENT says.
_LINE, _RESOURCE, _SCOPED, _SCOPE_OBJECT, _SPAN, _OTHER_SPAN, _STATUS, _EVENT = range(8)
_PARENT = np.array([-1, _LINE, _RESOURCE, _SCOPED, _SCOPED, _SCOPED, _SPAN, _SPAN])
_LISTED = np.isin(np.arange(len(_PARENT)), [_RESOURCE, _SCOPED, _SPAN, _OTHER_SPAN, _EVENT])

# What to do with a value, and the object or field that it is.
_SKIP, _COUNT, _TEXT, _SCOPE_NAME, _NAME_OF_EVENT, _ATTRIBUTES, _WITHIN, _LIST = range(8)
_PLAN: dict[int, dict[str, tuple[int, int]]] = {
    _LINE: {"resourceSpans": (_LIST, _RESOURCE)},
    _RESOURCE: {"scopeSpans": (_LIST, _SCOPED)},
    _SCOPED: {"scope": (_WITHIN, _SCOPE_OBJECT), "spans": (_LIST, _SPAN)},
    _SCOPE_OBJECT: {"name": (_SCOPE_NAME, 0)},
    _SPAN: {
        "name": (_TEXT, _NAME),
        "traceId": (_TEXT, out.SPAN_COLUMNS.index("trace_id")),
        "spanId": (_TEXT, out.SPAN_COLUMNS.index("span_id")),
        "parentSpanId": (_TEXT, out.SPAN_COLUMNS.index("parent_span_id")),
        "startTimeUnixNano": (_COUNT, out.SPAN_COLUMNS.index("start_ns")),
        "droppedEventsCount": (_COUNT, _DROPPED),
        "status": (_WITHIN, _STATUS),
        "attributes": (_ATTRIBUTES, 0),
        "events": (_LIST, _EVENT),
    },
    _OTHER_SPAN: {"name": (_TEXT, _NAME)},
    _STATUS: {"message": (_TEXT, out.SPAN_COLUMNS.index("status_message"))},
    _EVENT: {
        "name": (_NAME_OF_EVENT, 0),
        "timeUnixNano": (_COUNT, out.EVENT_COLUMNS.index("time_ns")),
        "attributes": (_ATTRIBUTES, 0),
    },
}
_KNOWN = list(dict.fromkeys([*(key for members in _PLAN.values() for key in members), *SCOPES, *otlp_columns.EVENTS]))
_NAMES, _LENGTHS, _TABLE = js.names_of(_KNOWN)
# By object and key; the last column stands for unknown keys, which are skipped.
_ACTION = np.full((len(_PLAN), len(_KNOWN) + 1), _SKIP)
_TARGET = np.zeros_like(_ACTION)
_MARK = np.zeros_like(_ACTION)  # a bit for each key of an object
for _object, _members in _PLAN.items():
    for _bit, (_key, _entry) in enumerate(_members.items()):
        _at = _object, _KNOWN.index(_key)
        _ACTION[_at], _TARGET[_at] = _entry
        _MARK[_at] = 1 << _bit
_SCOPE_SEEN = int(_MARK[_SCOPED, _KNOWN.index("scope")])
_IS_SCOPE = np.array([name in SCOPES for name in [*_KNOWN, ""]])
_EVENT_CODE = np.array(
    [otlp_columns.EVENTS.index(name) if name in otlp_columns.EVENTS else -1 for name in [*_KNOWN, ""]]
)


@entry
def scan_lines(given: out.Scan, at: int, end: int, line: int) -> tuple[int, int, int]:
    """Scan lines from ``at``, the first one numbered ``line``: ``(why it ended, where, next line)``.

    It ends at a line that is cut off by ``end`` (0), is left to the decoder (``UNUSUAL``) or does not fit (``FULL``).
    """
    scan = out.scan_of(given)
    text, state = scan.text, scan.state
    while True:
        stop = js.after_newline(text, at, end)
        if stop < 0:
            return 0, at, line
        text[stop - 1] = 0  # nothing goes on beyond the line
        begin = js.after_space(text, at)
        ended = begin
        if begin < stop - 1:
            filled = state[out.SPANS], state[out.EVENTS], state[out.TEXTS], state[out.TEXT_BYTES]
            ended = _line(scan, begin, line)
            if ended >= 0 and js.after_space(text, ended) != stop - 1:
                ended = js.UNUSUAL
            if ended < 0:
                state[out.SPANS], state[out.EVENTS], state[out.TEXTS], state[out.TEXT_BYTES] = filled
                state[out.LINE_END] = stop
        text[stop - 1] = js.NEWLINE
        if ended < 0:
            return ended, at, line
        at = stop
        line += 1


@compiled
def _line(scan: out.Scan, at: int, line: int) -> int:
    """The end of a line's object, whose spans and events are now in the rows."""
    text, state = scan.text, scan.state
    if text[at] != js.OPEN_BRACE:
        return js.UNUSUAL
    at = js.after_space(text, at + 1)
    inside = _LINE
    state[out.SEEN], state[out.SPAN_NUMBER] = 0, 0
    while True:
        if text[at] == js.CLOSE_BRACE:
            at += 1
            _leave(scan, inside)
            if inside == _LINE:
                return at if state[out.SEEN] else js.UNUSUAL
            if _LISTED[inside]:
                at = js.next_member(text, at, js.CLOSE_BRACKET)
                if at < 0:
                    return js.UNUSUAL
                if text[at] == js.OPEN_BRACE:
                    if not _enter(scan, inside, line):
                        return out.FULL
                    at = js.after_space(text, at + 1)
                    continue
                if text[at] != js.CLOSE_BRACKET:
                    return js.UNUSUAL
                at += 1
            inside = _PARENT[inside]
        else:
            if text[at] != js.QUOTE:
                return js.UNUSUAL
            key, at = js.name_at(text, at + 1, _NAMES, _LENGTHS, _TABLE)
            if at < 0:
                return js.UNUSUAL
            at = js.after_colon(text, at)
            if at < 0 or state[out.SEEN + inside] & _MARK[inside, key]:
                return js.UNUSUAL
            state[out.SEEN + inside] |= _MARK[inside, key]
            action, target = _ACTION[inside, key], _TARGET[inside, key]
            within = _members_of(text, at, action)
            if within > 0:
                if target == _SPAN:
                    if not state[out.SEEN + _SCOPED] & _SCOPE_SEEN:
                        return js.UNUSUAL
                    target = _SPAN if state[out.IS_READ] else _OTHER_SPAN
                inside = target
                if not _enter(scan, inside, line):
                    return out.FULL
                at = js.after_space(text, within)
                continue
            at = _value(scan, at, out.OF_EVENT if inside == _EVENT else out.OF_SPAN, action, target)
            if at < 0:
                return at
        at = js.next_member(text, at, js.CLOSE_BRACE)
        if at < 0:
            return js.UNUSUAL


@compiled
def _members_of(text: Bytes, at: int, action: int) -> int:
    """Where the members begin of an object that the plan enters, or of the first object of a list; 0 otherwise."""
    if action == _LIST:
        if text[at] != js.OPEN_BRACKET:
            return 0
        at = js.after_space(text, at + 1)
    return at + 1 if action >= _WITHIN and text[at] == js.OPEN_BRACE else 0


@compiled
def _enter(scan: out.Scan, inside: int, line: int) -> bool:
    """Begin an object; whether there is room for its row."""
    state = scan.state
    state[out.SEEN + inside] = 0
    if _SPAN <= inside <= _OTHER_SPAN:
        return out.begin_span(scan, line, inside == _SPAN)
    if inside == _EVENT:
        return out.begin_event(scan)
    if inside == _SCOPED:
        state[out.SCOPE], state[out.IS_READ] = out.EMPTY_TEXT, 0
    return True


@compiled
def _leave(scan: out.Scan, inside: int) -> None:
    """End an object: its row is kept, but of an event that nobody reads."""
    state, (events, event) = scan.state, out.begun(scan, out.OF_EVENT)
    if _SPAN <= inside <= _OTHER_SPAN:
        state[out.SPANS] += 1
    elif inside == _EVENT and events[event + _EVENT_NAME] < 0:
        scan.spans[state[out.SPANS] * out.SPAN_WIDTH + _OTHERS] += 1
    elif inside == _EVENT:
        state[out.EVENTS] += 1


@compiled
def _value(scan: out.Scan, at: int, whose: int, action: int, target: int) -> int:
    """The end of a value with which was done what the plan says; ``whose``: of the span or of the event."""
    text = scan.text
    if action == _SKIP:
        return js.after_value(text, at)
    if action == _ATTRIBUTES:
        return after_attributes(scan, at, whose)
    if text[at] == js.NULL_LETTER:
        return js.after_null(text, at)
    if action == _LIST and text[at] == js.OPEN_BRACKET:
        at = js.after_space(text, at + 1)
        return at + 1 if text[at] == js.CLOSE_BRACKET else js.UNUSUAL
    rows, first = out.begun(scan, whose)
    if action == _COUNT:
        is_dropped = whose == out.OF_SPAN and target == _DROPPED
        return _count(text, at, rows, first + target, out.LARGEST_DROPPED if is_dropped else -1)
    if text[at] != js.QUOTE or not _TEXT <= action <= _NAME_OF_EVENT:
        return js.UNUSUAL
    end = js.after_plain_text(text, at + 1)
    if end < 0:
        return js.UNUSUAL
    if action == _TEXT:
        return end if out.keep_text(scan, at + 1, end - 1, rows, first + target) else out.FULL
    name, _ = js.name_at(text, at + 1, _NAMES, _LENGTHS, _TABLE)
    if action == _NAME_OF_EVENT:
        rows[first + _EVENT_NAME] = _EVENT_CODE[name]
        return end
    scan.state[out.IS_READ] = _IS_SCOPE[name]
    return end if out.keep_text(scan, at + 1, end - 1, scan.state, out.SCOPE) else out.FULL


@compiled
def _count(text: Bytes, at: int, rows: Int64s, place: int, largest: int) -> int:
    """The end of a time or count, which is at ``place`` unless it is 0: a time of 0 is null, a count is 0 already."""
    value, at = whole(text, at)
    if at < 0 or (largest >= 0 and np.int64(value) > largest):
        return js.UNUSUAL
    if value > 0:
        rows[place] = np.int64(value)
    return at
