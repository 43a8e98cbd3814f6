"""The collector against the OpenTelemetry Python SDK and its exporters, as vLLM uses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from collecting import Running, collector, stored_spans
from grpc import Compression as GrpcCompression
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

MakeExporter = Callable[[Running], SpanExporter]
EXPORTERS: dict[str, MakeExporter] = {
    "grpc": lambda running: GrpcExporter(running.grpc),
    "grpc-gzip": lambda running: GrpcExporter(running.grpc, compression=GrpcCompression.Gzip),
    "http": lambda running: HttpExporter(running.http),
    "http-gzip": lambda running: HttpExporter(running.http, compression=HttpCompression.Gzip),
    "http-deflate": lambda running: HttpExporter(running.http, compression=HttpCompression.Deflate),
}
STEP_EVENTS = 200  # the SDK keeps the last 128 events of a span


def _trace(exporter: SpanExporter, service: str, count: int) -> tuple[ReadableSpan, ...]:
    """Export ``count`` journey spans and a step span through the batch processor; what the SDK handed out."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    journeys, steps = provider.get_tracer("vllm.scheduler"), provider.get_tracer("vllm.scheduler.step")
    for number in range(count):
        with journeys.start_as_current_span("llm_core", attributes={"gen_ai.request.id": f"cmpl-{number}-0"}) as one:
            for phase in ("QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"):
                one.add_event(f"journey.{phase}", {"ts.monotonic": number + 0.1, "scheduler.step": 2**53 + number})
    with steps.start_as_current_span("scheduler_steps_1") as one:
        for step in range(STEP_EVENTS):
            one.add_event("step.BATCH_SUMMARY", {"step.id": step, "kv.usage_gpu": 0.5, "texts": ["ä", "\x00"]})
    assert provider.force_flush()
    provider.shutdown()
    return kept.get_finished_spans()


@pytest.mark.parametrize("kind", EXPORTERS)
def test_what_the_sdk_exports_lies_on_disk_byte_by_byte(kind: str, tmp_path: Path) -> None:
    """Each span as the SDK's own encoder writes it, attributes and all."""
    with collector(tmp_path) as running:
        exported = _trace(EXPORTERS[kind](running), kind, 300)
    encoded = {
        one.span_id: one.SerializeToString()
        for resource_spans in encode_spans(exported).resource_spans
        for scope_spans in resource_spans.scope_spans
        for one in scope_spans.spans
    }
    stored = stored_spans(tmp_path)
    assert len(stored) == len(exported) == 301
    assert {one.span_id: one.SerializeToString() for one in stored} == encoded
    assert running.counts.spans == 301
    assert running.counts.services[kind].dropped_events == STEP_EVENTS - 128
    assert running.said == []
