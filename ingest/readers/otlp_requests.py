"""Upstream vLLM's ``llm_request`` spans (scope ``vllm.llm_engine``): one finished request each."""

from __future__ import annotations

from msgspec import Struct

from blis_replay.ingest.readers.documents import text
from blis_replay.ingest.readers.numbers import microseconds, tokens
from blis_replay.ingest.readers.otlp_values import MAX_NS, Attribute, scalars
from blis_replay.ingest.readers.requests_frame import request_row

REQUEST_SCOPE = "vllm.llm_engine"
REQUEST_SPAN = "llm_request"


class RequestSpan(Struct):
    """A span of this scope; start-up spans stand in it too, under other names."""

    name: str
    startTimeUnixNano: int
    attributes: list[Attribute] = []
    traceId: str = ""
    spanId: str = ""


def request_of(span: RequestSpan) -> tuple[str, dict[str, object]]:
    """Why a span cannot be used (``""`` if it can), and its row of ``READ_SCHEMA``.

    The arrival is the start of the span (epoch), to the microsecond; latencies are those the server measured.
    """
    values = scalars(span.attributes)
    latencies = {
        column: microseconds(values.get(f"gen_ai.latency.{name}"))
        for column, name in (
            ("ttft_us", "time_to_first_token"),
            ("e2e_us", "e2e"),
            ("queue_us", "time_in_queue"),
            ("prefill_us", "time_in_model_prefill"),
            ("decode_us", "time_in_model_decode"),
        )
    }
    if not 0 < span.startTimeUnixNano < MAX_NS:
        return "a start that is no epoch time", {}
    if latencies["e2e_us"] is None:
        return "no usable gen_ai.latency.e2e", {}
    if any(value is not None and value < 0 for value in latencies.values()):
        return "a negative latency", {}
    row = request_row(
        request_id=text(values.get("gen_ai.request.id")),
        prompt_tokens=tokens(values.get("gen_ai.usage.prompt_tokens")),
        output_tokens_reported=tokens(values.get("gen_ai.usage.completion_tokens")),
        usage_output_tokens=tokens(values.get("gen_ai.usage.completion_tokens")),
        max_tokens=tokens(values.get("gen_ai.request.max_tokens")),
        cached_prompt_tokens=tokens(values.get("gen_ai.usage.cached_tokens")),
        sent_us=span.startTimeUnixNano // 1000,
        status="ok",
        **latencies,
    )
    return "", row
