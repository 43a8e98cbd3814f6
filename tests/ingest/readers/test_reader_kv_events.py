"""KV-cache events on made files (no real one exists): exact hashes, doubled transfers, rotated and packed files."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blis_replay.ingest.readers.files import GZIP_MAGIC, ZSTD_MAGIC, RecordedFile
from blis_replay.ingest.readers.server.kv_events import KvEventsRead, read_kv_events, recognises
from blis_replay.ingest.recording import KV_EVENT_SCHEMA

T = 1_770_000_000.25
LARGEST = 2**64 - 1


def recorded(folder: Path, *lines: object, name: str = "kv_events.jsonl") -> RecordedFile:
    path = folder / name
    rows = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    content = b"\n".join(rows) + b"\n"
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return RecordedFile(path, name)


def events_of(
    folder: Path, *files: RecordedFile, zero_us: int | None = None
) -> tuple[list[dict[str, object]], KvEventsRead]:
    """The events as rows without their null fields."""
    read = read_kv_events(files, zero_us, folder / "out.parquet")
    frame = pl.read_parquet(folder / "out.parquet")
    assert dict(frame.schema) == {name: pl.Schema({name: kind})[name] for name, kind in KV_EVENT_SCHEMA.items()}
    assert len(frame) == read.events == sum(file.tally.records for file in files)
    return [{k: v for k, v in row.items() if v is not None} for row in frame.iter_rows(named=True)], read


def test_the_example_of_the_format_notes(tmp_path: Path) -> None:
    """Section 6: one block of 4 tokens stored, then one block committed to the CPU at step 33."""
    stored = ["BlockStored", [1234567890123456789], None, [5, 6, 7, 8], 4, None, "GPU", None]
    rows, read = events_of(
        tmp_path, recorded(tmp_path, [T, [stored, ["CacheStoreCommitted", "cmpl-a-0-0f0f0f0f", "CPU", 1, 33]], 0, None])
    )
    assert rows == [
        {
            "time_us": 0,
            "event": "BlockStored",
            "medium": "GPU",
            "blocks": 1,
            "tokens": 4,
            "rank": 0,
            "block_hashes": [1234567890123456789],
        },
        {
            "time_us": 0,
            "event": "CacheStoreCommitted",
            "request_id": "cmpl-a-0-0f0f0f0f",
            "medium": "CPU",
            "blocks": 1,
            "step_id": 33,
            "rank": 0,
        },
    ]
    assert read == KvEventsRead(2, 1_770_000_000_250_000)


def test_every_kind_of_event_has_its_fields(tmp_path: Path) -> None:
    batch = [
        ["BlockRemoved", [1, 2], "GPU"],
        ["AllBlocksCleared"],
        ["TransferInitiated", 2**32 + 7, "r", "GPU", "CPU", 5, 12],
        ["TransferCompleted", 2**32 + 7, "r", "GPU", "CPU", 5, True, 12],
        ["RemoteTransferInitiated", 8, "r", "nixl", 0, 1, 3],
        ["RemoteTransferCompleted", 8, "r", "nixl", 0, 1, 3, False],
        ["CacheLoadCommitted", "r", "LMCACHE", 4, 13],
        ["CacheEviction", "GPU", 9, "lru", 14, None],
    ]
    rows, _read = events_of(tmp_path, recorded(tmp_path, [T, batch, 1, 99]))
    common = {"time_us": 0, "rank": 1}
    transfer = {"request_id": "r", "medium": "GPU", "target_medium": "CPU", "blocks": 5, "transfer_id": 2**32 + 7}
    remote = {"request_id": "r", "detail": "nixl", "source_rank": 0, "target_rank": 1, "blocks": 3, "transfer_id": 8}
    # The step of the batch (99) holds where an event names none.
    assert rows == [
        common | {"event": "BlockRemoved", "medium": "GPU", "blocks": 2, "block_hashes": [1, 2], "step_id": 99},
        common | {"event": "AllBlocksCleared", "step_id": 99},
        common | transfer | {"event": "TransferInitiated", "step_id": 12},
        common | transfer | {"event": "TransferCompleted", "step_id": 12, "success": True},
        common | remote | {"event": "RemoteTransferInitiated", "step_id": 99},
        common | remote | {"event": "RemoteTransferCompleted", "step_id": 99, "success": False},
        common | {"event": "CacheLoadCommitted", "request_id": "r", "medium": "LMCACHE", "blocks": 4, "step_id": 13},
        common | {"event": "CacheEviction", "medium": "GPU", "blocks": 9, "detail": "lru", "step_id": 14},
    ]


def test_batches_of_upstream_have_two_or_three_elements(tmp_path: Path) -> None:
    rows, _read = events_of(tmp_path, recorded(tmp_path, [T, [["AllBlocksCleared"]]], [T, [["AllBlocksCleared"]], 2]))
    assert [row.get("rank") for row in rows] == [None, 2]


def test_hashes_are_exact_and_bytes_are_folded_to_their_last_64_bits(tmp_path: Path) -> None:
    """2^64 - 1 is no double; vLLM's integer form of a digest is its last 8 bytes, big endian."""
    digest = bytes(range(24)) + LARGEST.to_bytes(8, "big")
    as_text = base64.b64encode(digest).decode()
    batch = [
        ["BlockStored", [LARGEST, 2**53 + 1], as_text, list(range(32)), 16],
        ["BlockRemoved", [as_text], "GPU"],
        ["BlockRemoved", [-1], "GPU"],
    ]
    rows, _read = events_of(tmp_path, recorded(tmp_path, [T, batch]))
    assert [row["block_hashes"] for row in rows] == [[LARGEST, 2**53 + 1], [LARGEST], [LARGEST]]
    assert rows[0]["parent_block_hash"] == LARGEST
    assert rows[0]["tokens"] == 32


