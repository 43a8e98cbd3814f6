"""What the journey events of each span say, one row a span: when what happened first, the highest counts.

Events of one span stand together, so that a span is a slice of them and no table of groups is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Int64s

# Lifecycle stamp -> its event.  The first SCHEDULED and the way a request left are columns apart below.
STAMPS = {
    "arrived": "api.ARRIVED",
    "handoff": "api.HANDOFF_TO_CORE",
    "queued": "journey.QUEUED",
    "first_token": "journey.FIRST_TOKEN",
    "first_response": "api.FIRST_RESPONSE_FROM_CORE",
    "finished": "journey.FINISHED",
}
STAMPED_STEPS = ("queued", "scheduled", "first_token", "finished")
# Column of the spans -> of their events, none of which is negative.
_HIGHEST = {
    "preemptions": "preemptions",
    "event_prompt_tokens": "prompt_tokens",
    "event_max_tokens": "max_tokens",
    "output_tokens": "output_tokens",
    "last_ns": "time_ns",
}


_NONE = -1


@dataclass(frozen=True)
class _Spans:
    """Which events are whose: span s has those from row ``begins[s]`` on, the event in a row is of span ``of[row]``."""

    begins: Int64s
    of: Int64s

    def first(self, chosen: Bools) -> Int64s:
        """The row of the first chosen event of each span, ``_NONE`` where none is."""
        rows = np.flatnonzero(chosen)
        first = np.full(len(self.begins), _NONE)
        first[self.of[rows[::-1]]] = rows[::-1]  # what is written last stays
        return first

    def highest(self, values: pl.Series) -> Int64s:
        """The highest value of each span, ``_NONE`` where none is known."""
        return np.maximum.reduceat(values.to_numpy(), self.begins)


def content_of_spans(events: pl.DataFrame) -> pl.DataFrame:
    """``span_row`` and ``of_events``: a hash of all there is of its events, in whatever order."""
    rows = events["span_row"].to_numpy()
    spans = _spans_of(rows)
    hashes = events.drop("span_row").hash_rows().to_numpy()
    return pl.DataFrame({"span_row": rows[spans.begins], "of_events": np.add.reduceat(hashes, spans.begins)})


def stamps_of_spans(events: pl.DataFrame) -> pl.DataFrame:
    """``span_row``, when (``*_ns``, monotonic) and in which step each lifecycle event was, and what events say of it.

    ``events``: sound ones of ``JOURNEY_EVENT_SCHEMA``, by span, each with its ``monotonic_ns``.
    """
    columns = _stamp_columns(_by_time(events))
    rows, time_ns, step = (columns[name].to_numpy() for name in ("span_row", "monotonic_ns", "step_id"))
    spans = _spans_of(rows)
    at = {stamp: spans.first(columns[f"is_{stamp}"].to_numpy()) for stamp in (*STAMPS, "scheduled", "departed")}
    counts = {
        **{f"{stamp}_ns": _taken(time_ns, first) for stamp, first in at.items()},
        **{f"{stamp}_step": _taken(step, at[stamp]) for stamp in STAMPED_STEPS},
        **{name: spans.highest(columns[column]) for name, column in _HIGHEST.items()},
    }
    aborted, finished = (spans.first(columns[name].to_numpy()) for name in ("is_aborted", "has_finish_status"))
    said = pl.DataFrame({"span_row": rows[spans.begins], **counts, "aborted": aborted != _NONE}).with_columns(
        pl.when(pl.col(name) != _NONE).then(name) for name in counts
    )
    texts = {"finish_status": finished, "reason": aborted}
    return said.with_columns(
        *(columns[name].gather(_or_null(first)) for name, first in texts.items()),
        pl.Series("records", np.diff(spans.begins, append=len(columns))),
    )


def _stamp_columns(events: pl.DataFrame) -> pl.DataFrame:
    """The columns that stamps are made of: numbers (``_NONE`` for null) and which events give which stamp."""
    name, kind = pl.col("name"), pl.col("schedule_kind")
    # The event of the first admission may have been dropped, and a later SCHEDULED be left.
    first = (kind == "FIRST") | (kind.is_null() & (pl.col("preemptions") == 0))
    when = {stamp: name == event for stamp, event in STAMPS.items()}
    when["scheduled"] = (name == "journey.SCHEDULED") & first.fill_null(False)
    when["aborted"] = name == "api.ABORTED"
    when["departed"] = (name == "api.DEPARTED") | when["aborted"]
    return events.select(
        "span_row",
        *(pl.col(column).fill_null(_NONE) for column in ("monotonic_ns", "step_id", *_HIGHEST.values())),
        *(chosen.alias(f"is_{stamp}") for stamp, chosen in when.items()),
        "finish_status",
        pl.col("finish_status").is_not_null().alias("has_finish_status"),
        pl.coalesce("reason", "error").alias("reason"),
    )


def _by_time(events: pl.DataFrame) -> pl.DataFrame:
    """The events by span and time, as nearly all files have them."""
    span, time_ns = (events[name].to_numpy() for name in ("span_row", "monotonic_ns"))
    if ((np.diff(span) > 0) | (np.diff(time_ns) >= 0)).all():
        return events
    return events[np.lexsort((time_ns, span))]


def _spans_of(rows: Int64s) -> _Spans:
    begin = np.diff(rows, prepend=-1) != 0
    return _Spans(np.flatnonzero(begin), np.cumsum(begin) - 1)


def _or_null(rows: Int64s) -> pl.Series:
    series = pl.Series(rows)
    return series.set(series == _NONE, None)


def _taken(values: Int64s, rows: Int64s) -> Int64s:
    """The values in these rows, ``_NONE`` for no row."""
    return np.where(rows == _NONE, _NONE, values[rows]) if len(values) else rows
