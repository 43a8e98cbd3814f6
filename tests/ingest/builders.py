"""Recordings made by hand, for tests: small, complete, and true unless a test says otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from blis_replay.ingest import scratch as ingest_scratch
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import READ_SCHEMA
from blis_replay.ingest.recording import (
    AGGREGATE_SCHEMA,
    JOURNEY_EVENT_SCHEMA,
    LIFECYCLE_SCHEMA,
    REQUEST_SCHEMA,
    SNAPSHOT_SCHEMA,
    STEP_SCHEMA,
    Clock,
    Recording,
    Setting,
    SourceFile,
    Stage,
    TokenEvents,
)
from blis_replay.ingest.rows import Rows, rows_of
from blis_replay.ingest.scratch import Scratch
from blis_replay.ingest.store.recordings import TABLES


def recorded_file(folder: Path, content: Any, name: str = "file", **options: str) -> RecordedFile:
    """A file with these bytes, this text, or what JSON makes of anything else."""
    path = folder / name
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    path.write_bytes(content)
    return RecordedFile(path, name, **options)


def read_frame(rows: Iterable[dict[str, object]]) -> pl.DataFrame:
    """Requests as a reader returns them; what a row does not say is null."""
    return pl.DataFrame(list(rows), schema=READ_SCHEMA)


def requests(count: int = 3, **columns: Any) -> pl.DataFrame:
    """``count`` completed requests, one a second: TTFT 50 ms, 11 tokens, 20 ms between them.

    A column given as a scalar holds for all rows, one given as a list row by row.
    """
    defaults: dict[str, Any] = {
        "request_index": list(range(count)),
        "request_id": [f"r{i}" for i in range(count)],
        "stage": 0,
        "arrival_us": [i * 1_000_000 for i in range(count)],
        "prompt_tokens": 100,
        "output_tokens": 11,
        "output_tokens_source": "configured with ignore_eos",
        "ttft_us": 50_000,
        "e2e_us": 250_000,
        "status": "ok",
    }
    values = dict.fromkeys(REQUEST_SCHEMA) | defaults | columns
    rows = {name: v if isinstance(v, list) else [v] * count for name, v in values.items()}
    return pl.DataFrame(rows, schema=REQUEST_SCHEMA)


def steps(starts_us: Sequence[int], ids: Sequence[int] | None = None, **columns: Any) -> pl.DataFrame:
    """Step records that start at ``starts_us``, numbered from 1 unless ``ids`` says otherwise."""
    count = len(starts_us)
    defaults: dict[str, Any] = {
        "step_id": list(ids) if ids is not None else list(range(1, count + 1)),
        "start_us": list(starts_us),
        "duration_us": 300,
        "running_depth": 4,
        "waiting_depth": 0,
        "prefill_tokens": 0,
        "decode_tokens": 4,
    }
    values = dict.fromkeys(STEP_SCHEMA) | defaults | columns
    rows = {name: v if isinstance(v, list) else [v] * count for name, v in values.items()}
    return pl.DataFrame(rows, schema=STEP_SCHEMA)


def run_of_steps(
    rate_per_s: float,
    seconds: int,
    later_us: int,
    *,
    seed: int = 0,
    pre_us: int = 0,
    post_us: int = 0,
    residence_us: int = 1_000_000,
    every: int = 1,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Poisson requests, and the steps of an engine that had them, stamped ``later_us`` too early.

    A request is in the engine from ``pre_us`` after its send to ``post_us`` before its end;
    steps begin every 20 ms, and every ``every``-th of them, at random, was sampled.
    """
    rng = np.random.default_rng(seed)
    arrival_us = np.cumsum(rng.exponential(1e6 / rate_per_s, int(rate_per_s * seconds))).astype(np.int64)
    arrival_us -= arrival_us[0]
    e2e_us = (residence_us * rng.uniform(0.5, 1.5, len(arrival_us))).astype(np.int64) + pre_us + post_us
    ids = np.arange(0, int(arrival_us[-1] + e2e_us.max()) // 20_000)
    ids = ids[rng.random(len(ids)) < 1 / every]
    at_us = ids * 20_000
    admitted = np.searchsorted(np.sort(arrival_us) + pre_us, at_us, side="right")
    released = np.searchsorted(np.sort(arrival_us + e2e_us) - post_us, at_us, side="right")
    depth = (admitted - released).tolist()
    sent = requests(len(arrival_us), arrival_us=arrival_us.tolist(), e2e_us=e2e_us.tolist())
    return sent, steps((at_us - later_us).tolist(), (ids + 1).tolist(), running_depth=depth, decode_tokens=depth)


def server_traces() -> dict[str, Rows]:
    """Snapshots, lifecycles and journey events of one request, as fields of a recording."""
    snapshot = {"step_id": 1, "request_id": "r0-1234abcd", "prompt_tokens": 100}
    lifecycle = {"journey": 0, "request_index": 0, "core_request_id": "r0-1234abcd", "arrived_us": 0, "status": "ok"}
    events = [
        {"journey": 0, "event": "api.ARRIVED", "time_us": 0},
        {"journey": 0, "event": "api.DEPARTED", "time_us": 9},
    ]
    return {
        "snapshots": rows_of(pl.DataFrame([snapshot], schema=SNAPSHOT_SCHEMA)),
        "lifecycles": rows_of(pl.DataFrame([lifecycle], schema=LIFECYCLE_SCHEMA)),
        "journey_events": rows_of(pl.DataFrame(events, schema=JOURNEY_EVENT_SCHEMA)),
    }


@cache
def _scratch() -> Scratch:
    """One for all, which keeps no rows in memory: to open one takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ingest_scratch, "MEMORY_BYTES", 0)
        return Scratch()


def in_database(frame: pl.DataFrame, rows: int) -> Rows:
    """The rows of a frame in a scratch database, so many added at a time."""
    writer = _scratch().writer(frame.schema)
    for part in frame.iter_slices(rows):
        writer.add(part)
    return writer.done()


def aggregates(*rows: tuple[int, str, str, float]) -> pl.DataFrame:
    """Published numbers as ``(stage, metric, statistic, value)``."""
    return pl.DataFrame(rows, schema=AGGREGATE_SCHEMA, orient="row")


def write_events(path: Path, stamps: Sequence[Sequence[int]]) -> TokenEvents:
    """Token events in a file; ``stamps[i]``: the times in us that request i has."""
    np.array([time_us for times in stamps for time_us in times], np.int64).tofile(path)
    counts = np.array([len(times) for times in stamps], np.int64)
    return TokenEvents(path, np.cumsum(counts) - counts, counts, 0)


def recording(**fields: Any) -> Recording:
    """A recorded experiment of three requests; any field can be given."""
    defaults: dict[str, Any] = {
        "slug": "20260101-000000-toy-7b-tp1-general",
        "alias": "7b-general",
        "workload": "general",
        "model": "toy/toy-7b",
        "hardware": "H100",
        "tensor_parallelism": 1,
        "ground_truth": "recorded",
        "content_hash": "hash-1",
        "engine": {"max_num_seqs": Setting(128, "recorded", "exp-config.yaml"), "dtype": Setting("auto", "default")},
        "stages": (Stage(0, 1.0, 60_000_000),),
        "shared_prefix": None,
        "ignore_eos": True,
        "prefix_hit_rate": None,
        "requests": requests(),
        "token_events": None,
        "steps": pl.DataFrame(schema=STEP_SCHEMA),
        "aggregates": pl.DataFrame(schema=AGGREGATE_SCHEMA),
        "clocks": (Clock("client", "epoch", 1_770_000_000_000_000),),
        "files": (SourceFile("trace.csv", "TraceV2", 1000, "aa", 3, 1, (("line 3", "not a number"),)),),
        "missing": ("no step records",),
    }
    given = defaults | fields
    tables = {name: rows_of(value) for name in TABLES if isinstance(value := given.get(name), pl.DataFrame)}
    return Recording(**(given | tables))
