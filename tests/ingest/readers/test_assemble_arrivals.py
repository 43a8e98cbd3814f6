"""Recordings without latencies, and block identities: from files to the store and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.readers.discovery import sources_of
from blis_replay.ingest.readers.formats import input_formats
from blis_replay.ingest.recording import ARRIVALS, BY_CLIENT, RECORDED, Clock, Recording
from blis_replay.ingest.store import open_store, read_stored

MOONCAKE = [
    {"timestamp": 3000, "input_length": 600, "output_length": 20, "hash_ids": [1, 3]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
]
TRACEV2 = (
    "request_id,input_tokens,output_tokens,send_time_us,first_chunk_time_us,last_chunk_time_us,status\n"
    "0,10,3,1770000000123456,1770000000223456,1770000000323456,ok\n"
)


def stored(folder: Path, files: dict[str, str]) -> Recording:
    """What the store holds of an experiment ``run`` with these files."""
    for name, content in files.items():
        path = folder / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
    store_path = folder / "store.duckdb"
    (source,) = sources_of([folder / "run"])
    assert ingest_source(store_path, source).outcome == "new"
    assert ingest_source(store_path, source).outcome == "unchanged"
    with open_store(store_path) as store:
        return read_stored(store, "run")


def lines(rows: list[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.slow
def test_an_arrival_trace_has_no_model_and_says_so(tmp_path: Path) -> None:
    recording = stored(tmp_path, {"any-name.jsonl": lines([*MOONCAKE])})
    assert (recording.ground_truth, recording.model, recording.alias) == (ARRIVALS, None, "run")
    assert "model: it can be simulated as any, and compared with none" in recording.missing
    assert recording.requests["arrival_us"].to_list() == [0, 2_000_000]
    assert recording.requests["prompt_tokens"].to_list() == [1024, 600]
    assert recording.requests["output_tokens"].to_list() == [5, 20]
    assert recording.clocks == (Clock("server", "relative", 1_000_000),)
    assert [file.kind for file in recording.files] == ["mooncake"]


@pytest.mark.slow
def test_block_identities_follow_the_requests_into_send_order(tmp_path: Path) -> None:
    recording = stored(tmp_path, {"trace.jsonl": lines([*MOONCAKE])})
    assert recording.prefix is not None
    assert recording.prefix.source == "hash_ids of the trace, one for 512 tokens"
    # Prompts are numbered as the file has them: the request that was sent second is its first.
    assert recording.prefix.requests.rows() == [(0, 1), (1, 0)]
    assert recording.prefix.prompts.rows() == [(0, None, 0, 1024), (1, 0, 512, 1024)]


@pytest.mark.slow
def test_a_generated_tracev2_is_an_arrival_trace(tmp_path: Path) -> None:
    """As BLIS writes it for its own replay: times from 0, no chunk stamps."""
    rows = TRACEV2.splitlines()[0] + "\n0,10,3,0,0,0,ok\n1,10,3,2500,0,0,ok\n"
    recording = stored(tmp_path, {"trace.csv": rows})
    assert recording.ground_truth == ARRIVALS
    assert recording.requests["arrival_us"].to_list() == [0, 2500]
    assert recording.requests["e2e_us"].to_list() == [None, None]


@pytest.mark.slow
def test_a_recording_with_latencies_need_not_name_its_model_and_says_so(tmp_path: Path) -> None:
    recording = stored(tmp_path, {"trace.csv": TRACEV2})
    assert (recording.ground_truth, recording.model) == (RECORDED, None)
    assert any(missing.startswith("model: no file of it names one; say it with") for missing in recording.missing)


@pytest.mark.slow
def test_one_trace_of_a_folder_is_read_and_the_other_named(tmp_path: Path) -> None:
    """Two traces of one kind are two experiments, to be named one by one."""
    recording = stored(tmp_path, {"a.jsonl": lines([*MOONCAKE]), "b.jsonl": lines([*MOONCAKE, MOONCAKE[0]])})
    assert recording.requests.height == 2
    assert {file.name: file.kind for file in recording.files} == {
        "a.jsonl": "mooncake",
        "b.jsonl": f"mooncake (not used: a.jsonl is read; {BY_CLIENT})",
    }


def test_every_format_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "formats.md").read_text("utf-8")
    assert [name for name in input_formats() if f"| `{name}` |" not in page] == []
