"""Recordings into the store: whole, in one transaction."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from blis_replay.base.errors import StoreError
from blis_replay.ingest.recording import PUBLISHED, Recording, columns_of
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.store.file import MAKE_ROOM, Store, first_row, has_room, one_line
from blis_replay.ingest.store.recordings import IDENTITY, SHARED_PREFIX, TABLES
from blis_replay.ingest.stream import TokenLayout, runs, token_counts

if TYPE_CHECKING:
    import duckdb

WriteOutcome = Literal["unchanged", "new", "replaced"]

# Tables that hold one recording, all keyed by slug.
_RECORDING_TABLES = (
    *("experiments", "source_files", "rejected_records", "engine_args", "stages", "clocks", "aggregates"),
    *("token_event_runs", "prefix_identity", "prompts", "request_prompts", "findings", *TABLES),
)


def write_recording(
    store: Store, recording: Recording, token_layout: TokenLayout, read_by: str | None = None
) -> WriteOutcome:
    """Store a recording whole, or not at all: one transaction.

    ``read_by``: hash of the program that read its files, if it has any.  ``unchanged``: the same content with the same
    findings and settings is there, or published aggregates met a recorded experiment, which they never replace.  Raises
    ``StoreError`` if the store cannot be written; it is then as it was.
    """
    derived_hash = _derived_hash(recording, token_layout)
    with transaction(store) as connection:
        stored = first_row(
            connection,
            "SELECT ground_truth, content_hash, derived_hash FROM experiments WHERE slug = ?",
            [recording.slug],
        )
        if stored is not None:
            if recording.ground_truth == PUBLISHED and stored[0] != PUBLISHED:
                return "unchanged"
            if tuple(stored) == (recording.ground_truth, recording.content_hash, derived_hash):
                connection.execute("UPDATE experiments SET read_by = ? WHERE slug = ?", [read_by, recording.slug])
                return "unchanged"
            _delete(connection, recording.slug)
        _insert(connection, recording, token_layout, (derived_hash, read_by))
    return "new" if stored is None else "replaced"


def remove_recordings(store: Store, slugs: Sequence[str]) -> None:
    """Take recordings out of the store, all of them or none; raises ``StoreError`` if it cannot be written."""
    with transaction(store) as connection:
        for slug in slugs:
            _delete(connection, slug)


def _delete(connection: duckdb.DuckDBPyConnection, slug: str) -> None:
    for table in _RECORDING_TABLES:
        connection.execute(f"DELETE FROM {table} WHERE slug = ?", [slug])  # noqa: S608 (constants)


_INSERT_STAMPS = """
INSERT INTO token_event_runs
SELECT $slug, request_index, first_event, tokens, $stamps_per_token, $leading_events, times_us FROM rows_to_store
"""


def _insert(
    connection: duckdb.DuckDBPyConnection,
    recording: Recording,
    layout: TokenLayout,
    made_by: tuple[str, str | None],
) -> None:
    """Add all of a recording, within the caller's transaction; ``made_by``: ``derived_hash`` and ``read_by``."""
    slug, prefix, events = recording.slug, recording.prefix, recording.token_events
    for table, values in _small_tables(recording, layout, made_by).items():
        if values:
            marks = ", ".join("?" * len(values[0]))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", values)  # noqa: S608 (constants)
    frames = {"aggregates": recording.aggregates}
    if prefix is not None:
        frames |= {"prompts": prefix.prompts, "request_prompts": prefix.requests}
    schemas = {table: pl.Schema(columns_of(table)) for table in frames}
    tables = {table: rows_of(frames[table].select(of.keys()).cast(of)) for table, of in schemas.items()}
    for table, rows in (tables | {table: getattr(recording, table) for table in TABLES}).items():
        listed = ", ".join(rows.schema)
        sql = f"INSERT INTO {table} (slug, {listed}) SELECT ?, {listed} FROM rows_to_store"  # noqa: S608 (constants)
        with rows.reader() as stream:
            insert_stream(connection, sql, [slug], stream)
    if events is not None:
        bound = {"slug": slug, **{name: getattr(layout, name) for name in ("stamps_per_token", "leading_events")}}
        # Every stamp, with what tells which of them are tokens.
        stamps = runs(events, token_counts(events, recording.requests, layout))
        insert_stream(connection, _INSERT_STAMPS, bound, stamps)


