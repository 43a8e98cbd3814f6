"""Token times of a stored experiment, corrected for how its client stamped them."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest import queries
from blis_replay.ingest.queries import fetch
from blis_replay.ingest.store.file import Store

OUTPUT_TIME_SCHEMA: dict[str, type[pl.DataType]] = {
    "request_index": pl.Int64,
    "token_index": pl.Int64,
    "time_us": pl.Int64,
}


def token_times(store: Store, slug: str) -> pl.DataFrame:
    """``request_index``, ``token_index``, ``time_us``: output tokens only, in that order.

    Empty where the recording has no stream stamps, or none that can be told apart into tokens.
    """
    return fetch(store.connection, queries.OUTPUT_TIMES, {"slug": slug}, OUTPUT_TIME_SCHEMA)


def inter_token_gaps(
    store: Store, slug: str, chosen: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pooled gaps between consecutive output tokens of completed requests: ``(gap_us, count)``.

    ``chosen``: bool[n] by ``request_index``, the requests to pool; all of them without it.
    int64 arrays of one length, gaps ascending and distinct; empty without token times.
    Pooled in SQL, so memory grows with distinct gaps, not with tokens.
    """
    indices = np.flatnonzero(chosen) if chosen is not None else np.empty(0, np.int64)
    store.connection.register("chosen_requests", pl.DataFrame({"request_index": indices}).to_arrow())
    bound = {"slug": slug, "all_requests": chosen is None}
    columns = store.connection.execute(queries.POOLED_OUTPUT_GAPS, bound).fetchnumpy()
    store.connection.unregister("chosen_requests")
    return np.asarray(columns["gap_us"], np.int64), np.asarray(columns["count"], np.int64)


def stamp_gaps(store: Store, slug: str) -> pl.DataFrame:
    """``low_us``, ``count``: gaps between a request's stream stamps, tokens or not, in four bins a decade.

    Bins without a gap between two with one are there with 0; no rows without stamps.
    """
    bins = fetch(store.connection, queries.STAMP_GAPS, {"slug": slug}, {"bin": pl.Int64, "count": pl.Int64})
    if bins.is_empty():
        return pl.DataFrame(schema={"low_us": pl.Float64, "count": pl.Int64})
    low, high = int(bins["bin"].min()), int(bins["bin"].max())  # type: ignore[arg-type]
    every = pl.DataFrame({"bin": range(low, high + 1)}, schema={"bin": pl.Int64})
    return every.join(bins, on="bin", how="left", maintain_order="left").select(
        (10 ** (pl.col("bin") / 4)).alias("low_us"), pl.col("count").fill_null(0)
    )
