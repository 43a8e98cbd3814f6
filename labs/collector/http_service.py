"""OTLP over HTTP: ``POST /v1/traces`` with protobuf or JSON, plain or compressed.

The standard library's threading server: a handful of exporters send a batch every few
seconds, so one thread per connection is cheap, and its limits can be seen here.
"""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
from google.protobuf import json_format
from google.protobuf.json_format import MessageToJson
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from blis_replay.ingest.errors import printable
from blis_replay.ingest.readers.documents import DECODE_ERRORS
from blis_replay_labs.collector.batches import MalformedError, OversizeError, response_to
from blis_replay_labs.collector.limits import (
    GRACE_SECONDS,
    LARGE_BYTES,
    MAX_CONNECTIONS,
    MAX_DISCARDED_BYTES,
    MAX_HEADER_BYTES,
    NOT_ALLOWED,
    OPEN,
    READ_SECONDS,
    RETRY_SECONDS,
    WAIT_SECONDS,
    Access,
    BusyError,
    CollectorError,
    Turns,
)
from blis_replay_labs.collector.segments import Intake

if TYPE_CHECKING:
    from io import BufferedIOBase

    from google.protobuf.message import Message

_OBJECT = msgspec.json.Decoder(dict[str, Any])
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")
# Objects take many times the size of their text, and each some 8 us: one text at a time, of so many objects and lists.
_DECODING = Turns()
MAX_JSON_OBJECTS = 100_000


def protobuf_of(text: bytes) -> bytes:
    """The serialised ``ExportTraceServiceRequest`` of an OTLP JSON text; :class:`MalformedError` if it is none.

    An id that is no hex becomes empty, so that its span alone is rejected.  Raises :class:`BusyError` if too many
    texts are being decoded.
    """
    if text.count(b"{") + text.count(b"[") > MAX_JSON_OBJECTS:
        raise MalformedError(f"more than {MAX_JSON_OBJECTS} objects and lists in a text; export smaller batches")
    with _DECODING.turn(len(text), WAIT_SECONDS):
        try:
            document = _OBJECT.decode(text)
            for span in _spans(document):
                _to_base64(span, "traceId", "spanId", "parentSpanId")
                for link in _objects(span, "links"):
                    _to_base64(link, "traceId", "spanId")
            request = ExportTraceServiceRequest()
            json_format.ParseDict(document, request, ignore_unknown_fields=True)
        except (*DECODE_ERRORS, json_format.ParseError) as error:
            raise MalformedError(printable(f"no OTLP JSON: {' '.join(str(error).split())[:200]}")) from error
        message: bytes = request.SerializeToString()
        return message


def _spans(document: Any) -> Iterator[dict[str, Any]]:
    for resource_spans in _objects(document, "resourceSpans"):
        for scope_spans in _objects(resource_spans, "scopeSpans"):
            yield from _objects(scope_spans, "spans")


def _objects(parent: Any, key: str) -> list[dict[str, Any]]:
    children = parent.get(key) if isinstance(parent, dict) else None
    return [child for child in children if isinstance(child, dict)] if isinstance(children, list) else []


def _to_base64(document: dict[str, Any], *keys: str) -> None:
    for key in keys:
        if isinstance(identity := document.get(key), str):
            raw = bytes.fromhex(identity) if _HEX.fullmatch(identity) else b""
            document[key] = base64.b64encode(raw).decode("ascii")


def _tls(access: Access) -> ssl.SSLContext | None:
    if access.certificate is None or access.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(access.certificate, access.key)
    except (OSError, ValueError) as error:  # of which the first: ssl.SSLError too
        raise CollectorError(
            f"{access.certificate}: with {access.key} no certificate and its key in PEM ({error}); check both files"
        ) from error
    return context


PATH = "/v1/traces"
PROTOBUF, JSON = "application/x-protobuf", "application/json"
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_FULL = (
    f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {RETRY_SECONDS}\r\n"
    "Content-Length: 0\r\nConnection: close\r\n\r\n"
).encode("ascii")


