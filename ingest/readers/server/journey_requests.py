"""Journeys as the requests of a recording, and the requests of a client to which journeys belong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.readers.otlp.journeys import Journeys
from blis_replay.ingest.readers.otlp.requests import tokens
from blis_replay.ingest.readers.requests_frame import READ_SCHEMA, RequestsRead
from blis_replay.ingest.recording import LIFECYCLE_SCHEMA
from blis_replay.ingest.row_parts import PartWriter, RowParts, in_files, slices_of


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
    ids = _Ids.of(requests)
    writer = PartWriter(LIFECYCLE_SCHEMA, scratch, "lifecycles")
    for part in lifecycles.frames():
        writer.add(part.with_columns(_request_index(part, ids)))
    return writer.done()


@dataclass(frozen=True)
class _Ids:
    """Hashes of the ids that occur once, ascending, and the requests that have them: ids are several times as large."""

    hashes: NDArray[np.uint64]
    requests: NDArray[np.int64]

    @staticmethod
    def of(requests: pl.DataFrame) -> _Ids:
        named = pl.concat(
            part.drop_nulls().select(pl.col("request_id").hash(), "request_index")
            for part in slices_of(requests.select("request_id", "request_index"))
        ).sort("request_id")
        hashes = named["request_id"].to_numpy()
        first = np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)]
        once = first & np.append(first[1:], True)[: len(hashes)]
        return _Ids(hashes[once], named["request_index"].to_numpy()[once])

    def request_of(self, ids: pl.Series) -> pl.Series:
        """The request of each id, null where there is none."""
        if not len(self.hashes):
            return pl.Series([None] * len(ids), dtype=pl.Int64)
        wanted = ids.hash().to_numpy()
        place = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
        found = (self.hashes[place] == wanted) & ids.is_not_null().to_numpy()
        return pl.Series(self.requests[place]).set(pl.Series(~found), None)


def _request_index(lifecycles: pl.DataFrame, ids: _Ids) -> pl.Series:
    of_api = lifecycles["api_request_id"]
    told = [ids.request_of(of_api), ids.request_of(of_api.str.replace("^(?:chat)?cmpl-", ""))]
    told.append(ids.request_of(lifecycles["core_request_id"]))
    columns = pl.DataFrame({str(i): series for i, series in enumerate(told)})
    return columns.select(pl.coalesce(pl.all())).to_series().alias("request_index")


def _us(ns: pl.Expr) -> pl.Expr:
    # Stamps are rounded down one by one, so that segments add up to the whole.
    return ns // 1000
