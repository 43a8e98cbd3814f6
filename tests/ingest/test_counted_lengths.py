"""Lengths counted from the stream, where the client had only re-tokenised ones."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from builders import requests, write_events

from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.stream import with_counted_lengths

RETOKENISED = {"output_tokens_source": "re-tokenised", "output_tokens": 12, "output_tokens_reported": 12}


def stream(tokens: int, *, paired: bool = False) -> list[int]:
    """Stamps of ``tokens`` tokens 15 ms apart; ``paired``: each with its blank line, and a closing pair."""
    times = [50_000 + 15_000 * k for k in range(tokens)]
    if not paired:
        return times
    stamps = [t for time_us in times for t in (time_us, time_us + 30)]
    return [*stamps, stamps[-1] + 20, stamps[-1] + 21]


@pytest.mark.parametrize("paired", [False, True])
def test_a_stream_tells_the_length(tmp_path: Path, paired: bool) -> None:
    """Re-tokenised to 12, but 12, 11 and 13 tokens came."""
    events = write_events(tmp_path / "e", [stream(n, paired=paired) for n in (12, 11, 13)])
    counted = with_counted_lengths(rows_of(requests(3, **RETOKENISED)), events).frame()
    assert counted["output_tokens"].to_list() == [12, 11, 13]
    assert counted["output_tokens_source"].unique().to_list() == ["counted stream events"]
    assert counted["output_tokens_reported"].to_list() == [12, 12, 12]


def test_events_of_several_tokens_are_not_counted(tmp_path: Path) -> None:
    """11 events for a text of 12 tokens: 9 % more than the events, above the 5 % that re-tokenising adds."""
    events = write_events(tmp_path / "e", [stream(11)] * 3)
    made = requests(3, **RETOKENISED)
    assert with_counted_lengths(rows_of(made), events).frame().equals(made)


def test_better_sources_and_failed_requests_stay_as_they_are(tmp_path: Path) -> None:
    events = write_events(tmp_path / "e", [stream(11)] * 3)
    known = requests(3, output_tokens=10)
    assert with_counted_lengths(rows_of(known), events).frame().equals(known)
    failed = requests(3, **RETOKENISED, status="error")
    assert with_counted_lengths(rows_of(failed), events).frame().equals(failed)
    assert with_counted_lengths(rows_of(failed), None).frame().equals(failed)


def test_a_request_without_events_keeps_what_it_had(tmp_path: Path) -> None:
    events = write_events(tmp_path / "e", [stream(12), stream(12), []])
    counted = with_counted_lengths(rows_of(requests(3, **RETOKENISED)), events).frame()
    assert counted["output_tokens_source"].to_list() == ["counted stream events"] * 2 + ["re-tokenised"]


def test_a_text_that_is_re_tokenised_to_nothing_had_the_tokens_of_its_stream(tmp_path: Path) -> None:
    """A single token of white space is no token of the text; readers leave its length open."""
    events = write_events(tmp_path / "e", [stream(12), stream(11), stream(1)])
    made = requests(3, **RETOKENISED).with_columns(
        output_tokens=pl.Series([12, 12, None], dtype=pl.Int64),
        output_tokens_reported=pl.Series([12, 12, 0], dtype=pl.Int64),
        output_tokens_source=pl.Series(["re-tokenised", "re-tokenised", None], dtype=pl.String),
    )
    counted = with_counted_lengths(rows_of(made), events).frame()
    assert counted["output_tokens"].to_list() == [12, 11, 1]
    assert counted["output_tokens_source"].unique().to_list() == ["counted stream events"]
