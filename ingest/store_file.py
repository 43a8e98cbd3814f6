"""The store as a file: opening it, refusing what is not ours, one transaction at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from blis_replay.ingest.errors import StoreError

if TYPE_CHECKING:
    import duckdb

SCHEMA_VERSION = 2
_SCHEMA = ("schema.sql", "schema_journeys.sql", "schema_token_events.sql")
# An older version -> what brings its file to the next one.
_UPGRADES = {
    1: ("upgrade_1_to_2.sql", "schema_journeys.sql", "schema_token_events.sql", "upgrade_1_to_2_stamps.sql"),
}


@dataclass(frozen=True)
class Store:
    """An open ground-truth store: its DuckDB connection and its path."""

    connection: duckdb.DuckDBPyConnection
    path: Path


@contextmanager
def open_store(path: Path | str, *, read_only: bool = False) -> Iterator[Store]:
    """The store at ``path``, closed on leaving; unless ``read_only`` a new one is made, an older one updated.

    Raises ``StoreError`` (one line, with the mend) if it is absent or of an older schema and ``read_only``,
    is locked by another process, is no store of this program, has a newer schema, is
    damaged (also when that shows later, inside the context), or its folder cannot be
    written.
    """
    path = Path(path)
    if read_only and not path.exists():
        raise StoreError(f"{path}: there is no store; make one with an ingest, or point --store at another file")
    import duckdb

    connection = _connect(path, read_only)
    try:
        _check_schema(connection, path, read_only)
        yield Store(connection, path)
    except duckdb.Error as error:
        # Whatever a reader below did not expect of the file: a damaged block shows when it is read.
        raise StoreError(f"{path}: {_why_not_opened(path, one_line(error))}") from error
    finally:
        connection.close()


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
            raise StoreError(f"{store.path}: nothing was written: {one_line(error)}; mend that and repeat") from error
        raise


def fetch(
    connection: duckdb.DuckDBPyConnection, sql: str, bound: dict[str, object], schema: Mapping[str, type[pl.DataType]]
) -> pl.DataFrame:
    """The rows of a query as a frame of ``schema``; values are bound by name."""
    frame: pl.DataFrame = connection.sql(sql, params=bound).pl()
    return typed(frame, schema)


def first_row(
    connection: duckdb.DuckDBPyConnection, sql: str, bound: Sequence[object] | dict[str, object] | None = None
) -> tuple[Any, ...] | None:
    """The first row of a query or None; the result is read to its end, which DuckDB asks for."""
    rows: list[tuple[Any, ...]] = connection.execute(sql, bound).fetchall()
    return rows[0] if rows else None


def typed(frame: pl.DataFrame, schema: Mapping[str, type[pl.DataType]]) -> pl.DataFrame:
    """The columns of ``schema`` out of a frame, in its order and types."""
    return frame.select(pl.col(name).cast(kind) for name, kind in schema.items())


def one_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _roll_back(connection: duckdb.DuckDBPyConnection) -> None:
    import duckdb

    try:
        connection.execute("ROLLBACK")
    except duckdb.Error:
        # DuckDB has ended the transaction itself (a failed COMMIT): there is nothing to roll back.
        return


def _connect(path: Path, read_only: bool) -> duckdb.DuckDBPyConnection:
    import duckdb

    try:
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        return duckdb.connect(str(path), read_only=read_only)
    except OSError as error:
        raise StoreError(
            f"{path}: its folder cannot be made ({error.strerror or error}); choose another place with --store"
        ) from error
    except duckdb.Error as error:
        raise StoreError(f"{path}: {_why_not_opened(path, one_line(error))}") from error


def _why_not_opened(path: Path, text: str) -> str:
    lowered = text.lower()
    if path.is_dir():
        return "this is a folder; give the path of a file"
    locked = ("set lock", "conflicting lock", "different configuration", "used by another process")
    if any(words in lowered for words in locked):
        return "another process has it open; wait for it or choose another store with --store"
    if "not a valid duckdb" in lowered:
        return "this is not a blis-replay store; choose another path with --store"
    if "version number" in lowered or "newer version" in lowered:
        return f"written by another version of DuckDB ({text}); update duckdb, or ingest into a new store"
    if "permission denied" in lowered or "read-only" in lowered:
        return "it cannot be written; change its permissions or choose another place with --store"
    return f"it cannot be read ({text}); restore it from a copy, or ingest into a new store"


def _check_schema(connection: duckdb.DuckDBPyConnection, path: Path, read_only: bool) -> None:
    """Make the tables of an empty file and bring an older one up to date; refuse a foreign or newer one."""
    tables = {row[0] for row in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    if not tables:
        _run(connection, _SCHEMA, "INSERT INTO meta VALUES ('schema_version', ?)", SCHEMA_VERSION)
        return
    if "meta" not in tables or "experiments" not in tables:
        raise StoreError(f"{path}: a DuckDB file, but not a blis-replay store; choose another path with --store")
    row = first_row(connection, "SELECT value FROM meta WHERE key = 'schema_version'")
    version = str(row[0]) if row else "unknown"
    known = version.isdigit() and (int(version) >= SCHEMA_VERSION or int(version) in _UPGRADES)
    if not known:
        raise StoreError(f"{path}: its schema version is {version!r}; choose another path with --store")
    if int(version) > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: schema version {version} is newer than this program's {SCHEMA_VERSION}; update blis-replay"
        )
    if int(version) < SCHEMA_VERSION and read_only:
        raise StoreError(
            f"{path}: schema version {version} is older than this program's {SCHEMA_VERSION}; "
            "an ingest into it brings it up to date"
        )
    for older in range(int(version), SCHEMA_VERSION):
        _run(connection, _UPGRADES[older], "UPDATE meta SET value = ? WHERE key = 'schema_version'", older + 1)


def _run(connection: duckdb.DuckDBPyConnection, files: Sequence[str], noting_version: str, version: int) -> None:
    """Run SQL files of this package and note the version they lead to, in one transaction."""
    connection.execute("BEGIN TRANSACTION")
    for name in files:
        connection.execute(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    connection.execute(noting_version, [str(version)])
    connection.execute("COMMIT")