def test_token_ids_are_counted_and_not_kept(tmp_path: Path) -> None:
    file = recorded(tmp_path, [T, [["BlockStored", [1], None, [987_654_321] * 16, 16, None, "GPU"]]])
    rows, _read = events_of(tmp_path, file)
    assert rows[0]["tokens"] == 16
    assert "987654321" not in str(rows)


def test_doubled_transfers_are_removed_and_counted(tmp_path: Path) -> None:
    """Of a type and transfer id one is kept; a restarted server counts from 0 again, for other requests."""
    begun, ended = (
        ["TransferInitiated", 0, "r-1", "GPU", "CPU", 5, 12],
        ["TransferCompleted", 0, "r-1", "GPU", "CPU", 5, True, 12],
    )
    again = ["TransferInitiated", 0, "r-2", "GPU", "CPU", 5, 3]
    file = recorded(tmp_path, [T, [begun, begun, ended]], [T + 1, [ended, again]])
    rows, _read = events_of(tmp_path, file)
    assert [(row["event"], row["request_id"]) for row in rows] == [
        ("TransferInitiated", "r-1"),
        ("TransferCompleted", "r-1"),
        ("TransferInitiated", "r-2"),
    ]
    assert file.tally.rejected == [("line 1, event 2", "transfer 0 again"), ("line 2, event 1", "transfer 0 again")]


def test_rotated_and_packed_files_are_one_run(tmp_path: Path) -> None:
    """Times count from the first batch, and a transfer doubled across the seam is found."""
    begun = ["TransferInitiated", 4, "r", "GPU", "CPU", 5, 12]
    first = recorded(tmp_path, [T, [["AllBlocksCleared"], begun]], name="kv_events-1.jsonl.gz")
    second = recorded(tmp_path, [T + 2, [begun, ["AllBlocksCleared"]]])
    rows, _read = events_of(tmp_path, first, second)
    assert [row["time_us"] for row in rows] == [0, 0, 2_000_000]
    assert second.tally.rejected_count == 1


def test_times_count_from_the_zero_given(tmp_path: Path) -> None:
    rows, read = events_of(tmp_path, recorded(tmp_path, [T, [["AllBlocksCleared"]]]), zero_us=1_770_000_001_000_000)
    assert rows[0]["time_us"] == -750_000
    assert read.zero_us == 1_770_000_001_000_000


