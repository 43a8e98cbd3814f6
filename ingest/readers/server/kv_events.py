"""KV-cache events of a vLLM server (``kv_events.jsonl``): blocks stored, removed, evicted, transferred.

A line is a batch ``[ts, [event, ...], data_parallel_rank, scheduler_step]`` of positional
arrays.  Token ids are counted and never kept.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from blis_replay.ingest.readers.documents import DECODE_ERRORS, microseconds, quoted_value, text, whole
from blis_replay.ingest.readers.files import RecordedFile, lines
from blis_replay.ingest.recording import KV_EVENT_SCHEMA

# A batch that stores a million tokens fits.
MAX_LINE_BYTES = 16 << 20
BATCH_ROWS = 50_000
# Transfers are written twice within a batch, or nearly; so many are remembered.
REMEMBERED_TRANSFERS = 100_000

# The fields after the name of an event, by position.
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
    "TransferInitiated": ("transfer_id", "request_id", "medium", "target_medium", "blocks", "step_id"),
    "TransferCompleted": ("transfer_id", "request_id", "medium", "target_medium", "blocks", "success", "step_id"),
    "RemoteTransferInitiated": ("transfer_id", "request_id", "detail", "source_rank", "target_rank", "blocks"),
    "RemoteTransferCompleted": (
        "transfer_id",
        "request_id",
        "detail",
        "source_rank",
        "target_rank",
        "blocks",
        "success",
    ),
    "CacheLoadCommitted": ("request_id", "medium", "blocks", "step_id"),
    "CacheStoreCommitted": ("request_id", "medium", "blocks", "step_id"),
    "CacheEviction": ("medium", "blocks", "detail", "step_id", "block_hashes"),
}
_COUNTS = ("blocks", "step_id", "transfer_id", "source_rank", "target_rank")
_WORDS = ("request_id", "medium", "target_medium", "detail")
_BATCH = msgspec.json.Decoder(list[Any])
_LINE = re.compile(rb'(?:\xef\xbb\xbf)?\s*\[\s*[0-9][0-9.eE+-]*\s*,\s*\[\s*(?:\]|\[\s*"(\w+)")')


@dataclass(frozen=True)
class KvEventsRead:
    """What was read: how many events, and the epoch time (us) from which their times count."""

    events: int
    zero_us: int


def recognises(head: bytes) -> bool:
    """Whether the first line begins like a batch of known events, or of none."""
    match = _LINE.match(head)
    return match is not None and (match[1] is None or match[1].decode() in _FIELDS)


def read_kv_events(files: Sequence[RecordedFile], zero_us: int | None, path: Path) -> KvEventsRead:
    """Write the events of ``files`` (rotated parts of one run) to ``path`` as ``KV_EVENT_SCHEMA`` Parquet.

    ``zero_us``: the experiment's zero on the epoch clock; the first batch if None.  A
    transfer event that stands there twice is kept once.  What cannot be used is rejected
    and counted by line and event.  One batch of rows is in memory.
    """
    import pyarrow.parquet as pq

    scan = _Scan(zero_us)
    rows = (row for file in files for row in scan.rows(file))
    schema = pl.DataFrame(schema=KV_EVENT_SCHEMA).to_arrow().schema
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(rows, BATCH_ROWS)):
            writer.write_table(pl.DataFrame(batch, schema=KV_EVENT_SCHEMA, orient="row").to_arrow())
            count += len(batch)
    return KvEventsRead(count, scan.zero_us or 0)


class _Scan:
    """One reading of a run's files: its zero and the transfers seen lately."""

    def __init__(self, zero_us: int | None) -> None:
        self.zero_us = zero_us
        self.transfers: dict[tuple[object, ...], None] = {}

    def rows(self, file: RecordedFile) -> Iterator[dict[str, object]]:
        for number, line in lines(file, MAX_LINE_BYTES):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not content.strip():
                continue
            problem, ts_us, events, batch = _batch(content)
            if problem:
                file.tally.reject(f"line {number}", problem)
                continue
            self.zero_us = ts_us if self.zero_us is None else self.zero_us
            for place, event in enumerate(events, 1):
                problem, row = _row(event)
                problem = problem or self._again(row)
                if problem:
                    file.tally.reject(f"line {number}, event {place}", problem)
                    continue
                file.tally.records += 1
                row["step_id"] = batch["step_id"] if row["step_id"] is None else row["step_id"]
                yield row | {"time_us": ts_us - self.zero_us, "rank": batch["rank"]}

    def _again(self, row: dict[str, object]) -> str:
        if row["transfer_id"] is None:
            return ""
        # A server that was started again counts transfers anew, but no request has its name twice.
        key = (row["event"], row["transfer_id"], row["request_id"])
        if key in self.transfers:
            return f"transfer {row['transfer_id']} again"
        self.transfers[key] = None
        if len(self.transfers) > REMEMBERED_TRANSFERS:
            del self.transfers[next(iter(self.transfers))]
        return ""


