"""The store as a file: opening it, refusing what is not ours, one transaction at a time.

A store may come from anybody: it is opened as a file, with our tables and no view in place of one, and DuckDB
neither reads other files for it nor loads an extension.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from blis_replay.ingest.errors import StoreError
from blis_replay.ingest.queries import first_row

if TYPE_CHECKING:
    import duckdb

SCHEMA_VERSION = 5
# By default DuckDB takes most of the machine's memory for its buffers, and keeps in them what it once read.
_MEMORY = "120MB"
_WRITING_MEMORY = "200MB"
# A verb that waits for another one waits so long: a validation of all experiments takes a minute.
LOCK_TIMEOUT_S = 60.0
# In the environment, another number of seconds.
LOCK_TIMEOUT = "BLIS_REPLAY_LOCK_TIMEOUT"
_TOLD_AFTER_S = 1.0
_UNTRUSTED = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
# Where a file of DuckDB says that it is one.
_MAGIC, _MAGIC_AT = b"DUCK", 8

_SCHEMA = ("schema.sql", "schema_journeys.sql", "schema_token_events.sql", "schema_iterations.sql")
# An older version -> what brings its file to the next one.
_UPGRADES = {
    1: ("upgrade_1_to_2.sql", *_SCHEMA, "upgrade_1_to_2_stamps.sql"),
    2: ("upgrade_2_to_3.sql",),
    3: ("upgrade_3_to_4.sql",),
    4: ("schema_iterations.sql",),
}


@dataclass
class Store:
    """An open ground-truth store: its DuckDB connection, another one after ``writable``, and its path."""

    connection: duckdb.DuckDBPyConnection
    path: Path


@contextmanager
def open_store(path: Path | str, *, read_only: bool = False) -> Iterator[Store]:
    """The store at ``path``, closed on leaving; a new one is made unless ``read_only``.

    While another process has it open, this one waits, and says so.
    Raises ``StoreError`` (one line, with the mend) if it is absent and ``read_only``,
    is locked for longer than ``LOCK_TIMEOUT_S``, is no store of this program, has a newer schema, is
    damaged (also when that shows later, inside the context), or its folder cannot be
    written.  A store with an older schema is brought up to date; what is stored stays.
    """
    path = Path(path)
    _refuse_no_file(path)
    if read_only and not path.exists():
        raise StoreError(f"{path}: there is no store; make one with an ingest, or point --store at another file")
    import duckdb

    is_new = not path.exists()
    connection = _connect(path, read_only)
    left_whole = False
    try:
        version = _known_schema(connection, path, is_new)
        if version < SCHEMA_VERSION:
            if read_only:
                connection.close()
                with open_store(path):  # which brings it up to date, or says why it cannot
                    pass
                connection = _connect(path, read_only)
            else:
                _upgrade(connection) if version else _create(connection, path, is_new)
                _check_schema(connection, path)
        store = Store(connection, path)
        with _known_as_open(path.resolve(), connection, read_only):
            yield store
        connection = store.connection
        left_whole = not read_only and _version(connection) == str(SCHEMA_VERSION)
    except duckdb.Error as error:
        # Whatever a reader below did not expect of the file: a damaged block shows when it is read.
        raise StoreError(f"{path}: {_why_not_opened(path, one_line(error))}") from error
    finally:
        connection.close()
        if left_whole:
            _KNOWN[path.resolve()] = _state_of(path), SCHEMA_VERSION


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
            text = one_line(error)
            mend = _MAKE_ROOM if _is_full(text) else f"nothing was written: {text}; remove the cause, then repeat"
            raise StoreError(f"{store.path}: {mend}") from error
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
        raise StoreError(f"{path}: {_why_not_opened(path, one_line(error))}") from error


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
        raise StoreError(f"{path}: {_NOT_OURS}")


_NOT_OURS = "this is not a blis-replay store; choose another path with --store"


def _waited_for(path: Path, read_only: bool) -> duckdb.DuckDBPyConnection:
    """The connection, as soon as no other process is in the way."""
    import duckdb

    begin, told = time.monotonic(), False
    while True:
        try:
            return duckdb.connect(str(path), read_only=read_only, config={"memory_limit": _MEMORY, **_UNTRUSTED})
        except duckdb.Error as error:
            waited_s = time.monotonic() - begin
            if not _is_locked(one_line(error)) or path.resolve() in _OPEN or waited_s >= lock_timeout_s():
                raise
        if waited_s >= _TOLD_AFTER_S and not told:
            told = True
            print(f"waiting for {path}: another process has it open", file=sys.stderr, flush=True)
        time.sleep(min(0.1, lock_timeout_s()))


def lock_timeout_s() -> float:
    """How long to wait for another process: LOCK_TIMEOUT, where it is a number, else ``LOCK_TIMEOUT_S``."""
    try:
        seconds = max(float(os.environ[LOCK_TIMEOUT]), 0.0)
        return LOCK_TIMEOUT_S if math.isnan(seconds) else seconds
    except (KeyError, ValueError):
        return LOCK_TIMEOUT_S


def _is_locked(text: str) -> bool:
    locked = ("set lock", "conflicting lock", "different configuration", "used by another process")
    return any(words in text.lower() for words in locked)


def _is_full(text: str) -> bool:
    return any(words in text.lower() for words in ("no space left", "file too large", "quota exceeded"))


_MAKE_ROOM = "its disk is full, and nothing was written; make room there, or choose another place with --store"


def _why_not_opened(path: Path, text: str) -> str:
    lowered = text.lower()
    if _is_full(text):
        return _MAKE_ROOM
    if path.is_dir():
        return "this is a folder; give the path of a file"
    if _is_locked(lowered):
        return "another process has it open; wait for it (--lock-timeout) or choose another store with --store"
    if "not a valid duckdb" in lowered:
        return _NOT_OURS
    if "version number" in lowered or "newer version" in lowered:
        return f"written by another version of DuckDB ({text}); update duckdb, or ingest into a new store"
    if "permission denied" in lowered or "read-only" in lowered:
        return "it cannot be written; change its permissions or choose another place with --store"
    if not path.exists():
        return f"it cannot be made ({text}); choose another place with --store"
    return f"it cannot be read ({text}); restore it from a copy, or ingest into a new store"


# What this process found of a file, while it is as it was: rows are read by many short looks into a store.
_KNOWN: dict[Path, tuple[list[tuple[int, ...]], int]] = {}


def _known_schema(connection: duckdb.DuckDBPyConnection, path: Path, is_new: bool) -> int:
    """As ``_check_schema``, once for each state of the file and of what DuckDB keeps beside it."""
    state = _state_of(path)
    before, version = _KNOWN.get(path.resolve(), ([()], 0))
    if before != state:
        version = _check_schema(connection, path, is_new)
        _KNOWN[path.resolve()] = state, version
    return version


def _state_of(path: Path) -> list[tuple[int, ...]]:
    place = path.resolve()
    found = [file.stat() for file in (place, place.with_name(f"{place.name}.wal")) if file.exists()]
    return [(told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns) for told in found]


def _check_schema(connection: duckdb.DuckDBPyConnection, path: Path, is_new: bool = False) -> int:
    """The schema's version, 0 of a file without tables; refuses a foreign or newer one.

    ``is_new``: it was not there before it was opened.
    """
    tables = {row[0] for row in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    if not is_new or tables:
        _refuse_macros(connection, path)  # before anything else is asked of it
    if not tables:
        return 0
    if "meta" not in tables or "experiments" not in tables:
        raise StoreError(f"{path}: a DuckDB file, but not a blis-replay store; choose another path with --store")
    version = _version(connection)
    if not (version.isdigit() and (int(version) >= SCHEMA_VERSION or int(version) in _UPGRADES)):
        raise StoreError(f"{path}: its schema version is {version!r}; choose another path with --store")
    if int(version) > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: schema version {version} is newer than this program's {SCHEMA_VERSION}; update blis-replay, or "
            "choose another store with --store"
        )
    if int(version) == SCHEMA_VERSION:
        _refuse_other_objects(connection, path, tables)
    return int(version)


def _version(connection: duckdb.DuckDBPyConnection) -> str:
    """The version of the schema as the file says."""
    row = first_row(connection, "SELECT value FROM meta WHERE key = 'schema_version'")
    return str(row[0]) if row else "unknown"


def _refuse_other_objects(connection: duckdb.DuckDBPyConnection, path: Path, tables: set[str]) -> None:
    """A view in place of a table is a query that somebody else wrote."""
    rows = connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
    views = {str(row[0]) for row in rows}
    for kind, found, ours in (("TABLE", tables, _made("TABLE")), ("VIEW", views, _made("VIEW"))):
        if odd := sorted(found ^ ours):
            problem = "is not of a store" if odd[0] in found else "is missing"
            name = "".join(c if c.isprintable() else "?" for c in odd[0][:60])
            raise StoreError(f"{path}: {kind.lower()} {name} {problem}; ingest into a new store")


def _refuse_macros(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """A macro is a query too, and can have the name of a function that ours call."""
    row = first_row(connection, "SELECT function_name FROM duckdb_functions() WHERE NOT internal LIMIT 1")
    if row is not None:
        name = "".join(c if c.isprintable() else "?" for c in str(row[0])[:60])
        raise StoreError(f"{path}: macro {name} is not of a store; ingest into a new store")


@cache
def _made(kind: str) -> frozenset[str]:
    """The names of the tables or views that this package makes."""
    texts = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _SCHEMA]
    return frozenset(name for text in texts for name in re.findall(rf"CREATE {kind} IF NOT EXISTS (\w+)", text))


def _upgrade(connection: duckdb.DuckDBPyConnection) -> None:
    (version,) = first_row(connection, "SELECT value::BIGINT FROM meta WHERE key = 'schema_version'") or (0,)
    upgrades = [name for older in range(version, SCHEMA_VERSION) for name in _UPGRADES[older]]
    _run(connection, upgrades, "UPDATE meta SET value = ? WHERE key = 'schema_version'")


def _create(connection: duckdb.DuckDBPyConnection, path: Path, is_new: bool) -> None:
    """Make the tables; a new file that cannot have them (a full disk) is removed again."""
    try:
        _run(connection, _SCHEMA, "INSERT INTO meta VALUES ('schema_version', ?)")
    except BaseException:
        connection.close()
        if is_new:
            for file in (path, path.with_name(f"{path.name}.wal")):
                file.unlink(missing_ok=True)
        raise


def _run(connection: duckdb.DuckDBPyConnection, files: Sequence[str], noting_version: str) -> None:
    """Run SQL files of this package and note the version they lead to, in one transaction."""
    connection.execute("BEGIN TRANSACTION")
    for name in files:
        connection.execute(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    connection.execute(noting_version, [str(SCHEMA_VERSION)])
    connection.execute("COMMIT")
