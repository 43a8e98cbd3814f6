"""A server's OTLP spans, received over gRPC and on disk as JSON lines before they are acknowledged.

One exporter on the same machine sends them; what many exporters need (HTTP, TLS, tokens) is a lab's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from blis_replay.ingest.readers.otlp.protobuf import json_of

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
# A batch of the SDK has up to 512 spans, 1 to 2 MB; as JSON this is a third of the longest line that ingest reads.
MAX_MESSAGE_BYTES = 16 << 20
STOP_S = 10.0  # for calls that are under way when the server has ended
_HOST = "127.0.0.1"


class SpanLog:
    """``traces-N.jsonl`` in a directory: what :meth:`append` has returned from survives a crash of the machine.

    ``spans``: how many are on disk; ``say``: called with one line when the disk refuses a batch, and when it takes the
    next one.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self.directory, self.say = directory, say
        self.spans = 0
        self._number, self._path, self._handle, self._durable_bytes = 0, directory, -1, 0
        self._refusing = False

    def append(self, message: bytes) -> None:
        """Write a serialised export request; ``DecodeError`` for other bytes, ``OSError`` if it is not on disk."""
        request = ExportTraceServiceRequest.FromString(message)
        try:
            self._write(json_of(message) or b"")
        except OSError as error:
            self._take_back()
            if not self._refusing:
                self.say(f"error: {self.directory}: spans cannot be written ({error.strerror or error}): make room")
            self._refusing = True
            raise
        if self._refusing:
            self.say(f"{self.directory}: spans are written again")
        self._refusing = False
        self.spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def _write(self, line: bytes) -> None:
        if self._handle < 0:
            self._number += 1
            self._path = self.directory / f"traces-{self._number}.jsonl"
            self._handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
            self._durable_bytes = 0
            folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)  # makes the file's name durable
            finally:
                os.close(folder)
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._handle, rest) :]
        os.fsync(self._handle)
        self._durable_bytes += len(line)

    def _take_back(self) -> None:
        """Cut off what is not durable.  The next batch begins a new file: what a failed fsync left is not known."""
        if self._handle >= 0:
            with suppress(OSError):
                os.ftruncate(self._handle, self._durable_bytes)
                if not self._durable_bytes:
                    self._path.unlink()
            self.close()


@asynccontextmanager
async def receiving(log: SpanLog) -> AsyncIterator[str]:
    """The address of a gRPC server that takes export requests for ``log`` until the context ends."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "span log") as writer:

        async def export(message: bytes, context: Any) -> bytes:
            try:
                await loop.run_in_executor(writer, log.append, message)
            except DecodeError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not an ExportTraceServiceRequest in protobuf")
            except OSError as error:
                # The exporter tries again after UNAVAILABLE.
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"the disk: {error.strerror or error}")
            acknowledged: bytes = ExportTraceServiceResponse().SerializeToString()
            return acknowledged

        server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
        handler = grpc.unary_unary_rpc_method_handler(export)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
        port = server.add_insecure_port(f"{_HOST}:0")
        await server.start()
        try:
            yield f"{_HOST}:{port}"
        finally:
            await server.stop(STOP_S)
            await loop.run_in_executor(writer, log.close)
