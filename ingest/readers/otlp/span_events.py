"""What the journey events of each span say: when each kind happened first, and the highest counts."""

from __future__ import annotations

import polars as pl

# Lifecycle stamp -> its event; "scheduled" and "departed" are made of several (see stamps_of_spans).
STAMPS = {
    "arrived": "api.ARRIVED",
    "queued": "journey.QUEUED",
    "first_token": "journey.FIRST_TOKEN",
    "first_response": "api.FIRST_RESPONSE_FROM_CORE",
    "finished": "journey.FINISHED",
}
STAMPED_STEPS = ("queued", "scheduled", "first_token", "finished")
# Column of a span: the highest value of this column of its events.
_HIGHEST = {
    "preemptions": "preemptions",
    "event_prompt_tokens": "prompt_tokens",
    "event_max_tokens": "max_tokens",
    "output_tokens": "output_tokens",
    "last_ns": "time_ns",
}


def content_of_spans(events: pl.DataFrame) -> pl.DataFrame:
    """``span_row`` and ``of_events``: a hash of its events, the same in any order."""
    hashed = events.select("span_row", of_events=events.drop("span_row").hash_rows())
    return hashed.group_by("span_row", maintain_order=True).agg(pl.col("of_events").sum())


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
        *(pl.col("step_id").filter(f"is_{stamp}").first().alias(f"{stamp}_step") for stamp in STAMPED_STEPS),
        *(pl.col(column).max().alias(name) for name, column in _HIGHEST.items()),
        pl.col("aborted").any(),
        pl.col("finish_status").drop_nulls().first(),
        pl.col("reason").filter("aborted").first(),
        pl.len().alias("records"),
    )
