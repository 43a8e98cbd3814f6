"""A collector in this process, what is sent to it, and what it left on disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from blis_replay.ingest.collector.batches import Counts
from blis_replay.ingest.collector.collector import Address, CollectorSettings, Listening, collect
from blis_replay.ingest.collector.segments import segments
from blis_replay.ingest.frames import frame_spans

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
