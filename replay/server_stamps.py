"""When the server had each request, as far as a recording says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.recording import Recording

Floats = NDArray[np.float64]

JOURNEYS, SPANS, CLIENT_ONLY = "journeys", "durations of llm_request spans", "client latencies only"


@dataclass(frozen=True)
class ServerStamps:
    """Stamps of requests that succeeded, float64[n] in request order, us from the experiment's zero; nan: not recorded.

    ``arrived_us``: at the API server.  ``queued_us``, ``scheduled_us`` (first), ``first_token_us`` and
    ``finished_us`` are the engine's.  ``steps_waited``: calls of ``schedule()`` from queueing up to the one that
    admitted it, 1 if the first did.  ``source``: JOURNEYS, SPANS or CLIENT_ONLY.
    """

    arrived_us: Floats
    queued_us: Floats
    scheduled_us: Floats
    first_token_us: Floats
    finished_us: Floats
    steps_waited: Floats
    source: str


def server_stamps(recording: Recording) -> ServerStamps:
    """The server's stamps: of its journeys, else laid out from the durations that its spans carry."""
    requests = recording.requests
    ok = (requests["status"] == "ok").to_numpy()
    journeys = recording.lifecycles.whole().drop_nulls("request_index")
    if journeys.height:
        own = requests.select("request_index").join(
            journeys.unique("request_index", keep="none"), on="request_index", how="left", maintain_order="left"
        )
        return _stamps(own, ok, JOURNEYS)
    if requests["prefill_us"].null_count() < requests.height:
        return _stamps(_of_durations(requests), ok, SPANS)
    nothing = np.full(requests.height, np.nan)
    return ServerStamps(nothing, nothing, nothing, nothing, nothing, nothing, CLIENT_ONLY)


def _stamps(own: pl.DataFrame, ok: NDArray[np.bool_], source: str) -> ServerStamps:
    def of(expression: pl.Expr) -> Floats:
        values = own.select(expression.cast(pl.Float64).fill_null(np.nan)).to_series().to_numpy()
        return np.where(ok, values, np.nan)

    return ServerStamps(
        arrived_us=of(pl.col("arrived_us")),
        queued_us=of(pl.col("queued_us")),
        scheduled_us=of(pl.col("scheduled_us")),
        first_token_us=of(pl.col("first_token_us")),
        finished_us=of(pl.col("finished_us")),
        steps_waited=of(pl.col("scheduled_step") - pl.col("queued_step")),
        source=source,
    )


def _of_durations(requests: pl.DataFrame) -> pl.DataFrame:
    """A span has no stamp between arrival and end: its durations are laid back to back before the first token.

    So the way of a token to the client counts as time before the queue.
    """
    nothing = pl.lit(None, pl.Float64)
    first_token = pl.col("arrival_us") + pl.col("ttft_us")
    scheduled = first_token - pl.col("prefill_us")
    return requests.select(
        arrived_us=nothing,
        queued_us=scheduled - pl.col("queue_us"),
        scheduled_us=scheduled,
        first_token_us=first_token,
        finished_us=first_token + pl.col("decode_us"),
        scheduled_step=nothing,
        queued_step=nothing,
    )
