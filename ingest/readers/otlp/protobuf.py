"""OTLP in protobuf as OTLP JSON, by the library: what ``otelcol`` writes with ``format: proto``, and older recordings.

A ``TracesData`` and an ``ExportTraceServiceRequest`` have the same bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

import msgspec

_IDS = ("traceId", "spanId", "parentSpanId")
# Field 1 of a message and of a span (its trace ID of 16 bytes), field 2, and field 3; all are length-delimited.
_FIRST, _SECOND, _THIRD = 0x0A, 0x12, 0x1A
_TRACE_ID = bytes([_FIRST, 16])


def begins_like_traces(head: bytes) -> bool:
    """Whether these bytes begin a message, down to the trace ID of its first span."""
    resource_spans = _field(head, _FIRST)
    span = _field(_field(resource_spans, _SECOND), _SECOND)
    return span.startswith(_TRACE_ID)


def resources_of(message: bytes) -> Iterator[bytes]:
    """Each ``ResourceSpans`` of a message, as a message of its own; what follows the last whole one comes last."""
    at = 0
    while at < len(message):
        size, begin = _length(message, at + 1)
        end = begin + size if message[at] == _FIRST and size >= 0 else len(message)
        yield message[at:end]
        at = end


def _field(content: bytes, wanted: int) -> bytes:
    """The first field of a message with this tag, as far as it is there; only fields 1 to 3 come before it."""
    at = 0
    while at < len(content) and content[at] in (_FIRST, _SECOND, _THIRD):
        size, begin = _length(content, at + 1)
        if size < 0 or content[at] == wanted:
            return content[begin : begin + max(size, 0)]
        at = begin + size
    return b""


def _length(content: bytes, at: int) -> tuple[int, int]:
    """The length that begins at ``at`` (a varint of up to 5 bytes), -1 if it does not end, and the place behind it."""
    size = 0
    for place, byte in enumerate(content[at : at + 5]):
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return size, at + place + 1
    return -1, at


def json_of(message: bytes) -> bytes | None:
    """A serialised message as one line of OTLP JSON, as ``otelcol`` writes it (ids in hex); None if it is not one."""
    from google.protobuf.json_format import MessageToDict  # few recordings have protobuf
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    try:
        document = MessageToDict(TracesData.FromString(message), use_integers_for_enums=True)
    except DecodeError:
        return None
    for resource_spans in document.get("resourceSpans", ()):
        for scope_spans in resource_spans.get("scopeSpans", ()):
            for span in scope_spans.get("spans", ()):
                for owner in (span, *span.get("links", ())):
                    owner |= {name: base64.b64decode(owner[name]).hex() for name in _IDS if name in owner}
    return msgspec.json.encode(document) + b"\n"
