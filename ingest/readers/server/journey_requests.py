"""Journeys as the requests of a recording, and the requests of a client to which journeys belong."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from blis_replay.ingest.readers.otlp.journeys import Journeys
from blis_replay.ingest.readers.otlp.requests import tokens
from blis_replay.ingest.readers.requests_frame import READ_SCHEMA, RequestsRead
from blis_replay.ingest.recording import LIFECYCLE_SCHEMA
from blis_replay.ingest.row_parts import PartWriter, RowParts, in_files


def requests_of(journeys: Journeys, scratch: Path | None) -> RequestsRead | None:
    """The journeys as requests on the server's monotonic clock, ``None`` if there are none; large ones in ``scratch``.

    Arrival is that at the API server (of a request without its API span: when it was queued, and it
    has no TTFT and no E2E).  TTFT ends with the API server's first response where that is recorded,
    else with the scheduler's first token; E2E with the departure, which for a given-up
    request is when its client was gone.
    """
    arrived = pl.coalesce("arrived_ns", "queued_ns").is_not_null()
    status = pl.col("status")
    columns = {
        "request_id": pl.coalesce("api_request_id", "core_request_id"),
        "sent_us": _us(pl.coalesce("arrived_ns", "queued_ns")),
        "prompt_tokens": tokens("prompt_tokens"),
        "output_tokens_reported": tokens("output_tokens"),
        # What a given-up request got is not what the server would have decoded.
        "usage_output_tokens": pl.when(status == "ok").then(tokens("output_tokens")),
        "max_tokens": tokens("max_tokens"),
        "ttft_us": _us(pl.coalesce("first_response_ns", "first_token_ns")) - _us(pl.col("arrived_ns")),
        "e2e_us": _us(pl.col("departed_ns")) - _us(pl.col("arrived_ns")),
        "queue_us": _us(pl.col("scheduled_ns")) - _us(pl.col("queued_ns")),
        "prefill_us": _us(pl.col("first_token_ns")) - _us(pl.col("scheduled_ns")),
        "decode_us": _us(pl.col("finished_ns")) - _us(pl.col("first_token_ns")),
        "cached_prompt_tokens": pl.col("cached_prompt_tokens"),
        "status": pl.when(status == "ok").then(pl.lit("ok")).otherwise(pl.lit("error")),
        "error": pl.when(status != "ok").then(pl.concat_str(status, pl.format(": {}", "reason"), ignore_nulls=True)),
    }
    read = [columns.get(name, pl.lit(None)).cast(kind).alias(name) for name, kind in READ_SCHEMA.items()]
    parts = (part.filter(arrived).select(read) for part in journeys.lifecycles.frames())
    requests = in_files(parts, READ_SCHEMA, scratch, "journey-requests")
    return RequestsRead(requests, "server", "monotonic", model=journeys.model) if requests.height else None


def with_request_indices(lifecycles: RowParts, requests: pl.DataFrame, scratch: Path) -> RowParts:
    """The lifecycles with ``request_index``, by the ids that client and server share; large ones in ``scratch``.

    The API server prefixes a client's ``X-Request-Id`` with ``cmpl-`` or ``chatcmpl-``.  An id
    that occurs twice tells nothing.
    """
    # Of the ids hashes: all ids of a recording are several times as large.
    known = requests.select("request_index", _hash("request_id").alias("id")).drop_nulls()
    unique = known.filter(~pl.col("id").is_duplicated())
    writer = PartWriter(LIFECYCLE_SCHEMA, scratch, "lifecycles")
    for part in lifecycles.frames():
        writer.add(part.with_columns(_request_index(part, unique)))
    return writer.done()


def _request_index(lifecycles: pl.DataFrame, unique: pl.DataFrame) -> pl.Series:
    index = []
    for name in (
        _hash("api_request_id"),
        _hash(pl.col("api_request_id").str.replace("^(?:chat)?cmpl-", "")),
        _hash("core_request_id"),
    ):
        found = lifecycles.select(name.alias("id")).join(unique, on="id", how="left", maintain_order="left")
        index.append(found["request_index"])
    told = pl.DataFrame({str(i): series for i, series in enumerate(index)}).select(pl.coalesce(pl.all()))
    return told.to_series().alias("request_index")


def _hash(name: str | pl.Expr) -> pl.Expr:
    text = pl.col(name) if isinstance(name, str) else name
    return pl.when(text.is_not_null()).then(text.hash())


def _us(ns: pl.Expr) -> pl.Expr:
    # Stamps are rounded down one by one, so that segments add up to the whole.
    return ns // 1000
