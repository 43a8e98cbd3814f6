"""Export requests, checked before they are stored: which spans are sound, and what their SDK dropped.

Decoded, a message made of empty spans takes 90 times its size, and no other thread runs while protobuf decodes.  So the
resources, scopes and spans are found and counted in the bytes, and spans are decoded a piece at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

from blis_replay.ingest.errors import printable
from blis_replay_labs.collector.limits import (
    DECODING,
    LARGE,
    LARGE_BYTES,
    MAX_MESSAGE_ATTRIBUTES,
    MAX_MESSAGE_BYTES,
    MAX_MESSAGE_GROUPS,
    MAX_MESSAGE_SPANS,
    MAX_OTHER_FIELDS,
    MAX_SPAN_BYTES,
    PIECE_BYTES,
    WAIT_SECONDS,
)

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
_SMALL_BYTES = 16 << 10  # decoded in a millisecond
_RESOURCES, _SCOPES, _SPANS = 1, 2, 2  # numbers of the fields of a request, of a resource and of a scope


class MalformedError(Exception):
    """A message that is not an export request, or not acceptable; sending it again does not help."""


class OversizeError(MalformedError):
    """A message of more than ``most`` bytes."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"larger than the {most >> 20} MB that a message may have; export smaller batches"
            + (f", or collect with --max-message {MAX_MESSAGE_BYTES >> 20}" if most < MAX_MESSAGE_BYTES else "")
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


def response_to(batch: Batch) -> ExportTraceServiceResponse:
    """The acknowledgement of a batch: partial success if spans of it were rejected."""
    if not batch.rejected_spans:
        return ExportTraceServiceResponse()
    return ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(
            rejected_spans=batch.rejected_spans,
            error_message=f"{batch.rejected_spans} of {batch.spans + batch.rejected_spans} spans; {batch.reason}",
        )
    )


def batch_of(message: bytes, most: int = MAX_MESSAGE_BYTES) -> Batch:
    """The batch in a serialised ``ExportTraceServiceRequest`` of so many bytes at most.

    Raises :class:`MalformedError` if it is none, :class:`BusyError` if too many are being decoded.
    """
    if len(message) > most:
        raise OversizeError(most)
    try:
        large = len(message) > LARGE_BYTES
        with LARGE.turn(len(message), WAIT_SECONDS, rests=True) if large else nullcontext():
            return _Sorting(message).batch()
    except DecodeError as error:
        raise MalformedError("not an ExportTraceServiceRequest in protobuf") from error


