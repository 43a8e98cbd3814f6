"""One record of an OTLP JSON file decoded by a library: its spans and events as rows.

Numbers may be numbers or decimal strings, 64 bits exact.  Sound spans of a scope are decoded at once; where
one is malformed they are taken one by one, and so are the events of a malformed one.  Of a large record nothing is
decoded at once but a span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from blis_replay.ingest.readers.documents import DECODE_ERRORS
from blis_replay.ingest.readers.files import Tally
from blis_replay.ingest.readers.otlp.rows import (
    EVENT_LAYOUT,
    OTHER_VALUE,
    SPAN_LAYOUT,
    BatchRows,
    Layout,
    Malformed,
    OtherValue,
    Value,
    attribute_values,
    check_size,
)
from blis_replay.ingest.readers.records import ObjectScan
from blis_replay.ingest.scan.otlp_columns import EVENTS, SCOPES

# Decoded at once, a list of empty objects takes 60 times its size.
LARGE_BYTES = 4 << 20

_Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Nanoseconds = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
_EVENTS = frozenset(EVENTS)
_STATUS_NAMES = {"STATUS_CODE_UNSET": 0, "STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}


class _AnyValue(Struct, gc=False):
    intValue: _Int64 | None = None
    doubleValue: float | None = None
    stringValue: str | None = None
    boolValue: Raw | UnsetType = UNSET
    bytesValue: Raw | UnsetType = UNSET
    arrayValue: Raw | UnsetType = UNSET
    kvlistValue: Raw | UnsetType = UNSET


class _Attribute(Struct, gc=False):
    key: str
    value: _AnyValue | None = None


class _LooseAttribute(Struct, gc=False):
    """An attribute whose value is read only if the key is known."""

    key: str
    value: Raw = Raw(b"null")


class _Event(Struct):
    name: str | None = None
    timeUnixNano: _Nanoseconds | None = None
    attributes: list[_Attribute] | None = None


class _LooseEvent(Struct):
    name: str | None = None
    timeUnixNano: _Nanoseconds | None = None
    attributes: list[_LooseAttribute] | None = None


class _Status(Struct):
    code: _Int64 | str | None = None
    message: str | None = None


class _SpanHead(Struct):
    """What sound and loosely read spans have in common."""

    name: str | None = None
    traceId: str | None = None
    spanId: str | None = None
    parentSpanId: str | None = None
    startTimeUnixNano: _Nanoseconds | None = None
    endTimeUnixNano: _Nanoseconds | None = None
    droppedEventsCount: _Count | None = None
    status: _Status | None = None


class _Span(_SpanHead):
    attributes: list[_Attribute] | None = None
    events: list[_Event] | None = None


class _LooseSpan(_SpanHead):
    attributes: list[_LooseAttribute] | None = None
    events: list[Raw] | None = None


class _OtherSpan(Struct):
    name: str | None = None


class _Scope(Struct):
    name: str | None = None


class _ScopeSpans(Struct):
    spans: Raw = Raw(b"null")
    scope: _Scope | None = None
    instrumentationLibrary: _Scope | None = None  # before opentelemetry-proto 0.15


class _ResourceSpans(Struct):
    scopeSpans: list[_ScopeSpans] | None = None
    instrumentationLibrarySpans: list[_ScopeSpans] | None = None


class _Traces(Struct):
    resourceSpans: list[_ResourceSpans] | None


class _LargeResource(Struct):
    scopeSpans: Raw = Raw(b"null")
    instrumentationLibrarySpans: Raw = Raw(b"null")


class _LargeTraces(Struct):
    resourceSpans: Raw


# Not strict: protobuf JSON prints 64-bit integers as strings, and readers must take both.
_TRACES = msgspec.json.Decoder(_Traces)
_LARGE_TRACES = msgspec.json.Decoder(_LargeTraces)
_LARGE_RESOURCE = msgspec.json.Decoder(_LargeResource)
_SCOPED = msgspec.json.Decoder(_ScopeSpans)
_RAWS = msgspec.json.Decoder(list[Raw] | None)
_SPANS = msgspec.json.Decoder(list[_Span] | None, strict=False)
_LOOSE_SPAN = msgspec.json.Decoder(_LooseSpan, strict=False)
_LOOSE_EVENT = msgspec.json.Decoder(_LooseEvent, strict=False)
_OTHER_SPAN = msgspec.json.Decoder(_OtherSpan)
_VALUE = msgspec.json.Decoder(_AnyValue | None, strict=False)


def read_json(content: bytes, place: str, record: int, rows: BatchRows, tally: Tally) -> Iterator[None]:
    """Add the spans of an OTLP JSON object to ``rows``, with a pause after each (the caller may take the rows).

    What is malformed, and what breaks the rules of ``otlp_columns``, is rejected with its place.
    """
    number = 0
    try:
        for scoped in _scopes(content, place, tally):
            scope = (scoped.scope or scoped.instrumentationLibrary or _Scope()).name or ""
            for span in _spans(scoped.spans, scope, place, tally):
                number += 1
                try:
                    _read_span(span, scope, record, number, rows, tally, f"{place}, span {number}")
                except (*DECODE_ERRORS, Malformed) as error:
                    tally.reject(f"{place}, span {number}", str(error))
                yield
    except DECODE_ERRORS as error:
        tally.reject(place, f"no OTLP JSON ({error})")


def _scopes(content: bytes, place: str, tally: Tally) -> Iterator[_ScopeSpans]:
    if len(content) <= LARGE_BYTES:
        for resource in _TRACES.decode(content).resourceSpans or ():
            yield from (*(resource.scopeSpans or ()), *(resource.instrumentationLibrarySpans or ()))
        return
    for text in _members(_LARGE_TRACES.decode(content).resourceSpans, place, tally):
        large = _LARGE_RESOURCE.decode(text)
        for listed in (large.scopeSpans, large.instrumentationLibrarySpans):
            yield from map(_SCOPED.decode, _members(listed, place, tally))


def _members(listed: Raw, place: str, tally: Tally) -> Iterator[Raw]:
    """The objects of a list, one at a time; what is none in it is rejected."""
    text = bytes(listed)
    if text == b"null":
        return
    scan = ObjectScan(Tally(), len(text))
    yield from (Raw(member) for _number, member in scan.feed(text))
    scan.finish("")
    if scan.tally.rejected_count:
        tally.reject(place, "members of a list that are not objects")


def _spans(spans: Raw, scope: str, place: str, tally: Tally) -> Iterable[_Span | Raw]:
    """The spans of a scope, undecoded if one of them is malformed or if they are not ours."""
    if len(memoryview(spans)) > LARGE_BYTES:
        return _members(spans, place, tally)
    if scope in SCOPES:
        try:
            return _SPANS.decode(spans) or []
        except DECODE_ERRORS:
            pass
    try:
        return _RAWS.decode(spans) or []
    except DECODE_ERRORS as error:
        tally.reject(place, f"spans that cannot be read ({error})")
        return []


def _read_span(
    found: _Span | Raw, scope: str, record: int, number: int, rows: BatchRows, tally: Tally, place: str
) -> None:
    if isinstance(found, Raw):
        check_size(memoryview(found))
    if scope not in SCOPES:
        rows.add_other(record, number, scope, _OTHER_SPAN.decode(found).name or "")  # type: ignore[arg-type]
        return
    span = _LOOSE_SPAN.decode(found) if isinstance(found, Raw) else found
    attributes = attribute_values(SPAN_LAYOUT, _scalars(span.attributes, SPAN_LAYOUT))
    found_events: Iterable[_Event | Raw] = span.events or ()
    events, others = [], 0
    for index, found_event in enumerate(found_events, 1):
        try:
            event: _Event | _LooseEvent
            event = _LOOSE_EVENT.decode(found_event) if isinstance(found_event, Raw) else found_event
            if event.name not in _EVENTS:
                others += 1
                continue
            values = attribute_values(EVENT_LAYOUT, _scalars(event.attributes, EVENT_LAYOUT))
            events.append((index, event.name, event.timeUnixNano or None, *values))
        except (*DECODE_ERRORS, Malformed) as error:
            tally.reject(f"{place}, event {index}", str(error))
    times = (span.startTimeUnixNano or None, span.endTimeUnixNano or None)
    ids = (span.traceId, span.spanId, span.parentSpanId)
    status = span.status or _Status()
    counts = (span.droppedEventsCount or 0, others)
    rows.add(
        (record, number, scope, span.name or "", *ids, *times, _code(status.code), status.message or None, *counts),
        attributes,
        events,
    )


def _code(code: int | str | None) -> int:
    if isinstance(code, str):
        known = _STATUS_NAMES.get(code)
        if known is None:
            raise Malformed(f"status code {code[:30]!r}")
        return known
    return code or 0


def _scalars(attributes: list[Any] | None, layout: Layout) -> Iterator[tuple[str, Value | OtherValue]]:
    for attribute in attributes or ():
        if attribute.key in layout.places:
            value = attribute.value
            if isinstance(value, Raw):
                value = _VALUE.decode(value)
            yield attribute.key, _scalar(value or _AnyValue())


def _scalar(value: _AnyValue) -> Value | OtherValue:
    if value.intValue is not None:
        return value.intValue
    if value.doubleValue is not None:
        return value.doubleValue
    if value.stringValue is not None:
        return value.stringValue
    others = (value.boolValue, value.bytesValue, value.arrayValue, value.kvlistValue)
    return None if all(other is UNSET for other in others) else OTHER_VALUE
