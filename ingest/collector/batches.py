"""Export requests, checked before they are stored: which spans are sound, and what their SDK dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from blis_replay.ingest.errors import printable

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

# A batch of 512 spans, the SDK's most, is 1 to 2 MB of request spans; 16 MB are 200 step spans of 100 summaries.
MAX_MESSAGE_BYTES = 16 << 20
# Far above any batch; bounds the work on a message that is made of nothing but empty spans.
MAX_MESSAGE_SPANS = 100_000
# An SDK groups a batch by its one resource and some scopes; each of them is looked at in Python.
MAX_MESSAGE_GROUPS = 10_000
# Of resources, where the name of the service is looked for.
MAX_MESSAGE_ATTRIBUTES = 100_000
# An oversize HTTP body is read to its end, so that its sender hears why; the SDK itself sends no more than this.
MAX_DISCARDED_BYTES = 64 << 20
MAX_HEADER_BYTES = 32 << 10
# Calls of gRPC under way, and connections of HTTP, of which each has a thread; an exporter has one batch in flight.
MAX_CONNECTIONS = 64
# Connections of gRPC, which wait without a thread: a hundred exporters have one each, and idle ones lock nobody out.
MAX_CHANNELS = 512
# From the end of one request to the end of the next: exporters send every 5 s, or not at all.
READ_SECONDS = 60.0
# Room for a few of the largest messages while the disk is slow.
QUEUE_BYTES = 64 << 20
# Size at which the OpenTelemetry Collector rotates its files, too.
SEGMENT_BYTES = 100 << 20
# SDK exporters try six times within ten seconds.
RETRY_SECONDS = 1
STOP_SECONDS = 10.0


TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
# Decoded, a message made of empty spans takes 90 times its size: one at a time.
_DECODING = threading.Lock()


@dataclass(frozen=True)
class Access:
    """Who may send, and how what they send is kept from others.

    ``certificate``, ``key``: PEM files for TLS; ``token``: what a client sends as ``authorization: Bearer TOKEN``.
    """

    certificate: Path | None = None
    key: Path | None = None
    token: str = ""

    def allows(self, authorization: object) -> bool:
        """Whether a client with this header may send; in a time that does not tell how much of it is right."""
        said = authorization if isinstance(authorization, str) else ""
        return not self.token or compare_digest(said.encode(), f"Bearer {self.token}".encode())


OPEN = Access()
NOT_ALLOWED = "no bearer token, or a wrong one; set OTEL_EXPORTER_OTLP_HEADERS"


class MalformedError(Exception):
    """A message that is not an export request, or not acceptable; sending it again does not help."""


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
        groups = len(request.resource_spans)
        if groups <= MAX_MESSAGE_GROUPS:  # a list of millions takes seconds to walk
            groups += sum(len(resource_spans.scope_spans) for resource_spans in request.resource_spans)
        if groups > MAX_MESSAGE_GROUPS:
            raise MalformedError(
                f"{groups} resources and scopes in one message, of {MAX_MESSAGE_GROUPS} at most; export smaller batches"
            )
        attributes = sum(len(resource_spans.resource.attributes) for resource_spans in request.resource_spans)
        if attributes > MAX_MESSAGE_ATTRIBUTES:
            raise MalformedError(
                f"{attributes} attributes of resources in one message, of {MAX_MESSAGE_ATTRIBUTES} at most; "
                "export smaller batches"
            )
        if sum(len(scope.spans) for scope in _scopes(request)) > MAX_MESSAGE_SPANS:
            raise MalformedError(f"more than {MAX_MESSAGE_SPANS} spans in one message; export smaller batches")
        return _sorted_out(request, message)


def _sorted_out(request: ExportTraceServiceRequest, message: bytes) -> Batch:
    rejected, reason = 0, ""
    services: dict[str, ServiceCounts] = {}
    for resource_spans in request.resource_spans:
        of_service = services.setdefault(_service(resource_spans), ServiceCounts())
        for scope_spans in resource_spans.scope_spans:
            faults = [fault_of(span) for span in scope_spans.spans]
            unsound = [(index, fault) for index, fault in enumerate(faults) if fault]
            if unsound:
                index, fault = unsound[0]
                reason = reason or f"span {index + 1} of scope {_name(scope_spans.scope.name)!r}: {fault}"
                rejected += len(unsound)
                _keep(scope_spans, [span for span, fault in zip(scope_spans.spans, faults, strict=True) if not fault])
            of_service.add(_counts(scope_spans.spans))
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


def _scopes(request: ExportTraceServiceRequest) -> Iterator[ScopeSpans]:
    for resource_spans in request.resource_spans:
        yield from resource_spans.scope_spans


def _keep(scope_spans: ScopeSpans, sound: list[Span]) -> None:
    del scope_spans.spans[:]
    scope_spans.spans.extend(sound)


def _service(resource_spans: ResourceSpans) -> str:
    values = (a.value.string_value for a in resource_spans.resource.attributes if a.key == "service.name")
    return _name(next(values, ""))


def _name(text: str) -> str:
    return printable(text[:100]) or "(no name)"


def _counts(spans: Sequence[Span]) -> ServiceCounts:
    return ServiceCounts(
        spans=len(spans),
        dropped_events=sum(span.dropped_events_count for span in spans),
        dropped_attributes=sum(span.dropped_attributes_count for span in spans),
        dropped_links=sum(span.dropped_links_count for span in spans),
    )


# Names come from clients; what goes beyond is counted together.
MAX_SERVICES = 100
OTHER_SERVICES = "(other services)"


@dataclass
class Counts:
    """Counts since the start; complete once the collector has ended.

    ``requests`` may be acknowledged, and their ``spans`` and ``bytes`` lie on disk (a batch
    that a client sent again is there, and counted, again).  ``rejected_spans`` were malformed;
    ``malformed_requests`` could not be read at all, or were too large; ``refused_requests``
    were not taken for want of room or time, and their client may send them again.  ``say``
    is called with one line at the first rejection of each kind.
    """

    say: Callable[[str], None]
    requests: int = 0
    spans: int = 0
    bytes: int = 0
    rejected_spans: int = 0
    malformed_requests: int = 0
    refused_requests: int = 0
    services: dict[str, ServiceCounts] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stored(self, batch: Batch) -> None:
        """A batch is durable; what was malformed in it is not."""
        with self._lock:
            self.requests += 1
            self.spans += batch.spans
            self.bytes += len(batch.message)
            for name, counts in batch.services.items():
                known = name in self.services or len(self.services) < MAX_SERVICES
                self.services.setdefault(name if known else OTHER_SERVICES, ServiceCounts()).add(counts)
            first = batch.rejected_spans and not self.rejected_spans
            self.rejected_spans += batch.rejected_spans
        if first:
            self.say(f"warning: a span was rejected, and later ones are only counted: {batch.reason}")

    def malformed(self, reason: str) -> None:
        """A request was refused for good."""
        with self._lock:
            self.malformed_requests += 1
            first = self.malformed_requests == 1
        if first:
            self.say(f"warning: a request was rejected, and later ones are only counted: {reason}")

    def refused(self) -> None:
        """A client was asked to send its request again."""
        with self._lock:
            self.refused_requests += 1
