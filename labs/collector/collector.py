"""The live collector: listen over gRPC and HTTP, write, and end cleanly.

The gRPC service is the ``Export`` method of the OpenTelemetry collector's ``TraceService``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from blis_replay_labs.collector.batches import Batch, Counts, MalformedError, OversizeError, response_to
from blis_replay_labs.collector.http_service import TraceServer
from blis_replay_labs.collector.limits import (
    GRACE_SECONDS,
    LARGE_BYTES,
    MAX_CHANNELS,
    MAX_CONNECTIONS,
    MESSAGE_BYTES,
    NOT_ALLOWED,
    OPEN,
    QUEUE_BYTES,
    READ_SECONDS,
    RETRY_SECONDS,
    SEGMENT_BYTES,
    STOP_SECONDS,
    Access,
    BusyError,
    CollectorError,
)
from blis_replay_labs.collector.segments import (
    Damage,
    Intake,
    SegmentWriter,
    claimed,
    recover,
)

# A call passes from thread to thread some five times, and each time waits so long for one that looks through a message.
_SWITCH_SECONDS = 0.0005
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"

_OPTIONS = (
    # Else gRPC reads ahead up to some MB of each call, also of a message that is too large.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_allowed_incoming_connections", MAX_CHANNELS),
    ("grpc.max_concurrent_streams", MAX_CONNECTIONS),
    ("grpc.max_connection_idle_ms", 60_000),  # an exporter that comes back connects again
    ("grpc.keepalive_time_ms", 60_000),
    # Two collectors on one port would each get some of the batches.
    ("grpc.so_reuseport", 0),
)


async def _grpc_server(
    intake: Intake, address: str, read_seconds: float, access: Access
) -> tuple[grpc.aio.Server, int]:
    """A server that takes batches at ``host:port``, and the port that it has; ``CollectorError`` if it cannot."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", intake.message_bytes), *_OPTIONS])
    export = _Export(intake, read_seconds, access)
    # One message on the wire either way; taken as a stream, a client that never sends it can be given up.
    handler = grpc.stream_unary_rpc_method_handler(export.export)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
    try:
        if access.certificate is None or access.key is None:
            port = server.add_insecure_port(address)
        else:
            pair = access.key.read_bytes(), access.certificate.read_bytes()
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise CollectorError(f"{address}: cannot listen there for gRPC; choose another address") from error
    await server.start()
    return server, port


