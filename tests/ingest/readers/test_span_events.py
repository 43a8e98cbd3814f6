"""What the events of a span say of it: the earliest stamp of each kind, the highest counts, in whatever order."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.readers.otlp.journeys import STAMPS, stamps_of_spans
from blis_replay.ingest.scan.otlp_columns import EVENT_SEQUENCE, JOURNEY_EVENT_SCHEMA

counts = st.none() | st.integers(0, 9)
events = st.fixed_dictionaries(
    {
        "span_row": st.integers(0, 3),
        "name": st.sampled_from(EVENT_SEQUENCE),
        "monotonic_ns": st.integers(0, 5),
        "time_ns": counts,
        "step_id": counts,
        "preemptions": counts,
        "output_tokens": counts,
        "schedule_kind": st.sampled_from([None, "FIRST", "RESUME"]),
        "finish_status": st.sampled_from([None, "length"]),
        "reason": st.sampled_from([None, "client gone"]),
        "error": st.sampled_from([None, "out of memory"]),
    }
)


def frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Events by span, as a file has them."""
    return pl.DataFrame(sorted(rows, key=lambda row: row["span_row"]), schema=JOURNEY_EVENT_SCHEMA)


def is_first(row: dict[str, Any]) -> bool:
    return row["schedule_kind"] == "FIRST" or (row["schedule_kind"] is None and row["preemptions"] == 0)


def told_one_by_one(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The same of one span, event after event."""
    rows = sorted(rows, key=lambda row: row["monotonic_ns"])
    chosen = {stamp: [row for row in rows if row["name"] == event] for stamp, event in STAMPS.items()}
    chosen["scheduled"] = [row for row in rows if row["name"] == "journey.SCHEDULED" and is_first(row)]
    aborts = [row for row in rows if row["name"] == "api.ABORTED"]
    chosen["departed"] = [row for row in rows if row["name"] in ("api.DEPARTED", "api.ABORTED")]
    statuses = [row["finish_status"] for row in rows if row["finish_status"]]
    said = {f"{stamp}_ns": found[0]["monotonic_ns"] if found else None for stamp, found in chosen.items()}
    said |= {
        f"{stamp}_step": chosen[stamp][0]["step_id"] if chosen[stamp] else None
        for stamp in ("queued", "scheduled", "first_token", "finished")
    }
    for name, column in {"preemptions": "preemptions", "output_tokens": "output_tokens", "last_ns": "time_ns"}.items():
        said[name] = max((row[column] for row in rows if row[column] is not None), default=None)
    reason = (aborts[0]["reason"] or aborts[0]["error"]) if aborts else None
    return said | {
        "finish_status": statuses[0] if statuses else None,
        "aborted": bool(aborts),
        "reason": reason,
        "records": len(rows),
    }


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=25))
def test_spans_are_told_as_by_one_event_after_the_other(rows: list[dict[str, Any]]) -> None:
    of_events = frame(rows)
    found = stamps_of_spans(of_events)
    assert found["span_row"].to_list() == sorted({row["span_row"] for row in rows})
    for said in found.rows(named=True):
        own = [row for row in of_events.rows(named=True) if row["span_row"] == said["span_row"]]
        expected = told_one_by_one(own)
        assert {name: said[name] for name in expected} == expected
