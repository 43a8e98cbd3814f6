"""Recordings into the store: whole, in one transaction."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any, Literal

from blis_replay.ingest.recording import PUBLISHED, Recording, TokenEvents, columns_of
from blis_replay.ingest.rows import Rows, rows_of
from blis_replay.ingest.store.file import Store, first_row, insert_stream, transaction, typed
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
            for table in _RECORDING_TABLES:
                connection.execute(f"DELETE FROM {table} WHERE slug = ?", [recording.slug])  # noqa: S608 (constants)
        _insert(connection, recording, token_layout, (derived_hash, read_by))
    return "new" if stored is None else "replaced"


def _insert_prompts(connection: duckdb.DuckDBPyConnection, recording: Recording) -> None:
    """Add the prompt identities of a recording, within the caller's transaction."""
    slug, prefix = recording.slug, recording.prefix
    if prefix is not None:
        connection.execute("INSERT INTO prefix_identity VALUES (?, ?)", [slug, prefix.source])
        for table, frame in (("prompts", prefix.prompts), ("request_prompts", prefix.requests)):
            _insert_table(connection, table, slug, rows_of(typed(frame, columns_of(table))))


def _insert(
    connection: duckdb.DuckDBPyConnection,
    recording: Recording,
    layout: TokenLayout,
    made_by: tuple[str, str | None],
) -> None:
    """``made_by``: the columns ``derived_hash`` and ``read_by``."""
    slug = recording.slug
    _insert_experiment(connection, recording, layout, made_by)
    _insert_rows(
        connection,
        "engine_args",
        [(slug, name, json.dumps(s.value), s.source, s.detail) for name, s in sorted(recording.engine.items())],
    )
    _insert_rows(connection, "stages", [(slug, s.stage, s.rate_per_s, s.duration_us) for s in recording.stages])
    _insert_rows(connection, "clocks", [(slug, i, *astuple(clock)) for i, clock in enumerate(recording.clocks)])
    _insert_files(connection, recording)
    _insert_table(connection, "aggregates", slug, rows_of(typed(recording.aggregates, columns_of("aggregates"))))
    for table in TABLES:
        _insert_table(connection, table, slug, getattr(recording, table))
    if recording.token_events is not None:
        _insert_token_events(connection, recording, recording.token_events, layout)
    _insert_prompts(connection, recording)
    _insert_findings(connection, recording)


def _insert_experiment(
    connection: duckdb.DuckDBPyConnection,
    recording: Recording,
    layout: TokenLayout,
    made_by: tuple[str, str | None],
) -> None:
    shared, (derived_hash, read_by) = recording.shared_prefix, made_by
    row = (
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
    _insert_rows(connection, "experiments", [row])


_INSERT_STAMPS = """
INSERT INTO token_event_runs
SELECT $slug, request_index, first_event, tokens, $stamps_per_token, $leading_events, times_us FROM rows_to_store
"""


def _insert_token_events(
    connection: duckdb.DuckDBPyConnection, recording: Recording, events: TokenEvents, layout: TokenLayout
) -> None:
    """Copy every stamp into the store, with what tells which of them are tokens."""
    bound = {"slug": recording.slug, **{name: getattr(layout, name) for name in ("stamps_per_token", "leading_events")}}
    stamps = runs(events, token_counts(events, recording.requests, layout))
    insert_stream(connection, _INSERT_STAMPS, bound, stamps)


def _insert_files(connection: duckdb.DuckDBPyConnection, recording: Recording) -> None:
    slug = recording.slug
    files = ((f.name, f.kind, f.bytes, f.sha256, f.records, f.rejected_count) for f in recording.files)
    _insert_rows(connection, "source_files", [(slug, i, *file) for i, file in enumerate(files)])
    rejected = [
        (slug, i, j, place, reason)
        for i, file in enumerate(recording.files)
        for j, (place, reason) in enumerate(file.rejected)
    ]
    _insert_rows(connection, "rejected_records", rejected)


def _insert_findings(connection: duckdb.DuckDBPyConnection, recording: Recording) -> None:
    rows = [
        (recording.slug, i, f.check, f.severity, f.metric, f.message, json.dumps(f.measured), f.threshold)
        for i, f in enumerate(recording.findings)
    ]
    _insert_rows(connection, "findings", rows)


def _insert_rows(connection: duckdb.DuckDBPyConnection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    if rows:
        marks = ", ".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)  # noqa: S608


def _insert_table(connection: duckdb.DuckDBPyConnection, table: str, slug: str, rows: Rows) -> None:
    listed = ", ".join(rows.schema)
    sql = f"INSERT INTO {table} (slug, {listed}) SELECT ?, {listed} FROM rows_to_store"  # noqa: S608 (constants)
    with rows.reader() as stream:
        insert_stream(connection, sql, [slug], stream)


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
