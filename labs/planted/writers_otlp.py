"""``traces.json.gz``: OTLP JSON lines with step spans, and request spans or journeys if asked for."""

from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay_labs.planted.experiment import (
    SyntheticTruth,
    api_request_id,
    completion_id,
    core_request_id,
    hex_id,
    sampled,
    step_records,
)

Values = dict[str, int | float | str]
Messages = list[dict[str, Any]]


def span(name: str, kind: int, identity: int | str, values: Values) -> dict[str, Any]:
    """A span without times, with ids that follow from ``identity``."""
    return {
        "traceId": hex_id(f"trace {identity}", 16),
        "spanId": hex_id(f"span {identity}", 8),
        "flags": 256,
        "name": name,
        "kind": kind,
        "attributes": attributes(values),
    }


def attributes(values: Values) -> list[dict[str, Any]]:
    """The values as OTLP attributes."""
    return [attribute(name, value) for name, value in values.items()]


def attribute(key: str, value: int | float | str) -> dict[str, Any]:
    """One attribute; integers are decimal strings."""
    if isinstance(value, str):
        return {"key": key, "value": {"stringValue": value}}
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    return {"key": key, "value": {"doubleValue": value}}


def json_lines(messages: Messages) -> bytes:
    """One message per line, as the collector's file exporter writes them."""
    return b"".join(compact(message) + b"\n" for message in messages)