def _batch(line: bytes) -> tuple[str, int, list[object], dict[str, int | None]]:
    """What is wrong with a line, or its time (us of the epoch), its events, and what holds for all of them."""
    try:
        values = _BATCH.decode(line)
    except DECODE_ERRORS as error:
        return str(error), 0, [], {}
    if not 2 <= len(values) <= 4 or not isinstance(values[1], list):
        return "no batch of a time, events, a rank and a step", 0, [], {}
    ts_us = microseconds(values[0]) if not isinstance(values[0], str) else None
    if ts_us is None or ts_us < 0:
        return f"a time of {quoted_value(values[0])}", 0, [], {}
    rank, step_id = (whole(value) for value in [*values[2:], None, None][:2])
    return "", ts_us, values[1], {"rank": rank, "step_id": step_id}


def _row(event: object) -> tuple[str, dict[str, object]]:
    """What is wrong with an event, or its row; fields that are null or left off are null."""
    if not isinstance(event, list) or not event or not isinstance(event[0], str):
        return "not an array that begins with a name", {}
    names = _FIELDS.get(event[0])
    if names is None:
        return f"an event of the unknown kind {quoted_value(event[0])}", {}
    given = {name: value for name, value in zip(names, event[1:], strict=False) if value is not None}
    row: dict[str, object] = dict.fromkeys(KV_EVENT_SCHEMA) | {"event": event[0]}
    row |= {name: whole(given.get(name)) for name in _COUNTS} | {name: text(given.get(name)) for name in _WORDS}
    for name in (*_COUNTS, *_WORDS):
        if name in given and row[name] is None:
            return f"{name} is {quoted_value(given[name])}", {}
    row["success"] = given.get("success")
    if row["success"] is not None and not isinstance(row["success"], bool):
        return f"success is {quoted_value(row['success'])}", {}
    return _with_blocks(event[0], given, row)


def _with_blocks(event: str, given: dict[str, object], row: dict[str, object]) -> tuple[str, dict[str, object]]:
    """The row with block hashes and how many blocks and tokens they are."""
    hashes = given.get("block_hashes")
    if hashes is None and event in ("BlockStored", "BlockRemoved"):
        return "no block hashes", {}
    if hashes is not None:
        folded = [_hash(value) for value in hashes] if isinstance(hashes, list) else [None]
        if None in folded:
            return "a block hash that is neither a whole number of 64 bits nor base64", {}
        row |= {"block_hashes": folded, "blocks": len(folded) if row["blocks"] is None else row["blocks"]}
    if "parent_block_hash" in given:
        row["parent_block_hash"] = _hash(given["parent_block_hash"])
        if row["parent_block_hash"] is None:
            return "a parent hash that is neither a whole number of 64 bits nor base64", {}
    token_ids = given.get("token_ids")
    row["tokens"] = len(token_ids) if isinstance(token_ids, list) else None
    return "", row


def _hash(value: object) -> int | None:
    """A block hash as its last 64 bits, which is how vLLM folds the bytes that it writes as base64 otherwise."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value & ((1 << 64) - 1) if -(1 << 63) <= value < 1 << 64 else None
    if not isinstance(value, str):
        return None
    try:
        digest = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
    return int.from_bytes(digest[-8:], "big") if digest else None
