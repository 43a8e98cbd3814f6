"""What a client sent, looked at before it is stored: which spans are sound, what they say was dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from blis_replay.ingest.collector.limits import MAX_MESSAGE_BYTES, MAX_MESSAGE_SPANS
from blis_replay.ingest.printable import printable

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
# Decoded, a message made of empty spans takes 90 times its size: one at a time.
_DECODING = threading.Lock()


class MalformedError(Exception):
    """A message that is no export request, or has no place here; sending it again is of no use."""


class OversizeError(MalformedError):
    """A message beyond :data:`MAX_MESSAGE_BYTES`."""

    def __init__(self) -> None:
        super().__init__(
            f"larger than the {MAX_MESSAGE_BYTES >> 20} MB that a message may have; export smaller batches"
        )


@dataclass
class ServiceCounts:
    """Spans of one service, and what its spans say that the exporting SDK had to drop from them."""

    spans: int = 0
    dropped_events: int = 0
    dropped_attributes: int = 0
    dropped_links: int = 0

    def add(self, other: ServiceCounts) -> None:
        """Count the other's as well."""
        self.spans += other.spans
        self.dropped_events += other.dropped_events
        self.dropped_attributes += other.dropped_attributes
        self.dropped_links += other.dropped_links


@dataclass(frozen=True)
class Batch:
    """An export request as it will be stored.

    ``message``: the serialised request without the rejected spans, byte by byte as it was
    sent if there were none, empty if nothing is left; ``rejected_spans`` and, for the first
    of them, the ``reason``; ``services``: counts by ``service.name``.
    """

    message: bytes
    rejected_spans: int = 0
    reason: str = ""
    services: dict[str, ServiceCounts] = field(default_factory=dict)

    @property
    def spans(self) -> int:
        """The spans that are stored."""
        return sum(counts.spans for counts in self.services.values())


def batch_of(message: bytes) -> Batch:
    """The batch in a serialised ``ExportTraceServiceRequest``; :class:`MalformedError` if it is none."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise OversizeError
    with _DECODING:
        try:
            request = ExportTraceServiceRequest.FromString(message)
        except DecodeError as error:
            raise MalformedError("no ExportTraceServiceRequest in protobuf") from error
        if sum(len(scope.spans) for _, scope in _scopes(request)) > MAX_MESSAGE_SPANS:
            raise MalformedError(f"more than {MAX_MESSAGE_SPANS} spans in one message; export smaller batches")
        return _sorted_out(request, message)


def _sorted_out(request: ExportTraceServiceRequest, message: bytes) -> Batch:
    rejected, reason = 0, ""
    services: dict[str, ServiceCounts] = {}
    for resource_spans, scope_spans in _scopes(request):
        faults = [fault_of(span) for span in scope_spans.spans]
        unsound = [(index, fault) for index, fault in enumerate(faults) if fault]
        if unsound:
            index, fault = unsound[0]
            reason = reason or f"span {index + 1} of scope {_name(scope_spans.scope.name)!r}: {fault}"
            rejected += len(unsound)
            _keep(scope_spans, [span for span, fault in zip(scope_spans.spans, faults, strict=True) if not fault])
        services.setdefault(_service(resource_spans), ServiceCounts()).add(_counts(scope_spans.spans))
    if not any(counts.spans for counts in services.values()):
        message = b""
    elif rejected:
        message = request.SerializeToString()
    return Batch(message, rejected, reason, services)


def fault_of(span: Span) -> str:
    """What a span lacks that OTLP requires of it (ids and a name), ``""`` if it is sound."""
    for what, identity, length in (
        ("trace_id", span.trace_id, TRACE_ID_BYTES),
        ("span_id", span.span_id, SPAN_ID_BYTES),
    ):
        if len(identity) != length:
            return f"{what} of {len(identity)} bytes instead of {length}"
        if not any(identity):
            return f"{what} of nothing but zeros"
    return "" if span.name else "no name"


def _scopes(request: ExportTraceServiceRequest) -> Iterator[tuple[ResourceSpans, ScopeSpans]]:
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            yield resource_spans, scope_spans


def _keep(scope_spans: ScopeSpans, sound: list[Span]) -> None:
    del scope_spans.spans[:]
    scope_spans.spans.extend(sound)


def _service(resource_spans: ResourceSpans) -> str:
    values = (a.value.string_value for a in resource_spans.resource.attributes if a.key == "service.name")
    return _name(next(values, ""))


def _name(text: str) -> str:
    return printable(text[:100]) or "(no name)"


def _counts(spans: Iterable[Span]) -> ServiceCounts:
    counts = ServiceCounts()
    for span in spans:
        counts.spans += 1
        counts.dropped_events += span.dropped_events_count
        counts.dropped_attributes += span.dropped_attributes_count
        counts.dropped_links += span.dropped_links_count
    return counts
