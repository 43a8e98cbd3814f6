"""Forward passes as Dynamo traces them: steps without requests, in segments, sampled or all, several workers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from mutations import mutated

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.server.iterations import IterationLines
from blis_replay.ingest.rows import Scratch
from blis_replay_labs.formats.forward_passes import in_order, read_forward_passes, recognises


def forward_pass(counter: int, prefill: int = 2, decode: int = 3, rank: int = 0, mode: str = "full") -> dict[str, Any]:
    """The example of Dynamo's page on forward-pass tracing: 25 ms, 256 prefill tokens of 2 requests, 3 decode."""
    scheduled = {
        "num_prefill_requests": prefill,
        "sum_prefill_tokens": 128 * prefill,
        "var_prefill_length": 100.0,
        "sum_prefill_kv_tokens": 64,
        "num_decode_requests": decode,
        "sum_decode_kv_tokens": 1024,
        "var_decode_kv_tokens": 50.0,
    }
    fpm = {
        "version": 1,
        "worker_id": "4192",
        "dp_rank": rank,
        "counter_id": counter,
        "wall_time": 0.025 if prefill or decode else 0.0,
        "scheduled_requests": scheduled,
        "queued_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 128},
    }
    event = {
        "schema": "dynamo.fpm.trace.v1",
        "source": {"namespace": "default", "component": "backend", "producer_id": "4192"},
        "capture_mode": mode,
        "observed_at_unix_ms": 1_782_777_601_250 + 25 * counter,
        "fpm": fpm,
    }
    return {"timestamp": 1250, "event": event}


def read(folder: Path, *segments: list[dict[str, Any]]) -> tuple[pl.DataFrame, tuple[str, ...], list[RecordedFile]]:
    files = []
    for number, passes in enumerate(segments):
        path = folder / f"fpm.4192.{number:06}.jsonl.gz"
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, passes)).encode()))
        files.append(RecordedFile(path, path.name))
    iterations = IterationLines(Scratch())
    remarks = read_forward_passes(files, iterations)
    return iterations.done().rows.frame(), remarks, files


def test_a_pass_is_an_iteration(tmp_path: Path) -> None:
    """Its wall time is the elapsed time; a decoding request computes one token."""
    frame, remarks, files = read(tmp_path, [forward_pass(0), forward_pass(1, prefill=0)])
    counts = ["iteration", "prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens", "elapsed_us"]
    assert frame.select(counts).rows() == [(0, 2, 256, 3, 3, 25_000), (1, 0, 0, 3, 3, 25_000)]
    assert remarks == ("decode tokens of 2 forward passes: not written, one per decoding request is taken",)
    assert (files[0].tally.records, files[0].tally.rejected_count) == (2, 0)


def test_segments_are_read_by_their_numbers(tmp_path: Path) -> None:
    names = [f"fpm.4192.{number}.jsonl.gz" for number in (10, 9, 100)]
    ordered = in_order([RecordedFile(tmp_path / name, name) for name in names])
    assert [file.name.split(".")[2] for file in ordered] == ["9", "10", "100"]
    frame, _remarks, _files = read(tmp_path, [forward_pass(0), forward_pass(1)], [forward_pass(2)])
    assert frame["iteration"].to_list() == [0, 1, 2]


def test_what_is_sampled_idle_or_of_other_workers_is_named(tmp_path: Path) -> None:
    passes = [forward_pass(0, mode="sampled"), forward_pass(1, 0, 0), forward_pass(4, rank=1)]
    frame, remarks, _files = read(tmp_path, passes)
    assert frame["engine"].to_list() == [0, 1]
    assert "1 were sampled" in remarks[1] and "1 heartbeats" in remarks[2] and "2 workers are numbered" in remarks[3]


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("wall_time", -1, "a wall_time that is not a duration"),
        ("counter_id", -1, "a counter or a time that cannot be"),
        ("worker_id", None, "Expected `str`, got `null`"),
    ],
)
def test_a_broken_line_costs_itself(tmp_path: Path, place: str, value: object, reason: str) -> None:
    broken = forward_pass(1)
    broken["event"]["fpm"][place] = value
    frame, _remarks, files = read(tmp_path, [forward_pass(0), broken])
    assert frame.height == 1
    assert files[0].tally.rejected[0][0] == "line 2" and reason in files[0].tally.rejected[0][1]


def test_passes_lie_beside_the_requests_of_a_client(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    read(tmp_path / "run", [forward_pass(number) for number in range(5)])
    (tmp_path / "run" / "mine.csv").write_text("arrival_s,prompt_tokens,output_tokens,e2e_s\n1,2,3,4\n")
    with read_recording(tmp_path / "run") as recording:
        assert recording.iterations.height == 5
        assert "forward-passes" in {file.kind for file in recording.files}


def test_passes_are_known_by_their_schema() -> None:
    assert recognises(json.dumps(forward_pass(0)).encode())
    assert not recognises(b'{"schema": "dynamo.request.trace.v1"}')


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(document=mutated(forward_pass(3)))
def test_mutated_passes_are_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    try:
        frame, _remarks, (file,) = read(tmp_path_factory.mktemp("m"), [document])
    except RecordingError as error:
        assert "\n" not in str(error)
    else:
        assert frame.height <= file.tally.records <= 1
