"""Journeys: what the API server and the engine noted about one request, joined (trace-formats, section 2).

The engine's span (scope ``vllm.scheduler``) is a child of the API server's (``vllm.api``); ids are never cut up to find
each other.  Times are ns on the server's monotonic clock until the experiment's zero is known (:func:`on_zero`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from blis_replay.ingest.readers.documents import MAX_INTEGER
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp.spans import (
    first_spans,
    no_count,
    no_time,
    placed_spans,
    reject_repeated,
    sound,
    tokens,
    with_texts_on_one_line,
)
from blis_replay.ingest.recording import JOURNEY_EVENT_SCHEMA, LIFECYCLE_SCHEMA
from blis_replay.ingest.rows import BATCH_ROWS, Rows, Schema, query, shaped
from blis_replay.ingest.scan.otlp_columns import API_SCOPE, CORE_SCOPE, EVENT_SEQUENCE, UNITS, TraceBatch
from blis_replay.ingest.scratch import Scratch, whole_groups

CORE_SPAN, API_SPAN = "llm_core", "llm_request"
_FROM_START = "span start"

# What follows what; an abort reaches the engine after the API server has let go of the request.
_ORDER = (
    ("arrived", "queued"),
    ("arrived", "first_response"),
    ("arrived", "departed"),
    ("queued", "scheduled"),
    ("scheduled", "first_token"),
    ("first_token", "first_response"),
    ("first_token", "finished"),
    ("first_response", "departed"),
)
_EVENT_COUNTS = ("step_id", "prompt_tokens", "output_tokens", "max_tokens", "preemptions")
_EVENT_TEXTS = ("schedule_kind", "finish_status", "reason", "error")
# Lifecycle stamp -> its event; "scheduled" and "departed" are made of several (see stamps_of_spans).
STAMPS = {
    "arrived": "api.ARRIVED",
    "queued": "journey.QUEUED",
    "first_token": "journey.FIRST_TOKEN",
    "first_response": "api.FIRST_RESPONSE_FROM_CORE",
    "finished": "journey.FINISHED",
}
_STAMPED_STEPS = ("queued", "scheduled", "first_token", "finished")
# Column of a span: the highest value of this column of its events.
_HIGHEST = {
    "preemptions": "preemptions",
    "event_prompt_tokens": "prompt_tokens",
    "event_max_tokens": "max_tokens",
    "output_tokens": "output_tokens",
    "last_ns": "time_ns",
}


# Spans as read, in the order of the files: where they stand, what they say, and what their events say.
SPAN_SCHEMA: Schema = {
    **{"file": pl.Int64, "unit": pl.Enum(UNITS), "record": pl.Int64, "span": pl.Int64},
    **{"records": pl.UInt32, "span_key": pl.Int64},
    "scope": pl.Enum((CORE_SCOPE, API_SCOPE)),
    **dict.fromkeys(("trace_id", "span_id", "parent_span_id", "request_id"), pl.String),
    **dict.fromkeys(("model", "status_message", "finish_status", "reason"), pl.String),
    **dict.fromkeys(("start_ns", "dropped_events", "prompt_tokens", "completion_tokens", "max_tokens"), pl.Int64),
    **{f"{stamp}_ns": pl.Int64 for stamp in (*STAMPS, "scheduled", "departed", "last")},
    **{f"{stamp}_step": pl.Int64 for stamp in _STAMPED_STEPS},
    **dict.fromkeys(("preemptions", "event_prompt_tokens", "event_max_tokens", "output_tokens"), pl.Int64),
    "aborted": pl.Boolean,
}
# Events as read.  ``offset_ns``: epoch less monotonic time.
EVENT_SCHEMA: Schema = {
    **{"span_key": pl.Int64, "event": pl.Enum(EVENT_SEQUENCE), "time_ns": pl.Int64, "offset_ns": pl.Int64},
    **{name: kind for name, kind in JOURNEY_EVENT_SCHEMA.items() if name not in ("journey", "event", "time_us")},
}
# Journeys with times in ns, the keys of their two spans, and what orders them.
_ARRIVAL = ("arrival_ns", "trace_id", "first_span")
_MOST_OFFSETS = 2_000_000
_WIDE_ROWS = BATCH_ROWS // 10  # spans, and what they are joined to, are wider than other rows
_SORTED_ROWS = BATCH_ROWS // 20  # journeys, each with some eight events
READ_LIFECYCLE_SCHEMA: Schema = {
    **{
        name.removesuffix("_us") + "_ns" if name.endswith("_us") else name: kind
        for name, kind in LIFECYCLE_SCHEMA.items()
    },
    # ``arrived_stamp``: where the arrival comes from, api.ARRIVED, the start of the span or ARRIVAL_TIME.
    **{"arrived_stamp": pl.String, "reason": pl.String, "dropped_events": pl.Int64},
    **{"span_key": pl.Int64, "span_key_api": pl.Int64},
    **dict(zip(_ARRIVAL, (pl.Int64, pl.String, pl.Int64), strict=True)),
}


@dataclass(frozen=True)
class Journeys:
    """Journeys in order of arrival.

    ``lifecycles``: ``LIFECYCLE_SCHEMA`` with times ``*_ns`` on the server's monotonic clock; ``events``:
    ``EVENT_SCHEMA`` on the same, in the order of the files.  ``model``: that the API server named.
    ``remarks``: what is missing or odd, in words.
    """

    lifecycles: Rows
    events: Rows
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


_OFFSETS = """
SELECT offset_ns FROM (SELECT offset_ns, row_number() OVER () AS place FROM events SEMI JOIN spans USING (span_key))
WHERE (place - 1) % $every = 0
"""


def bridging_offsets(spans: Rows, events: Rows, ended_ns: int | None) -> pl.Series:
    """Epoch less monotonic time (ns) of the events, without those of journeys of earlier starts (:func:`is_since`).

    Of more than some million events every k-th: as many say no more about a median.
    """
    if ended_ns is None and events.height <= _MOST_OFFSETS:
        return events["offset_ns"]
    every = {"every": max(1, -(-events.height // _MOST_OFFSETS))}
    since = is_since(spans, ended_ns)
    return query(_OFFSETS, {"offset_ns": pl.Int64}, every, events=events, spans=since)["offset_ns"]


def is_since(rows: Rows, ended_ns: int | None, last: str = "last_ns") -> Rows:
    """Those that were not over when an earlier start of the server was last seen (epoch ns)."""
    return rows if ended_ns is None else rows.where(f"{last} IS NULL OR {last} > $ended_ns", ended_ns=ended_ns)


_BY_TRACE = """
WITH traces AS (SELECT trace_id, min(span_key) AS first_of_trace FROM spans GROUP BY trace_id)
SELECT span_key, first_of_trace FROM spans JOIN traces ON spans.trace_id IS NOT DISTINCT FROM traces.trace_id
ORDER BY first_of_trace, span_key
"""
_BY_ARRIVAL = """
SELECT * REPLACE (row_number() OVER () - 1 AS journey)
FROM (SELECT * FROM lifecycles ORDER BY arrival_ns NULLS LAST, trace_id NULLS LAST, first_span NULLS LAST)
"""


def joined(
    spans: Rows,
    events: Rows,
    hits: pl.DataFrame,
    offset_ns: int | None,
    ended_ns: int | None,
    files: Sequence[RecordedFile],
    scratch: Scratch,
) -> Journeys:
    """Each API span with its engine span as one journey.

    ``spans``, ``events``: ``SPAN_SCHEMA``, ``EVENT_SCHEMA``; ``span_key`` numbers all spans through.  ``hits``:
    :func:`cache_hits`; ``offset_ns``: epoch less monotonic clock, if known; ``ended_ns``: the end of earlier
    starts of the server, whose journeys are left out.  Spans that were recorded twice are rejected in their files.
    """
    repeated, models, read = [], [], scratch.writer(READ_LIFECYCLE_SCHEMA)
    for batch in _by_trace(is_since(spans, ended_ns)):
        first, later = first_spans(batch)
        repeated.append(later)
        models.append(first["model"].drop_nulls().value_counts())
        read.add(_lifecycles(_both_halves(first).join(hits, on="request_id", how="left"), offset_ns))
    reject_repeated(repeated, files)
    lifecycles = by_arrival(read.done(), scratch)
    counts = pl.concat(models).group_by("model").agg(pl.col("count").sum())
    model = next(iter(counts.sort("count", "model", descending=[True, False])["model"]), None)
    return Journeys(lifecycles, events, model, _remarks(lifecycles))


def by_arrival(lifecycles: Rows, scratch: Scratch) -> Rows:
    """``READ_LIFECYCLE_SCHEMA`` in order of arrival, numbered; they are in ``scratch``."""
    held = lifecycles.held
    if held is not None and not held["arrival_ns"].null_count() and (held["arrival_ns"].diff() > 0).all():
        # Sorting would copy them, and mostly they are in order.
        return scratch.hold(held.with_columns(journey=pl.int_range(pl.len())))
    return scratch.kept(query(_BY_ARRIVAL, READ_LIFECYCLE_SCHEMA, lifecycles=lifecycles))


def _by_trace(spans: Rows) -> Iterator[pl.DataFrame]:
    """The spans, those of a trace in one batch and near the first of them: they are too wide to be sorted."""
    keys = query(_BY_TRACE, dict.fromkeys(("span_key", "first_of_trace"), pl.Int64), spans=spans)
    for batch in whole_groups(keys.batches(rows=_WIDE_ROWS), "first_of_trace"):
        first, last = batch.select(first=pl.col("span_key").min(), last=pl.col("span_key").max()).row(0)
        near = spans.between("span_key", first, last).frame()
        yield batch.join(near, on="span_key", maintain_order="left").select(SPAN_SCHEMA.keys())


def _both_halves(spans: pl.DataFrame) -> pl.DataFrame:
    core = spans.filter(pl.col("scope") == CORE_SCOPE)
    api = spans.filter(pl.col("scope") == API_SCOPE).drop("parent_span_id")
    of_core, of_api = ["trace_id", "parent_span_id"], ["trace_id", "span_id"]
    return core.join(api, left_on=of_core, right_on=of_api, how="full", suffix="_api")


def on_zero(journeys: Journeys, zero_us: int, scratch: Scratch) -> tuple[Rows, Rows]:
    """``(LIFECYCLE_SCHEMA, JOURNEY_EVENT_SCHEMA)`` from the zero at which the monotonic clock shows ``zero_us``.

    Events are in order of journey and time.
    """
    time_us, events = pl.col("time_ns") // 1000 - zero_us, scratch.writer(JOURNEY_EVENT_SCHEMA)
    # Sorted all at once, the events of two million journeys do not go into memory.
    for batch in journeys.lifecycles.batches(["journey", "span_key", "span_key_api"], rows=_SORTED_ROWS):
        both = (batch.select("journey", span_key=name) for name in ("span_key", "span_key_api"))
        of_spans = pl.concat(both).drop_nulls("span_key")
        first, last = of_spans.select(first=pl.col("span_key").min(), last=pl.col("span_key").max()).row(0)
        of_batch = journeys.events.between("span_key", first, last).frame()
        of_batch = of_batch.join(of_spans, on="span_key", maintain_order="left").with_columns(time_us=time_us)
        # Events of one time in the sequence that they have in the server, which is that of their type.
        of_batch = of_batch.sort("journey", "time_ns", "event", nulls_last=True, maintain_order=True)
        events.add(of_batch.select(JOURNEY_EVENT_SCHEMA.keys()))
    columns = {name: pl.col(name) for name in LIFECYCLE_SCHEMA}
    times = [name.removesuffix("_us") for name in columns if name.endswith("_us")]
    columns |= {f"{name}_us": pl.col(f"{name}_ns") // 1000 - zero_us for name in times}
    of = (shaped(batch, LIFECYCLE_SCHEMA, columns) for batch in journeys.lifecycles.batches())
    return scratch.gathered(LIFECYCLE_SCHEMA, of), events.done()


def _monotonic_ns() -> pl.Expr:
    """The monotonic time: in ns, where 0 means none, or in seconds as a double, which rounds to the same ns."""
    rounded = (pl.col("monotonic_s") * 1e9).round()
    usable = rounded.is_finite() & rounded.is_between(0, MAX_INTEGER / 2)
    seconds = pl.when(usable).then(rounded).cast(pl.Int64)
    return pl.coalesce(pl.when(pl.col("monotonic_ns") != 0).then(pl.col("monotonic_ns")), seconds)


def _spans(batch: TraceBatch, number: int, first_key: int, kept: pl.DataFrame) -> pl.DataFrame:
    """The journey spans of a batch with their key and what :func:`first_spans` needs; ``kept``: their sound events."""
    spans = placed_spans(batch, number).filter(is_journey_span())
    counts = ("prompt_tokens", "completion_tokens", "max_tokens")
    journeys = (
        with_texts_on_one_line(spans, ("request_id", "model", "status_message"))
        .with_columns(tokens(name).alias(name) for name in counts)
        .join(stamps_of_spans(kept), on="span_row", how="left", maintain_order="left")
    )
    columns = {
        "span_key": pl.col("span_row") + first_key,
        "start_ns": pl.when(~no_time("start_ns")[0]).then("start_ns"),  # less a negative offset it would not fit int64
        "records": pl.col("records").fill_null(0),
    }
    return journeys.select(columns.get(name, pl.col(name)).cast(kind).alias(name) for name, kind in SPAN_SCHEMA.items())


def stamps_of_spans(events: pl.DataFrame) -> pl.DataFrame:
    """One row per span: ``span_row``, when (``*_ns``, monotonic) and in which step each kind of event happened first.

    And the highest counts, how the request ended, and ``records``, how many events there are.  ``events``: sound ones
    of ``JOURNEY_EVENT_SCHEMA``, each with its ``monotonic_ns``.
    """
    name, kind = pl.col("name"), pl.col("schedule_kind")
    # The event of the first admission may have been dropped, and a later SCHEDULED be left.
    first = (kind == "FIRST") | (kind.is_null() & (pl.col("preemptions") == 0))
    aborted = name == "api.ABORTED"
    when = {stamp: name == event for stamp, event in STAMPS.items()}
    when |= {
        "scheduled": (name == "journey.SCHEDULED") & first.fill_null(False),
        "departed": (name == "api.DEPARTED") | aborted,
    }
    # Nearly all files have them in this order.
    if not ((events["span_row"].diff() > 0) | (events["monotonic_ns"].diff() >= 0)).all():
        events = events.sort("span_row", "monotonic_ns", maintain_order=True)
    chosen_columns = events.select(
        "span_row",
        "step_id",
        "monotonic_ns",
        "finish_status",
        *_HIGHEST.values(),
        *(chosen.alias(f"is_{stamp}") for stamp, chosen in when.items()),
        aborted.alias("aborted"),
        pl.coalesce("reason", "error").alias("reason"),
    )
    return chosen_columns.group_by("span_row", maintain_order=True).agg(
        *(pl.col("monotonic_ns").filter(f"is_{stamp}").first().alias(f"{stamp}_ns") for stamp in when),
        *(pl.col("step_id").filter(f"is_{stamp}").first().alias(f"{stamp}_step") for stamp in _STAMPED_STEPS),
        *(pl.col(column).max().alias(name) for name, column in _HIGHEST.items()),
        pl.col("aborted").any(),
        pl.col("finish_status").drop_nulls().first(),
        pl.col("reason").filter("aborted").first(),
        pl.len().alias("records"),
    )


def is_journey_span() -> pl.Expr:
    """Whether a span is one half of a journey."""
    core = (pl.col("scope") == CORE_SCOPE) & (pl.col("name") == CORE_SPAN)
    return core | ((pl.col("scope") == API_SCOPE) & (pl.col("name") == API_SPAN))


_FIRST_HITS = """
SELECT request_id, arg_min(prompt_tokens - effective_prompt_tokens, place) AS cached_prompt_tokens
FROM (SELECT *, row_number() OVER () AS place FROM snapshots) WHERE prompt_tokens >= effective_prompt_tokens
GROUP BY request_id
"""


def cache_hits(snapshots: Rows) -> pl.DataFrame:
    """``request_id`` of the engine, and ``cached_prompt_tokens`` that its first admission found in the prefix cache.

    ``snapshots``: ``SNAPSHOT_SCHEMA`` by step.
    """
    schema = {"request_id": pl.String, "cached_prompt_tokens": pl.Int64}
    return query(_FIRST_HITS, schema, snapshots=snapshots).frame()


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
        **{f"{stamp}_ns": pl.col(f"{stamp}_ns_api") for stamp in ("first_response", "departed")},
        "status": _status(),
        "reason": pl.coalesce("reason_api", "status_message_api"),
        "prompt_tokens": pl.coalesce("prompt_tokens_api", "event_prompt_tokens"),
        "max_tokens": pl.coalesce("max_tokens_api", "event_max_tokens"),
        "output_tokens": pl.coalesce("output_tokens", "completion_tokens_api"),
        "dropped_events": pl.sum_horizontal("dropped_events", "dropped_events_api"),
    }
    joined = both.with_columns(expression.alias(name) for name, expression in columns.items()).with_columns(
        pl.coalesce("arrived_ns", "queued_ns").alias("arrival_ns"),
        pl.min_horizontal("span_key", "span_key_api").alias("first_span"),
    )
    return joined.select(pl.col(name).cast(kind) for name, kind in READ_LIFECYCLE_SCHEMA.items())


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


def _remarks(lifecycles: Rows) -> tuple[str, ...]:
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
    columns = list({name: None for flag in counted.values() for name in flag.meta.root_names()})
    counts = pl.concat(
        batch.select(flag.sum().alias(sentence) for sentence, flag in counted.items())
        for batch in lifecycles.batches(columns)
    )
    return tuple(sentence.format(count) for sentence, count in zip(counted, counts.sum().row(0), strict=True) if count)
