"""A collector in this process, what is sent to it, and what it left on disk."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import requests
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from blis_replay_labs.collector.batches import Counts
from blis_replay_labs.collector.collector import SERVICE, Address, CollectorSettings, Listening, collect
from blis_replay_labs.collector.frames import frame_spans
from blis_replay_labs.collector.segments import segments

ANY_PORT = Address("127.0.0.1", 0)


@dataclass
class Running:
    """A collector that listens: its addresses, what it said, and, once it has ended, its counts."""

    listening: Listening
    said: list[str]
    counts: Counts = field(default_factory=lambda: Counts(print))

    @property
    def grpc(self) -> str:
        """The endpoint for a gRPC exporter."""
        return f"http://{self.listening.grpc}"

    @property
    def http(self) -> str:
        """The endpoint for an HTTP exporter."""
        return f"http://{self.listening.http}/v1/traces"


@contextmanager
def collector(directory: Path, **limits: Any) -> Iterator[Running]:
    """A collector that listens inside the context, on ports of its own, and has ended cleanly after it."""
    settings = CollectorSettings(directory, ANY_PORT, ANY_PORT, **limits)
    ready, said, found = threading.Event(), [], []
    state: dict[str, Any] = {}

    async def run() -> None:
        state["loop"], state["stop"] = asyncio.get_running_loop(), asyncio.Event()

        def listening(where: Listening) -> None:
            found.append(Running(where, said))
            ready.set()

        state["counts"] = await collect(settings, state["stop"], listening, said.append)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(10)
    running = found[0]
    try:
        yield running
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join()
    running.counts = state["counts"]


def span(number: int, **fields: Any) -> Span:
    """A sound span whose ids are made of ``number``."""
    values = {
        "trace_id": (number + 1).to_bytes(16, "big"),
        "span_id": (number + 1).to_bytes(8, "big"),
        "name": "llm_core",
    }
    return Span(**values | fields)


def request(*spans: Span, service: str = "vllm") -> ExportTraceServiceRequest:
    """An export request with these spans in one scope."""
    message = ExportTraceServiceRequest()
    resource_spans = message.resource_spans.add()
    resource_spans.resource.attributes.add(key="service.name").value.string_value = service
    scope_spans = resource_spans.scope_spans.add()
    scope_spans.scope.name = "vllm.scheduler"
    scope_spans.spans.extend(spans)
    return message


# The serialised request that collectors are sent where it does not matter what is in it.
SOUND = request(span(0)).SerializeToString()
PROTOBUF = "application/x-protobuf"


def post(running: Running, body: bytes, content_type: str = PROTOBUF, **headers: str) -> requests.Response:
    """One request on a connection of its own."""
    sent = {"Content-Type": content_type} | {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.post(running.http, body, headers=sent, timeout=10)


def call(running: Running, message: bytes, seconds: float = 10, **options: Any) -> ExportTraceServiceResponse:
    """One call on a channel of its own; raises ``grpc.RpcError``."""
    with grpc.insecure_channel(str(running.listening.grpc), **options) as channel:
        export = channel.unary_unary(f"/{SERVICE}/Export")
        return ExportTraceServiceResponse.FromString(export(message, timeout=seconds))


def raw(running: Running) -> socket.socket:
    """A connection to the HTTP port."""
    where = running.listening.http
    return socket.create_connection((where.host, where.port), timeout=10)


def status_of_post(running: Running) -> int:
    """What a sound request is answered with over HTTP; 0: nothing."""
    try:
        return post(running, SOUND).status_code
    except requests.ConnectionError:
        return 0


def is_called(running: Running) -> bool:
    """Whether a sound request is acknowledged over gRPC."""
    try:
        call(running, SOUND)
    except grpc.RpcError:
        return False
    return True


def asks_for_a_retry(error: Any) -> None:
    """The end of a call tells its exporter to try again after a second."""
    metadata = dict(error.trailing_metadata())
    status = Status.FromString(metadata["grpc-status-details-bin"])
    told = RetryInfo()
    assert status.details[0].Unpack(told)
    assert told.retry_delay.seconds == 1
    assert RetryInfo.FromString(metadata["google.rpc.retryinfo-bin"]) == told


def until(condition: Any, seconds: float = 10) -> None:
    """Wait for it; fails if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stored_messages(directory: Path) -> list[bytes]:
    """The messages of all segments of a directory, read by the framing alone."""
    return [path.read_bytes()[at : at + size] for path in segments(directory) for at, size in frame_spans(path)]


def stored_spans(directory: Path) -> list[Span]:
    """The spans on disk, decoded by opentelemetry-proto."""
    return [
        one
        for message in stored_messages(directory)
        for resource_spans in ExportTraceServiceRequest.FromString(message).resource_spans
        for scope_spans in resource_spans.scope_spans
        for one in scope_spans.spans
    ]
