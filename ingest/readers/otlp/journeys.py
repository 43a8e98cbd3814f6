"""Journeys: what the API server and the engine noted about one request, joined (trace-formats, section 2).

The engine's span (scope ``vllm.scheduler``) is a child of the API server's (``vllm.api``); ids are
never cut up to find each other.  Times are ns on the server's monotonic clock until the
experiment's zero is known (:func:`on_zero`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.numbers import MAX_INTEGER
from blis_replay.ingest.readers.otlp.columns import API_SCOPE, CORE_SCOPE, EVENT_SEQUENCE, UNITS, TraceBatch
from blis_replay.ingest.readers.otlp.places import (
    first_spans,
    no_count,
    no_time,
    placed_spans,
    reject_repeated,
    sound,
    with_texts_on_one_line,
)
from blis_replay.ingest.readers.otlp.requests import tokens
from blis_replay.ingest.readers.otlp.span_events import STAMPED_STEPS, STAMPS, content_of_spans, stamps_of_spans
from blis_replay.ingest.recording import JOURNEY_EVENT_SCHEMA, LIFECYCLE_SCHEMA
from blis_replay.ingest.row_parts import PART_ROWS, PartWriter, RowParts, Schema, by_ranges

CORE_SPAN, API_SPAN = "llm_core", "llm_request"
_FROM_START = "span start"

# What follows what; an abort reaches the engine after the API server has let go of the request.
_ORDER = (
    ("arrived", "handoff"),
    ("arrived", "queued"),
    ("arrived", "first_response"),
    ("arrived", "departed"),
    ("queued", "scheduled"),
    ("scheduled", "first_token"),
    ("first_token", "first_response"),
    ("first_token", "finished"),
    ("first_response", "departed"),
)
_EVENT_COUNTS = ("step_id", "prompt_tokens", "prefill_done_tokens", "output_tokens", "max_tokens", "preemptions")
_EVENT_TEXTS = ("phase", "schedule_kind", "finish_status", "reason", "error")


# Spans as read, in the order of the files: where they stand, what they say, and what their events say (span_events).
SPAN_SCHEMA: Schema = {
    **{"file": pl.Int64, "unit": pl.Enum(UNITS), "record": pl.Int64, "span": pl.Int64},
    **{"content": pl.UInt64, "records": pl.UInt32, "span_key": pl.Int64},
    "scope": pl.Enum((CORE_SCOPE, API_SCOPE)),
    **dict.fromkeys(("trace_id", "span_id", "parent_span_id", "request_id"), pl.String),
    **dict.fromkeys(("model", "status_message", "finish_status", "reason"), pl.String),
    **dict.fromkeys(("start_ns", "dropped_events", "prompt_tokens", "completion_tokens", "max_tokens"), pl.Int64),
    **{f"{stamp}_ns": pl.Int64 for stamp in (*STAMPS, "scheduled", "departed", "last")},
    **{f"{stamp}_step": pl.Int64 for stamp in STAMPED_STEPS},
    **dict.fromkeys(("preemptions", "event_prompt_tokens", "event_max_tokens", "output_tokens"), pl.Int64),
    "aborted": pl.Boolean,
}
# Events as read.  ``offset_ns``: epoch less monotonic time.
EVENT_SCHEMA: Schema = {
    **{"span_key": pl.Int64, "event": pl.Enum(EVENT_SEQUENCE), "time_ns": pl.Int64, "offset_ns": pl.Int64},
    **{name: kind for name, kind in JOURNEY_EVENT_SCHEMA.items() if name not in ("journey", "event", "time_us")},
}
# Journeys that are not numbered yet, with the keys of their two spans and what orders them.
_ARRIVAL = ("arrival_ns", "trace_id", "first_span")
_NEVER = (1 << 63) - 1
_MOST_OFFSETS = 2_000_000
_WIDE = 4  # spans and what they are joined to are so many times as wide as other rows
_LIFECYCLE_SCHEMA: Schema = {
    **{
        name.removesuffix("_us") + "_ns" if name.endswith("_us") else name: kind
        for name, kind in LIFECYCLE_SCHEMA.items()
    },
    **{"span_key": pl.Int64, "span_key_api": pl.Int64},
    **dict(zip(_ARRIVAL, (pl.Int64, pl.String, pl.Int64), strict=True)),
}


@dataclass(frozen=True)
class JourneyParts:
    """Spans (``SPAN_SCHEMA``) and events (``EVENT_SCHEMA``) of journeys; ``span_key`` numbers all spans through."""

    spans: RowParts
    events: RowParts


@dataclass(frozen=True)
class Journeys:
    """Journeys in order of arrival.

    ``lifecycles``: ``LIFECYCLE_SCHEMA`` with times ``*_ns`` on the server's monotonic clock; ``events``:
    ``EVENT_SCHEMA`` on the same, in the order of the files; ``journey_of_span``: by span key, null for spans that are
    not used.  ``model``: that the API server named.  ``remarks``: what is missing or odd, in words.
    """

    lifecycles: RowParts
    events: RowParts
    journey_of_span: pl.Series
    model: str | None
    remarks: tuple[str, ...]


def spans_and_events_of(
    batch: TraceBatch, number: int, file: RecordedFile, first_key: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The journey spans (``SPAN_SCHEMA``) and events (``EVENT_SCHEMA``) of a batch of file ``number``.

    What makes no sense is rejected.  Keys start at ``first_key``.
    """
    events = with_texts_on_one_line(batch.journey_events, _EVENT_TEXTS).with_columns(
        _monotonic_ns().alias("monotonic_ns")
    )
    problems = [
        *no_count((*_EVENT_COUNTS, "monotonic_ns")),
        no_time("time_ns"),
        (pl.col("monotonic_ns").is_null(), pl.lit("an event without a usable monotonic time")),
    ]
    kept = sound(batch, events, problems, file)
    columns = {
        "span_key": pl.col("span_row") + first_key,
        "event": pl.col("name"),
        "time_ns": pl.col("monotonic_ns"),
        "offset_ns": pl.col("time_ns") - pl.col("monotonic_ns"),
    }
    narrow = kept.select(columns.get(name, pl.col(name)).alias(name) for name in EVENT_SCHEMA)
    return _spans(batch, number, first_key, kept), narrow


