"""Upstream vLLM's ``llm_request`` spans (scope ``vllm.llm_engine``): one finished request each."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.numbers import MAX_INTEGER, MAX_TOKENS
from blis_replay.ingest.readers.otlp.columns import ENGINE_SCOPE, TraceBatch
from blis_replay.ingest.readers.otlp.places import PLACE_COLUMNS, no_time, placed_spans, sound, with_texts_on_one_line
from blis_replay.ingest.readers.requests_frame import READ_SCHEMA

REQUEST_SPAN = "llm_request"
_LATENCIES = {"ttft_us": "ttft_s", "e2e_us": "e2e_s", "queue_us": "queue_s", "prefill_us": "prefill_s"} | {
    "decode_us": "decode_s"
}


def request_spans_of(batch: TraceBatch, number: int, file: RecordedFile) -> pl.DataFrame:
    """The request spans of a batch as ``READ_SCHEMA`` with what ``first_spans`` needs; ``number``: of the file.

    The arrival is the start of the span (epoch), to the microsecond; latencies are those the server
    measured.  What makes no sense is rejected.
    """
    spans = placed_spans(batch, number).filter(pl.col("scope") == ENGINE_SCOPE, pl.col("name") == REQUEST_SPAN)
    timed = spans.with_columns(_microseconds(seconds).alias(name) for name, seconds in _LATENCIES.items())
    negative = pl.any_horizontal(pl.col(name) < 0 for name in _LATENCIES)
    problems = [
        (pl.col("start_ns").is_null(), pl.lit("a start that is no epoch time")),
        no_time("start_ns"),
        (pl.col("e2e_us").is_null(), pl.lit("no usable gen_ai.latency.e2e")),
        (negative, pl.lit("a negative latency")),
    ]
    content = spans.drop("span_row", *PLACE_COLUMNS).hash_rows()
    kept = sound(batch, timed.with_columns(content.alias("content")), problems, file)
    kept = with_texts_on_one_line(kept, ["request_id"])
    columns = {
        "request_id": pl.col("request_id"),
        "prompt_tokens": tokens("prompt_tokens"),
        "output_tokens_reported": tokens("completion_tokens"),
        "usage_output_tokens": tokens("completion_tokens"),
        "max_tokens": tokens("max_tokens"),
        "cached_prompt_tokens": tokens("cached_tokens"),
        "sent_us": pl.col("start_ns") // 1000,
        "status": pl.lit("ok"),
        **{name: pl.col(name) for name in _LATENCIES},
    }
    read = [columns.get(name, pl.lit(None)).cast(kind).alias(name) for name, kind in READ_SCHEMA.items()]
    return kept.select(*PLACE_COLUMNS, "trace_id", "span_id", "content", pl.lit(1).alias("records"), *read)


def tokens(column: str) -> pl.Expr:
    """A column's number of tokens of at least 1, else null (``numbers.tokens`` on columns)."""
    return pl.when(pl.col(column).is_between(1, MAX_TOKENS - 1)).then(pl.col(column))


def _microseconds(column: str) -> pl.Expr:
    """Seconds as whole us, null where they are no number or beyond 2^61 us (``numbers.microseconds`` on columns)."""
    micro = pl.col(column) * 1e6
    return pl.when(micro.is_finite() & (micro.abs() < MAX_INTEGER)).then(micro.round()).cast(pl.Int64)
