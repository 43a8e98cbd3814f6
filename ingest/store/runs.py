"""Simulated runs in the store, each beside the recording that it replays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import polars as pl

from blis_replay.base.errors import StoreError
from blis_replay.ingest.recording import columns_of
from blis_replay.ingest.rows import shaped
from blis_replay.ingest.store.file import Store, first_row, insert_stream, read_table, transaction


@dataclass(frozen=True)
class RunRecord:
    """What identifies a run (the first four that matter make its key) and where it came from.

    ``content_hash``: of the recording replayed; ``provenance``: versions, substitutions,
    assumptions, as plain JSON values.
    """

    slug: str
    simulator: str
    release: str
    release_hash: str
    replay_mode: str
    content_hash: str
    provenance: dict[str, object] = field(default_factory=dict)

    @property
    def run_key(self) -> str:
        """SHA-256 over slug, simulator, release hash and replay mode."""
        parts = json.dumps([self.slug, self.simulator, self.release_hash, self.replay_mode])
        return hashlib.sha256(parts.encode()).hexdigest()


def is_stored(store: Store, run: RunRecord) -> bool:
    """Whether this very run is stored: same key, same recording, same provenance (versions included)."""
    row = first_row(store.connection, "SELECT content_hash, provenance FROM runs WHERE run_key = ?", [run.run_key])
    return row is not None and row == (run.content_hash, json.dumps(run.provenance, sort_keys=True))


# Rows of a table some after the others, or all of them.
Parts = Iterable[pl.DataFrame]


def write_run(
    store: Store, run: RunRecord, requests: Parts | pl.DataFrame, steps: Parts | pl.DataFrame, errors: pl.DataFrame
) -> Literal["new", "replaced"]:
    """Store a run in one transaction, in place of an earlier one of the same key.

    Frames have columns of ``run_requests``, ``run_steps`` and ``errors`` (``schema.sql``); a missing one is stored as
    null.  Raises ``StoreError`` for an unknown column or if the store cannot be written.
    """
    tables = {"run_requests": requests, "run_steps": steps, "errors": errors}
    with transaction(store) as connection:
        known = first_row(connection, "SELECT 1 FROM runs WHERE run_key = ?", [run.run_key])
        for table in ("runs", *tables):
            connection.execute(f"DELETE FROM {table} WHERE run_key = ?", [run.run_key])  # noqa: S608 (constants)
        columns = vars(run) | {"provenance": json.dumps(run.provenance, sort_keys=True)}
        connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", [run.run_key, *columns.values()])
        for table, parts in tables.items():
            sql = f"INSERT INTO {table} SELECT ?, * FROM rows_to_store"  # noqa: S608 (constants)
            insert_stream(connection, sql, [run.run_key], _arrow(parts, table))
    return "replaced" if known else "new"


def _arrow(parts: Parts | pl.DataFrame, table: str) -> Any:
    """The rows for DuckDB; of parts one stream, as what an INSERT leaves of a row group stays in memory."""
    if isinstance(parts, pl.DataFrame):
        return conform(parts, table).to_arrow()
    import pyarrow as pa

    streamed = (batch for part in parts for batch in conform(part, table).to_arrow().to_batches())
    return pa.RecordBatchReader.from_batches(pl.DataFrame(schema=columns_of(table)).to_arrow().schema, streamed)


def conform(frame: pl.DataFrame, table: str) -> pl.DataFrame:
    """``frame`` with exactly the columns of a table, absent ones null; ``StoreError`` for others."""
    schema = columns_of(table)
    unknown = sorted(set(frame.columns) - set(schema))
    if unknown:
        raise StoreError(f"{table} has no column {', '.join(unknown)}; give the columns of schema.sql")
    try:
        return shaped(frame, schema, {name: pl.col(name) for name in frame.columns})
    except pl.exceptions.PolarsError as error:
        raise StoreError(f"{table}: {str(error).splitlines()[0]}; give the types of schema.sql") from error


def list_runs(store: Store, slug: str | None = None) -> list[RunRecord]:
    """Stored runs, of one experiment or of all, ordered by slug, simulator, release and mode."""
    rows = store.connection.execute(
        "SELECT slug, simulator, release, release_hash, replay_mode, content_hash, provenance FROM runs "
        "WHERE $slug IS NULL OR slug = $slug ORDER BY slug, simulator, release, replay_mode, run_key",
        {"slug": slug},
    ).fetchall()
    return [replace(RunRecord(*row[:-1]), provenance=json.loads(row[-1])) for row in rows]


def read_run(store: Store, run: RunRecord) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """``(requests, steps, errors)`` of a stored run; ``StoreError`` if it is not stored."""
    if first_row(store.connection, "SELECT 1 FROM runs WHERE run_key = ?", [run.run_key]) is None:
        raise StoreError(f"{store.path}: no {run.replay_mode} run of {run.slug} with {run.release}; validate it first")
    tables = ("run_requests", "request_index"), ("run_steps", "step"), ("errors", "metric, statistic")
    requests, steps, errors = (read_table(store, *table, run_key=run.run_key) for table in tables)
    return requests, steps, errors