class TraceServer(ThreadingHTTPServer):
    """Takes batches at an address; each connection has a deadline until which its next request must be read."""

    daemon_threads = False  # ending waits for those that are being answered
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self, intake: Intake, host: str, port: int, *, read_seconds: float = READ_SECONDS, access: Access = OPEN
    ) -> None:
        """Listens at once; ``CollectorError`` if it cannot."""
        self.intake, self.read_seconds, self.access = intake, read_seconds, access
        self.tls = _tls(access)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.ending = False
        self._deadlines: dict[socket.socket, float] = {}
        self._loop = threading.Thread(target=self.serve_forever, args=(0.1,), name="http")
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise CollectorError(
                f"{host}:{port}: cannot listen there for HTTP ({error.strerror or error}); choose another address"
            ) from error
        self._loop.start()

    def get_request(self) -> tuple[Any, Any]:
        """The next connection; under TLS its handshake is the business of its own thread."""
        connection, address = super().get_request()
        if self.tls is None:
            return connection, address
        return self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def end(self) -> None:
        """Take no more connections, answer what has arrived, and close."""
        self.ending = True
        self.shutdown()
        for connection in self._deadlines.copy():
            _stop_reading(connection)
        self.server_close()
        self._loop.join()

    def reading(self, connection: socket.socket, *, done: bool) -> None:
        """A connection waits for its next request, or has read it."""
        self._deadlines[connection] = float("inf") if done else time.monotonic() + self.read_seconds

    def server_bind(self) -> None:
        """As the standard library does, without asking a name server for our name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, or a word that there are too many."""
        if len(self._deadlines) >= MAX_CONNECTIONS and not self._makes_room():
            self.intake.counts.refused()
            with suppress(OSError):
                request.sendall(_FULL)
            super().shutdown_request(request)
            return
        self.reading(request, done=False)
        super().process_request(request, client_address)

    def _makes_room(self) -> bool:
        """Give up the connection that has waited longest for its next request, if that is long enough."""
        connection, deadline = min(self._deadlines.copy().items(), key=itemgetter(1))
        if time.monotonic() - (deadline - self.read_seconds) < GRACE_SECONDS:
            return False
        self._deadlines.pop(connection, None)
        _stop_reading(connection)
        return True

    def shutdown_request(self, request: Any) -> None:
        """The connection is over."""
        self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called ten times a second: a client that is too slow hears the end of its own request."""
        now = time.monotonic()
        for connection, deadline in self._deadlines.copy().items():
            if now > deadline:
                _stop_reading(connection)


class _Handler(BaseHTTPRequestHandler):
    server: TraceServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "blis-replay", ""
    timeout = READ_SECONDS
    disable_nagle_algorithm = True  # headers and body are two small writes

    def handle(self) -> None:
        # A client that has gone, or is too slow, has no acknowledgement, and will send again.
        with suppress(OSError):
            if isinstance(self.connection, ssl.SSLSocket):
                self.connection.do_handshake()
            super().handle()

    def handle_one_request(self) -> None:
        self.server.reading(self.connection, done=False)
        super().handle_one_request()
        self.close_connection = self.close_connection or self.server.ending

    def parse_request(self) -> bool:
        stream, self.rfile = self.rfile, _Headers(self.rfile)  # type: ignore[assignment]
        try:
            return super().parse_request()
        finally:
            self.rfile = stream

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: what is worth a line is counted, and printed at the end."""

    def do_POST(self) -> None:
        """Take one batch: answered when it is durable, with what of it was rejected."""
        with ExitStack() as room:
            body = self._body(room)
            self.server.reading(self.connection, done=True)
            if body is not None:
                self._take(body, room)

    def _body(self, room: ExitStack) -> bytes | None:
        """The body as sent; None if there is none to take, which has then been answered."""
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit() and len(length) < 16):
            self._hang_up(HTTPStatus.LENGTH_REQUIRED, "send the body whole, with its Content-Length")
        elif int(length) > (most := self.server.intake.message_bytes):
            self._discard(int(length))
            self.server.intake.counts.malformed(str(OversizeError(most)))
            self._hang_up(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(OversizeError(most)))
        elif no_room := self._no_room(int(length), room):
            self._discard(int(length))
            self._hang_up(HTTPStatus.SERVICE_UNAVAILABLE, no_room)
        elif len(body := self.rfile.read(int(length))) < int(length):
            self.server.intake.counts.refused()
            self._hang_up(HTTPStatus.REQUEST_TIMEOUT, "the body did not come, or not in time")
        elif not self.server.access.allows(self.headers.get("Authorization")):
            self.server.intake.counts.malformed(NOT_ALLOWED)
            self._refuse(HTTPStatus.UNAUTHORIZED, NOT_ALLOWED)
        elif self.path != PATH:
            self._refuse(HTTPStatus.NOT_FOUND, f"traces go to {PATH}")
        elif self._content_type() not in (PROTOBUF, JSON) or self._encoding() not in ("identity", *_WINDOW_BITS):
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"{PROTOBUF} and {JSON} are read, plain, gzip or deflate")
        else:
            return body
        return None

    def _no_room(self, length: int, room: ExitStack) -> str:
        """Why a body of so many bytes cannot be read now; ``""`` if it can, and ``room`` has room for it then."""
        try:
            # Not read, and not refused at once: who sends large ones without end waits at its own side.
            room.enter_context(self.server.intake.room_for(length, WAIT_SECONDS))
        except BusyError as error:
            return str(error)
        return ""

    def _take(self, body: bytes, room: ExitStack) -> None:
        intake = self.server.intake
        try:
            message = body
            if self._encoding() != "identity":
                expanding = intake.room_for if len(body) <= LARGE_BYTES else nullcontext
                most, bits = intake.message_bytes, _WINDOW_BITS[self._encoding()]
                message = _expanded(body, bits, most, lambda: room.enter_context(expanding(most)))
            batch, durable = intake.submit(message, protobuf_of if self._content_type() == JSON else None)
            durable.result()
        except MalformedError as error:
            intake.counts.malformed(str(error))
            oversize = isinstance(error, OversizeError)
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE if oversize else HTTPStatus.BAD_REQUEST, str(error))
        except (BusyError, OSError) as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        else:
            self._answer(HTTPStatus.OK, response_to(batch))

    def _content_type(self) -> str:
        return str(self.headers.get("Content-Type", "")).split(";")[0].strip().lower()

    def _encoding(self) -> str:
        return str(self.headers.get("Content-Encoding", "identity")).strip().lower()

    def _discard(self, length: int) -> None:
        left = min(length, MAX_DISCARDED_BYTES)
        while left > 0 and (piece := self.rfile.read(min(left, 1 << 16))):
            left -= len(piece)

    def _hang_up(self, status: HTTPStatus, why: str) -> None:
        """Answer and close: where the next request begins is not known."""
        self.close_connection = True
        self._refuse(status, why)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, Status(message=why))

    def _answer(self, status: HTTPStatus, message: Message) -> None:
        as_json = self._content_type() == JSON
        body = MessageToJson(message).encode("utf-8") if as_json else message.SerializeToString()
        self.send_response(status)
        self.send_header("Content-Type", JSON if as_json else PROTOBUF)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", str(RETRY_SECONDS))
        if self.close_connection or self.server.ending:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