class _Sorting:
    """The sound spans of one message, and how many of each kind of its parts there were so far."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.groups = self.attributes = self.spans = self.others = 0
        self.rejected, self.reason = 0, ""
        self.waited = False
        self.services: dict[str, ServiceCounts] = {}

    def batch(self) -> Batch:
        rest, resources = self._groups(0, len(self.message), _RESOURCES)
        ExportTraceServiceRequest.FromString(rest)  # so that a reader of the whole finds no fault in it
        message = rest + b"".join(_field(_RESOURCES, self._resource(*place)) for place in resources)
        if not any(counts.spans for counts in self.services.values()):
            message = b""
        elif not self.rejected:
            message = self.message
        return Batch(message, self.rejected, self.reason, self.services)

    def _resource(self, begin: int, end: int) -> bytes:
        head, scopes = self._groups(begin, end, _SCOPES)
        with self._turn(head):
            decoded = ResourceSpans.FromString(head)
        self.attributes += len(decoded.resource.attributes)
        if self.attributes > MAX_MESSAGE_ATTRIBUTES:
            raise _too_many("attributes of resources", MAX_MESSAGE_ATTRIBUTES)
        of_service = self.services.setdefault(_service(decoded), ServiceCounts())
        return head + b"".join(_field(_SCOPES, self._scope(begin, end, of_service)) for begin, end in scopes)

    def _scope(self, begin: int, end: int, of_service: ServiceCounts) -> bytes:
        head, places = self._parts(begin, end, _SPANS, MAX_MESSAGE_SPANS - self.spans)
        if places is None:
            raise _too_many("spans", MAX_MESSAGE_SPANS)
        self.spans += len(places)
        with self._turn(head):
            name = _name(ScopeSpans.FromString(head).scope.name)
        kept, before = [head], 0
        for piece in _pieces(places):
            content = b"".join(_field(_SPANS, self.message[first:last]) for first, last in piece)
            with self._turn(content):
                kept.append(self._sound(content, before, name, of_service))
            before += len(piece)
        return b"".join(kept)

    def _sound(self, content: bytes, before: int, scope: str, of_service: ServiceCounts) -> bytes:
        """Those of some spans that are sound, serialised; ``before``: how many of their scope stand before them."""
        decoded = ScopeSpans.FromString(content)
        faults = [fault_of(span) for span in decoded.spans]
        unsound = [(index, fault) for index, fault in enumerate(faults) if fault]
        if unsound:
            index, fault = unsound[0]
            self.reason = self.reason or f"span {before + index + 1} of scope {scope!r}: {fault}"
            self.rejected += len(unsound)
            _keep(decoded, [span for span, fault in zip(decoded.spans, faults, strict=True) if not fault])
            content = decoded.SerializeToString()
        of_service.add(_counts(decoded.spans))
        return content

    def _turn(self, content: bytes) -> AbstractContextManager[None]:
        if len(content) < _SMALL_BYTES:
            return nullcontext()
        # A message that has begun goes on: what it has done is not done again.
        wait_seconds, self.waited = None if self.waited else WAIT_SECONDS, True
        return DECODING.turn(len(self.message), wait_seconds)

    def _groups(self, begin: int, end: int, number: int) -> tuple[bytes, list[tuple[int, int]]]:
        rest, groups = self._parts(begin, end, number, MAX_MESSAGE_GROUPS - self.groups)
        if groups is None:
            raise _too_many("resources and scopes", MAX_MESSAGE_GROUPS)
        self.groups += len(groups)
        return rest, groups

    def _parts(self, begin: int, end: int, number: int, most: int) -> tuple[bytes, list[tuple[int, int]] | None]:
        """Between two positions: other fields one after the other, and where the messages of one field are.

        None where there are more of these than ``most``.
        """
        others, parts, at = [], [], begin
        while at < end:
            key, value_at = _varint(self.message, at, end)
            value_end = _value_end(self.message, key & 7, value_at, end)
            if key == number << 3 | 2:
                parts.append((_varint(self.message, value_at, end)[1], value_end))
            else:
                others.append(self.message[at:value_end])
            at = value_end
            if len(parts) > most:
                return b"", None
            if self.others + len(others) > MAX_OTHER_FIELDS:
                raise _too_many("fields of resources and scopes", MAX_OTHER_FIELDS)
        self.others += len(others)
        rest = b"".join(others)
        if len(rest) > MAX_SPAN_BYTES:
            raise MalformedError(f"{len(rest)} bytes of a resource or a scope, of {MAX_SPAN_BYTES} at most")
        return rest, parts


def _too_many(what: str, most: int) -> MalformedError:
    return MalformedError(f"more than {most} {what} in one message; export smaller batches")


def _pieces(places: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Runs of spans with about ``PIECE_BYTES`` each; :class:`MalformedError` if one alone has too many."""
    piece: list[tuple[int, int]] = []
    size = 0
    for begin, end in places:
        if end - begin > MAX_SPAN_BYTES:
            raise MalformedError(f"a span of {end - begin} bytes, of {MAX_SPAN_BYTES} at most")
        if piece and size + end - begin > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append((begin, end))
        size += end - begin
    if piece:
        yield piece


def _field(number: int, content: bytes) -> bytes:
    length, rest = bytearray(), len(content)
    while rest >= 0x80:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((number << 3 | 2, *length, rest)) + content


def _varint(message: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of up to ten bytes, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("cut off")


def _value_end(message: bytes, kind: int, at: int, end: int) -> int:
    """Where a field's value ends; ``DecodeError`` if it is none of protobuf, or goes beyond ``end``."""
    if kind == 0:
        return _varint(message, at, end)[1]
    length = {1: 8, 5: 4}.get(kind)
    if kind == 2:
        length, at = _varint(message, at, end)
    if length is None or at + length > end:
        raise DecodeError("cut off, or a group")
    return at + length


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
