"""Decode lengths from the stream itself, where the client recorded no better count than its own."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.recording import COUNTED, RETOKENISED, TokenEvents
from blis_replay.ingest.token_layout import NO_EVENTS, detect_layout, token_counts

# Text tokenised again came out up to 3.7 % long where each token had its event (BOS, other splits);
# beyond that, events carry several tokens or some tokens had none.
MOST_LONGER = 0.05


def with_counted_lengths(requests: pl.DataFrame, events: TokenEvents | None) -> pl.DataFrame:
    """``requests`` with lengths that were only re-tokenised replaced by the count of token events.

    A server sends an event for each token, so their number is the length, unless the
    re-tokenised text is more than 5 % longer on average.
    """
    # A text that is re-tokenised to nothing is no count at all; there was a token of it all the same.
    emptied = pl.col("output_tokens").is_null() & (pl.col("output_tokens_reported") == 0)
    retokenised = (pl.col("output_tokens_source") == RETOKENISED).fill_null(False)
    doubtful = (retokenised | emptied.fill_null(False)) & (pl.col("status") == "ok")
    if events is None or requests.filter(doubtful).is_empty():
        return requests
    layout = detect_layout(events, requests)
    if layout == NO_EVENTS or not layout.identified:
        return requests
    counted = requests.with_columns(pl.Series("tokens", token_counts(events, requests, layout), pl.Int64))
    compared = counted.filter(doubtful & (pl.col("tokens") > 0))
    reported_tokens, counted_tokens = (int(compared[name].sum()) for name in ("output_tokens_reported", "tokens"))
    if not counted_tokens or reported_tokens > (1 + MOST_LONGER) * counted_tokens:
        return requests
    replaced = doubtful & (pl.col("tokens") > 0)
    return counted.with_columns(
        pl.when(replaced).then("tokens").otherwise("output_tokens").alias("output_tokens"),
        pl.when(replaced).then(pl.lit(COUNTED)).otherwise("output_tokens_source").alias("output_tokens_source"),
    ).drop("tokens")
