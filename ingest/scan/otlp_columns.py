"""The columns into which OTLP traces are decoded: the one seam between decoding and meaning.

A decoder (of JSON, of protobuf) knows encodings and fills these columns; what the columns mean for
steps, requests and journeys is worked out on whole frames.  The rules that every decoder keeps:

* A span of a scope in :data:`SCOPES` is decoded in full.  Of any other span only its place,
  ``scope`` and ``name`` are filled.
* Ids are lower-case hex (:func:`with_plain_ids`).  A time of 0, an empty id and an empty status
  message are null, as protobuf cannot tell them from absent ones.  ``dropped_events`` is then 0.
* Events of other names than :data:`EVENTS` are counted in ``other_events`` of their span; attributes
  of other names are ignored.  If an attribute is repeated, the last one counts.
* An integer column takes ``intValue`` (number or decimal string, 64 bits exact) and a
  ``doubleValue`` without fraction below 2^53.  A float column takes either, NaN and infinities too.  A string
  column takes ``stringValue``.  An attribute without a value is null.
* A known attribute of another type, a number beyond int64, or a time before 1970 rejects the event (or
  the span, with its events), with its place.  Decoders do not check whether a number is plausible.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

STEP_SCOPE, CORE_SCOPE, API_SCOPE = "vllm.scheduler.step", "vllm.scheduler", "vllm.api"
# Upstream vLLM writes one span per finished request: under the name its engines gave their tracer, and since its
# tracing became a package under the name of that package's module (vllm/tracing/otel.py).
ENGINE_SCOPES = ("vllm.llm_engine", "vllm.tracing.otel")
SCOPES = (STEP_SCOPE, CORE_SCOPE, API_SCOPE, *ENGINE_SCOPES)

STEP_EVENT, SNAPSHOT_EVENT = "step.BATCH_SUMMARY", "step.REQUEST_SNAPSHOT"
JOURNEY_EVENTS = (
    "journey.QUEUED",
    "journey.SCHEDULED",
    "journey.FIRST_TOKEN",
    "journey.PREEMPTED",
    "journey.FINISHED",
)
API_EVENTS = (
    "api.ARRIVED",
    "api.HANDOFF_TO_CORE",
    "api.FIRST_RESPONSE_FROM_CORE",
    "api.DEPARTED",
    "api.ABORTED",
)
# The 128 events that an SDK keeps of a span take some 300 KB.  Decoded, empty events take 60 times their size.
MAX_SPAN_BYTES = 4 << 20
# What a record of a file is called, by its framing.
UNITS = ("line", "object", "frame", "resource")
EVENTS = (STEP_EVENT, SNAPSHOT_EVENT, *JOURNEY_EVENTS, *API_EVENTS)
# Journey events of both scopes, in the order in which those with one stamp happen.
EVENT_SEQUENCE = (*API_EVENTS[:2], *JOURNEY_EVENTS[:3], API_EVENTS[2], *JOURNEY_EVENTS[3:], *API_EVENTS[3:])

# Attribute of a span -> column.  Latencies are in seconds, as recorded.
SPAN_INTEGERS = {
    "gen_ai.usage.prompt_tokens": "prompt_tokens",
    "gen_ai.usage.completion_tokens": "completion_tokens",
    "gen_ai.usage.cached_tokens": "cached_tokens",
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.n": "sequences",
}
SPAN_FLOATS = {
    "gen_ai.latency.time_to_first_token": "ttft_s",
    "gen_ai.latency.e2e": "e2e_s",
    "gen_ai.latency.time_in_queue": "queue_s",
    "gen_ai.latency.time_in_model_prefill": "prefill_s",
    "gen_ai.latency.time_in_model_decode": "decode_s",
}
SPAN_STRINGS = {"gen_ai.request.id": "request_id", "gen_ai.response.model": "model"}

# Attribute of an event -> column.  Two attributes share a column where they are one quantity of different events.
EVENT_INTEGERS = {
    "step.id": "step_id",
    "scheduler.step": "step_id",
    "step.ts_start_ns": "ts_start_ns",
    "step.ts_end_ns": "ts_end_ns",
    "step.duration_us": "duration_us",
    "queue.running_depth": "running_depth",
    "queue.waiting_depth": "waiting_depth",
    "batch.num_prefill_reqs": "prefill_requests",
    "batch.num_decode_reqs": "decode_requests",
    "request.scheduled_tokens_this_step": "scheduled_tokens",
    "batch.prefill_tokens": "prefill_tokens",
    "batch.decode_tokens": "decode_tokens",
    "batch.num_preempted": "preempted_requests",
    "kv.blocks_total_gpu": "kv_blocks_total",
    "kv.blocks_free_gpu": "kv_blocks_free",
    "request.num_prompt_tokens": "prompt_tokens",
    "prefill.total_tokens": "prompt_tokens",
    "request.num_computed_tokens": "computed_tokens",
    "request.num_output_tokens": "output_tokens",
    "decode.done_tokens": "output_tokens",
    "decode.max_tokens": "max_tokens",
    "num_preemptions": "preemptions",
    "request.effective_prompt_len": "effective_prompt_tokens",
    "ts.monotonic_ns": "monotonic_ns",
}
EVENT_FLOATS = {"kv.usage_gpu_ratio": "kv_usage", "ts.monotonic": "monotonic_s", "event.ts.monotonic": "monotonic_s"}
EVENT_STRINGS = {
    "request.id": "request_id",
    "schedule.kind": "schedule_kind",
    "finish.status": "finish_status",
    "reason": "reason",
    "error": "error",
}

# One row a span, in the order of the file.
SPAN_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "record": pl.Int64,  # number of its line, object or frame in the file, from 1
    "span": pl.Int64,  # its number in that record, over all scopes, from 1
    "scope": pl.String,
    "name": pl.String,
    "trace_id": pl.String,
    "span_id": pl.String,
    "parent_span_id": pl.String,
    "start_ns": pl.Int64,  # epoch
    "status_message": pl.String,
    "dropped_events": pl.Int64,  # that the tracing SDK says it discarded
    "other_events": pl.Int64,
    **dict.fromkeys(SPAN_INTEGERS.values(), pl.Int64),
    **dict.fromkeys(SPAN_FLOATS.values(), pl.Float64),
    **dict.fromkeys(SPAN_STRINGS.values(), pl.String),
}

# Of any event in EVENTS: its place, its stamp, and the columns of all attributes.
EVENT_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "span_row": pl.Int64,  # row of its span in the span frame of the same batch
    "event": pl.Int64,  # its number in that span, from 1, left-out ones counted
    "name": pl.Enum(EVENTS),
    "time_ns": pl.Int64,  # epoch
    **dict.fromkeys(EVENT_INTEGERS.values(), pl.Int64),
    **dict.fromkeys(EVENT_FLOATS.values(), pl.Float64),
    **dict.fromkeys(EVENT_STRINGS.values(), pl.String),
}


def _of_event(*columns: str) -> dict[str, pl.DataType | type[pl.DataType]]:
    return {name: EVENT_SCHEMA[name] for name in ("span_row", "event", "time_ns", *columns)}


# What is kept of an event, by its kind: one row each, in the order of the file.
STEP_EVENT_SCHEMA = _of_event(
    *("step_id", "ts_start_ns", "ts_end_ns", "duration_us", "running_depth", "waiting_depth"),
    *("prefill_requests", "decode_requests", "prefill_tokens", "decode_tokens"),
    *("preempted_requests", "kv_blocks_total", "kv_blocks_free", "kv_usage"),
)
SNAPSHOT_EVENT_SCHEMA = _of_event(
    *("step_id", "request_id", "prompt_tokens", "effective_prompt_tokens", "computed_tokens"),
    *("output_tokens", "scheduled_tokens"),
)
JOURNEY_EVENT_SCHEMA = {"name": pl.Enum(EVENT_SEQUENCE)} | _of_event(
    *("monotonic_ns", "monotonic_s", "step_id", "prompt_tokens", "output_tokens"),
    *("max_tokens", "preemptions", "schedule_kind", "finish_status", "reason", "error"),
)


@dataclass(frozen=True)
class TraceBatch:
    """A bounded part of one file: ``spans`` (``SPAN_SCHEMA``) and their events.

    ``steps`` (``STEP_EVENT_SCHEMA``), ``snapshots`` (``SNAPSHOT_EVENT_SCHEMA``) and ``journey_events``
    (``JOURNEY_EVENT_SCHEMA``), each by span.  A span and its events are in one batch.  ``unit``: what a record of this
    file is, for places (``line``, ``object``, ``frame``).
    """

    unit: str
    spans: pl.DataFrame
    steps: pl.DataFrame
    snapshots: pl.DataFrame
    journey_events: pl.DataFrame


def batch_of(unit: str, spans: pl.DataFrame, events: pl.DataFrame) -> TraceBatch:
    """A batch of spans whose ids are as they were written, and of ``EVENT_SCHEMA`` by span."""
    name = pl.col("name")
    journey_events = events.filter(name.is_in([STEP_EVENT, SNAPSHOT_EVENT]).not_())
    return TraceBatch(
        unit,
        with_plain_ids(spans),
        events.filter(name == STEP_EVENT).select(STEP_EVENT_SCHEMA.keys()),
        events.filter(name == SNAPSHOT_EVENT).select(SNAPSHOT_EVENT_SCHEMA.keys()),
        journey_events.select(name.cast(pl.String).cast(pl.Enum(EVENT_SEQUENCE)), pl.exclude("name")).select(
            JOURNEY_EVENT_SCHEMA.keys()
        ),
    )


def with_plain_ids(spans: pl.DataFrame) -> pl.DataFrame:
    """The spans with ids as lower-case hex, from hex or base64 (a generic protobuf printer); ``""`` becomes null.

    Base64 of 16 or 8 bytes always ends in ``=``, which hex never has; an id that is neither stays as it is.
    """
    return spans.with_columns(_plain_id(name) for name in ("trace_id", "span_id", "parent_span_id"))


def _plain_id(name: str) -> pl.Expr:
    raw = pl.col(name)
    padded = pl.when(raw.str.ends_with("=")).then(raw)
    decoded = padded.str.decode("base64", strict=False).bin.encode("hex")
    plain = pl.coalesce(decoded, raw).str.to_lowercase()
    return pl.when(raw != "").then(plain).alias(name)
