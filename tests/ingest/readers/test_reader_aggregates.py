"""inference-perf's aggregate reports: seconds become microseconds, median becomes p50."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import recorded_file
from hypothesis import given, settings
from mutations import damaged, mutated

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.clients.inference_perf import read_aggregates
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.served import published

REPORT: dict[str, Any] = {
    "load_summary": {"count": 3, "send_duration": 1.5, "requested_rate": 2.0, "achieved_rate": 2.0},
    "successes": {
        "count": 2,
        "latency": {"request_latency": {"mean": 0.25, "median": 0.2}, "time_to_first_token": None},
        "prompt_len": {"mean": 12.0},
        "output_len": {"p50": 7},
    },
    "failures": {"count": 1},
}


def test_every_number_has_stage_metric_statistic_and_its_unit(tmp_path: Path) -> None:
    frame = read_aggregates(recorded_file(tmp_path, json.dumps(REPORT).encode()), stage=0)
    assert set(frame.rows()) == {
        (0, "requests", "sent", 3.0),
        (0, "requests", "succeeded", 2.0),
        (0, "requests", "failed", 1.0),
        (0, "requested_rate", "mean", 2.0),
        (0, "achieved_rate", "mean", 2.0),
        (0, "send_duration", "mean", 1_500_000.0),
        (0, "e2e", "mean", 250_000.0),
        (0, "e2e", "p50", 200_000.0),
        (0, "prompt_tokens", "mean", 12.0),
        (0, "output_tokens_reported", "p50", 7.0),
    }
    assert published(frame, 0, "requests", "sent") == 3
    assert published(frame, 1, "requests", "sent") is None


def test_what_is_no_number_is_rejected_by_name(tmp_path: Path) -> None:
    report = '{"successes": {"count": "9", "latency": {"request_latency": {"mean": NaN, "max": 1, "min": true}}}}'
    file = recorded_file(tmp_path, report.encode())
    assert read_aggregates(file)["statistic"].to_list() == ["max"]
    assert [place for place, _why in file.tally.rejected] == ["requests.succeeded", "e2e.mean", "e2e.min"]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"a": ', b"\x00\x01\xff", b"[" * 100_000, b'{"a":' * 100_000, b"null"]
)
def test_broken_json_is_a_recording_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(RecordingError):
        read_aggregates(recorded_file(tmp_path, content))


@settings(max_examples=100, deadline=None)
@given(content=mutated(REPORT).map(lambda report: json.dumps(report).encode()) | damaged(REPORT))
def test_any_report_is_finite_rows_or_a_recording_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    try:
        frame = read_aggregates(recorded_file(tmp_path_factory.mktemp("any"), content))
    except RecordingError as error:
        assert "\n" not in str(error)
    else:
        assert frame["value"].is_finite().all()


def test_the_published_summary_of_34b_general(data_pack: Path) -> None:
    """trace-formats, section 4.4: mean E2E 4.0925 s, TTFT 0.0516 s, reported ITL 8.1274 ms, 16,800 requests."""
    folder = data_pack / "h100" / "20260218-150304-codellama-34b-tp2-general" / "results"
    frame = read_aggregates(RecordedFile(folder / "summary_lifecycle_metrics.json", "s"))
    mean = {row[1]: row[3] for row in frame.rows() if row[2] == "mean"}
    assert mean["e2e"] == pytest.approx(4_092_500, abs=100)
    assert mean["ttft"] == pytest.approx(51_600, abs=50)
    assert mean["itl_reported"] == pytest.approx(8127.4, abs=0.1)
    assert published(frame, -1, "requests", "sent") == 16_800


def test_a_time_that_is_infinite_in_microseconds_is_rejected(tmp_path: Path) -> None:
    """1e308 s is a finite number, and 1e314 us is none."""
    report = {"successes": {"latency": {"request_latency": {"mean": 1e308, "max": -1e300, "median": 0.5}}}}
    file = recorded_file(tmp_path, json.dumps(report).encode())
    assert read_aggregates(file).rows() == [(-1, "e2e", "p50", 500_000.0)]
    assert [place for place, _reason in file.tally.rejected] == ["e2e.mean", "e2e.max"]
