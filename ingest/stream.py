"""Which of a client's stream stamps are output tokens (trace-formats, section 4.4).

Load generators have stamped every line of a server-sent-event stream: a token's data line, the blank line after it, and
the closing ``[DONE]`` with its own.  A chat stream begins with an event that has only the role.  A layout says which
stamps are tokens; it belongs to the client's version, so it is decided once for a run, by majority of its requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.ingest.recording import COUNTED, OUTPUT_LENGTH_SOURCES, RETOKENISED, Recording, TokenEvents
from blis_replay.ingest.rows import Rows, query, rows_of
from blis_replay.ingest.served import NO_STEP_US, by_arrival, completed_requests

if TYPE_CHECKING:
    import pyarrow as pa


# A blank line is stamped some tens of us after its data line; a step takes milliseconds.
TINY_GAP_US = 200
# No model answers a step faster than this.
FASTEST_STEP_US = 1_000
# Where fewer events than this share of its tokens reach the median request, tokens come together.
ONE_BY_ONE = 0.98
_IN_PAIRS = 1.5  # stamps per token, from which a client takes two of each
_SAMPLED_REQUESTS = 500
_FEWEST_STAMPS = 8
_GAPS = ("even_gap_us", "odd_gap_us", "last_odd_gap_us", "gap_us", "first_gap_us", "last_gap_us")
_GAP_SCHEMA: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(("request_index", "stamps"), pl.Int64),
    **dict.fromkeys(("even_tiny_share", *_GAPS), pl.Float64),
}
# Gaps of a few hundred requests, to tell how a client stamped its stream.
_SAMPLED_GAPS = """
WITH gaps AS (
    SELECT request_index, event_index,
           lead(time_us) OVER (PARTITION BY request_index ORDER BY event_index) - time_us AS gap_us
    FROM sampled
)
SELECT request_index, count(*) AS stamps,
       coalesce(avg((gap_us < $tiny_us)::INT) FILTER (WHERE event_index % 2 = 0 AND gap_us IS NOT NULL), 0)
           AS even_tiny_share,
       median(gap_us) FILTER (WHERE event_index % 2 = 0) AS even_gap_us,
       median(gap_us) FILTER (WHERE event_index % 2 = 1) AS odd_gap_us,
       arg_max(gap_us, event_index) FILTER (WHERE event_index % 2 = 1 AND gap_us IS NOT NULL) AS last_odd_gap_us,
       median(gap_us) AS gap_us,
       arg_min(gap_us, event_index) FILTER (WHERE gap_us IS NOT NULL) AS first_gap_us,
       arg_max(gap_us, event_index) FILTER (WHERE gap_us IS NOT NULL) AS last_gap_us
