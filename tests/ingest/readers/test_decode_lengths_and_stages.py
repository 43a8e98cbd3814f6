"""Decode lengths by source, load stages by count and by time, step clocks."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from builders import requests, run_of_steps

from blis_replay.ingest.readers.decode_lengths import with_decode_lengths
from blis_replay.ingest.readers.load_stages import stage_of_requests
from blis_replay.ingest.readers.otlp_steps import READ_STEP_SCHEMA
from blis_replay.ingest.readers.requests_frame import frame_of, in_send_order, request_row
from blis_replay.ingest.readers.step_clock import align_steps
from blis_replay.ingest.recording import REQUEST_SCHEMA, STEP_SCHEMA, Clock, Stage, empty_frame

STAGES = (Stage(0, 8.0, 600_000_000), Stage(1, 20.0, 600_000_000))


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"usage_output_tokens": 61, "max_tokens": 64, "ignore_eos": True}, (61, "server usage")),
        ({"max_tokens": 64, "ignore_eos": True, "output_tokens_reported": 9}, (64, "max_tokens with ignore_eos")),
        ({"max_tokens": 64, "output_tokens_reported": 9}, (64, "max_tokens with ignore_eos")),
        ({"max_tokens": 64, "ignore_eos": False, "output_tokens_reported": 9}, (9, "re-tokenised")),
        ({"output_tokens_reported": 195}, (248, "configured with ignore_eos")),
        ({"output_tokens_reported": 0, "status": "timeout"}, (248, "configured with ignore_eos")),
        ({"usage_output_tokens": 0}, (248, "configured with ignore_eos")),
    ],
)
def test_the_best_source_of_a_decode_length_wins(known: dict[str, object], expected: tuple[int, str]) -> None:
    frame = frame_of([request_row(**{"status": "ok", **known})])
    found = with_decode_lengths(frame, configured_tokens=248, ignore_eos=True)
    assert found.select("output_tokens", "output_tokens_source").row(0) == expected


def test_without_ignore_eos_the_configured_length_is_not_used() -> None:
    frame = frame_of([request_row(status="ok", output_tokens_reported=195), request_row(status="error")])
    found = with_decode_lengths(frame, configured_tokens=248, ignore_eos=None)
    assert found.select("output_tokens", "output_tokens_source").rows() == [(195, "re-tokenised"), (None, None)]


def test_send_order_is_stable_and_starts_at_zero() -> None:
    frame = frame_of([request_row(request_id=name, sent_us=sent) for name, sent in (("b", 7), ("a", 5), ("c", 7))])
    ordered, order, zero_us = in_send_order(frame)
    assert ordered.select("request_index", "request_id", "arrival_us").rows() == [(0, "a", 0), (1, "b", 2), (2, "c", 2)]
    assert (order.tolist(), zero_us) == ([1, 0, 2], 5)


def test_the_counts_of_the_stage_reports_decide_where_they_add_up() -> None:
    arrivals = np.arange(5) * 1_000_000
    stages = stage_of_requests(arrivals, STAGES, [2, 3])
    assert stages is not None
    assert stages.tolist() == [0, 0, 1, 1, 1]


def test_without_counts_a_stage_ends_at_its_pause() -> None:
    """Two stages of 600 s, a pause of 5 s: the first ends late, at 600.2 s, the second begins at 605.2 s."""
    arrivals = np.array([0, 300, 599, 600.2, 605.2, 700, 1204]) * 1e6
    stages = stage_of_requests(arrivals.astype(np.int64), STAGES, [None, None])
    assert stages is not None
    assert stages.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_without_a_pause_a_stage_ends_when_it_was_configured_to() -> None:
    arrivals = (np.arange(12_000) * 100_000).astype(np.int64)
    stages = stage_of_requests(arrivals, STAGES, [3, 4])
    assert stages is not None
    assert int((stages == 0).sum()) == 6000


def test_without_configured_stages_there_are_none() -> None:
    assert stage_of_requests(np.zeros(3, np.int64), (), []) is None


def steps(*starts_us: int, epoch_offset_us: int = 0) -> pl.DataFrame:
    rows = {
        "step_id": list(range(1, len(starts_us) + 1)),
        "ts_start_ns": [start * 1000 for start in starts_us],
        "ts_end_ns": [start * 1000 + 500 for start in starts_us],
        "epoch_ns": [(start + epoch_offset_us) * 1000 + 900 for start in starts_us],
    }
    return pl.DataFrame(
        {name: rows.get(name, [0] * len(starts_us)) for name in READ_STEP_SCHEMA}, schema=READ_STEP_SCHEMA
    )


NO_REQUESTS = empty_frame(REQUEST_SCHEMA)


def test_the_epoch_stamps_of_the_events_bridge_the_clocks() -> None:
    """Step clock 5,000,000 is epoch 1,000,000,005,000,000; the first send is 4.9 s after the zero of the step clock."""
    client = Clock("client", "epoch", 1_000_000_004_900_000)
    records = steps(5_000_000, 5_010_000, epoch_offset_us=10**15)
    frame, clock, remark = align_steps(records, client, NO_REQUESTS, False)
    assert frame["start_us"].to_list() == [100_000, 110_000]
    assert list(frame.columns) == list(STEP_SCHEMA)
    expected = Clock("step", "monotonic", 4_900_000, placed="bridged by pairs", stamped_zero_us=4_900_000)
    assert (clock, remark) == (expected, "")


@pytest.mark.parametrize("sequential", [True, False])
def test_constructed_stamps_bridge_nothing(sequential: bool) -> None:
    """First step stamped on the first send, as in the published H100 records; or span ids that count."""
    zero_us = 10**15 + 5_000_000 if not sequential else 10**15 + 77
    records = steps(5_000_000, 5_010_000, epoch_offset_us=10**15)
    frame, clock, remark = align_steps(records, Clock("client", "epoch", zero_us), NO_REQUESTS, sequential)
    assert frame["start_us"].to_list() == [0, 10_000]
    assert clock is not None
    assert (clock.zero_us, clock.constructed, clock.placed) == (5_000_000, True, "not known")
    assert clock.stamped_zero_us == zero_us - 10**15
    assert "not known (fewer than 50 steps" in remark


def test_two_monotonic_clocks_are_one_where_they_overlap() -> None:
    client, sends = Clock("client", "monotonic", 4_900_000), requests(2)
    frame, clock, _remark = align_steps(steps(5_000_000), client, sends, False)
    assert clock is not None
    assert (frame["start_us"].to_list(), clock.placed) == ([100_000], "one clock")
    frame, _clock, remark = align_steps(steps(5_000_000), Clock("client", "monotonic", 10**12), sends, False)
    assert frame["start_us"].to_list() == [0]
    assert remark


@pytest.mark.parametrize("said_later_us", [5_000, 3_000_000])
def test_stamps_that_the_depth_contradicts_are_not_believed(said_later_us: int) -> None:
    """The epoch stamps put the steps ``said_later_us`` too late; below a step of 10 ms they would be left alone."""
    traffic, records = run_of_steps(rate_per_s=10.0, seconds=60, later_us=0)
    raw = steps(*(records["start_us"] + 5_000_000), epoch_offset_us=10**15 - 5_000_000 + said_later_us).with_columns(
        records["running_depth"], records["waiting_depth"]
    )
    frame, clock, remark = align_steps(raw, Clock("client", "epoch", 10**15), traffic, False)
    assert clock is not None
    assert (clock.placed, remark) == ("bridged by pairs" if said_later_us < 10_000 else "estimated from depth", "")
    shift_us = int((frame["start_us"] - records["start_us"]).mean() or 0)  # type: ignore[arg-type]
    assert abs(shift_us) <= (clock.uncertainty_us or 5_000)
