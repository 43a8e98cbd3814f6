"""Runs and their errors, put into the store; a run that cannot be stored is still an answer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import polars as pl

from blis_replay.ingest.errors import StoreError
from blis_replay.ingest.store import RunRecord, Store, open_store, writable, write_run
from blis_replay.ingest.store.file import limit_writing
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.store import record_of, run_tables
from blis_replay.validate.comparison.compare import Comparison


def store_run(store: Store, run: ReplayRun, comparison: Comparison) -> None:
    """Store a run and its errors; raises ``StoreError`` if that cannot be."""
    with writable(store) as opened:
        limit_writing(opened)
        write_run(opened, record_of(run), *run_tables(run), errors_frame(comparison))


def why_not_stored(store: Store, run: ReplayRun, comparison: Comparison) -> str:
    """Store a run; why it cannot be, else an empty text."""
    try:
        store_run(store, run, comparison)
    except StoreError as error:
        return str(error)
    return ""


def leave_tables(scratch: Path, run: ReplayRun) -> None:
    """The tables of a run as files in a folder: only one process at a time can write the store."""
    for name, parts in zip(("requests", "steps"), run_tables(run), strict=True):
        for number, part in enumerate(parts):
            part.write_parquet(_table_file(scratch, record_of(run), name, number))


def why_not_all_stored(store: Path, scratch: Path, left: Sequence[tuple[RunRecord, Comparison]]) -> str:
    """Store the runs whose tables were left in a folder, one at a time in memory; as ``why_not_stored``."""
    try:
        if left:
            with open_store(store) as opened:
                limit_writing(opened)
                for run, comparison in left:
                    requests, steps = (_left_parts(scratch, run, name) for name in ("requests", "steps"))
                    write_run(opened, run, requests, steps, errors_frame(comparison))
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


def errors_frame(comparison: Comparison) -> pl.DataFrame:
    """The table of a comparison in the store's form."""
    return pl.DataFrame(
        [
            {
                "metric": metric,
                "statistic": statistic,
                "observed_us": cell.a_us,
                "simulated_us": cell.b_us,
                "error": cell.error,
                "reason": cell.reason,
            }
            for metric, cells in comparison.metrics.items()
            for statistic, cell in cells.items()
        ],
        infer_schema_length=None,
    )