def bridging_offsets(parts: JourneyParts, ended_ns: int | None) -> pl.Series:
    """Epoch less monotonic time (ns) of the events, without those of journeys of earlier starts (:func:`is_since`).

    Of more than some million events every k-th: as many say no more about a median.
    """
    every = max(1, -(-parts.events.height // _MOST_OFFSETS))
    if ended_ns is None:
        frames = parts.events.frames(["offset_ns"])
    else:
        since = (frame.filter(is_since(ended_ns)) for frame in parts.spans.frames(["span_key", "last_ns"]))
        spans = pl.concat(frame.select("span_key") for frame in since)
        events = parts.events.frames(["span_key", "offset_ns"])
        frames = (frame.join(spans, on="span_key", how="semi") for frame in events)
    return pl.concat(frame["offset_ns"].gather_every(every) for frame in frames)


def is_since(ended_ns: int, last: str = "last_ns") -> pl.Expr:
    """Whether a span was not over when an earlier start of the server was last seen (epoch ns)."""
    return pl.col(last).is_null() | (pl.col(last) > ended_ns)


def joined(
    parts: JourneyParts,
    hits: pl.DataFrame,
    offset_ns: int | None,
    ended_ns: int | None,
    files: Sequence[RecordedFile],
    scratch: Path | None = None,
    part_rows: int = PART_ROWS,
) -> Journeys:
    """Each API span with its engine span as one journey.

    ``hits``: :func:`cache_hits`; ``offset_ns``: epoch less monotonic clock, if known; ``ended_ns``: the end of earlier
    starts of the server, whose journeys are left out.  Spans that were recorded twice are rejected in their files.
    """
    repeated, models = [], []
    wide_rows = -(-part_rows // _WIDE)
    found = PartWriter(_LIFECYCLE_SCHEMA, scratch, "journeys", wide_rows)
    for frame in by_ranges(parts.spans, _first_of_trace(parts.spans), ["span_key"], wide_rows):
        spans, later = first_spans(frame if ended_ns is None else frame.filter(is_since(ended_ns)))
        repeated.append(later)
        models.append(spans["model"].drop_nulls().value_counts())
        found.add(_lifecycles(_both_halves(spans).join(hits, on="request_id", how="left"), offset_ns))
    reject_repeated(repeated, files)
    lifecycles = _numbered(found.done(), scratch, wide_rows)
    return Journeys(
        lifecycles,
        parts.events,
        _journey_of_span(lifecycles),
        _most_named(pl.concat(models)),
        _remarks(lifecycles),
    )


def _first_of_trace(spans: RowParts) -> Callable[[pl.DataFrame], pl.Series]:
    """What tells for each span of a part how many spans stand before the first one of its trace."""
    whole = spans.whole(["span_key", "trace_id"])
    _, first, trace = np.unique(whole["trace_id"].hash().to_numpy(), return_index=True, return_inverse=True)
    keys, firsts = whole["span_key"].to_numpy(), first[trace]
    return lambda part: pl.Series(firsts[np.searchsorted(keys, part["span_key"].to_numpy())])


def _both_halves(spans: pl.DataFrame) -> pl.DataFrame:
    core = spans.filter(pl.col("scope") == CORE_SCOPE)
    api = spans.filter(pl.col("scope") == API_SCOPE).drop("parent_span_id")
    of_core, of_api = ["trace_id", "parent_span_id"], ["trace_id", "span_id"]
    return core.join(api, left_on=of_core, right_on=of_api, how="full", suffix="_api")


def _most_named(models: pl.DataFrame) -> str | None:
    """The name with the highest count, the first in the alphabet of several."""
    counts = models.group_by("model").agg(pl.col("count").sum()).sort("count", "model", descending=[True, False])
    return str(counts["model"][0]) if len(counts) else None


def _numbered(found: RowParts, scratch: Path | None, part_rows: int) -> RowParts:
    """Lifecycles in order of arrival, with their number."""
    writer, count = PartWriter(_LIFECYCLE_SCHEMA, scratch, "numbered-journeys", part_rows), 0
    for frame in by_ranges(found, lambda part: part["arrival_ns"].fill_null(_NEVER), ["arrival_ns"], part_rows):
        ordered = frame.sort(_ARRIVAL, nulls_last=True, maintain_order=True)
        writer.add(ordered.with_columns(pl.int_range(count, count + pl.len(), dtype=pl.Int64).alias("journey")))
        count += frame.height
    return writer.done()


def _journey_of_span(lifecycles: RowParts) -> pl.Series:
    """The journey of each span, by its key; null where it is of none."""
    of_spans = lifecycles.whole(["journey", "span_key", "span_key_api"])
    last = of_spans.select(pl.max_horizontal(pl.col("span_key", "span_key_api").max())).item()
    journeys = np.full(int(last or 0) + 1, -1)
    for key in ("span_key", "span_key_api"):
        known = of_spans.select("journey", key).drop_nulls()
        journeys[known[key].to_numpy()] = known["journey"].to_numpy()
    return pl.Series("journey", journeys).set(pl.Series(journeys < 0), None)


def on_zero(
    journeys: Journeys, zero_us: int, scratch: Path | None = None, part_rows: int = PART_ROWS
) -> tuple[RowParts, RowParts]:
    """``(LIFECYCLE_SCHEMA, JOURNEY_EVENT_SCHEMA)`` from the zero at which the monotonic clock shows ``zero_us``.

    Events are in order of journey and time, and those of a journey in one part.
    """
    writer = PartWriter(JOURNEY_EVENT_SCHEMA, scratch, "journey-events", part_rows)

    def journey(frame: pl.DataFrame) -> pl.Series:
        return journeys.journey_of_span.gather(frame["span_key"], null_on_oob=True)

    moved = {"time_us": _moved("time_us", zero_us)}
    for events in by_ranges(journeys.events, journey, ["span_key"], part_rows):
        ordered = events.with_columns(journey(events)).sort("journey", "time_ns", "event", maintain_order=True)
        writer.add(ordered.select(moved.get(name, pl.col(name)) for name in JOURNEY_EVENT_SCHEMA))
    lifecycles = replace(
        journeys.lifecycles,
        schema=LIFECYCLE_SCHEMA,
        made={name: _moved(name, zero_us) for name in LIFECYCLE_SCHEMA if name.endswith("_us")},
    )
    return lifecycles, writer.done()


def _moved(name: str, zero_us: int) -> pl.Expr:
    """``*_us`` from that zero of ``*_ns``."""
    return (pl.col(name.removesuffix("_us") + "_ns") // 1000 - zero_us).alias(name)


def _monotonic_ns() -> pl.Expr:
    """The monotonic time: in ns, where 0 means none, or in seconds as a double, which rounds to the same ns."""
    rounded = (pl.col("monotonic_s") * 1e9).round()
    usable = rounded.is_finite() & rounded.is_between(0, MAX_INTEGER / 2)
    seconds = pl.when(usable).then(rounded).cast(pl.Int64)
    return pl.coalesce(pl.when(pl.col("monotonic_ns") != 0).then(pl.col("monotonic_ns")), seconds)


def _spans(batch: TraceBatch, number: int, first_key: int, kept: pl.DataFrame) -> pl.DataFrame:
    """The journey spans of a batch with their key and what :func:`first_spans` needs; ``kept``: their sound events."""
    spans = placed_spans(batch, number).filter(is_journey_span())
    own = spans.select(name for name in batch.spans.columns if name not in ("record", "span")).hash_rows()
    of_events = content_of_spans(batch.journey_events).join(stamps_of_spans(kept), on="span_row", how="left")
    counts = ("prompt_tokens", "completion_tokens", "max_tokens")
    journeys = (
        with_texts_on_one_line(spans, ("request_id", "model", "status_message"))
        .with_columns(own.alias("own"), *(tokens(name).alias(name) for name in counts))
        .join(of_events, on="span_row", how="left", maintain_order="left")
    )
    columns = {
        "span_key": pl.col("span_row") + first_key,
        "content": pl.struct("own", "of_events").hash(),
        "start_ns": pl.when(~no_time("start_ns")[0]).then("start_ns"),  # less a negative offset it would not fit int64
        "records": pl.col("records").fill_null(0),
    }
    return journeys.select(columns.get(name, pl.col(name)).cast(kind).alias(name) for name, kind in SPAN_SCHEMA.items())


def is_journey_span() -> pl.Expr:
    """Whether a span is one half of a journey."""
    core = (pl.col("scope") == CORE_SCOPE) & (pl.col("name") == CORE_SPAN)
    return core | ((pl.col("scope") == API_SCOPE) & (pl.col("name") == API_SPAN))


def cache_hits(snapshots: RowParts) -> pl.DataFrame:
    """``request_id`` of the engine, and ``cached_prompt_tokens`` that its first admission found in the prefix cache.

    ``snapshots``: ``SNAPSHOT_SCHEMA`` by step.
    """
    hit = pl.col("prompt_tokens") - pl.col("effective_prompt_tokens")
    columns = ["request_id", "prompt_tokens", "effective_prompt_tokens"]
    known = pl.concat(
        frame.filter(hit >= 0)
        .select("request_id", hit.alias("cached_prompt_tokens"))
        .unique("request_id", keep="first", maintain_order=True)
        for frame in snapshots.frames(columns)
    )
    return known.unique("request_id", keep="first", maintain_order=True)


def _lifecycles(both: pl.DataFrame, offset_ns: int | None) -> pl.DataFrame:
    """``LIFECYCLE_SCHEMA`` with times in ns, not numbered yet, and the trace and the keys of the two spans."""
    started_ns = pl.col("start_ns_api") - offset_ns if offset_ns is not None else pl.lit(None, pl.Int64)
    arrived = pl.col("arrived_ns_api")
    columns = {
        "journey": pl.lit(None, pl.Int64),
        "request_index": pl.lit(None, pl.Int64),
        "api_request_id": pl.col("request_id_api"),
        "core_request_id": pl.col("request_id"),
        "arrived_ns": pl.coalesce(arrived, started_ns),
        "arrived_stamp": pl.when(arrived.is_not_null())
        .then(pl.lit(STAMPS["arrived"]))
        .when(started_ns.is_not_null())
        .then(pl.lit(_FROM_START)),
        **{f"{stamp}_ns": pl.col(f"{stamp}_ns_api") for stamp in ("handoff", "first_response", "departed")},
        "status": _status(),
        "reason": pl.coalesce("reason_api", "status_message_api"),
        "prompt_tokens": pl.coalesce("prompt_tokens_api", "event_prompt_tokens"),
        "max_tokens": pl.coalesce("max_tokens_api", "event_max_tokens"),
        "output_tokens": pl.coalesce("output_tokens", "completion_tokens_api"),
        "dropped_events": pl.sum_horizontal("dropped_events", "dropped_events_api"),
    }
    told = both.with_columns(expression.alias(name) for name, expression in columns.items()).with_columns(
        pl.coalesce("arrived_ns", "queued_ns").alias("arrival_ns"),
        pl.min_horizontal("span_key", "span_key_api").alias("first_span"),
    )
    return told.select(pl.col(name).cast(kind) for name, kind in _LIFECYCLE_SCHEMA.items())


def _status() -> pl.Expr:
    finish = pl.col("finish_status")
    return (
        pl.when(pl.col("aborted_api").fill_null(False) | (finish == "aborted").fill_null(False))
        .then(pl.lit("aborted"))
        .when(finish.is_in(["ignored", "error"]))
        .then(pl.lit("error"))
        .when(pl.col("departed_ns_api").is_not_null() | finish.is_not_null())
        .then(pl.lit("ok"))
        .otherwise(pl.lit("unfinished"))
    )


def _remarks(lifecycles: RowParts) -> tuple[str, ...]:
    """What the journeys lack, a sentence each, and which stamps stand for what."""
    core, api = pl.col("span_key").is_not_null(), pl.col("span_key_api").is_not_null()
    dropped = pl.col("dropped_events") > 0
    # A request that was given up in the queue was never admitted.
    unadmitted = pl.col("scheduled_ns").is_null() & pl.col("first_token_ns").is_not_null()
    admission_lost = core & (pl.col("queued_ns").is_null() | unadmitted)
    negative = pl.any_horizontal(pl.col(f"{after}_ns") < pl.col(f"{before}_ns") for before, after in _ORDER)
    late = (pl.col("departed_ns") < pl.col("finished_ns")) & (pl.col("status") != "aborted")
    answered = api & pl.col("first_token_ns").is_not_null()
    counted = {
        "engine spans of {} requests (llm_core: not exported, or not finished when the server ended)": api & ~core,
        "API spans of {} requests (llm_request of vllm.api): they arrive when they are queued": core & ~api,
        "events of {} journeys that the tracing SDK discarded": dropped,
        "journey.QUEUED or the first journey.SCHEDULED of {} journeys": admission_lost,
        "the end of {} journeys (neither departed nor aborted nor finished)": pl.col("status") == "unfinished",
        "time order in {} journeys (a stamp before the one that it follows)": negative.fill_null(False)
        | late.fill_null(False),
        "api.ARRIVED of {} requests: the start of their span is used": pl.col("arrived_stamp") == _FROM_START,
        "api.FIRST_RESPONSE_FROM_CORE of {} requests: their TTFT ends with journey.FIRST_TOKEN": answered
        & pl.col("first_response_ns").is_null(),
    }
    counts = pl.concat(
        frame.select(flag.sum().alias(sentence) for sentence, flag in counted.items()) for frame in lifecycles.frames()
    )
    return tuple(sentence.format(count) for sentence, count in zip(counted, counts.sum().row(0), strict=True) if count)
