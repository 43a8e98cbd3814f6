"""A replay as the store keeps it, put there, and without its rows; what cannot be stored is still an answer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from blis_replay.base.errors import StoreError
from blis_replay.blis.result import SimResult, step_parts
from blis_replay.blis.trace import RequestTrace
from blis_replay.ingest.recording import columns_of, empty_frame
from blis_replay.ingest.rows import no_rows
from blis_replay.ingest.store import Store, open_store
from blis_replay.ingest.store.file import limit_writing, writable
from blis_replay.ingest.store.recordings import TABLES
from blis_replay.ingest.store.runs import RunRecord, write_run
from blis_replay.replay.driver import ReplayRun


def provenance_of(run: ReplayRun) -> dict[str, object]:
    """Everything a result depends on: versions, hashes, substitutions, engine arguments."""
    return {
        "blis_replay": version("blis-replay"),
        "simulator": run.simulator,
        "recording_hash": run.recording.content_hash,
        "coefficients": run.release.name,
        "coefficients_hash": run.release.sha256,
        "replay": run.mode.name,
        "basis": run.basis,
        "scheduling": "asynchronous" if run.simulated.asynchronous else "synchronous",
        "engine": {name: {"value": s.value, "source": s.source} for name, s in sorted(run.plan.arguments.items())},
        "delays": dict((run.entry.sources if run.entry else None) or {}),
    }


def record_of(run: ReplayRun) -> RunRecord:
    """What identifies a replay in the store, and what it depends on."""
    return RunRecord(
        slug=run.recording.slug,
        simulator=run.simulator,
        release=run.release.name,
        release_hash=run.release.sha256,
        replay_mode=run.mode.name,
        content_hash=run.recording.content_hash,
        provenance=provenance_of(run),
    )


# Requests that are stored together.
_REQUESTS_AT_A_TIME = 200_000


def run_tables(run: ReplayRun) -> tuple[Iterator[pl.DataFrame], Iterator[pl.DataFrame]]:
    """Requests (``run_requests``) and steps (``run_steps``) of a replay as they are stored, some after the others.

    A simulator that reports requests only has no steps, and of a request only its latencies.
    """
    engine = run.simulated.engine
    return _request_parts(run), iter([empty_frame(columns_of("run_steps"))]) if engine is None else _step_frames(engine)


def _request_parts(run: ReplayRun) -> Iterator[pl.DataFrame]:
    """A time that a request has not is null."""
    engine, completed = run.simulated.engine, run.simulated.completed
    columns = {"ttft_us": run.ttft_us, "e2e_us": run.e2e_us}
    if engine is not None:
        columns |= {"queued_us": engine.queued_us, "scheduled_us": engine.scheduled_us}
        columns |= {"first_token_us": engine.first_token_us, "finished_us": engine.finished_us}
    for first in range(0, max(len(completed), 1), _REQUESTS_AT_A_TIME):
        part = slice(first, first + _REQUESTS_AT_A_TIME)
        frame = pl.DataFrame({name: values[part] for name, values in columns.items()} | {"done": completed[part]})
        yield frame.select(
            pl.int_range(first, first + pl.len()).alias("request_index"),
            *(pl.when("done").then(name) for name in columns if name in ("ttft_us", "e2e_us", "finished_us")),
            *(pl.col(name) for name in columns if name == "queued_us"),
            *(pl.when(pl.col(name) >= 0).then(name) for name in columns if name in ("scheduled_us", "first_token_us")),
            pl.when("done").then(pl.lit("completed")).otherwise(pl.lit("aborted")).alias("state"),
        )


_STEP_COLUMNS = (
    *("start_us", "end_us", "prefill_tokens", "decode_tokens", "context_tokens", "running_depth", "waiting_depth"),
)


def _step_frames(result: SimResult) -> Iterator[pl.DataFrame]:
    first = 0
    for steps in step_parts(result.steps):
        yield pl.DataFrame({"step": range(first, first + len(steps)), **{name: steps[name] for name in _STEP_COLUMNS}})
        first += len(steps)


def step_table(result: SimResult) -> pl.DataFrame:
    """The steps of a run, a row each: ``step``, ``start_us``, ``end_us``, tokens of the batch, and queue depths."""
    return pl.concat(_step_frames(result))


def without_rows(run: ReplayRun) -> ReplayRun:
    """What a run was of, by whom and how, without its requests and steps: small enough to keep hundreds of them."""
    recording, plan, simulated = run.recording, run.plan, run.simulated
    nothing = np.empty(0, np.int64)
    tables: dict[str, Any] = {name: no_rows(columns_of(name)) for name in TABLES}
    recording = replace(recording, **tables, prefix=None)
    trace = RequestTrace(nothing, nothing, nothing, nothing, nothing)
    return replace(
        run,
        recording=recording,
        plan=replace(plan, recording=recording, trace=trace, sessions=None, cycles=None, delivery_us=None),
        simulated=replace(
            simulated,
            completed=nothing.astype(np.bool_),
            ttft_us=nothing,
            e2e_us=nothing,
            output_tokens=nothing,
            engine=None,
        ),
    )


def store_run(store: Store, run: ReplayRun, errors: pl.DataFrame) -> None:
    """Store a run and its ``errors`` (of a comparison with its recording); raises ``StoreError`` if that cannot be."""
    with writable(store) as opened:
        limit_writing(opened)
        write_run(opened, record_of(run), *run_tables(run), errors)


def why_not_stored(store: Store, run: ReplayRun, errors: pl.DataFrame) -> str:
    """Store a run; why it cannot be, else an empty text."""
    try:
        store_run(store, run, errors)
    except StoreError as error:
        return str(error)
    return ""


def leave_tables(scratch: Path, run: ReplayRun) -> None:
    """The tables of a run as files in a folder: only one process at a time can write the store."""
    for name, parts in zip(("requests", "steps"), run_tables(run), strict=True):
        for number, part in enumerate(parts):
            part.write_parquet(_table_file(scratch, record_of(run), name, number))


def why_not_all_stored(store: Path, scratch: Path, left: Sequence[tuple[RunRecord, pl.DataFrame]]) -> str:
    """Store the runs whose tables were left in a folder, one at a time in memory; as ``why_not_stored``."""
    try:
        if left:
            with open_store(store) as opened:
                limit_writing(opened)
                for run, errors in left:
                    requests, steps = (_left_parts(scratch, run, name) for name in ("requests", "steps"))
                    write_run(opened, run, requests, steps, errors)
    except StoreError as error:
        return str(error)
    return ""


def writable_folder(store: Path) -> Path | None:
    """Where the store is, which has room for its runs; None, that of temporary files, if nobody may write there."""
    return store.parent if os.access(store.parent, os.W_OK) else None


def _table_file(scratch: Path, run: RunRecord, name: str, number: int) -> Path:
    return scratch / f"{run.run_key}.{name}.{number}.parquet"


def _left_parts(scratch: Path, run: RunRecord, name: str) -> Iterator[pl.DataFrame]:
    """The parts of a table that was left in a folder."""
    for number in count():
        file = _table_file(scratch, run, name, number)
        if not file.exists():
            return
        yield pl.read_parquet(file)
