"""Recordings without latencies, block identities and KV-cache events: from files to the store and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.readers.discovery import sources_of
from blis_replay.ingest.readers.formats import input_formats
from blis_replay.ingest.recording import ARRIVALS, RECORDED, Clock, Recording
from blis_replay.ingest.store import KvEventCount, kv_event_counts, open_store, read_stored

MOONCAKE = [
    {"timestamp": 3000, "input_length": 600, "output_length": 20, "hash_ids": [1, 3]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
]
TRACEV2 = (
    "request_id,input_tokens,output_tokens,send_time_us,first_chunk_time_us,last_chunk_time_us,status\n"
    "0,10,3,1770000000123456,1770000000223456,1770000000323456,ok\n"
)
KV = [
    [1770000000.623456, [["BlockStored", [2**64 - 1, 5], None, [1] * 32, 16, None, "GPU"]], 0],
    [1770000001.0, [["BlockRemoved", [5], "GPU"], ["CacheEviction", "GPU", 1, "lru", 7, None]], 0],
]


def stored(folder: Path, files: dict[str, str]) -> tuple[Recording, tuple[KvEventCount, ...]]:
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
        return read_stored(store, "run"), kv_event_counts(store, "run")


def lines(rows: list[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.slow
def test_an_arrival_trace_has_no_model_and_says_so(tmp_path: Path) -> None:
    recording, _cache = stored(tmp_path, {"any-name.jsonl": lines([*MOONCAKE])})
    assert (recording.ground_truth, recording.model, recording.alias) == (ARRIVALS, None, "run")
    assert "model: it can be simulated as any, and compared with none" in recording.missing
    assert recording.requests["arrival_us"].to_list() == [0, 2_000_000]
    assert recording.requests["prompt_tokens"].to_list() == [1024, 600]
    assert recording.requests["output_tokens"].to_list() == [5, 20]
    assert recording.clocks == (Clock("server", "relative", 1_000_000),)
    assert [file.kind for file in recording.files] == ["mooncake"]


@pytest.mark.slow
def test_block_identities_follow_the_requests_into_send_order(tmp_path: Path) -> None:
    recording, _cache = stored(tmp_path, {"trace.jsonl": lines([*MOONCAKE])})
    assert recording.prefix is not None
    assert recording.prefix.source == "hash_ids of the trace, one for 512 tokens"
    assert recording.prefix.requests.rows() == [(0, 0), (1, 1)]
    assert recording.prefix.prompts.rows() == [(0, None, 0, 1024), (1, 0, 512, 1024)]


@pytest.mark.slow
def test_a_generated_tracev2_is_an_arrival_trace(tmp_path: Path) -> None:
    """As BLIS writes it for its own replay: times from 0, no chunk stamps."""
    rows = TRACEV2.splitlines()[0] + "\n0,10,3,0,0,0,ok\n1,10,3,2500,0,0,ok\n"
    recording, _cache = stored(tmp_path, {"trace.csv": rows})
    assert recording.ground_truth == ARRIVALS
    assert recording.requests["arrival_us"].to_list() == [0, 2500]
    assert recording.requests["e2e_us"].to_list() == [None, None]


@pytest.mark.slow
def test_a_recording_with_latencies_need_not_name_its_model_and_says_so(tmp_path: Path) -> None:
    recording, _cache = stored(tmp_path, {"trace.csv": TRACEV2})
    assert (recording.ground_truth, recording.model) == (RECORDED, None)
    assert any(missing.startswith("model: no file of it names one; say it with") for missing in recording.missing)


@pytest.mark.slow
def test_one_trace_of_a_folder_is_read_and_the_other_named(tmp_path: Path) -> None:
    """Two traces of one kind are two experiments, to be named one by one."""
    recording, _cache = stored(tmp_path, {"a.jsonl": lines([*MOONCAKE]), "b.jsonl": lines([*MOONCAKE, MOONCAKE[0]])})
    assert recording.requests.height == 2
    assert {file.name: file.kind for file in recording.files} == {
        "a.jsonl": "mooncake",
        "b.jsonl": "mooncake (not used: a.jsonl is read)",
    }


def test_kv_events_are_laid_on_the_epoch_clock_of_the_requests(tmp_path: Path) -> None:
    """The first batch is 0.5 s after the first send."""
    files = {"exp-config.yaml": "model: toy/toy-7b\n", "trace.csv": TRACEV2, "kv_events.jsonl": lines([*KV])}
    recording, cache = stored(tmp_path, files)
    assert recording.ground_truth == RECORDED
    assert cache == (
        KvEventCount("BlockRemoved", "GPU", None, 1, 1, None, 0),
        KvEventCount("BlockStored", "GPU", None, 1, 2, 32, 0),
        KvEventCount("CacheEviction", "GPU", None, 1, 1, None, 0),
    )
    assert recording.clocks[-1] == Clock("kv events", "epoch", 1_770_000_000_123_456)
    with open_store(tmp_path / "store.duckdb") as store:
        rows = store.connection.execute(
            "SELECT time_us, step_id, block_hashes FROM kv_events ORDER BY event"
        ).fetchall()
    assert rows == [(876_544, None, [5]), (500_000, None, [2**64 - 1, 5]), (876_544, 7, None)]


def test_without_a_common_clock_kv_events_count_from_their_own_first(tmp_path: Path) -> None:
    recording, cache = stored(tmp_path, {"trace.jsonl": lines([*MOONCAKE]), "other-name.jsonl": lines([*KV])})
    assert len(cache) == 3
    assert recording.clocks[-1] == Clock("kv events", "epoch", 1_770_000_000_623_456)
    assert any("clock offset between KV-cache events and requests" in line for line in recording.missing)


def test_every_format_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "formats.md").read_text("utf-8")
    assert [name for name in input_formats() if f"| `{name}` |" not in page] == []
