"""Journeys: what the API server and the engine noted about one request, joined (trace-formats, section 2).

The engine's span (scope ``vllm.scheduler``) is a child of the API server's (``vllm.api``); ids are
never cut up to find each other.  Times are ns on the server's monotonic clock until the
experiment's zero is known (:func:`on_zero`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.numbers import MAX_INTEGER
from blis_replay.ingest.readers.otlp.columns import API_EVENTS, API_SCOPE, CORE_SCOPE, JOURNEY_EVENTS, TraceBatch
from blis_replay.ingest.readers.otlp.places import (
    PLACE_COLUMNS,
    no_count,
    no_time,
    placed_events,
    placed_spans,
    sound,
    with_texts_on_one_line,
    without_repeated_spans,
)
from blis_replay.ingest.readers.otlp.requests import tokens
from blis_replay.ingest.recording import JOURNEY_EVENT_SCHEMA, LIFECYCLE_SCHEMA

CORE_SPAN, API_SPAN = "llm_core", "llm_request"
_FROM_START = "span start"

# Lifecycle stamp -> its event.  The first SCHEDULED and the way a request left are told apart below.
_STAMPS = {
    "arrived": "api.ARRIVED",
    "handoff": "api.HANDOFF_TO_CORE",
    "queued": "journey.QUEUED",
    "first_token": "journey.FIRST_TOKEN",
    "first_response": "api.FIRST_RESPONSE_FROM_CORE",
    "finished": "journey.FINISHED",
}
# Order of events with one stamp.
_SEQUENCE = (*API_EVENTS[:2], *JOURNEY_EVENTS[:3], API_EVENTS[2], *JOURNEY_EVENTS[3:], *API_EVENTS[3:])
# What follows what; an abort reaches the engine after the API server has let go of the request.
_ORDER = (
    ("arrived", "handoff"),
    ("arrived", "queued"),
    ("queued", "scheduled"),
    ("scheduled", "first_token"),
    ("first_token", "first_response"),
    ("first_token", "finished"),
    ("first_response", "departed"),
)
_EVENT_COUNTS = ("step_id", "prompt_tokens", "prefill_done_tokens", "output_tokens", "max_tokens", "preemptions")
_EVENT_TEXTS = ("phase", "schedule_kind", "finish_status", "reason", "error")
_SPAN_COLUMNS = (
    *("span_key", "scope", "trace_id", "span_id", "parent_span_id", "start_ns", "dropped_events"),
    *("prompt_tokens", "completion_tokens", "max_tokens", "request_id", "model", "status_message"),
)


@dataclass(frozen=True)
class JourneyParts:
    """Spans and events of journeys, batch by batch; ``span_key`` numbers the spans through."""

    spans: pl.DataFrame
    events: pl.DataFrame


@dataclass(frozen=True)
class Journeys:
    """Journeys in order of arrival.

    ``lifecycles``: ``LIFECYCLE_SCHEMA`` with times ``*_ns`` on the server's monotonic clock; ``events``:
    ``JOURNEY_EVENT_SCHEMA`` with ``time_ns`` alike.  ``model``: that the API server named.
    ``remarks``: what is missing or odd, in words.
    """

    lifecycles: pl.DataFrame
    events: pl.DataFrame
    model: str | None
    remarks: tuple[str, ...]


def parts_of(batch: TraceBatch, file: int, files: Sequence[RecordedFile], first_key: int) -> JourneyParts:
    """The journey spans and events of a batch; what makes no sense is rejected.  Keys start at ``first_key``."""
    names = (*JOURNEY_EVENTS, *API_EVENTS)
    stamps = ("name", "time_ns", "monotonic_ns", "monotonic_s")
    found = placed_events(batch, file, names, (*stamps, *_EVENT_COUNTS, *_EVENT_TEXTS))
    events = with_texts_on_one_line(found, _EVENT_TEXTS).with_columns(
        (pl.col("span_row") + first_key).alias("span_key"),
        _monotonic_ns().alias("monotonic_ns"),
    )
    problems = [
        *no_count((*_EVENT_COUNTS, "monotonic_ns")),
        no_time("time_ns"),
        (pl.col("monotonic_ns").is_null(), pl.lit("an event without a usable monotonic time")),
    ]
    kept = sound(events, problems, files)
    columns = ("span_key", "name", "time_ns", "monotonic_ns", *_EVENT_COUNTS, *_EVENT_TEXTS)
    return JourneyParts(_spans(batch, file, first_key, kept), kept.select(columns))


def joined(
    parts: JourneyParts, snapshots: pl.DataFrame, offset_ns: int | None, files: Sequence[RecordedFile]
) -> Journeys:
    """Each API span with its engine span as one journey.

    ``snapshots``: ``SNAPSHOT_SCHEMA``, which know prefix-cache hits; ``offset_ns``: epoch less monotonic clock,
    if known.  Spans that were recorded twice are rejected in their files.
    """
    spans = without_repeated_spans(parts.spans, files).select(_SPAN_COLUMNS)
    events = parts.events
    if len(spans) < len(parts.spans):
        events = events.join(spans.select("span_key"), on="span_key", how="semi")
    spans = spans.join(_stamps(events), on="span_key", how="left")
    core = spans.filter(pl.col("scope") == CORE_SCOPE)
    api = spans.filter(pl.col("scope") == API_SCOPE).drop("parent_span_id")
    both = core.join(
        api,
        left_on=["trace_id", "parent_span_id"],
        right_on=["trace_id", "span_id"],
        how="full",
        suffix="_api",
    )
    hits = _cache_hits(snapshots)
    lifecycles = _lifecycles(both.join(hits, left_on="request_id", right_on="request_id", how="left"), offset_ns)
    keyed = pl.concat(
        [
            lifecycles.select("journey", pl.col(key).alias("span_key")).drop_nulls("span_key")
            for key in ("span_key", "span_key_api")
        ]
    )
    model = spans["model"].drop_nulls().mode().sort()
    return Journeys(
        lifecycles.drop("span_key", "span_key_api"),
        _in_order(events, keyed),
        str(model[0]) if len(model) else None,
        _remarks(lifecycles),
    )


def _in_order(events: pl.DataFrame, keyed: pl.DataFrame) -> pl.DataFrame:
    """The events by journey (``keyed``: of each span) and time, ``JOURNEY_EVENT_SCHEMA`` with ``time_ns``."""
    turn = pl.col("name").cast(pl.String).cast(pl.Enum(_SEQUENCE))
    kept = [name for name in JOURNEY_EVENT_SCHEMA if name in events.columns]
    narrow = events.select("span_key", pl.col("monotonic_ns").alias("time_ns"), turn.alias("event"), *kept)
    ordered = narrow.join(keyed, on="span_key").sort("journey", "time_ns", "event")
    columns = ["time_ns" if name == "time_us" else name for name in JOURNEY_EVENT_SCHEMA]
    return ordered.select(columns).with_columns(pl.col("event").cast(pl.String))


def on_zero(journeys: Journeys, zero_us: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """``(LIFECYCLE_SCHEMA, JOURNEY_EVENT_SCHEMA)`` from the zero at which the monotonic clock shows ``zero_us``."""

    def placed(frame: pl.DataFrame, schema: dict[str, type[pl.DataType]]) -> pl.DataFrame:
        moved = frame.with_columns(
            (pl.col(name) // 1000 - zero_us).alias(name.removesuffix("_ns") + "_us")
            for name in frame.columns
            if name.endswith("_ns")
        )
        return moved.select(pl.col(name).cast(kind) for name, kind in schema.items())

    return placed(journeys.lifecycles, LIFECYCLE_SCHEMA), placed(journeys.events, JOURNEY_EVENT_SCHEMA)


def _monotonic_ns() -> pl.Expr:
    """The monotonic time: in ns, where 0 means none, or in seconds as a double, which rounds to the same ns."""
    rounded = (pl.col("monotonic_s") * 1e9).round()
    usable = rounded.is_finite() & rounded.is_between(0, MAX_INTEGER / 2)
    seconds = pl.when(usable).then(rounded).cast(pl.Int64)
    return pl.coalesce(pl.when(pl.col("monotonic_ns") != 0).then(pl.col("monotonic_ns")), seconds)


def _spans(batch: TraceBatch, file: int, first_key: int, kept: pl.DataFrame) -> pl.DataFrame:
    """The journey spans of a batch with their key and what ``without_repeated_spans`` needs; ``kept``: their events."""
    events = batch.events.select("span_row").with_columns(content=batch.events.drop("span_row").hash_rows())
    of_events = events.group_by("span_row").agg(pl.col("content").sum().alias("of_events"))
    spans = placed_spans(batch, file).with_row_index("span_row").with_columns(pl.col("span_row").cast(pl.Int64))
    own = batch.spans.drop("record", "span").hash_rows()
    journeys = (
        spans.with_columns(own.alias("own"), (pl.col("span_row") + first_key).alias("span_key"))
        .join(of_events, on="span_row", how="left", maintain_order="left")
        .join(
            kept.group_by("span_key").agg(pl.len().alias("records")), on="span_key", how="left", maintain_order="left"
        )
        .filter(is_journey_span())
        .with_columns(
            pl.struct("own", "of_events").hash().alias("content"),
            pl.col("records").fill_null(0),
            pl.when(~no_time("start_ns")[0]).then("start_ns"),  # less a negative offset it would not fit int64
            *(tokens(name).alias(name) for name in ("prompt_tokens", "completion_tokens", "max_tokens")),
        )
        .select(*PLACE_COLUMNS, "content", "records", *_SPAN_COLUMNS)
    )
    return with_texts_on_one_line(journeys, ("request_id", "model", "status_message"))


def is_journey_span() -> pl.Expr:
    """Whether a span is one half of a journey."""
    core = (pl.col("scope") == CORE_SCOPE) & (pl.col("name") == CORE_SPAN)
    return core | ((pl.col("scope") == API_SCOPE) & (pl.col("name") == API_SPAN))


def _stamps(events: pl.DataFrame) -> pl.DataFrame:
    """One row a span: when and in which step each lifecycle event was, and what the events say of the request."""
    name, kind = pl.col("name"), pl.col("schedule_kind")
    when = {column: name == event for column, event in _STAMPS.items()}
    # The event of the first admission may have been dropped, and a later SCHEDULED be left.
    first = (kind == "FIRST") | (kind.is_null() & (pl.col("preemptions") == 0))
    when["scheduled"] = (name == "journey.SCHEDULED") & first
    when["departed"] = name.is_in(["api.DEPARTED", "api.ABORTED"])
    aborted = name == "api.ABORTED"
    steps = ("queued", "scheduled", "first_token", "finished")
    return (
        events.sort("span_key", "monotonic_ns")
        .group_by("span_key")
        .agg(
            *(pl.col("monotonic_ns").filter(chosen).first().alias(f"{stamp}_ns") for stamp, chosen in when.items()),
            *(pl.col("step_id").filter(when[stamp]).first().alias(f"{stamp}_step") for stamp in steps),
            pl.col("finish_status").drop_nulls().first(),
            aborted.any().alias("aborted"),
            pl.coalesce("reason", "error").filter(aborted).first().alias("reason"),
            pl.col("preemptions").max(),
            pl.col("prompt_tokens").max().alias("event_prompt_tokens"),
            pl.col("max_tokens").max().alias("event_max_tokens"),
            pl.col("output_tokens").max(),
        )
    )


def _cache_hits(snapshots: pl.DataFrame) -> pl.DataFrame:
    """Engine request id -> tokens that its first admission found in the prefix cache."""
    hit = pl.col("prompt_tokens") - pl.col("effective_prompt_tokens")
    known = snapshots.with_columns(hit.alias("cached_prompt_tokens")).filter(hit >= 0)
    return known.sort("step_id").group_by("request_id").agg(pl.col("cached_prompt_tokens").first())


def _lifecycles(both: pl.DataFrame, offset_ns: int | None) -> pl.DataFrame:
    """``LIFECYCLE_SCHEMA`` with times in ns, and the keys of the two spans."""
    started_ns = pl.col("start_ns_api") - offset_ns if offset_ns is not None else pl.lit(None, pl.Int64)
    arrived = pl.col("arrived_ns_api")
    columns = {
        "request_index": pl.lit(None, pl.Int64),
        "api_request_id": pl.col("request_id_api"),
        "core_request_id": pl.col("request_id"),
        "arrived_ns": pl.coalesce(arrived, started_ns),
        "arrived_stamp": pl.when(arrived.is_not_null())
        .then(pl.lit(_STAMPS["arrived"]))
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
    ordered = both.with_columns(expression.alias(name) for name, expression in columns.items()).sort(
        pl.coalesce("arrived_ns", "queued_ns"), "trace_id", nulls_last=True, maintain_order=True
    )
    numbered = ordered.with_row_index("journey").with_columns(pl.col("journey").cast(pl.Int64))
    names = [name.removesuffix("_us") + "_ns" if name.endswith("_us") else name for name in LIFECYCLE_SCHEMA]
    return numbered.select(*names, "span_key", "span_key_api")


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


def _remarks(lifecycles: pl.DataFrame) -> tuple[str, ...]:
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
    counts = lifecycles.select(flag.sum().alias(sentence) for sentence, flag in counted.items()).row(0)
    return tuple(sentence.format(count) for sentence, count in zip(counted, counts, strict=True) if count)