@pytest.mark.parametrize(
    ("line", "place", "reason"),
    [
        (b"[1770000000.25,[[", "line 2", "truncated"),
        (b"{}", "line 2", "Expected `array`"),
        (b"[" * 100_000, "line 2", "recursion"),
        ([T], "line 2", "no batch"),
        ([T, [], 0, 0, 0], "line 2", "no batch"),
        (["soon", []], "line 2", "a time of 'soon'"),
        ([-1, []], "line 2", "a time of '-1'"),
        ([T, ["BlockRemoved"]], "line 2, event 1", "not an array"),
        ([T, [{"type": "BlockRemoved"}]], "line 2, event 1", "not an array"),
        ([T, [["Nothing", 1]]], "line 2, event 1", "the unknown kind 'Nothing'"),
        ([T, [["BlockRemoved", None]]], "line 2, event 1", "no block hashes"),
        ([T, [["BlockRemoved", [2**64]]]], "line 2, event 1", "a block hash"),
        ([T, [["BlockRemoved", ["###"]]]], "line 2, event 1", "a block hash"),
        ([T, [["BlockRemoved", [1.5]]]], "line 2, event 1", "a block hash"),
        ([T, [["BlockStored", [1], 0.5, [], 16]]], "line 2, event 1", "a parent hash"),
        ([T, [["CacheEviction", "GPU", -1, "lru", 1]]], "line 2, event 1", "blocks is '-1'"),
        ([T, [["CacheLoadCommitted", 7, "GPU", 1, 1]]], "line 2, event 1", "request_id is '7'"),
        ([T, [["TransferCompleted", 1, "r", "GPU", "CPU", 5, "yes", 1]]], "line 2, event 1", "success is 'yes'"),
        ([T, [["TransferCompleted", 1, "r", "GPU", "CPU", 5, 1, 1]]], "line 2, event 1", "success is '1'"),
    ],
)
def test_what_cannot_be_used_is_counted_and_costs_itself_only(
    tmp_path: Path, line: object, place: str, reason: str
) -> None:
    good = [T, [["AllBlocksCleared"]]]
    file = recorded(tmp_path, good, line, good)
    rows, _read = events_of(tmp_path, file)
    assert len(rows) == 2
    ((where, why),) = file.tally.rejected
    assert where == place
    assert reason in why


def test_it_is_known_by_its_first_line() -> None:
    assert recognises(b'[1770000000.25,[["BlockStored",[1]')
    assert recognises(b"[1770000000, []]\n")
    assert not recognises(b'[{"start_time": 1}]')
    assert not recognises(b'[1.5, [["Other", 1]]]')
    assert not recognises(b"")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=12,
)
NAMES = ("BlockStored", "BlockRemoved", "TransferInitiated", "TransferCompleted", "CacheEviction", "AllBlocksCleared")
FIELDS = st.one_of(st.sampled_from([None, 0, 1, True, "r", [1], "AAAA", 2**64, 0.5]), JSON)
EVENTS = st.one_of(st.builds(lambda name, fields: [name, *fields], st.sampled_from(NAMES), st.lists(FIELDS)), JSON)


@pytest.mark.heavy
@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"")),
            st.tuples(st.floats(0, 2e9), st.lists(EVENTS, max_size=4)),
            JSON,
        ),
        max_size=4,  # 20 rejections are kept with their places
    )
)
def test_every_event_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, lines: list[object]) -> None:
    folder = tmp_path_factory.mktemp("any")
    file = recorded(folder, *lines)
    assume(not file.path.read_bytes().startswith((GZIP_MAGIC, ZSTD_MAGIC)))
    rows, _read = events_of(folder, file)
    places = [place for place, _why in file.tally.rejected]
    whole = [place for place in places if "event" not in place]
    # A byte order mark stands at the start of a file; elsewhere it is content.
    content = file.path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    batches = [json.loads(line) for n, line in enumerate(content, 1) if line.strip() and f"line {n}" not in whole]
    assert len(rows) + len(places) == len(whole) + sum(len(batch[1]) for batch in batches)
