"""AIPerf's records and summary: units, warm-up, failures, lengths asked for, generations, damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import recorded_file
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.readers.clients import aiperf
from blis_replay.ingest.readers.clients.aiperf import read_requests, recognises
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import RequestsRead
from blis_replay.ingest.recording import Stage

START_NS = 1_770_000_000_000_000_000


def metric(value: object, unit: str = "ms") -> dict[str, object]:
    return {"value": value, "unit": unit}


def record(i: int = 0, **changed: Any) -> dict[str, Any]:
    """Request i is sent at i s; its events with text come 50, 70 and 100 ms later, its stream ends after 101 ms."""
    start = START_NS + i * 1_000_000_000
    metadata = {"x_request_id": f"r{i}", "request_start_ns": start, "request_end_ns": start + 101_000_000}
    made = {
        "metadata": {**metadata, "benchmark_phase": "profiling", "was_cancelled": False},
        "metrics": {
            "time_to_first_token": metric(50.0),
            "inter_chunk_latency": metric([20.0, 30.0]),
            "request_latency": metric(100.0),
            "input_sequence_length": metric(80, "tokens"),
            "output_sequence_length": metric(4, "tokens"),
        },
        "error": None,
    }
    return {**made, **changed}


def with_metrics(i: int = 0, **metrics: Any) -> dict[str, Any]:
    return record(i, metrics={**record(i)["metrics"], **metrics})


def read(folder: Path, *records: object) -> tuple[RequestsRead, RecordedFile]:
    file = recorded_file(folder, b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in records))
    return read_requests(file, folder / "stamps"), file


def summary(folder: Path, **document: Any) -> RequestsRead:
    return aiperf.read_summary(recorded_file(folder, document), folder / "stamps")


def test_a_record(tmp_path: Path) -> None:
    """E2E goes to the last event with text, not to the end of the stream."""
    found, _file = read(tmp_path, record())
    request = found.frame.row(0, named=True)
    assert (request["sent_us"], request["ttft_us"], request["e2e_us"]) == (START_NS // 1000, 50_000, 100_000)
    assert (request["prompt_tokens"], request["output_tokens_reported"], request["usage_output_tokens"]) == (
        80,
        4,
        None,
    )
    assert (request["request_id"], request["status"], found.clock_kind) == ("r0", "ok", "epoch")
    stamps = np.fromfile(tmp_path / "stamps", np.int64) - START_NS // 1000
    assert stamps.tolist() == [50_000, 70_000, 100_000]


def test_units_are_taken_from_the_metric(tmp_path: Path) -> None:
    made = with_metrics(time_to_first_token=metric(0.05, "sec"), request_latency=metric(100_000_000, "ns"))
    assert read(tmp_path, made)[0].frame.select("ttft_us", "e2e_us").row(0) == (50_000, 100_000)


def test_the_servers_usage_wins_over_the_clients_counts(tmp_path: Path) -> None:
    usage = {"usage_prompt_tokens": metric(81, "tokens"), "usage_completion_tokens": metric(3, "tokens")}
    request = read(tmp_path, with_metrics(**usage))[0].frame.row(0, named=True)
    assert (request["prompt_tokens"], request["usage_output_tokens"], request["output_tokens_reported"]) == (81, 3, 4)


@pytest.mark.parametrize(("percent", "asked"), [(100 / 3, 3), (0.0, 4), (-20.0, 5), (7.0, None), (-100.0, None)])
def test_the_length_asked_for_follows_from_the_mismatch(tmp_path: Path, percent: float, asked: int | None) -> None:
    """Counted 4; 3 asked for is 33.3 % too many, 5 is 20 % too few; 7 % belongs to no whole number."""
    made = with_metrics(osl_mismatch_diff_pct=metric(percent, "%"))
    assert read(tmp_path, made)[0].frame["max_tokens"].to_list() == [asked]


def test_warm_up_is_left_out_and_counted(tmp_path: Path) -> None:
    warm = record(1, metadata={**record(1)["metadata"], "benchmark_phase": "warmup"})
    found, file = read(tmp_path, warm, record(2))
    assert found.frame["request_id"].to_list() == ["r2"]
    assert file.tally.rejected == [("line 1", "of the warm-up phase, left out")]


def test_failed_and_cancelled_requests_keep_how_long_the_client_held_on(tmp_path: Path) -> None:
    failed = {"metrics": {"error_isl": metric(80, "tokens")}, "error": {"code": 500, "type": "X", "message": "made"}}
    late = {"metrics": {}, "error": {"type": "RequestTimeout", "message": None}}
    cancelled = record(2, metadata={**record(2)["metadata"], "was_cancelled": True}, metrics={})
    frame = read(tmp_path, record(0, **failed), record(1, **late), cancelled)[0].frame
    assert frame["status"].to_list() == ["error", "timeout", "aborted"]
    assert frame["error"].to_list() == ["X: made", "RequestTimeout", "cancelled by the client"]
    assert (frame["prompt_tokens"].to_list(), frame["e2e_us"].to_list()) == ([80, None, None], [101_000] * 3)


def test_a_request_that_was_not_streamed_has_no_ttft(tmp_path: Path) -> None:
    found, _file = read(tmp_path, record(metrics={"request_latency": metric(100.0)}))
    assert (found.frame["ttft_us"].to_list(), found.frame["e2e_us"].to_list(), found.events) == (
        [None],
        [100_000],
        None,
    )


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (with_metrics(request_latency=metric(1.0, "furlongs")), "not a usable time"),
        (with_metrics(time_to_first_token=metric([1.0, 2.0])), "not a usable time"),
        (with_metrics(inter_chunk_latency=metric(["x"])), "not a usable time"),
        (with_metrics(inter_chunk_latency=metric([-1.0])), "not a usable time"),
        (with_metrics(inter_chunk_latency=metric([1e308, 1e308])), "not a usable time"),
        (record(metrics={}), "no request_latency"),
        (record(metadata={"request_start_ns": -1}), "start or end"),
        (record(metadata={"request_start_ns": START_NS, "request_end_ns": 5}), "start or end"),
        (record(metadata={}), "request_start_ns"),
        (b"{", "truncated"),
        (b"[]", "Expected"),
    ],
)
def test_a_broken_line_is_counted_and_costs_itself_only(tmp_path: Path, broken: object, reason: str) -> None:
    found, file = read(tmp_path, record(0), broken, record(1))
    assert found.frame["request_id"].to_list() == ["r0", "r1"]
    assert file.tally.rejected[0][0] == "line 2" and reason in file.tally.rejected[0][1]


def test_records_are_known_by_content_and_the_raw_export_is_none() -> None:
    assert recognises(json.dumps(record()).encode() + b"\n")
    assert not recognises(b'{"metadata":{"request_start_ns":1},"start_perf_ns":2,"responses":[]}\n')


@pytest.mark.parametrize(
    "configured",
    [
        {
            "endpoint": {"model_names": ["org/m-7b"]},
            "input": {"extra": [["ignore_eos", True]], "prompt": {"output_tokens": {"mean": 35, "stddev": 0.0}}},
        },
        {
            "models": {"items": [{"name": "org/m-7b"}]},
            "endpoint": {"extra": {"ignore_eos": True}},
            "datasets": [{"prompts": {"osl": {"mean": 35.0, "stddev": 0}}}],
        },
    ],
)
def test_the_summary_says_what_all_requests_asked_for(tmp_path: Path, configured: dict[str, Any]) -> None:
    """As 0.3 and 0.6 write it, and as 0.13 does."""
    found = summary(tmp_path, input_config=configured, aiperf_version="0.6.0")
    assert (found.model, found.ignore_eos, found.configured_output_tokens) == ("org/m-7b", True, 35)
    assert found.version == "aiperf 0.6.0" and "profile_export.jsonl" in found.lacks[0]


@pytest.mark.parametrize(
    ("configured", "rate", "clients"),
    [
        ({"loadgen": {"request_rate": 8.0, "request_count": 100}}, 8.0, None),
        ({"loadgen": {"concurrency": 6, "arrival_pattern": "concurrency_burst"}}, None, 6.0),
        ({"loadgen": {"concurrency": 6, "request_rate": 8.0}}, None, None),  # which of the two holds is not known
        ({"phases": [{"kind": "warmup", "concurrency": 2}, {"kind": "profiling", "rate": 8.0}]}, 8.0, None),
        ({"phases": [{"kind": "profiling", "type": "concurrency", "concurrency": 6}]}, None, 6.0),
        ({"phases": [{"name": "warmup", "concurrency": 2}, {"name": "profiling", "concurrency": 1}]}, None, 1.0),
        ({"phases": "none", "loadgen": {"request_rate": 1e-30}}, None, None),
    ],
)
def test_the_summary_says_how_requests_were_sent(
    tmp_path: Path, configured: dict[str, Any], rate: float | None, clients: float | None
) -> None:
    """As 0.3 to 0.6, 0.10 and 0.13 write it: 100 requests at 8 a second take 12.5 s."""
    found = summary(tmp_path, input_config=configured, request_count={"unit": "requests", "avg": 100.0})
    assert found.stages == (() if rate is None else (Stage(0, rate, 12_500_000),))
    said = found.aggregates.filter(metric="concurrency")["value"].to_list()
    assert said == ([] if clients is None else [clients])


def test_lengths_that_vary_are_not_taken_for_one(tmp_path: Path) -> None:
    configured = {"input": {"prompt": {"output_tokens": {"mean": 35, "stddev": 5.0}}}}
    assert summary(tmp_path, input_config=configured).configured_output_tokens is None


def test_the_summarys_numbers(tmp_path: Path) -> None:
    found = summary(
        tmp_path,
        inter_token_latency={"unit": "ms", "avg": 15.2, "p99": 17.0, "std": 1.0},
        output_sequence_length={"unit": "tokens", "avg": 35.8},
        request_count={"unit": "requests", "avg": 100.0},
        error_request_count=None,
        time_to_first_token={"unit": "parsecs", "avg": 1.0},
    )
    said = {(metric, name): value for _stage, metric, name, value in found.aggregates.iter_rows()}
    assert said["itl_reported", "mean"] == pytest.approx(15_200) and said["itl_reported", "p99"] == 17_000
    assert (said["output_tokens_reported", "mean"], said["requests", "succeeded"]) == (35.8, 100)
    assert set(found.aggregates["stage"]) == {-1} and ("ttft", "mean") not in said


def test_the_summary_of_0_1_has_its_numbers_one_level_down(tmp_path: Path) -> None:
    """AIPerf 0.1 has no records of requests, so it is all there is."""
    inner = {key: value for key, value in SUMMARY.items() if key not in ("input_config", "aiperf_version")}
    found = summary(tmp_path, input_config={"endpoint": {"model_names": ["m"]}}, records=inner)
    assert (found.model, found.aggregates.height) == ("m", 3)


SUMMARY = {
    "aiperf_version": "0.13.0",
    "request_latency": {"unit": "ms", "avg": 500.0, "p99": 700.0},
    "request_count": {"unit": "requests", "avg": 100.0},
    "input_config": {"models": {"items": [{"name": "m"}]}, "endpoint": {"extra": [["ignore_eos", True]]}},
}


@settings(max_examples=50, deadline=None)
@given(head=st.binary(max_size=200))
def test_recognising_never_raises(head: bytes) -> None:
    assert isinstance(aiperf.recognises(head) or aiperf.recognises_summary(head), bool)
