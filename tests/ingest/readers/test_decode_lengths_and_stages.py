"""Decode lengths by source, load stages by count and by time, step clocks."""

from __future__ import annotations

import numpy as np
import pytest
from builders import read_frame

from blis_replay.ingest.readers.clients.inference_perf import stage_of_requests
from blis_replay.ingest.readers.requests import in_send_order
from blis_replay.ingest.recording import Stage
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.stream import with_decode_lengths

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
    frame = read_frame([dict(**{"status": "ok", **known})])
    found = with_decode_lengths(frame, configured_tokens=248, ignore_eos=True)
    assert found.select("output_tokens", "output_tokens_source").row(0) == expected


def test_without_ignore_eos_the_configured_length_is_not_used() -> None:
    frame = read_frame([{"status": "ok", "output_tokens_reported": 195}, {"status": "error"}])
    found = with_decode_lengths(frame, configured_tokens=248, ignore_eos=None)
    assert found.select("output_tokens", "output_tokens_source").rows() == [(195, "re-tokenised"), (None, None)]


def test_send_order_is_stable_and_starts_at_zero() -> None:
    frame = read_frame([{"request_id": name, "sent_us": sent} for name, sent in (("b", 7), ("a", 5), ("c", 7))])
    ordered, order, zero_us = in_send_order(rows_of(frame))
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
