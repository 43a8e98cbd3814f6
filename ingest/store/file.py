"""The store as a file: opening it, refusing what is not ours, one transaction at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blis_replay.ingest.errors import StoreError
from blis_replay.ingest.queries import first_row

if TYPE_CHECKING:
    import duckdb

SCHEMA_VERSION = 5
# By default DuckDB takes most of the machine's memory for its buffers, and keeps in them what it once read.
_MEMORY = "400MB"
_WRITING_MEMORY = "200MB"

_SCHEMA = ("schema.sql", "schema_journeys.sql", "schema_token_events.sql", "schema_iterations.sql")
# An older version -> what brings its file to the next one.
_UPGRADES = {
    1: ("upgrade_1_to_2.sql", *_SCHEMA, "upgrade_1_to_2_stamps.sql"),
    2: ("upgrade_2_to_3.sql",),
    3: ("upgrade_3_to_4.sql",),
    4: ("schema_iterations.sql",),
}


@dataclass(frozen=True)
class Store:
    """An open ground-truth store: its DuckDB connection and its path."""

    connection: duckdb.DuckDBPyConnection
    path: Path


@contextmanager
def open_store(path: Path | str, *, read_only: bool = False) -> Iterator[Store]:
    """The store at ``path``, closed on leaving; a new one is made unless ``read_only``.

    Raises ``StoreError`` (one line, with the mend) if it is absent and ``read_only``,
    is locked by another process, is no store of this program, has a newer schema, is
    damaged (also when that shows later, inside the context), or its folder cannot be
    written.  A store with an older schema is brought up to date; what is stored stays.
    """
    path = Path(path)
    if read_only and not path.exists():
        raise StoreError(f"{path}: there is no store; make one with an ingest, or point --store at another file")
    import duckdb

    connection = _connect(path, read_only)
    try:
        if _check_schema(connection, path) < SCHEMA_VERSION:
            if read_only:
                connection.close()
                with open_store(path):  # which brings it up to date, or says why it cannot
                    pass
                connection = _connect(path, read_only)
            else:
                _upgrade(connection)
        with _known_as_open(path.resolve(), connection, read_only):
            yield Store(connection, path)
    except duckdb.Error as error:
        # Whatever a reader below did not expect of the file: a damaged block shows when it is read.
        raise StoreError(f"{path}: {_why_not_opened(path, one_line(error))}") from error
    finally:
        connection.close()


# Stores that this process has open: DuckDB lets nobody else write one that is read, nor read one that is written.
_OPEN: dict[Path, tuple[duckdb.DuckDBPyConnection, bool]] = {}


@contextmanager
def _known_as_open(path: Path, connection: duckdb.DuckDBPyConnection, read_only: bool) -> Iterator[None]:
    before = _OPEN.get(path)
    _OPEN[path] = connection, read_only
    try:
        yield
    finally:
        _OPEN.pop(path)
        if before is not None:
            _OPEN[path] = before


def is_being_written(path: Path) -> bool:
    """Whether this process has the store at ``path`` open for writing."""
    return path in _OPEN and not _OPEN[path][1]


@contextmanager
def reading(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to the store at ``path``, which this process may have open already; raises as ``open_store``."""
    if path in _OPEN:
        cursor = _OPEN[path][0].cursor()
        try:
            yield cursor
        finally:
            cursor.close()
    else:
        with open_store(path, read_only=True) as store:
            yield store.connection


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
            raise StoreError(f"{store.path}: nothing was written: {one_line(error)}; mend that and repeat") from error
        raise


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
        connection = duckdb.connect(str(path), read_only=read_only, config={"memory_limit": _MEMORY})
        # Its own progress bar goes to the standard output, in a pipe too, in the middle of what is printed there.
        connection.execute("SET enable_progress_bar = false")
        return connection
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


def _check_schema(connection: duckdb.DuckDBPyConnection, path: Path) -> int:
    """The schema's version; makes the tables of an empty file, refuses a foreign or newer one."""
    tables = {row[0] for row in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    if not tables:
        _create(connection)
        return SCHEMA_VERSION
    if "meta" not in tables or "experiments" not in tables:
        raise StoreError(f"{path}: a DuckDB file, but not a blis-replay store; choose another path with --store")
    row = first_row(connection, "SELECT value FROM meta WHERE key = 'schema_version'")
    version = row[0] if row else "unknown"
    if not (str(version).isdigit() and (int(version) >= SCHEMA_VERSION or int(version) in _UPGRADES)):
        raise StoreError(f"{path}: its schema version is {version!r}; choose another path with --store")
    if int(version) > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: schema version {version} is newer than this program's {SCHEMA_VERSION}; update blis-replay"
        )
    return int(version)


def _upgrade(connection: duckdb.DuckDBPyConnection) -> None:
    (version,) = first_row(connection, "SELECT value::BIGINT FROM meta WHERE key = 'schema_version'") or (0,)
    upgrades = [name for older in range(version, SCHEMA_VERSION) for name in _UPGRADES[older]]
    _run(connection, upgrades, "UPDATE meta SET value = ? WHERE key = 'schema_version'")


def _create(connection: duckdb.DuckDBPyConnection) -> None:
    _run(connection, _SCHEMA, "INSERT INTO meta VALUES ('schema_version', ?)")


def _run(connection: duckdb.DuckDBPyConnection, files: Sequence[str], noting_version: str) -> None:
    """Run SQL files of this package and note the version they lead to, in one transaction."""
    connection.execute("BEGIN TRANSACTION")
    for name in files:
        connection.execute(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    connection.execute(noting_version, [str(SCHEMA_VERSION)])
    connection.execute("COMMIT")