def _small_tables(
    recording: Recording, layout: TokenLayout, made_by: tuple[str, str | None]
) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of the tables that hold what a recording has one or a few of, in the order of their columns."""
    slug, shared, (derived_hash, read_by) = recording.slug, recording.shared_prefix, made_by
    experiment = (
        *(getattr(recording, name) for name in IDENTITY),
        derived_hash,
        recording.ignore_eos,
        recording.prefix_hit_rate,
        layout.name,
        json.dumps(list(recording.missing)),
        *(None if shared is None else getattr(shared, name) for name in SHARED_PREFIX),
        recording.dropped_step_events,
        None if recording.load_profile is None else json.dumps(asdict(recording.load_profile)),
        read_by,
    )
    engine, files, findings = sorted(recording.engine.items()), recording.files, recording.findings
    return {
        "experiments": [experiment],
        "engine_args": [(slug, name, json.dumps(s.value), s.source, s.detail) for name, s in engine],
        "stages": [(slug, *astuple(stage)) for stage in recording.stages],
        "clocks": [(slug, i, *astuple(clock)) for i, clock in enumerate(recording.clocks)],
        "source_files": [(slug, i, *astuple(file)[:-1]) for i, file in enumerate(files)],
        "rejected_records": [
            (slug, i, j, *record) for i, file in enumerate(files) for j, record in enumerate(file.rejected)
        ],
        "findings": [
            (slug, i, f.check, f.severity, f.metric, f.message, json.dumps(f.measured), f.threshold)
            for i, f in enumerate(findings)
        ],
        "prefix_identity": [] if recording.prefix is None else [(slug, recording.prefix.source)],
    }


_SETTINGS = (
    *("stages", "shared_prefix", "load_profile", "ignore_eos", "prefix_hit_rate"),
    *("missing", "clocks", "findings"),
)


def _derived_hash(recording: Recording, layout: TokenLayout) -> str:
    """What this program made of the content: changes with settings, findings and layout."""
    parts = (
        *(getattr(recording, name) for name in IDENTITY[1:6]),
        sorted(recording.engine.items()),
        *(getattr(recording, name) for name in _SETTINGS),
        recording.prefix and (recording.prefix.source, recording.prefix.prompts.height),
        layout,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


_WRITING_MEMORY = "200MB"


def limit_writing(store: Store) -> None:
    """Keep less of what is written in memory than of what is read, and write with one thread.

    Rows come as one stream: further threads would have buffers of their own and wait for one another.
    """
    store.connection.execute("SET memory_limit = ?", [_WRITING_MEMORY])
    store.connection.execute("SET threads = 1")


@contextmanager
def transaction(store: Store) -> Iterator[duckdb.DuckDBPyConnection]:
    """One transaction: committed on leaving, rolled back whatever goes wrong inside.

    Raises ``StoreError`` if the store cannot take it (disk full, read-only, conflict).
    """
    import duckdb

    connection = store.connection
    try:
        connection.execute("BEGIN TRANSACTION")
    except duckdb.Error as error:
        raise StoreError(f"{store.path}: cannot write: {one_line(error)}; close whatever else uses it") from error
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException as error:
        _roll_back(connection)
        if isinstance(error, duckdb.Error):
            problem = f"nothing was written: {one_line(error)}; remove the cause, then repeat"
            raise StoreError(f"{store.path}: {problem if has_room(store.path) else MAKE_ROOM}") from error
        raise


def _roll_back(connection: duckdb.DuckDBPyConnection) -> None:
    import duckdb

    try:
        connection.execute("ROLLBACK")
    except duckdb.Error:
        # DuckDB has ended the transaction itself (a failed COMMIT): there is nothing to roll back.
        return


def insert_stream(
    connection: duckdb.DuckDBPyConnection, sql: str, bound: Sequence[object] | dict[str, object], rows: Any
) -> None:
    """Run an INSERT that selects from ``rows_to_store``; ``rows``: Arrow data, as a stream where there are many.

    What an INSERT leaves of a row group stays in memory until the commit: one stream leaves one.
    """
    connection.register("rows_to_store", rows)
    connection.execute(sql, bound)
    connection.unregister("rows_to_store")