class _Export:
    """The method, and how many calls of it are under way."""

    def __init__(self, intake: Intake, read_seconds: float, access: Access) -> None:
        self.intake, self.read_seconds, self.access = intake, read_seconds, access
        self.calls = 0
        # What reads the messages that have not come -> since when; who waits longest is the first.
        self.waiting: dict[asyncio.Future[Any], float] = {}
        # Each call can wait for its turn; the loop goes on.
        self.decoders = ThreadPoolExecutor(MAX_CONNECTIONS, "decoder")
        self.loop = asyncio.get_running_loop()

    async def export(self, _: object, context: Any) -> bytes:
        """Take one batch: answered when it is durable, with what of it was rejected."""
        if not self.access.allows(dict(context.invocation_metadata() or ()).get("authorization")):
            self.intake.counts.malformed(NOT_ALLOWED)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, NOT_ALLOWED)
        if self.calls >= MAX_CONNECTIONS and not self._makes_room():
            self.intake.counts.refused()
            await _ask_again(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self.calls} calls are under way")
        self.calls += 1
        try:
            return await self._take(await self._message(context), context)
        finally:
            self.calls -= 1

    def _makes_room(self) -> bool:
        """Give up the call that has waited longest for its message, if that is long enough."""
        reading, since = next(iter(self.waiting.items()), (None, 0.0))
        if reading is None or self.loop.time() - since < GRACE_SECONDS:
            return False
        del self.waiting[reading]
        return reading.cancel()

    async def _message(self, context: Any) -> bytes:
        reading = asyncio.ensure_future(context.read())
        self.waiting[reading] = self.loop.time()
        try:
            message = await asyncio.wait_for(reading, self.read_seconds)
        except TimeoutError:
            self.intake.counts.refused()
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no message within {self.read_seconds:g} s")
        except asyncio.CancelledError:
            if reading in self.waiting:
                raise  # the client hung up, or the collector ends
            self.intake.counts.refused()
            await _ask_again(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "others wait, and no message has come")
        finally:
            self.waiting.pop(reading, None)
        if isinstance(message, bytes):
            return message
        # gRPC itself has answered a message that is too large, and a client that hung up wants no answer.
        self.intake.counts.malformed(f"{OversizeError(self.intake.message_bytes)}; or the client hung up")
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no message")
        raise AssertionError("abort raises")

    def _submitted(self, message: bytes) -> tuple[Batch, Future[None]]:
        with self.intake.room_for(len(message)):
            return self.intake.submit(message)

    async def _take(self, message: bytes, context: Any) -> bytes:
        size = len(message)
        try:
            batch, durable = await self.loop.run_in_executor(self.decoders, self._submitted, message)
            await asyncio.wrap_future(durable)
        except MalformedError as error:
            self.intake.counts.malformed(str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except BusyError as error:
            why = str(error)
        except OSError as error:
            await _ask_again(context, grpc.StatusCode.UNAVAILABLE, f"the disk: {error.strerror or error}")
        else:
            response: bytes = response_to(batch).SerializeToString()
            return response
        del message
        if size > LARGE_BYTES:
            await self._hold_back()
        await _ask_again(context, grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        raise AssertionError("abort raises")

    async def _hold_back(self) -> None:
        """Let a sender of large messages wait for its refusal, so that it does not send the next at once.

        Nothing of its message is kept meanwhile, and others have its place.
        """
        self.calls -= 1
        try:
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self.calls += 1


async def _ask_again(context: Any, code: grpc.StatusCode, why: str) -> None:
    """End the call so that the exporter tries again after a while (OTLP: only with ``RetryInfo``)."""
    retry = RetryInfo(retry_delay=Duration(seconds=RETRY_SECONDS))
    details = AnyMessage()
    details.Pack(retry)
    status = Status(code=code.value[0], message=why, details=[details])
    # The second key is the standard's, the first the one that the Python SDK looks at.
    metadata = (
        ("google.rpc.retryinfo-bin", retry.SerializeToString()),
        ("grpc-status-details-bin", status.SerializeToString()),
    )
    await context.abort(code, why, metadata)


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0 is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        """As in a URL: an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class CollectorSettings:
    """Where the collector listens and writes; the limits have the defaults of ``batches``."""

    directory: Path
    grpc: Address
    http: Address
    segment_bytes: int = SEGMENT_BYTES
    queue_bytes: int = QUEUE_BYTES
    message_bytes: int = MESSAGE_BYTES
    read_seconds: float = READ_SECONDS
    access: Access = OPEN


@dataclass(frozen=True)
class Listening:
    """The addresses with their real ports, and what was damaged in the directory, as a kill leaves it or worse."""

    grpc: Address
    http: Address
    damaged: tuple[Damage, ...]


async def collect(
    settings: CollectorSettings,
    stop: asyncio.Event,
    listening: Callable[[Listening], None],
    say: Callable[[str], None],
) -> Counts:
    """Collect until ``stop`` is set, then answer what has arrived, and return the counts.

    ``listening`` is called once; ``say`` (from any thread) with one line for the operator.
    Raises ``CollectorError`` if the directory or an address is not to be had.
    """
    with claimed(settings.directory), _switching_often():
        damaged = recover(settings.directory)
        counts = Counts(say)
        writer = SegmentWriter(
            settings.directory, say, segment_bytes=settings.segment_bytes, queue_bytes=settings.queue_bytes
        )
        try:
            intake = Intake(writer, counts, settings.message_bytes)
            await _serve(settings, intake, stop, lambda grpc, http: listening(Listening(grpc, http, damaged)))
        finally:
            writer.close()
    return counts


@contextmanager
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def _serve(
    settings: CollectorSettings,
    intake: Intake,
    stop: asyncio.Event,
    listening: Callable[[Address, Address], None],
) -> None:
    http = TraceServer(
        intake, settings.http.host, settings.http.port, read_seconds=settings.read_seconds, access=settings.access
    )
    try:
        server, port = await _grpc_server(intake, str(settings.grpc), settings.read_seconds, settings.access)
        try:
            listening(Address(settings.grpc.host, port), Address(settings.http.host, http.server_port))
            await stop.wait()
        finally:
            await server.stop(STOP_SECONDS)
    finally:
        await asyncio.to_thread(http.end)