class _Headers:
    """The beginning of a request: its lines, of which there are only so many bytes."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self.stream, self.left = stream, MAX_HEADER_BYTES

    def readline(self, limit: int) -> bytes:
        line = self.stream.readline(limit)
        self.left -= len(line)
        if self.left < 0:
            raise http.client.LineTooLong("headers")
        return line


def _expanded(body: bytes, window_bits: int, most: int, enlarge: Callable[[], object]) -> bytes:
    """``most``: bytes that there may be; ``enlarge``: called before more than ``LARGE_BYTES`` of them are taken."""
    unpack = zlib.decompressobj(wbits=window_bits)
    try:
        content = unpack.decompress(body, min(LARGE_BYTES, most + 1))
        if not unpack.eof and len(content) <= most:
            enlarge()
            content += unpack.decompress(unpack.unconsumed_tail, most + 1 - len(content))
    except zlib.error as error:
        raise MalformedError("the compressed body is broken") from error
    if len(content) > most:
        raise OversizeError(most)
    if not unpack.eof or unpack.unused_data:
        raise MalformedError("the compressed body is cut off, or followed by something else")
    return content


def _stop_reading(connection: socket.socket) -> None:
    """The connection's reader gets what has arrived, then the end of the stream; answers still go out."""
    with suppress(OSError):
        # Of an encrypted one too, which would go on in clear after its own ``shutdown``.
        socket.socket.shutdown(connection, socket.SHUT_RD)
