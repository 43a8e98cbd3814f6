"""Requests that client and server both recorded, paired by their ids: what that says of the two clocks."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from blis_replay.ingest.recording import LIFECYCLE_SCHEMA
from blis_replay.ingest.rows import Rows, Scratch, query

# What only a server measures of a request.
SERVER_COLUMNS = ("queue_us", "prefill_us", "decode_us", "cached_prompt_tokens")
_FEWEST = 2
# The API server puts this before a client's id, and the engine these behind (prompt number, random hex).
_PREFIX, _SUFFIX = "^(?:chat)?cmpl-", r"-\d+(?:-[0-9a-f]{8})?$"


@dataclass(frozen=True)
class Alignment:
    """The server's clock less the client's: between ``low_us`` and ``high_us``, by ``pairs`` requests.

    A server has a request after its client sent it, and its first token before the client has
    it: each pair bounds the offset from both sides.  (Ends tell less: a server may note that it is
    done after the client has the last token.)  Bounds that cross (``low_us`` above
    ``high_us``) mean clocks that drift, or ids that are not of the same requests.
    ``clock_kind``: of the server (epoch | monotonic).
    """

    low_us: int
    high_us: int
    pairs: int
    clock_kind: str

    def offset_us(self, stamped_us: int | None) -> int:
        """What the stamps say (``stamped_us``) if the bounds allow it, else the middle of the bounds."""
        if stamped_us is not None and self.low_us <= stamped_us <= self.high_us:
            return stamped_us
        return (self.low_us + self.high_us) // 2

    def uncertainty_us(self, offset_us: int) -> int:
        """How far the true offset can be from this one; at least a microsecond."""
        return max(abs(self.high_us - offset_us), abs(offset_us - self.low_us), 1)

    @property
    def crossed(self) -> bool:
        """Whether no constant offset agrees with every pair."""
        return self.low_us > self.high_us


def paired(client: pl.DataFrame, server: pl.DataFrame, clock_kind: str) -> tuple[pl.DataFrame, Alignment | None]:
    """The client's requests with what the server measured of them, and how their clocks lie.

    Both are ``READ_SCHEMA``, each on its own clock; ``clock_kind`` is the server's.  Ids that
    occur twice on a side tell nothing.  Without at least two pairs the requests are as they were.
    """
    pairs = _pairs(client, server)
    if pairs.height < _FEWEST:
        return client, None
    joined = client.with_row_index("row").join(pairs, on="row", how="left", maintain_order="left")
    with_server = joined.with_columns(pl.coalesce(name, f"{name}_server").alias(name) for name in SERVER_COLUMNS)
    return with_server.select(client.columns), _alignment(joined, clock_kind)


def _pairs(client: pl.DataFrame, server: pl.DataFrame) -> pl.DataFrame:
    """``row`` of the client's request and the server's columns, for each pair."""
    known = client.with_row_index("row").select("row", pl.col("request_id").alias("id")).drop_nulls()
    plain = pl.col("id").str.replace(_PREFIX, "")
    known = known.filter(~pl.col("id").is_duplicated()).with_columns(plain).filter(~pl.col("id").is_duplicated())
    own = pl.col("request_id").str.replace(_PREFIX, "")
    rows = []
    for name in (own, own.str.replace(_SUFFIX, "")):
        found = server.select(name.alias("id")).join(known, on="id", how="left", maintain_order="left")
        rows.append(found["row"])
    row = pl.DataFrame({str(i): series for i, series in enumerate(rows)}).select(pl.coalesce(pl.all())).to_series()
    columns = ("sent_us", "ttft_us", *SERVER_COLUMNS)
    of_server = server.select(row.alias("row"), *(pl.col(name).alias(f"{name}_server") for name in columns))
    return of_server.drop_nulls("row").filter(~pl.col("row").is_duplicated())


def _alignment(joined: pl.DataFrame, clock_kind: str) -> Alignment | None:
    """The bounds over all pairs: sends bound from above, first tokens from below."""
    begun = pl.col("sent_us_server") - pl.col("sent_us")
    bounds = joined.filter(pl.col("sent_us_server").is_not_null()).select(
        begun.min().alias("high"),
        (begun + pl.col("ttft_us_server") - pl.col("ttft_us")).max().alias("low"),
        pl.len().alias("pairs"),
    )
    high, low, pairs = bounds.row(0)
    return None if high is None or low is None else Alignment(int(low), int(high), int(pairs), clock_kind)


_WITH_REQUESTS = """
WITH ids AS (
    SELECT request_id, any_value(request_index) AS request_index FROM requests
    WHERE request_id IS NOT NULL GROUP BY request_id HAVING count(*) = 1
)
SELECT lifecycles.* REPLACE (
    coalesce(by_api.request_index, unprefixed.request_index, by_core.request_index) AS request_index
)
FROM lifecycles
LEFT JOIN ids by_api ON by_api.request_id = api_request_id
LEFT JOIN ids unprefixed ON unprefixed.request_id = regexp_replace(api_request_id, $prefix, '')
LEFT JOIN ids by_core ON by_core.request_id = core_request_id
ORDER BY journey
"""


def with_request_indices(lifecycles: Rows, requests: Rows, scratch: Scratch) -> Rows:
    """The lifecycles with ``request_index``, by the ids that client and server share, in ``scratch``.

    The API server prefixes a client's ``X-Request-Id`` with ``cmpl-`` or ``chatcmpl-``.  An id
    that occurs twice tells nothing.
    """
    tables = {"lifecycles": lifecycles, "requests": requests}
    return scratch.kept(query(_WITH_REQUESTS, LIFECYCLE_SCHEMA, {"prefix": _PREFIX}, **tables))