FROM gaps GROUP BY request_index ORDER BY request_index
"""


@dataclass(frozen=True)
class TokenLayout:
    """How stamps lie: token k is stamp ``(k + leading_events) * stamps_per_token``.

    ``leading_events`` and ``closing_events``: data lines without a token at the begin of a stream (the role) and at the
    end of a completed one (``[DONE]``).  ``identified`` is false where stamps cannot be assigned to tokens.
    """

    name: str
    stamps_per_token: int
    closing_events: int
    identified: bool = True
    leading_events: int = 0


NO_EVENTS = TokenLayout("no token events", 1, 0, identified=False)
PLAIN = TokenLayout("plain", 1, 0)
SINGLE_WITH_DONE = TokenLayout("single_with_done", 1, 1)
ROLE_FIRST = TokenLayout("role_first", 1, 0, leading_events=1)
PAIRED = TokenLayout("paired", 2, 0)
PAIRED_WITH_DONE = TokenLayout("paired_with_done", 2, 1)
SEVERAL_TOKENS_PER_EVENT = TokenLayout("several_tokens_per_event", 1, 0, identified=False)
BUNCHED = TokenLayout("bunched", 1, 0, identified=False)

_EVENT_BY_EVENT = (PLAIN, SINGLE_WITH_DONE, ROLE_FIRST, PAIRED, PAIRED_WITH_DONE)
LAYOUTS = {layout.name: layout for layout in (NO_EVENTS, *_EVENT_BY_EVENT, SEVERAL_TOKENS_PER_EVENT, BUNCHED)}


@dataclass(frozen=True)
class EventTotals:
    """Completed requests of a run, pooled: stamps, tokens and mean gaps in us (null without gaps)."""

    requests: int
    stamps: int
    tokens: int
    stamped_gap_us: float | None
    token_gap_us: float | None


def trusted_lengths(requests: Rows) -> pl.DataFrame:
    """``request_index``, ``output_tokens``, ``trusted_tokens`` (null if only re-tokenised), ``completed`` (bool)."""
    trusted = pl.col("output_tokens_source").ne_missing("re-tokenised")
    return requests.select(
        "request_index",
        "output_tokens",
        pl.when(trusted).then(pl.col("output_tokens")).alias("trusted_tokens"),
        pl.col("status").eq("ok").fill_null(False).alias("completed"),
    )


def detect_layout(events: TokenEvents | None, requests: Rows) -> TokenLayout:
    """The layout of a run's stamps, by majority of up to some 500 completed requests.

    ``requests``: REQUEST_SCHEMA.
    """
    if events is None:
        return NO_EVENTS
    gaps, layout, bunched = _stamped(events, requests)
    if gaps.is_empty():
        return NO_EVENTS
    return _decide(gaps, layout) if bunched is None else BUNCHED


def _stamped(events: TokenEvents, requests: Rows) -> tuple[pl.DataFrame, TokenLayout, Bunches | None]:
    """Gaps of up to some 500 completed requests with their lengths, how they are stamped, and how they are bunched."""
    lengths = trusted_lengths(requests)
    candidates = lengths.filter("completed") if lengths["completed"].any() else lengths
    chosen = candidates["request_index"].gather_every(max(1, candidates.height // _SAMPLED_REQUESTS))
    sampled = stamps_of(events, chosen.to_numpy())
    gaps = query(_SAMPLED_GAPS, _GAP_SCHEMA, {"tiny_us": TINY_GAP_US}, sampled=rows_of(sampled)).frame()
    gaps = gaps.join(lengths, on="request_index", how="left")
    layout = _stamping(gaps) if gaps.height else NO_EVENTS
    return gaps, layout, _bunches(sampled, gaps, layout)


def _decide(gaps: pl.DataFrame, layout: TokenLayout) -> TokenLayout:
    data_lines = (pl.col("stamps") + layout.stamps_per_token - 1) // layout.stamps_per_token
    no_tokens = layout.leading_events + layout.closing_events
    delivered = gaps.select(((data_lines - no_tokens) / pl.col("trusted_tokens")).median()).item()
    return SEVERAL_TOKENS_PER_EVENT if delivered is not None and delivered < ONE_BY_ONE else layout


def _stamping(gaps: pl.DataFrame) -> TokenLayout:
    voters = gaps.filter(pl.col("stamps") >= _FEWEST_STAMPS)
    if _is_paired(voters if voters.height else gaps, by_gaps=voters.height > 0):
        surplus = pl.col("stamps") - 2 * pl.col("trusted_tokens")
        closed = _closed(surplus, pl.col("last_odd_gap_us"), pl.col("odd_gap_us"))
        return PAIRED_WITH_DONE if _majority(gaps, closed) else PAIRED
    surplus = pl.col("stamps") - pl.col("trusted_tokens")
    # The role comes with the first token: the server has nothing to send before.
    role_first = _right_after(pl.col("first_gap_us")) & ~_right_after(pl.col("last_gap_us"))
    if _majority(gaps, (surplus == 1) & role_first):
        return ROLE_FIRST
    closed = _closed(surplus, pl.col("last_gap_us"), pl.col("gap_us"))
    return SINGLE_WITH_DONE if _majority(gaps, closed) else PLAIN


def _closed(surplus: pl.Expr, last_gap_us: pl.Expr, usual_gap_us: pl.Expr) -> pl.Expr:
    """Whether a stream ends with an event that is not a token: more stamps than tokens need, or,
    where some tokens came together or the length is unknown, a last one right after a token."""
    return (surplus >= 1) | ((surplus < 0).fill_null(True) & _right_after(last_gap_us, usual_gap_us))


def _right_after(gap_us: pl.Expr, usual_gap_us: pl.Expr | None = None) -> pl.Expr:
    """Whether an event came with the one before it, not a step later."""
    usual_gap_us = pl.col("gap_us") if usual_gap_us is None else usual_gap_us
    return (gap_us < 0.2 * usual_gap_us) & (gap_us < FASTEST_STEP_US)


def _is_paired(gaps: pl.DataFrame, *, by_gaps: bool) -> bool:
    if by_gaps:
        return _majority(gaps, (pl.col("even_tiny_share") >= 0.9) & (pl.col("odd_gap_us") > 5 * pl.col("even_gap_us")))
    # Too few stamps for gaps to tell: 2n..2n+3 stamps for n tokens.
    surplus = pl.col("stamps") - 2 * pl.col("trusted_tokens")
    return _majority(gaps, surplus.is_between(0, 3).fill_null(False) & (pl.col("trusted_tokens") > 1))


def _majority(frame: pl.DataFrame, vote: pl.Expr) -> bool:
    share = frame.select(vote.fill_null(False).mean()).item()
    return share is not None and share > 0.5


_BUNCHED_FIRST, _BUNCHED_LATER = 0.3, 0.25  # shares of first gaps and of later ones; recorded streams: 0.1 at most
_FEWEST_IN_BUNCHES = 4  # events of a request; fewer have no gap between the first and the last one
_ROUNDED_US = 10_000  # a clock that is this coarse gives tokens of short steps one stamp


@dataclass(frozen=True)
class Bunches:
    """Streams that come in bunches of ``events_per_bunch`` on average, a median of ``every_us`` from one to the next.

    ``begin_with_one``: the share of the streams that begin with several events at once.
    """

    events_per_bunch: float
    every_us: float
    begin_with_one: float


def bunches(events: TokenEvents, requests: Rows) -> Bunches | None:
    """How the events of a run are bunched; None where they are not, or where the first of a stream comes alone.

    A first token comes alone where steps give several tokens, and where a server has a ``stream_interval``.
    """
    return _stamped(events, requests)[2]


def _bunches(sampled: pl.DataFrame, gaps: pl.DataFrame, layout: TokenLayout) -> Bunches | None:
    per_token = gaps.select((pl.col("stamps") / pl.col("output_tokens")).median()).item()
    if layout.stamps_per_token == 2 and (per_token is None or per_token >= _IN_PAIRS):
        sampled = sampled.filter(pl.col("event_index") % 2 == 0)
    of = sampled.select(
        gap_us=pl.col("time_us").diff().over("request_index"),
        place=pl.int_range(pl.len()).over("request_index"),
        last=pl.len().over("request_index") - 1,
    ).filter(pl.col("place") > 0, pl.col("last") >= _FEWEST_IN_BUNCHES - 1)
    if of.is_empty():
        return None
    of = of.with_columns(held=_right_after(pl.col("gap_us"), pl.col("gap_us").mean()))
    first = of.select(pl.col("held").filter(pl.col("place") == 1).mean()).item()
    # A stream may begin with a role and end with an event without a token.
    later = of.select(pl.col("held").filter(pl.col("place") > 1, pl.col("place") < pl.col("last")).mean()).item()
    if first < _BUNCHED_FIRST or later < _BUNCHED_LATER:
        return None
    apart_us = of.filter(~pl.col("held"))["gap_us"].to_numpy()
    every_us, unit_us = float(np.median(apart_us)), int(np.gcd.reduce(of["gap_us"].to_numpy()))
    if every_us < 3 * unit_us <= 3 * _ROUNDED_US:
        return None
    streams = of.filter(pl.col("place") == 1).height
    return Bunches((of.height + streams) / (len(apart_us) + streams), every_us, first)


def event_totals(events: TokenEvents, requests: Rows, layout: TokenLayout) -> EventTotals:
    """Stamps and gaps of a run pooled over its completed requests, as stamped and per token."""
    tokens = token_counts(events, requests, layout)
    pooled = np.flatnonzero(trusted_lengths(requests)["completed"].to_numpy() & (tokens > 0))
    stamps, tokens = events.counts[pooled], tokens[pooled]
    stamped_us = stamps_at(events, pooled, stamps - 1) - stamps_at(events, pooled, np.zeros_like(stamps))
    first = np.full_like(stamps, layout.leading_events * layout.stamps_per_token)
    first_us = stamps_at(events, pooled, first)
    token_us = stamps_at(events, pooled, first + (tokens - 1) * layout.stamps_per_token) - first_us
    return EventTotals(
        requests=len(pooled),
        stamps=int(stamps.sum()),
        tokens=int(tokens.sum()),
        stamped_gap_us=_mean(stamped_us, stamps - 1),
        token_gap_us=_mean(token_us, tokens - 1),
    )


def token_counts(events: TokenEvents, requests: Rows, layout: TokenLayout) -> NDArray[np.int64]:
    """int64[n]: how many of a request's stamps are output tokens.

    A token's first stamp is every ``stamps_per_token``-th one; the leading event and the closing
    one of a completed stream are taken off, and nothing beyond a trusted length is a token.
    """
    if not layout.identified:
        return np.zeros_like(events.counts)
    lengths = trusted_lengths(requests).sort("request_index")
    data_lines = -(-events.counts // layout.stamps_per_token)
    trusted = lengths["trusted_tokens"].fill_null(np.iinfo(np.int64).max).to_numpy()
    closing = np.where(lengths["completed"].to_numpy(), layout.closing_events, 0)
    return np.asarray(np.maximum(0, np.minimum(trusted, data_lines - layout.leading_events - closing)))


def _mean(total_us: NDArray[np.int64], gaps: NDArray[np.int64]) -> float | None:
    return float(total_us.sum()) / float(gaps.sum()) if gaps.sum() else None


# As a store keeps them: short runs, so that what it holds in memory at once stays small.
RUN_EVENTS = 64
_BATCH_EVENTS = 1 << 20
# Each touches some pages of the file, which stay in memory as long as the file is mapped.
_MAPPED_REQUESTS = 1024


def stamps_at(events: TokenEvents, requests: Int64s, event: Int64s) -> Int64s:
    """int64[len(requests)]: the time in us from the experiment's zero of one event of each request."""
    times_us = np.empty(len(requests), np.int64)
    places = events.offsets[requests] + event
    for first in range(0, len(requests), _MAPPED_REQUESTS):
        batch = slice(first, first + _MAPPED_REQUESTS)
        times_us[batch] = np.memmap(events.path, np.int64, "r")[places[batch]]
    return times_us - events.zero_us


