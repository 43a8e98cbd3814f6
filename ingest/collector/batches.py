"""Export requests, checked before they are stored: which spans are sound, and what their SDK dropped.

Decoded, a message made of empty spans takes 90 times its size, and no other thread runs while protobuf decodes.  So the
resources, scopes and spans are found and counted in the bytes, and spans are decoded a piece at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from heapq import heappop, heappush
from hmac import compare_digest
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

from blis_replay.ingest.errors import printable

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

# As gRPC takes by default, and so the OpenTelemetry Collector. A batch of 512 spans, the SDK's most, is 1 to 2 MB of
# request spans, or 50 MB of step spans of 128 events; but it is sent every 5 s, with a few of those.
MESSAGE_BYTES = 4 << 20
# The most that may be asked for: gRPC keeps whole what 64 calls send at once.
MAX_MESSAGE_BYTES = 16 << 20
# As many as fit into that with 800 bytes each, 40 of the SDK's largest batches; each of them is looked at in Python.
MAX_MESSAGE_SPANS = 20_000
# An SDK groups a batch by its one resource and some scopes; each of them is looked at in Python.
MAX_MESSAGE_GROUPS = 10_000
# Of resources, where the name of the service is looked for.
MAX_MESSAGE_ATTRIBUTES = 100_000
# Of spans that are decoded at once, while no other thread runs; empty ones take 23 MB then, and 5 ms.
PIECE_BYTES = 1 << 18
# A span of an engine step with 128 events has 0.1 MB.
MAX_SPAN_BYTES = 4 << 20
# Beside resources, scopes and spans: what a resource or a scope says of itself, and what a later schema adds.
MAX_OTHER_FIELDS = 30_000
# Who waits longer for a decoder is asked to come again: exporters give up after ten seconds.
WAIT_SECONDS = 1.0
# An oversize HTTP body is read to its end, so that its sender hears why; the SDK itself sends no more than this.
MAX_DISCARDED_BYTES = 64 << 20
MAX_HEADER_BYTES = 32 << 10
# Calls of gRPC under way, and connections of HTTP, of which each has a thread; an exporter has one batch in flight.
MAX_CONNECTIONS = 64
# Connections of gRPC, which wait without a thread: a hundred exporters have one each, and idle ones lock nobody out.
MAX_CHANNELS = 512
# Where all of these are taken, who has not sent its request for so long makes room for one that comes.
GRACE_SECONDS = 2.0
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


class BusyError(Exception):
    """More waits, for the decoder or for the disk, than there is time or room for; the sender should try again."""


class Turns:
    """One thread at a time, the one with the smallest message first: whoever sends large ones waits for the others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._numbers = count()
        self._taken = False
        self._rest_until = 0.0

    @contextmanager
    def turn(self, size: int, wait_seconds: float | None = None, *, rests: bool = False) -> Iterator[None]:
        """Within, no other thread is; ``BusyError`` if the turn does not come in time.

        ``rests``: the turn after it begins as much later as it took of CPU time, which others have.
        """
        mine = (size, next(self._numbers))
        with self._changed:
            heappush(self._waiting, mine)
            its_turn = self._changed.wait_for(lambda: not self._taken and self._waiting[0] == mine, wait_seconds)
            if not its_turn:
                self._waiting.remove(mine)
                self._waiting.sort()
                self._changed.notify_all()
                raise BusyError("other messages are being decoded")
            heappop(self._waiting)
            self._taken = True
        time.sleep(max(self._rest_until - time.monotonic(), 0.0))
        begin = time.thread_time()
        try:
            yield
        finally:
            if rests:
                self._rest_until = time.monotonic() + time.thread_time() - begin
            with self._changed:
                self._taken = False
                self._changed.notify_all()


# Messages above this are rare: so many are in memory at once, and one is worked on at a time and half of the time.
LARGE_BYTES, MAX_LARGE = 2 << 20, 4
_DECODING, _LARGE, _ROOM = Turns(), Turns(), threading.BoundedSemaphore(MAX_LARGE)
_SMALL_BYTES = 16 << 10  # decoded in a millisecond
_RESOURCES, _SCOPES, _SPANS = 1, 2, 2  # numbers of the fields of a request, of a resource and of a scope


@contextmanager
def room_for(size: int, wait_seconds: float = 0.0) -> Iterator[None]:
    """Within, a message of so many bytes may be in memory; ``BusyError`` if as many large ones stay as may be."""
    if size <= LARGE_BYTES:
        yield
        return
    if not _ROOM.acquire(timeout=wait_seconds):
        raise BusyError(f"{MAX_LARGE} messages of more than {LARGE_BYTES >> 20} MB are worked on")
    try:
        yield
    finally:
        _ROOM.release()


def batch_of(message: bytes, most: int = MAX_MESSAGE_BYTES) -> Batch:
    """The batch in a serialised ``ExportTraceServiceRequest`` of so many bytes at most.

    Raises :class:`MalformedError` if it is none, :class:`BusyError` if too many are being decoded.
    """
    if len(message) > most:
        raise OversizeError(most)
    try:
        large = len(message) > LARGE_BYTES
        with _LARGE.turn(len(message), WAIT_SECONDS, rests=True) if large else nullcontext():
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
        return _DECODING.turn(len(self.message), wait_seconds)

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
