"""Decode lengths from the stream itself, where the client recorded no better count than its own."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.recording import COUNTED, OUTPUT_LENGTH_SOURCES, RETOKENISED, TokenEvents
from blis_replay.ingest.rows import Rows, rows_of
from blis_replay.ingest.stream.layout import NO_EVENTS, detect_layout, token_counts

# Text tokenised again came out up to 3.7 % long where each token had its event (BOS, other splits);
# beyond that, events carry several tokens or some tokens had none.
MOST_LONGER = 0.05


def with_counted_lengths(requests: Rows, events: TokenEvents | None) -> Rows:
    """``requests`` with lengths that were only re-tokenised replaced by the count of token events.

    A server sends an event for each token, so their number is the length, unless the
    re-tokenised text is more than 5 % longer on average.
    """
    # A text that is re-tokenised to nothing is no count at all; there was a token of it all the same.
    emptied = pl.col("output_tokens").is_null() & (pl.col("output_tokens_reported") == 0)
    retokenised = (pl.col("output_tokens_source") == RETOKENISED).fill_null(False)
    doubtful = (retokenised | emptied.fill_null(False)) & (pl.col("status") == "ok")
    if events is None or not requests.select(doubtful.any()).item():
        return requests
    layout = detect_layout(events, requests)
    if layout == NO_EVENTS or not layout.identified:
        return requests
    counted = requests.frame().with_columns(pl.Series("tokens", token_counts(events, requests, layout), pl.Int64))
    compared = counted.filter(doubtful & (pl.col("tokens") > 0))
    reported_tokens, counted_tokens = (int(compared[name].sum()) for name in ("output_tokens_reported", "tokens"))
    if not counted_tokens or reported_tokens > (1 + MOST_LONGER) * counted_tokens:
        return requests
    replaced = doubtful & (pl.col("tokens") > 0)
    lengths = counted.with_columns(
        pl.when(replaced).then("tokens").otherwise("output_tokens").alias("output_tokens"),
        pl.when(replaced).then(pl.lit(COUNTED)).otherwise("output_tokens_source").alias("output_tokens_source"),
    )
    return rows_of(lengths.drop("tokens"))


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
    return frame.with_columns(pl.coalesce("output_tokens", *usable), pl.coalesce("output_tokens_source", source))