def stamps_of(events: TokenEvents, requests: Int64s) -> pl.DataFrame:
    """``request_index``, ``event_index``, ``time_us``: all events of the given requests, in their order."""
    counts = events.counts[requests]
    columns = {
        "request_index": np.repeat(requests, counts),
        "event_index": _counting_up(counts),
        "time_us": _gathered(events, requests),
    }
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.Int64))


def runs(events: TokenEvents, tokens: Int64s) -> pa.RecordBatchReader:
    """All events as a stream of ``request_index``, ``first_event``, ``tokens``, ``times_us``.

    A row holds up to ``RUN_EVENTS`` consecutive events of a request; ``tokens[i]``: output tokens of request i.
    """
    import pyarrow as pa

    integer = pa.int64()
    schema = pa.schema(
        [("request_index", integer), ("first_event", integer), ("tokens", integer), ("times_us", pa.list_(integer))]
    )
    return pa.RecordBatchReader.from_batches(schema, _run_batches(events, tokens, schema))


def _run_batches(events: TokenEvents, tokens: Int64s, schema: Any) -> Iterator[Any]:
    import pyarrow as pa

    for requests in _batches(events.counts):
        counts = events.counts[requests]
        owned = -(-counts // RUN_EVENTS)
        first_event = _counting_up(owned) * RUN_EVENTS
        starts = np.repeat(np.cumsum(counts) - counts, owned) + first_event
        times = pa.ListArray.from_arrays(
            pa.array(np.append(starts, counts.sum()), pa.int32()), pa.array(_gathered(events, requests))
        )
        columns = [pa.array(np.repeat(requests, owned)), pa.array(first_event)]
        yield pa.record_batch([*columns, pa.array(np.repeat(tokens[requests], owned)), times], schema=schema)


def _batches(counts: Int64s) -> Iterator[Int64s]:
    """Runs of request indices with about ``_BATCH_EVENTS`` events each."""
    edges = np.flatnonzero(np.diff(np.cumsum(counts) // _BATCH_EVENTS)) + 1
    for first, last in pairwise([0, *edges.tolist(), len(counts)]):
        yield np.arange(first, last)


def _gathered(events: TokenEvents, requests: Int64s) -> Int64s:
    begins = events.offsets[requests]
    ends = begins + events.counts[requests]
    if not (ends > begins).any():
        return np.empty(0, np.int64)
    stamps = np.asarray(np.memmap(events.path, np.int64, "r"))
    pieces = [stamps[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    return np.concatenate(pieces) - events.zero_us


def _counting_up(counts: Int64s) -> Int64s:
    """0, 1, ... counts[0]-1, 0, 1, ... counts[1]-1, ..."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)


# Where each token had its event, re-tokenised text had up to 3.7 % more tokens (BOS, other splits).  Beyond 5 %, events
# carry several tokens or some tokens had no event.
MOST_LONGER = 0.05


def with_counted_lengths(requests: Rows, events: TokenEvents | None) -> Rows:
    """``requests`` with lengths that were only re-tokenised replaced by the count of token events.

    A server sends an event for each token, so their number is the length, unless the
    re-tokenised text is more than 5 % longer on average.
    """
    # A text that re-tokenises to 0 tokens is not a count: at least one token was sent.
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

    Sources, best first: the server's usage; where EOS is ignored (by the request, else by ``ignore_eos``)
    ``max_tokens``, then ``configured_tokens``; the client's re-tokenised count.  A count of 0 means "unknown".  What
    the reader filled in stays.  A failed request gets the length it asked for: the server would have decoded that.
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


# -- First tokens that are not first ---------------------------------------------------------------------------------

_FEWEST_LATE = 20  # requests of several tokens
_SEVERAL = 4  # output tokens
_FOLLOWS = 0.3  # correlation of changes from one request to the next; a queue follows no request's own length
_CERTAIN = 5.0  # standard errors of that correlation
_SHARE_OF_PACE = 0.1  # of E2E per token that TTFT grows by
# Of the gap of a request.  On 19 recordings of vLLM 0.29 and 0.32 first and last tokens are equally long on their way:
# the lowest quarter differs by less than 0, behind a proxy that collects 1,200 bytes by 4.5 gaps.
_HELD_BACK_GAPS = 2.0
_HELD_BACK_SHARE = 0.75  # of requests
_OWN_SPREAD = 0.01  # of the variance of output lengths, beyond what prompt lengths explain


@dataclass(frozen=True)
class LateFirstTokens:
    """A stream whose first event is not its first token: reasoning without events, or a proxy that holds tokens back.

    ``us_per_token``: what TTFT grows by per output token, with ``correlation``; ``gap_us``: the median of
    ``(E2E - TTFT) / (output tokens - 1)``.  ``held_back_us``: how much longer than last tokens first tokens are on
    their way from the engine to the client, where three quarters of them are by two gaps and more; else None.
    """

    us_per_token: float
    correlation: float
    gap_us: float
    held_back_us: float | None = None

    @property
    def comes_at_once(self) -> bool:
        """Whether all of a stream comes at its end."""
        return self.gap_us < NO_STEP_US


def late_first_tokens(recording: Recording) -> LateFirstTokens | None:
    """TTFT that grows with a request's own output, which no server knows at its first token; None if it does not."""
    names = ("arrival_us", "prompt_tokens", "output_tokens", "output_tokens_source", "ttft_us", "e2e_us")
    several = (pl.col("output_tokens") >= _SEVERAL) & pl.col("output_tokens_source").ne_missing(RETOKENISED)
    timed = by_arrival(completed_requests(recording, *names).filter(several).drop_nulls(["ttft_us", "e2e_us"]))
    if timed.height < _FEWEST_LATE:
        return None
    gap = (pl.col("e2e_us") - pl.col("ttft_us")) / (pl.col("output_tokens") - 1)
    gap_us = float(timed.select(gap.median()).item())
    # Changes from one request to the next leave out what all of a time have in common: a queue, a drift.
    changes = timed.select(pl.col("prompt_tokens", "output_tokens", "ttft_us", "e2e_us").cast(pl.Float64).diff())
    prompt, *others = (changes[name].slice(1).fill_null(0.0).to_numpy() for name in changes.columns)
    tokens, ttft_us, e2e_us = (_beyond(prompt, of) for of in others)
    told = float(tokens @ tokens) > _OWN_SPREAD * float(others[0] @ others[0])
    slope, correlation, errors = _slope(tokens, ttft_us) if told else (0.0, 0.0, 0.0)
    pace = _slope(tokens, e2e_us)[0] if told else 0.0
    grows = correlation > _FOLLOWS and errors > _CERTAIN and slope > max(_SHARE_OF_PACE * pace, NO_STEP_US)
    late = LateFirstTokens(slope, correlation, gap_us)
    if grows or late.comes_at_once:
        return late
    held_back_us = _held_back_us(recording)
    return None if held_back_us is None else replace(late, held_back_us=held_back_us)


def _held_back_us(recording: Recording) -> float | None:
    """us by which a client has first tokens later than last ones after the engine had them: the median.

    None where less than three quarters of the requests with a journey have two gaps or more.
    """
    sent = completed_requests(recording, "request_index", "ttft_us", "e2e_us", "output_tokens")
    stamps = ("request_index", "first_token_us", "finished_us")
    decoded_us = pl.col("finished_us") - pl.col("first_token_us")
    lags = [
        sent.join(batch, on="request_index")
        .filter(pl.col("output_tokens") >= _SEVERAL)
        .select(
            # Clocks of client and server need not agree: their difference is in both ways.
            later_us=decoded_us - (pl.col("e2e_us") - pl.col("ttft_us")),
            gap_us=decoded_us / (pl.col("output_tokens") - 1),
        )
        .drop_nulls()
        for batch in recording.lifecycles.batches(stamps)
    ]
    both = pl.concat(lags)
    if both.height < _FEWEST_LATE:
        return None
    in_gaps = both.select((pl.col("later_us") / pl.col("gap_us")).quantile(1 - _HELD_BACK_SHARE)).item()
    return float(both["later_us"].median()) if in_gaps > _HELD_BACK_GAPS else None  # type: ignore[arg-type]


def _slope(of: Floats, values: Floats) -> tuple[float, float, float]:
    """What ``values`` change by per unit of ``of``; the correlation, and how many standard errors it is from 0."""
    spread, other, both = float(of @ of), float(values @ values), float(of @ values)
    if not spread or not other:
        return 0.0, 0.0, 0.0
    correlation = both / math.sqrt(spread * other)
    return both / spread, correlation, correlation * math.sqrt(len(of) / max(1 - correlation**2, 1e-9))


def _beyond(prompt: Floats, values: Floats) -> Floats:
    """What of ``values`` the prompt lengths do not explain: a long prompt takes longer, and may have a long answer."""
    spread = float(prompt @ prompt)
    return values - prompt * (float(prompt @ values) / spread) if spread else values
