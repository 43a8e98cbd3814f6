"""The live collector: listen, write, and end cleanly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blis_replay.ingest.collector import grpc_service
from blis_replay.ingest.collector.counts import Counts
from blis_replay.ingest.collector.http_service import TraceServer
from blis_replay.ingest.collector.intake import Intake
from blis_replay.ingest.collector.limits import QUEUE_BYTES, READ_SECONDS, SEGMENT_BYTES, STOP_SECONDS
from blis_replay.ingest.collector.segment_writer import SegmentWriter
from blis_replay.ingest.collector.segments import TornTail, claimed, recover


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
    """Where the collector listens and writes; the limits have the defaults of ``limits``."""

    directory: Path
    grpc: Address
    http: Address
    segment_bytes: int = SEGMENT_BYTES
    queue_bytes: int = QUEUE_BYTES
    read_seconds: float = READ_SECONDS


@dataclass(frozen=True)
class Listening:
    """The addresses with their real ports, and what a killed collector had left in the directory."""

    grpc: Address
    http: Address
    torn_tails: tuple[TornTail, ...]


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
    with claimed(settings.directory):
        tails = recover(settings.directory)
        counts = Counts(say)
        writer = SegmentWriter(
            settings.directory, say, segment_bytes=settings.segment_bytes, queue_bytes=settings.queue_bytes
        )
        try:
            await _serve(
                settings, Intake(writer, counts), stop, lambda grpc, http: listening(Listening(grpc, http, tails))
            )
        finally:
            writer.close()
    return counts


async def _serve(
    settings: CollectorSettings,
    intake: Intake,
    stop: asyncio.Event,
    listening: Callable[[Address, Address], None],
) -> None:
    http = TraceServer(intake, settings.http.host, settings.http.port, read_seconds=settings.read_seconds)
    try:
        server, port = await grpc_service.start(intake, str(settings.grpc), read_seconds=settings.read_seconds)
        try:
            listening(Address(settings.grpc.host, port), Address(settings.http.host, http.server_port))
            await stop.wait()
        finally:
            await server.stop(STOP_SECONDS)
    finally:
        await asyncio.to_thread(http.end)
