"""The true decode length of each request, from the best source that the recording has."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.recording import COUNTED, OUTPUT_LENGTH_SOURCES
from blis_replay.ingest.row_parts import PART_ROWS

# The others take the requests alone.
_SOURCES = [name for name in OUTPUT_LENGTH_SOURCES if name != COUNTED]


def with_decode_lengths(frame: pl.DataFrame, configured_tokens: int | None, ignore_eos: bool | None) -> pl.DataFrame:
    """``frame`` (``READ_SCHEMA``) with ``output_tokens`` and ``output_tokens_source`` filled in.

    Sources, best first: the server's usage; ``max_tokens`` where EOS is ignored (by the
    request itself, else by the load configuration ``ignore_eos``); the configured length
    ``configured_tokens`` where EOS is ignored; the client's re-tokenised count.  A count of
    0 is how tools write "unknown".  What the reader itself filled in stays.  Failed requests
    get the requested length: it is what the server would have decoded.
    """
    eos_ignored = pl.coalesce("ignore_eos", pl.lit(ignore_eos, dtype=pl.Boolean)).fill_null(False)
    candidates = (
        pl.col("usage_output_tokens"),
        pl.when(eos_ignored).then(pl.col("max_tokens")),
        pl.when(eos_ignored).then(pl.lit(configured_tokens, dtype=pl.Int64)),
        pl.when(pl.col("status") == "ok").then(pl.col("output_tokens_reported")),
    )
    usable = [pl.when(tokens > 0).then(tokens) for tokens in candidates]
    source = pl.coalesce(
        pl.when(tokens.is_not_null()).then(pl.lit(name)) for tokens, name in zip(usable, _SOURCES, strict=True)
    )
    found = (pl.coalesce("output_tokens", *usable), pl.coalesce("output_tokens_source", source))
    # Some of them at a time: on the way to two columns there are many.
    parts = frame.iter_slices(PART_ROWS)
    return frame.with_columns(pl.concat(part.select(found) for part in parts)) if len(frame) else frame
