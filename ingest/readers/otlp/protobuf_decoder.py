"""OTLP traces in protobuf, decoded into rows; a span that is no protobuf costs itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from blis_replay.ingest.readers.files import Tally
from blis_replay.ingest.readers.otlp.rows import (
    EVENT_LAYOUT,
    OTHER_VALUE,
    SPAN_LAYOUT,
    BatchRows,
    Malformed,
    OtherValue,
    Value,
    attribute_values,
    check_size,
    checked_ns,
)
from blis_replay.ingest.scan.otlp_columns import EVENTS, SCOPES

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10
_MAX_FIELD = (1 << 29) - 1


class WireError(ValueError):
    """These bytes are no protobuf message, or not all of one."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at ``at`` and where it ends; raises :class:`WireError` if it does not end."""
    value = 0
    for count, byte in enumerate(data[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at + count + 1
    raise WireError("a number that does not end")


def messages(data: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """``(field number, content, whole)`` of each length-delimited field of a message; other fields are passed over.

    ``whole`` is false for a last one that the data cuts off.  Raises :class:`WireError`
    where the bytes are no message or end inside a number.
    """
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if not 0 < number <= _MAX_FIELD:
            raise WireError(f"field number {number}")
        if kind == _LENGTH:
            size, at = varint(data, at)
            yield number, data[at : at + size], at + size <= len(data)
            at += size
        elif kind == _VARINT:
            _value, at = varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
            if at > len(data):
                raise WireError("a number that does not end")
        else:
            raise WireError(f"wire type {kind}")


_EVENTS = frozenset(EVENTS)
_SCALARS = ("int_value", "double_value", "string_value")


def read_protobuf(content: bytes, place: str, record: int, rows: BatchRows, tally: Tally) -> Iterator[None]:
    """Add the spans of a ``TracesData`` to ``rows``, with a pause after each (the caller may take the rows).

    What is no protobuf, and what breaks the rules of ``otlp_columns``, is rejected with its place.
    """
    number = 0
    try:
        for scope, content_of_span in _spans(content):
            number += 1
            try:
                _read_span(content_of_span, scope, record, number, rows, tally, f"{place}, span {number}")
            except (DecodeError, Malformed) as error:
                tally.reject(f"{place}, span {number}", str(error))
            yield
    except (WireError, UnicodeDecodeError) as error:
        tally.reject(place, f"no OTLP protobuf ({error})")


def _spans(content: bytes) -> Iterator[tuple[str, bytes]]:
    """``(scope, serialised span)`` of every span."""
    for resource_spans in _parts(content, 1):
        for scope_spans in _parts(resource_spans, 2):
            scope = b""
            for named in _parts(scope_spans, 1):
                scope = next(_parts(named, 1), b"")
            text = scope.decode()
            for span in _parts(scope_spans, 2):
                yield text, span


def _parts(content: bytes, wanted: int) -> Iterator[bytes]:
    """The contents of one field of a message."""
    for number, part, whole in messages(content):
        if not whole:
            raise WireError("cut off")
        if number == wanted:
            yield part


def _read_span(content: bytes, scope: str, record: int, number: int, rows: BatchRows, tally: Tally, place: str) -> None:
    check_size(content)
    span = Span.FromString(content)
    if scope not in SCOPES:
        rows.add_other(record, number, scope, span.name)
        return
    attributes = attribute_values(SPAN_LAYOUT, _scalars(span.attributes))
    start_ns = checked_ns(span.start_time_unix_nano, "startTimeUnixNano")
    end_ns = checked_ns(span.end_time_unix_nano, "endTimeUnixNano")
    events, others = [], 0
    for index, event in enumerate(span.events, 1):
        try:
            time_ns = checked_ns(event.time_unix_nano, "timeUnixNano")
            if event.name not in _EVENTS:
                others += 1
                continue
            events.append((index, event.name, time_ns, *attribute_values(EVENT_LAYOUT, _scalars(event.attributes))))
        except Malformed as error:
            tally.reject(f"{place}, event {index}", str(error))
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    status = (span.status.code, span.status.message or None)
    counts = (span.dropped_events_count, others)
    rows.add((record, number, scope, span.name, *ids, start_ns, end_ns, *status, *counts), attributes, events)


def _scalars(attributes: object) -> Iterator[tuple[str, Value | OtherValue]]:
    attribute: KeyValue
    for attribute in attributes:  # type: ignore[attr-defined]
        kind = attribute.value.WhichOneof("value")
        if kind is None:
            yield attribute.key, None
        else:
            yield attribute.key, getattr(attribute.value, kind) if kind in _SCALARS else OTHER_VALUE
