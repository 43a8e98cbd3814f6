"""The store as a file: opening it, and refusing what is not ours.

A store may come from anybody: it is opened as a file, with our tables and no view in place of one, and DuckDB
neither reads other files for it nor loads an extension.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import polars as pl

from blis_replay.base.errors import StoreError
from blis_replay.ingest.recording import SCHEMA_SQL, columns_of
from blis_replay.ingest.rows import result_frame

if TYPE_CHECKING:
    import duckdb

SCHEMA_VERSION = 9
# By default DuckDB takes most of the machine's memory for its buffers, and keeps in them what it once read.
_MEMORY = "120MB"
# How long a verb waits for another one that has the store open: a validation of all experiments takes a minute.
LOCK_TIMEOUT_S = 60.0
# Environment variable with another number of seconds.
LOCK_TIMEOUT = "BLIS_REPLAY_LOCK_TIMEOUT"
_SAY_AFTER_S = 1.0  # seconds of waiting before the operator hears of it
_FREE_TRIES = 10  # one or two say little: whoever waits looks as well, and is in the way while it looks
_UNTRUSTED = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
# Every DuckDB file has these bytes at offset 8.
_MAGIC, _MAGIC_AT = b"DUCK", 8
# Written to see whether there is room: DuckDB writes blocks of 256 KB.
_PROBE_BYTES = 1 << 20
_FULL_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


@dataclass
class Store:
    """An open ground-truth store: its DuckDB connection, another one after ``writable``, and its path."""

    connection: duckdb.DuckDBPyConnection
    path: Path


@contextmanager
def open_store(path: Path | str, *, read_only: bool = False) -> Iterator[Store]:
    """The store at ``path``, closed on leaving; a new one is made unless ``read_only``.

    While another process has it open, this one waits, and says so.  Raises ``StoreError`` (one line, with the remedy)
    if it is absent and ``read_only``, locked for longer than ``LOCK_TIMEOUT_S``, not a store of this schema version
    or damaged, or if its folder cannot be written.  Damage may show only later, inside the context.
    """
    path = Path(path)
    _refuse_no_file(path)
    if read_only and not path.exists():
        raise StoreError(f"{path}: there is no store; make one with an ingest, or point --store at another file")
    import duckdb

    is_new = not path.exists()
    connection = _connect(path, read_only)
    try:
        if not _is_checked(connection, path):
            if read_only:
                connection.close()
                with open_store(path):  # makes the tables, or says why it cannot
                    pass
                connection = _connect(path, read_only)
            else:
                _create(connection, path, is_new)
        store = Store(connection, path)
        with _known_as_open(path.resolve(), connection, read_only):
            yield store
        connection = store.connection
    except duckdb.Error as error:
        # Whatever a reader below did not expect of the file: a damaged block shows when it is read.
        raise StoreError(f"{path}: {_why_not_opened(path, read_only, error)}") from error
    finally:
        connection.close()


@contextmanager
def open_for_reading(path: Path | str) -> Iterator[Store]:
    """The store at ``path``, made if it is absent, and open for reading only: so others can read it too.

    What has to be written is written within ``writable``.  Raises as ``open_store``.
    """
    if not Path(path).exists():
        with open_store(path):
            pass
    with open_store(path, read_only=True) as store:
        yield store


@contextmanager
def writable(store: Store) -> Iterator[Store]:
    """The store open for writing; where it is open for reading that ends meanwhile.  Raises as ``open_store``."""
    path = store.path.resolve()
    if path not in _OPEN or not _OPEN[path][1]:
        yield store
        return
    store.connection.close()
    _OPEN.pop(path)
    try:
        with open_store(store.path) as opened:
            yield opened
    finally:
        store.connection = _connect(store.path, read_only=True)
        _OPEN[path] = store.connection, True


# Stores that this process has open: DuckDB lets nobody else write one that is read, nor read one that is written.
_OPEN: dict[Path, tuple[duckdb.DuckDBPyConnection, bool]] = {}


@contextmanager
def _known_as_open(path: Path, connection: duckdb.DuckDBPyConnection, read_only: bool) -> Iterator[None]:
    before = _OPEN.get(path)
    _OPEN[path] = connection, read_only
    try:
        yield
    finally:
        _OPEN.pop(path, None)
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


def one_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _connect(path: Path, read_only: bool) -> duckdb.DuckDBPyConnection:
    import duckdb

    try:
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = _waited_for(path, read_only)
        connection.execute("SET enable_external_access = false")
        # Its own progress bar goes to the standard output, in a pipe too, in the middle of what is printed there.
        connection.execute("SET enable_progress_bar = false")
        return connection
    except OSError as error:
        raise StoreError(
            f"{path}: its folder cannot be made ({error.strerror or error}); choose another place with --store"
        ) from error
    except duckdb.Error as error:
        raise StoreError(f"{path}: {_why_not_opened(path, read_only, error)}") from error


def _refuse_no_file(path: Path) -> None:
    """What DuckDB would open as something else than a file of its own: memory, a service, another database."""
    if re.match(r":|[A-Za-z][A-Za-z0-9+.-]+:", str(path)):
        raise StoreError(f"{path}: a store is a file; give its path with --store (./{path} for a file of that name)")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise StoreError(f"{path}: this is not a regular file; choose another path with --store")
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        with path.open("rb") as file:
            head = file.read(_MAGIC_AT + len(_MAGIC))
    except OSError as error:
        raise StoreError(f"{path}: it cannot be read ({error.strerror}); change its permissions") from error
    if head[_MAGIC_AT:] != _MAGIC:
        raise StoreError(f"{path}: this is not a blis-replay store; choose another path with --store")


def _waited_for(path: Path, read_only: bool) -> duckdb.DuckDBPyConnection:
    """The connection, as soon as no other process is in the way."""
    import duckdb

    begin, said, free_tries = time.monotonic(), False, 0
    while True:
        try:
            return duckdb.connect(str(path), read_only=read_only, config={"memory_limit": _MEMORY, **_UNTRUSTED})
        except duckdb.IOException:
            waited_s = time.monotonic() - begin
            free_tries = 0 if _is_locked(path, read_only) else free_tries + 1
            if waited_s >= lock_timeout_s() or free_tries == _FREE_TRIES:
                raise
        if waited_s >= _SAY_AFTER_S and not said and not free_tries:
            said = True
            print(f"waiting for {path}: another process has it open", file=sys.stderr, flush=True)
        time.sleep(min(0.02 if free_tries else 0.1, lock_timeout_s()))


def lock_timeout_s() -> float:
    """How long to wait for another process: LOCK_TIMEOUT, where it is a number, else ``LOCK_TIMEOUT_S``."""
    try:
        seconds = max(float(os.environ[LOCK_TIMEOUT]), 0.0)
        return LOCK_TIMEOUT_S if math.isnan(seconds) else seconds
    except (KeyError, ValueError):
        return LOCK_TIMEOUT_S


def _is_locked(path: Path, read_only: bool) -> bool:
    """Whether another process has the file open; DuckDB holds a POSIX lock, shared where it only reads."""
    if path.resolve() in _OPEN:
        return False  # a lock of our own: closing a file of ours here would end it
    try:
        with path.open("rb" if read_only else "r+b") as file:
            fcntl.lockf(file, (fcntl.LOCK_SH if read_only else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN) and os.access(path, os.R_OK if read_only else os.W_OK)
    return False


def has_room(path: Path) -> bool:
    """Whether the store could grow: tried with a sparse file of its size in the same folder."""
    try:
        with TemporaryFile(dir=path.parent) as file:
            file.seek(path.stat().st_size if path.exists() else 0)
            file.write(bytes(_PROBE_BYTES))
            file.flush()
    except OSError as error:
        return error.errno not in _FULL_ERRORS
    return True


MAKE_ROOM = "its disk is full, and nothing was written; make room there, or choose another place with --store"


def _why_not_opened(path: Path, read_only: bool, error: duckdb.Error) -> str:
    import duckdb

    text = one_line(error)
    if path.is_dir():
        return "this is a folder; give the path of a file"
    # A connection of this process with other settings, or a lock of another process.
    if isinstance(error, duckdb.ConnectionException) or _is_locked(path, read_only):
        return "another process has it open; wait for it (--lock-timeout) or choose another store with --store"
    if not read_only and not has_room(path):
        return MAKE_ROOM
    if not path.exists():
        return f"it cannot be made ({text}); choose another place with --store"
    if not os.access(path, os.R_OK if read_only else os.R_OK | os.W_OK):
        return "it cannot be written; change its permissions or choose another place with --store"
    return f"DuckDB cannot read it ({text}); update duckdb, restore it from a copy, or ingest into a new store"


# Stores that were checked, and the state of their files then: rows are read by many short looks into a store, and a
# check takes 15 ms.
_CHECKED: dict[Path, list[tuple[int, int, int, int, int]]] = {}


def _is_checked(connection: duckdb.DuckDBPyConnection, path: Path) -> bool:
    """As ``_has_schema``, once for each state of the file and of the WAL that DuckDB keeps beside it."""
    place = path.resolve()
    stats = [file.stat() for file in (place, place.with_name(f"{place.name}.wal")) if file.exists()]
    state = [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]
    if _CHECKED.get(place) != state:
        if not _has_schema(connection, path):
            return False
        _CHECKED[place] = state
    return True


_OBJECTS = """
SELECT 'macro', function_name FROM duckdb_functions() WHERE NOT internal UNION ALL
SELECT 'table', table_name FROM duckdb_tables() UNION ALL
SELECT 'view', view_name FROM duckdb_views() WHERE NOT internal
"""


def _has_schema(connection: duckdb.DuckDBPyConnection, path: Path) -> bool:
    """Whether the file has tables (they are then ours, of our schema version); refuses any other file.

    A macro, or a view in place of a table, is a query that somebody else wrote: neither may run.
    """
    objects = {(str(kind), str(name)) for kind, name in connection.execute(_OBJECTS).fetchall()}
    macros = sorted(name for kind, name in objects if kind == "macro")
    if macros:
        raise StoreError(f"{path}: macro {_shown(macros[0])} is not of a store; ingest into a new store")
    if not any(kind == "table" for kind, _name in objects):
        return False
    if not {("table", "meta"), ("table", "experiments")} <= objects:
        raise StoreError(f"{path}: a DuckDB file, but not a blis-replay store; choose another path with --store")
    version = _version(connection)
    if version.isdigit() and int(version) > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: schema version {version} is newer than this program's {SCHEMA_VERSION}; update blis-replay, or "
            "choose another store with --store"
        )
    if version != str(SCHEMA_VERSION):
        raise StoreError(
            f"{path}: its schema version is {version!r}, and this program reads {SCHEMA_VERSION}; ingest again into "
            "another store (--store)"
        )
    for kind, name in sorted(objects ^ _ours()):
        problem = "is not of a store" if (kind, name) in objects else "is missing"
        raise StoreError(f"{path}: {kind} {_shown(name)} {problem}; ingest into a new store")
    return True


def _version(connection: duckdb.DuckDBPyConnection) -> str:
    """The version of the schema as the file says."""
    row = first_row(connection, "SELECT value FROM meta WHERE key = 'schema_version'")
    return str(row[0]) if row else "unknown"


def _shown(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name[:60])


@cache
def _ours() -> frozenset[tuple[str, str]]:
    """Kind and name of the tables and views that this package makes."""
    made = re.findall(r"CREATE (TABLE|VIEW) IF NOT EXISTS (\w+)", SCHEMA_SQL)
    return frozenset((kind.lower(), name) for kind, name in made)


def _create(connection: duckdb.DuckDBPyConnection, path: Path, is_new: bool) -> None:
    """Make the tables in one transaction; a new file that cannot have them (a full disk) is removed again."""
    try:
        connection.execute("BEGIN TRANSACTION")
        connection.execute(SCHEMA_SQL)
        connection.execute("INSERT INTO meta VALUES ('schema_version', ?)", [str(SCHEMA_VERSION)])
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        if is_new:
            for file in (path, path.with_name(f"{path.name}.wal")):
                file.unlink(missing_ok=True)
        raise


# -- Values are bound (``?``, ``$name``), never pasted -------------------------------------------------


def fetch(
    connection: duckdb.DuckDBPyConnection, sql: str, bound: dict[str, object], schema: Mapping[str, type[pl.DataType]]
) -> pl.DataFrame:
    """The rows of a query as a frame of ``schema``; values are bound by name."""
    return result_frame(connection.sql(sql, params=bound)).select(schema.keys()).cast(pl.Schema(schema))


def read_table(store: Store, table: str, order: str, slug: str) -> pl.DataFrame:
    """The rows of a table that belong to one experiment."""
    schema = columns_of(table)
    sql = f"SELECT {', '.join(schema)} FROM {table} WHERE slug = $slug ORDER BY {order}"  # noqa: S608 (constants)
    return fetch(store.connection, sql, {"slug": slug}, schema)


def first_row(
    connection: duckdb.DuckDBPyConnection, sql: str, bound: Sequence[object] | dict[str, object] | None = None
) -> tuple[Any, ...] | None:
    """The first row of a query or None; the result is read to its end, which DuckDB asks for."""
    rows: list[tuple[Any, ...]] = connection.execute(sql, bound).fetchall()
    return rows[0] if rows else None
