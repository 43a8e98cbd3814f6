"""What the journey events of each span say, one row a span: when what happened first, the highest counts.

Events of one span stand together, so that a span is a slice of them and no table of groups is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

# Lifecycle stamp -> its event.  The first SCHEDULED and the way a request left are told apart below.
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

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class _Spans:
    """Which events are whose: span s has those from row ``begins[s]`` on, the event in a row is of span ``of[row]``."""

    begins: Int64s
    of: Int64s

    def first(self, chosen: pl.Series) -> pl.Series:
        """The row of the first chosen event of each span, null where none is."""
        rows = np.flatnonzero(chosen.fill_null(False).to_numpy())
        first = np.full(len(self.begins), -1)
        first[self.of[rows[::-1]]] = rows[::-1]  # what is written last stays
        return _known(first)

    def highest(self, values: pl.Series) -> pl.Series:
        """The highest value of each span, null where none is known."""
        return _known(np.maximum.reduceat(values.fill_null(-1).to_numpy(), self.begins))


def content_of_spans(events: pl.DataFrame) -> pl.DataFrame:
    """``span_row`` and ``of_events``: a hash of all there is of its events, in whatever order."""
    spans = _spans_of(events["span_row"].to_numpy())
    hashes = events.drop("span_row").hash_rows().to_numpy()
    return pl.DataFrame(
        {"span_row": events["span_row"].gather(spans.begins), "of_events": np.add.reduceat(hashes, spans.begins)},
        schema_overrides={"of_events": pl.UInt64},
    )


def stamps_of_spans(events: pl.DataFrame) -> pl.DataFrame:
    """``span_row``, when (``*_ns``, monotonic) and in which step each lifecycle event was, and what events say of it.

    ``events``: sound ones of ``JOURNEY_EVENT_SCHEMA``, by span, each with its ``monotonic_ns``.
    """
    events = _by_time(events)
    spans = _spans_of(events["span_row"].to_numpy())
    at = {stamp: spans.first(chosen) for stamp, chosen in _chosen(events).items()}
    aborted = spans.first(events["name"] == "api.ABORTED")
    return pl.DataFrame(
        {
            "span_row": events["span_row"].gather(spans.begins),
            **{f"{stamp}_ns": events["monotonic_ns"].gather(rows) for stamp, rows in at.items()},
            **{f"{stamp}_step": events["step_id"].gather(at[stamp]) for stamp in STAMPED_STEPS},
            "finish_status": events["finish_status"].gather(spans.first(events["finish_status"].is_not_null())),
            "aborted": aborted.is_not_null(),
            "reason": events.select(pl.coalesce("reason", "error")).to_series().gather(aborted),
            **{name: spans.highest(events[column]) for name, column in _HIGHEST.items()},
            "records": np.diff(spans.begins, append=len(events)),
        }
    )


def _chosen(events: pl.DataFrame) -> dict[str, pl.Series]:
    """Lifecycle stamp -> which events make it."""
    name, kind = pl.col("name"), pl.col("schedule_kind")
    # The event of the first admission may have been dropped, and a later SCHEDULED be left.
    first = (kind == "FIRST") | (kind.is_null() & (pl.col("preemptions") == 0))
    when = {stamp: name == event for stamp, event in STAMPS.items()}
    when["scheduled"] = (name == "journey.SCHEDULED") & first
    when["departed"] = (name == "api.DEPARTED") | (name == "api.ABORTED")
    return events.select(chosen.alias(stamp) for stamp, chosen in when.items()).to_dict()


def _by_time(events: pl.DataFrame) -> pl.DataFrame:
    """The events by span and time, as nearly all files have them."""
    span, time_ns = (events[name].to_numpy() for name in ("span_row", "monotonic_ns"))
    if ((np.diff(span) > 0) | (np.diff(time_ns) >= 0)).all():
        return events
    return events[np.lexsort((time_ns, span))]


def _spans_of(rows: Int64s) -> _Spans:
    begin = np.diff(rows, prepend=-1) != 0
    return _Spans(np.flatnonzero(begin), np.cumsum(begin) - 1)


def _known(values: Int64s) -> pl.Series:
    """The values, null where they are negative."""
    series = pl.Series(values, dtype=pl.Int64)
    return series.set(series < 0, None) if (values < 0).any() else series
