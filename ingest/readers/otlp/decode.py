"""OTLP JSON records that the compiled scan does not read: small files, other framings, unusual lines.

Each span is decoded by itself, and so is each of its events: what is malformed costs itself, and a large record is
never in memory as objects all at once.  Numbers may be numbers or decimal strings, 64 bits exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import polars as pl
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from blis_replay.ingest.readers.documents import DECODE_ERRORS
from blis_replay.ingest.readers.files import Tally
from blis_replay.ingest.readers.records import ObjectScan
from blis_replay.ingest.scan import otlp_columns

BATCH_ROWS = 50_000  # spans or events
# A longer list is split member by member: decoded at once, empty objects take 60 times their size.
LARGE_BYTES = 4 << 20

_Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Nanoseconds = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
_MAX_EXACT = 1 << 53  # doubles below it hold every integer
_EVENT_NAMES = frozenset(otlp_columns.EVENTS)
_NULL = Raw(b"null")

_Scalar = int | float | str | None
_Kind = type[int] | type[float] | type[str]
_EXPECTED: dict[_Kind, str] = {int: "a whole number", float: "a number", str: "a text"}


class _Value(Struct, gc=False):
    """The value of an attribute, by its type."""

    intValue: _Int64 | None = None
    doubleValue: float | None = None
    stringValue: str | None = None
    boolValue: Raw | UnsetType = UNSET
    bytesValue: Raw | UnsetType = UNSET
    arrayValue: Raw | UnsetType = UNSET
    kvlistValue: Raw | UnsetType = UNSET


class _Attribute(Struct, gc=False):
    """An attribute; its value is decoded only if it has a column."""

    key: str
    value: Raw = _NULL


class _Event(Struct):
    name: str | None = None
    timeUnixNano: _Nanoseconds | None = None
    attributes: list[_Attribute] | None = None


class _Status(Struct):
    message: str | None = None


class _Span(Struct):
    name: str | None = None
    traceId: str | None = None
    spanId: str | None = None
    parentSpanId: str | None = None
    startTimeUnixNano: _Nanoseconds | None = None
    droppedEventsCount: _Count | None = None
    status: _Status | None = None
    attributes: list[_Attribute] | None = None
    events: list[Raw] | None = None


class _Named(Struct):
    """A scope, or a span of a scope that is not read."""

    name: str | None = None


class _ScopeSpans(Struct):
    spans: Raw = _NULL
    scope: _Named | None = None


class _ResourceSpans(Struct):
    scopeSpans: Raw = _NULL


class _Traces(Struct):
    resourceSpans: Raw


# Not strict: protobuf JSON prints 64-bit integers as strings, and readers must take both.
_SPAN = msgspec.json.Decoder(_Span, strict=False)
_EVENT = msgspec.json.Decoder(_Event, strict=False)
_VALUE = msgspec.json.Decoder(_Value | None, strict=False)
_NAMED = msgspec.json.Decoder(_Named)
_SCOPE_SPANS = msgspec.json.Decoder(_ScopeSpans)
_RESOURCE_SPANS = msgspec.json.Decoder(_ResourceSpans)
_TRACES = msgspec.json.Decoder(_Traces)
_MEMBERS = msgspec.json.Decoder(list[Raw] | None)


class Malformed(ValueError):
    """A span or an event cannot be used; the text says why."""


@dataclass
class BatchRows:
    """Rows of ``SPAN_SCHEMA`` and ``EVENT_SCHEMA``, gathered span by span."""

    spans: list[list[_Scalar]] = field(default_factory=list)
    events: list[list[_Scalar]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether it is time for the next batch."""
        return len(self.spans) >= BATCH_ROWS or len(self.events) >= BATCH_ROWS

    def batch(self, unit: str) -> otlp_columns.TraceBatch:
        """The rows as frames; ``unit``: what a record of their file is called."""
        spans = pl.DataFrame(self.spans, otlp_columns.SPAN_SCHEMA, orient="row")
        events = pl.DataFrame(self.events, otlp_columns.EVENT_SCHEMA, orient="row")
        return otlp_columns.batch_of(unit, spans, events)


def read_json(content: bytes, place: str, record: int, rows: BatchRows, tally: Tally) -> Iterator[None]:
    """Add the spans of an OTLP JSON object to ``rows``, with a pause after each (the caller may take the rows).

    What is malformed, and what breaks the rules of ``otlp_columns``, is rejected with its place.
    """
    number = 0
    try:
        for scope, span in _spans(content, place, tally):
            number += 1
            try:
                _add_span(span, scope, record, number, rows, tally, f"{place}, span {number}")
            except (*DECODE_ERRORS, Malformed) as error:
                tally.reject(f"{place}, span {number}", str(error))
            yield
    except DECODE_ERRORS as error:
        tally.reject(place, f"no OTLP JSON ({error})")


