"""Exports read again: the same requests, and what a format cannot carry by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recordings import make_recording

from blis_replay.base.errors import FileExistsAlreadyError, ReplayError
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.discovery import sources_of
from blis_replay.ingest.recording import ARRIVALS, Clock, Recording, SharedPrefix
from blis_replay.ingest.rows import rows_of
from blis_replay_labs.exchange.export import TARGETS, export
from blis_replay_labs.formats.arrival_traces import prompts_of_blocks

EPOCH_US = 1_770_000_000_123_456
ARRIVED = {"arrival_us": [0, 1_234_567, 1_234_567, 9_999_999], "prompt_tokens": [600, 1100, 20, 33]} | {
    "output_tokens": [5, 1, 7, 300]
}
SERVED = ARRIVED | {
    "request_id": ["a", "b", "c", "d"],
    "ttft_us": [50_000, 40_001, 30_000, None],
    "e2e_us": [90_000, 40_001, 80_003, 300_000_000],
    "status": ["ok", "ok", "ok", "timeout"],
    "error": [None, None, None, "gave, up"],
}
ENGINE_LOST = "engine arguments async_scheduling, block_size, max_model_len, max_num_batched_tokens, max_num_seqs"
# The first prompt has blocks 4 and 5 of 512 tokens, the second 4, 6 and 7: it begins with one of the first's.
KEYS = np.array([4, 5, 4, 6, 7])
PROMPTS = prompts_of_blocks("hash_ids of the trace, one for 512 tokens", 512, np.array([2, 3, 0, 0]), KEYS)
TREE = PROMPTS.in_order(np.arange(4))


def arrivals(**more: object) -> Recording:
    """An arrival trace: no model, and engine arguments by default only."""
    recording = make_recording(ARRIVED)
    engine = {name: replace(setting, source="default") for name, setting in recording.engine.items()}
    return replace(recording, ground_truth=ARRIVALS, model=None, engine=engine, missing=("token times",), **more)


def served() -> Recording:
    clock = Clock("client", "epoch", EPOCH_US)
    return replace(make_recording(SERVED), clocks=(clock,), missing=("token times",))


def again(*files: Path) -> Recording:
    """What ingest makes of exported files."""
    with read_recording(*sources_of(files, slug="back")) as recording:
        return recording


def columns(recording: Recording, *names: str) -> list[tuple[object, ...]]:
    return recording.requests.select(names).rows()


@pytest.mark.parametrize("target", TARGETS)
def test_arrivals_and_lengths_come_back_from_every_target(tmp_path: Path, target: str) -> None:
    done = export(arrivals(), target, tmp_path / "out")
    back = again(*done.files)
    names = ("request_index", "arrival_us", "prompt_tokens", "output_tokens", "status")
    assert columns(back, *names) == columns(arrivals(), *names)
    assert (back.ground_truth, back.model, done.requests) == (ARRIVALS, None, 4)
    assert back.files[0].rejected_count == 0


def test_tracev2_carries_latencies_failures_and_the_server(tmp_path: Path) -> None:
    """A failed request keeps how long its client held on, and no output: that is how TraceV2 is read."""
    original = served()
    done = export(original, "tracev2", tmp_path / "out")
    assert [path.name for path in done.files] == ["trace.yaml", "trace.csv"]
    assert done.not_carried == (
        "output_tokens of 1 failed requests",
        "request_id",
        "output_tokens_source",
        "engine arguments async_scheduling, max_num_batched_tokens",
    )
    back = again(*done.files)
    names = ("arrival_us", "prompt_tokens", "ttft_us", "e2e_us", "status", "error")
    assert columns(back, *names) == columns(original, *names)
    assert back.requests["output_tokens"].to_list() == [5, 1, 7, None]
    assert (back.model, back.tensor_parallelism, back.clocks) == ("some/Model", 1, original.clocks)
    assert back.engine["max_num_seqs"].value == 128
    header = (tmp_path / "out" / "trace.yaml").read_text("utf-8")
    assert "mode: real" in header


def test_a_request_that_the_client_gave_up_is_incomplete_in_tracev2(tmp_path: Path) -> None:
    original = served()
    given_up = original.requests["status"].replace({"error": "aborted", "timeout": "aborted"})
    original = replace(original, requests=rows_of(original.requests.frame().with_columns(given_up.alias("status"))))
    done = export(original, "tracev2", tmp_path / "out")
    assert ",incomplete," in (tmp_path / "out" / "trace.csv").read_text("utf-8")
    assert columns(again(*done.files), "status") == columns(original, "status")


def test_tracev2_counts_from_0_where_there_is_no_epoch(tmp_path: Path) -> None:
    original = replace(served(), clocks=(Clock("client", "monotonic", 77),))
    done = export(original, "tracev2", tmp_path / "out")
    assert "mode: generated" in (tmp_path / "out" / "trace.yaml").read_text("utf-8")
    assert columns(again(*done.files), "arrival_us", "ttft_us", "e2e_us") == columns(
        original, "arrival_us", "ttft_us", "e2e_us"
    )


def test_mooncake_writes_whole_ms_as_such_and_an_id_for_each_recorded_block(tmp_path: Path) -> None:
    original = arrivals(prefix=TREE)
    done = export(original, "mooncake", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in done.files[0].read_text("utf-8").splitlines()]
    assert [line["timestamp"] for line in lines] == [0, 1234.567, 1234.567, 9999.999]
    assert [line.get("hash_ids") for line in lines] == [[0, 1], [0, 2, 3], None, None]
    assert '"timestamp": 0,' in done.files[0].read_text("utf-8")
    back = again(*done.files)
    assert back.prefix is not None
    assert back.prefix.prompts.rows() == TREE.prompts.rows()
    assert done.not_carried == ()


def test_mooncake_ids_are_made_of_a_shared_prefix_workload(tmp_path: Path) -> None:
    """Two prompts of one group in turn: 1,024 of 1,200 tokens are the group's, the third id is of the prompt."""
    columns_ = {"arrival_us": range(4), "prompt_tokens": [1200] * 4, "output_tokens": [2] * 4}
    workload = SharedPrefix(1, 2, 1024, 176, 2)
    done = export(make_recording(columns_, shared_prefix=workload), "mooncake", tmp_path / "out.jsonl")
    ids = [json.loads(line)["hash_ids"] for line in done.files[0].read_text("utf-8").splitlines()]
    assert [row[:2] for row in ids] == [ids[0][:2]] * 4
    assert len({row[2] for row in ids}) == 4
    assert "prefixes that end within a block of 512 tokens" in done.not_carried


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_overwritten_without_being_asked_to(tmp_path: Path, target: str) -> None:
    out = tmp_path / "out"
    files = export(arrivals(), target, out).files
    files[-1].write_text("mine", "utf-8")
    with pytest.raises(FileExistsAlreadyError, match="give --force"):
        export(arrivals(), target, out)
    assert files[-1].read_text("utf-8") == "mine"
    assert export(arrivals(), target, out, force=True).files == files
    assert files[-1].read_bytes() != b"mine"


@pytest.mark.parametrize("target", TARGETS)
def test_a_recording_without_lengths_is_refused(tmp_path: Path, target: str) -> None:
    unknown = make_recording({"arrival_us": [0], "prompt_tokens": [5], "output_tokens": [None]})
    with pytest.raises(ReplayError, match="the output length is unknown for"):
        export(unknown, target, tmp_path / target)
    assert not list(tmp_path.iterdir())


def test_a_recording_without_requests_is_refused(tmp_path: Path) -> None:
    nothing = replace(arrivals(), requests=rows_of(arrivals().requests.frame().clear()))
    with pytest.raises(ReplayError, match="no requests to export"):
        export(nothing, "mooncake", tmp_path / "p")