def compact(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def api_spans(truth: SyntheticTruth) -> list[dict[str, Any]]:
    """A span of scope ``vllm.api`` for each request, in order of their ends.

    The server is next to its client: a request arrives when it is sent, and departs when its client is done.
    """
    return _by_end([_api_span(truth, request) for request in range(len(truth))])


def core_spans(truth: SyntheticTruth) -> list[dict[str, Any]]:
    """A span of scope ``vllm.scheduler`` for each request that reached the engine, in order of their ends.

    Raises ``ValueError`` for a run with preemptions, whose times the engine does not keep.
    """
    if truth.result.preemptions.any():
        raise ValueError("journeys of preempted requests cannot be written: give the engine more KV blocks")
    reached = np.flatnonzero(truth.result.queued_us >= 0)
    return _by_end([_core_span(truth, int(request)) for request in reached])


def _by_end(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(spans, key=lambda s: int(s["endTimeUnixNano"]))


def _api_span(truth: SyntheticTruth, request: int) -> dict[str, Any]:
    arrived_us = int(truth.trace.arrival_us[request])
    ok = bool(truth.ok[request])
    values: Values = {
        "gen_ai.request.id": api_request_id(request),
        "http.route": "/v1/chat/completions",
        "gen_ai.response.model": truth.spec.model,
        "gen_ai.usage.prompt_tokens": int(truth.trace.prompt_tokens[request]),
        "gen_ai.request.max_tokens": truth.spec.shared_prefix.output_tokens,
    }
    events = [("api.ARRIVED", arrived_us), ("api.HANDOFF_TO_CORE", arrived_us)]
    if truth.result.first_step[request] >= 0 and ok:
        values["gen_ai.usage.completion_tokens"] = int(truth.result.output_tokens[request])
        events.append(("api.FIRST_RESPONSE_FROM_CORE", arrived_us + int(truth.result.ttft_us[request])))
    events.append(("api.DEPARTED" if ok else "api.ABORTED", int(truth.client_end_us[request])))
    span_json = span("llm_request", 2, f"api {request}", values)
    recorded = []
    for name, at_us in events:
        of_event: Values = {"event.ts.monotonic": _monotonic_ns(truth, at_us) / 1e9}
        if name == "api.ABORTED":
            of_event["reason"] = "client_disconnect"
        recorded.append(_event(truth, name, at_us, of_event))
    return _timed(span_json, recorded, {"code": 2, "message": "Client disconnected"} if not ok else {})


def _core_span(truth: SyntheticTruth, request: int) -> dict[str, Any]:
    result, ok = truth.result, bool(truth.ok[request])
    scheduled_at = result.steps["scheduled_us"]
    prompt_tokens = int(truth.trace.prompt_tokens[request])
    queued_us = int(truth.taken_in_us[request])

    def event(name: str, at_us: int, step: int, phase: str, done_tokens: int, output_tokens: int) -> dict[str, Any]:
        at_ns = _monotonic_ns(truth, at_us)
        values: Values = {
            "event.type": name,
            "ts.monotonic": at_ns / 1e9,
            "ts.monotonic_ns": at_ns,
            "scheduler.step": step,
            "phase": phase,
            "prefill.done_tokens": done_tokens,
            "prefill.total_tokens": prompt_tokens,
            "decode.done_tokens": output_tokens,
            "decode.max_tokens": truth.spec.shared_prefix.output_tokens,
            "num_preemptions": 0,
        }
        if name == "SCHEDULED":
            values["schedule.kind"] = "FIRST"
        if name == "FINISHED":
            values["finish.status"] = "length" if ok else "aborted"
        return _event(truth, f"journey.{name}", at_us, values)

    # The step under way when something happens is the last one begun before.
    events = [event("QUEUED", queued_us, int(np.searchsorted(scheduled_at, queued_us)), "WAITING", 0, 0)]
    if (row := int(result.scheduled_step[request])) >= 0:
        events.append(event("SCHEDULED", int(result.scheduled_us[request]), row + 1, "PREFILL", 0, 0))
    first_row = int(result.first_step[request])
    if first_row >= 0:
        at_us = int(result.first_token_us[request])
        events.append(event("FIRST_TOKEN", at_us, first_row + 1, "DECODE", prompt_tokens, 1))
    output_tokens = int(result.output_tokens[request])
    if ok:
        ended_us, step = int(result.finished_us[request]), int(result.last_step[request]) + 1
    else:
        ended_us = int(truth.trace.abort_us[request])
        step = int(np.searchsorted(scheduled_at, ended_us))
    phase, done_tokens = ("DECODE", prompt_tokens) if first_row >= 0 else ("PREFILL", 0)
    events.append(event("FINISHED", ended_us, step, phase, done_tokens, output_tokens))
    parent = span("llm_request", 2, f"api {request}", {})
    span_json = span("llm_core", 1, f"core {request}", {"gen_ai.request.id": core_request_id(request)})
    span_json |= {"traceId": parent["traceId"], "parentSpanId": parent["spanId"], "flags": 768}
    return _timed(span_json, events, {})


def _timed(span_json: dict[str, Any], events: list[dict[str, Any]], status: dict[str, Any]) -> dict[str, Any]:
    times = {"startTimeUnixNano": events[0]["timeUnixNano"], "endTimeUnixNano": events[-1]["timeUnixNano"]}
    return span_json | times | {"events": events, "status": status}


def _event(truth: SyntheticTruth, name: str, at_us: int, values: Values) -> dict[str, Any]:
    return {"timeUnixNano": str(truth.epoch_ns(at_us)), "name": name, "attributes": attributes(values)}


def _monotonic_ns(truth: SyntheticTruth, at_us: int) -> int:
    return truth.spec.step_zero_ns + at_us * 1000


CLOSURE_INTERVAL = 100
SPANS_PER_LINE = 4

_FIELDS = {
    "queue.running_depth": "running_depth",
    "queue.waiting_depth": "waiting_depth",
    "batch.num_prefill_reqs": "prefill_requests",
    "batch.num_decode_reqs": "decode_requests",
    "batch.scheduled_tokens": "scheduled_tokens",
    "batch.prefill_tokens": "prefill_tokens",
    "batch.decode_tokens": "decode_tokens",
    "batch.num_finished": "finished_requests",
    "batch.num_preempted": "preempted_requests",
}


def traces(truth: SyntheticTruth) -> bytes:
    """The file as a collector's file exporter writes it: gzip'ed lines of a few spans each."""
    return gzip.compress(json_lines(messages_of(truth)), mtime=0)


def messages_of(truth: SyntheticTruth) -> list[dict[str, Any]]:
    messages = _of_scope("vllm.scheduler.step", _step_spans(truth))
    if truth.spec.request_spans:
        messages += _of_scope("vllm.llm_engine", _request_spans(truth))
    if truth.spec.journeys:
        messages += _of_scope("vllm.scheduler", core_spans(truth)) + _of_scope("vllm.api", api_spans(truth))
    return messages


def _of_scope(scope: str, spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    resource = {"attributes": [attribute("service.name", "vllm")]}
    starts = range(0, len(spans), SPANS_PER_LINE)
    parts = [{"scope": {"name": scope}, "spans": spans[at : at + SPANS_PER_LINE]} for at in starts]
    return [{"resourceSpans": [{"resource": resource, "scopeSpans": [part]}]} for part in parts]


def _step_spans(truth: SyntheticTruth) -> list[dict[str, Any]]:
    """One span for every closure interval in which a step was drawn."""
    records, drawn = step_records(truth), sampled(truth)
    records["scheduled_tokens"] = records["prefill_tokens"] + records["decode_tokens"]
    intervals = drawn // CLOSURE_INTERVAL
    spans = []
    for sequence, interval in enumerate(np.unique(intervals).tolist(), start=1):
        members = drawn[intervals == interval].tolist()
        first, last = interval * CLOSURE_INTERVAL, min((interval + 1) * CLOSURE_INTERVAL, len(records["step_id"])) - 1
        values: Values = {
            "scheduler.span_sequence": sequence,
            "scheduler.step_range_start": first + 1,
            "scheduler.closure_interval": CLOSURE_INTERVAL,
            "scheduler.step_range_end": last + 1,
        }
        events = [_step_event(truth, records, step) for step in members]
        span_json = span(f"scheduler_steps_{sequence}", 1, sequence, values)
        span_json["startTimeUnixNano"] = str(truth.epoch_ns(records["start_us"][first]))
        span_json["endTimeUnixNano"] = events[-1]["timeUnixNano"]
        spans.append(span_json | {"events": events, "status": {}})
    return spans


def _step_event(truth: SyntheticTruth, records: dict[str, Int64s], step: int) -> dict[str, Any]:
    spec = truth.spec
    start_us, duration_us = int(records["start_us"][step]), int(records["duration_us"][step])
    start_ns = spec.step_zero_ns + start_us * 1000
    blocks = (spec.engine.num_gpu_blocks or 1) - 1
    free = int(records["kv_blocks_free"][step]) if blocks else 0
    values: Values = {
        "step.id": int(records["step_id"][step]),
        "step.ts_start_ns": start_ns,
        "step.ts_end_ns": start_ns + duration_us * 1000,
        "step.duration_us": duration_us,
        **{name: int(records[field][step]) for name, field in _FIELDS.items()},
        "kv.usage_gpu_ratio": 1 - free / blocks if blocks else 0,
        "kv.blocks_total_gpu": blocks,
        "kv.blocks_free_gpu": free,
    }
    # The event is stamped after the summary has been put together.
    at_ns = truth.epoch_ns(start_us + duration_us) + 40_000
    return {"timeUnixNano": str(at_ns), "name": "step.BATCH_SUMMARY", "attributes": attributes(values)}


def _request_spans(truth: SyntheticTruth) -> list[dict[str, Any]]:
    """A span for each finished request, in order of completion; one that was given up has none."""
    done = np.flatnonzero(truth.ok)
    return [_request_span(truth, int(r)) for r in done[np.argsort(truth.client_end_us[done], kind="stable")]]


def _request_span(truth: SyntheticTruth, request: int) -> dict[str, Any]:
    result = truth.result
    queued_us, scheduled_us = int(truth.taken_in_us[request]), int(result.scheduled_us[request])
    first_us, finished_us = int(result.first_token_us[request]), int(result.finished_us[request])
    e2e_us = int(result.e2e_us[request])
    values: Values = {
        "gen_ai.latency.time_to_first_token": int(result.ttft_us[request]) / 1e6,
        "gen_ai.latency.e2e": e2e_us / 1e6,
        "gen_ai.latency.time_in_queue": (scheduled_us - queued_us) / 1e6,
        "gen_ai.usage.prompt_tokens": int(truth.trace.prompt_tokens[request]),
        "gen_ai.usage.completion_tokens": int(result.output_tokens[request]),
        "gen_ai.latency.time_in_model_prefill": (first_us - scheduled_us) / 1e6,
        "gen_ai.latency.time_in_model_decode": (finished_us - first_us) / 1e6,
        "gen_ai.latency.time_in_model_inference": (finished_us - scheduled_us) / 1e6,
        "gen_ai.request.id": f"{completion_id(request)}-0",
        "gen_ai.request.max_tokens": truth.spec.shared_prefix.output_tokens,
    }
    start_ns = truth.epoch_ns(truth.trace.arrival_us[request])
    span_json = span("llm_request", 2, 1_000_000 + request, values)
    return span_json | {
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + e2e_us * 1000 + 150_000),
        "status": {},
    }