def _spans(content: bytes, place: str, tally: Tally) -> Iterator[tuple[str, Raw]]:
    """The name of its scope, and the text, of each span of a record."""
    for resource in _members(_TRACES.decode(content).resourceSpans, place, tally):
        listed = _RESOURCE_SPANS.decode(resource).scopeSpans
        for scoped in map(_SCOPE_SPANS.decode, _members(listed, place, tally)):
            scope = (scoped.scope or _Named()).name or ""
            for span in _members(scoped.spans, place, tally):
                yield scope, span


def _members(listed: Raw, place: str, tally: Tally) -> Iterator[Raw]:
    """The members of a list, or of ``null``; of a large one only objects, and whatever else is in it is rejected."""
    if len(memoryview(listed)) <= LARGE_BYTES:
        yield from _MEMBERS.decode(listed) or ()
        return
    text = bytes(listed)
    scan = ObjectScan(Tally(), len(text))
    yield from (Raw(member) for _number, member in scan.feed(text))
    scan.finish("")
    if scan.tally.rejected_count:
        tally.reject(place, "members of a list that are not objects")


def _add_span(text: Raw, scope: str, record: int, number: int, rows: BatchRows, tally: Tally, place: str) -> None:
    if (size := len(memoryview(text))) > otlp_columns.MAX_SPAN_BYTES:
        raise Malformed(f"a span of {size} bytes")
    row: list[_Scalar] = [record, number, scope, *(None,) * (len(otlp_columns.SPAN_SCHEMA) - 3)]
    if scope not in otlp_columns.SCOPES:
        row[3] = _NAMED.decode(text).name or ""
        rows.spans.append(row)
        return
    span = _SPAN.decode(text)
    events, others = [], 0
    for index, event in enumerate(span.events or (), 1):
        try:
            read = _EVENT.decode(event)
            if read.name not in _EVENT_NAMES:
                others += 1
                continue
            of_event: list[_Scalar] = [len(rows.spans), index, read.name, read.timeUnixNano or None]
            of_event += (None,) * (len(otlp_columns.EVENT_SCHEMA) - len(of_event))
            _fill(of_event, read.attributes, _OF_EVENT)
            events.append(of_event)
        except (*DECODE_ERRORS, Malformed) as error:
            tally.reject(f"{place}, event {index}", str(error))
    message = (span.status or _Status()).message or None
    row[3:7] = span.name or "", span.traceId, span.spanId, span.parentSpanId
    row[7:11] = span.startTimeUnixNano or None, message, span.droppedEventsCount or 0, others
    _fill(row, span.attributes, _OF_SPAN)
    rows.spans.append(row)
    rows.events += events


def _places(
    schema: Mapping[str, Any], integers: Mapping[str, str], floats: Mapping[str, str], strings: Mapping[str, str]
) -> dict[str, tuple[int, _Kind]]:
    """The place in a row of ``schema`` and the type of each attribute."""
    tables: tuple[tuple[Mapping[str, str], _Kind], ...] = ((integers, int), (floats, float), (strings, str))
    columns = list(schema)
    return {name: (columns.index(column), kind) for table, kind in tables for name, column in table.items()}


_OF_SPAN = _places(
    otlp_columns.SPAN_SCHEMA, otlp_columns.SPAN_INTEGERS, otlp_columns.SPAN_FLOATS, otlp_columns.SPAN_STRINGS
)
_OF_EVENT = _places(
    otlp_columns.EVENT_SCHEMA, otlp_columns.EVENT_INTEGERS, otlp_columns.EVENT_FLOATS, otlp_columns.EVENT_STRINGS
)


def _fill(row: list[_Scalar], attributes: Iterable[_Attribute] | None, places: Mapping[str, tuple[int, _Kind]]) -> None:
    """Put the attributes that have a column into the row; raises :class:`Malformed` for one of another type."""
    for attribute in attributes or ():
        if (column := places.get(attribute.key)) is not None:
            place, kind = column
            row[place] = _scalar(attribute.key, _VALUE.decode(attribute.value) or _Value(), kind)


def _scalar(key: str, value: _Value, kind: _Kind) -> _Scalar:
    scalars = (value.intValue, value.doubleValue, value.stringValue)
    scalar: _Scalar = next((scalar for scalar in scalars if scalar is not None), None)
    if scalar is None:
        others = (value.boolValue, value.bytesValue, value.arrayValue, value.kvlistValue)
        if all(other is UNSET for other in others):
            return None
    elif type(scalar) is kind:
        return scalar
    elif kind is float and isinstance(scalar, int):
        return float(scalar)
    elif kind is int and isinstance(scalar, float) and scalar.is_integer() and abs(scalar) < _MAX_EXACT:
        return int(scalar)
    # A text is not quoted: it may be of a prompt.
    said = (
        "neither a number nor a text" if scalar is None else "a text" if isinstance(scalar, str) else f"{scalar!r:.30}"
    )
    raise Malformed(f"{key} is {said}, expected {_EXPECTED[kind]}")
