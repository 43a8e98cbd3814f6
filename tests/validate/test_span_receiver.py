"""The receiver of ``record``: what it acknowledges is on disk, and is what ``ingest`` reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from full_disk import files_of_at_most
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp.protobuf import json_of
from blis_replay.ingest.readers.otlp.traces import read_traces
from blis_replay.validate.span_receiver import SpanLog, receiving

STEPS = 200  # the SDK keeps the last 128 events of a span


def message_of(*names: str) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    scope.scope.name = "vllm.api"
    for number, name in enumerate(names, 1):
        span = scope.spans.add(name=name, trace_id=bytes([number] * 16), span_id=bytes([number] * 8), kind=2)
        span.attributes.add(key="gen_ai.usage.prompt_tokens").value.int_value = 2**53 + number
        span.links.add(trace_id=bytes([9] * 16), span_id=bytes([8] * 8))
    return request


def lines_in(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines()]


def received(log: SpanLog, act: Callable[[str], Awaitable[None]]) -> None:
    async def run() -> None:
        async with receiving(log) as address:
            await act(address)

    asyncio.run(run())


def test_a_request_is_one_line_of_otlp_json() -> None:
    line = json_of(message_of("llm_request").SerializeToString())
    assert line is not None and line.endswith(b"\n")
    assert json.loads(line)["resourceSpans"][0]["scopeSpans"] == [
        {
            "scope": {"name": "vllm.api"},
            "spans": [
                {
                    "traceId": "01" * 16,
                    "spanId": "01" * 8,
                    "name": "llm_request",
                    "kind": 2,
                    "attributes": [{"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "9007199254740993"}}],
                    "links": [{"traceId": "09" * 16, "spanId": "08" * 8}],
                }
            ],
        }
    ]
    assert json_of(b"hello") is None


def test_what_the_sdk_exports_is_what_ingest_reads(tmp_path: Path) -> None:
    """Journeys and steps through the exporter that vLLM uses."""

    def export(address: str) -> None:
        provider = TracerProvider(resource=Resource({"service.name": "vllm"}), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"http://{address}")))
        for number in range(300):
            with provider.get_tracer("vllm.scheduler").start_as_current_span(
                "llm_core", attributes={"gen_ai.request.id": f"cmpl-{number}-0"}
            ) as span:
                for place, name in enumerate(("QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED")):
                    span.add_event(f"journey.{name}", {"ts.monotonic": 1.0 + place, "scheduler.step": number})
        with provider.get_tracer("vllm.scheduler.step").start_as_current_span("scheduler_steps_1") as span:
            for step in range(STEPS):
                span.add_event("step.BATCH_SUMMARY", {"step.id": step, "step.ts_start_ns": step, "texts": ["ä", "\0"]})
        provider.shutdown()

    said: list[str] = []
    log = SpanLog(tmp_path, said.append)
    received(log, lambda address: asyncio.to_thread(export, address))
    assert (log.spans, said) == (301, [])
    read = read_traces([RecordedFile(path, path.name) for path in sorted(tmp_path.iterdir())])
    assert read.steps["step_id"].to_list() == list(range(STEPS - 128, STEPS))
    assert read.dropped_events == STEPS - 128
    assert read.journeys is not None
    assert sorted(read.journeys.lifecycles["core_request_id"]) == sorted(f"cmpl-{n}-0" for n in range(300))
    assert sorted(read.journeys.lifecycles["queued_step"]) == list(range(300))


def test_a_batch_that_the_disk_does_not_take_is_asked_for_again(tmp_path: Path) -> None:
    """As on a full disk: what was acknowledged stays, the cut-off line goes, the next batch is in a file of its own."""
    said: list[str] = []
    log = SpanLog(tmp_path, said.append)
    log.append(message_of("first").SerializeToString())
    size = (tmp_path / "traces-1.jsonl").stat().st_size

    async def act(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = TraceServiceStub(channel)
            with files_of_at_most(size - 40):
                for _ in range(2):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stub.Export(message_of("second"))
                    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            await stub.Export(message_of("second"))

    received(log, act)
    assert len(lines_in(tmp_path)) == log.spans == 2
    assert (tmp_path / "traces-1.jsonl").stat().st_size == size
    assert [line.split(": ")[0] for line in said] == ["error", str(tmp_path)]


def test_what_is_no_request_is_refused_for_good(tmp_path: Path) -> None:
    log = SpanLog(tmp_path, print)
    with pytest.raises(DecodeError):
        log.append(b"no protobuf")

    async def act(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"no protobuf")
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    received(log, act)
    assert (log.spans, list(tmp_path.iterdir())) == (0, [])
