"""Rows of one schema, wherever they are: few in a frame, many in a DuckDB database, or the result of SQL on either.

The database is a scratch one while a recording is read (``scratch.py``), and the store afterwards.  Nothing is read
before it is asked for, and only the columns that are asked for.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4
from weakref import finalize

import polars as pl

if TYPE_CHECKING:
    import duckdb

Schema = Mapping[str, pl.DataType | type[pl.DataType]]

BATCH_ROWS = 100_000  # rows worked on at a time; requests then take some 20 MB
FEW_ROWS = BATCH_ROWS  # tables of up to this many rows may be kept in memory
DATABASE_BYTES = 300 << 20  # memory of a database of this process; more goes to files in its folder
_NAMES = count()
_BOUND = re.compile(r"\$(\w+)")


class Database(Protocol):
    """Where tables are."""

    def connection(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """A connection for one read."""

    def is_shared(self) -> bool:
        """Whether another process can read them too."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one ``schema``, in a fixed order.

    ``held``: all of them as a frame.  Else they are the result of the query ``sql`` over tables of ``database`` and
    over ``frames`` (by name), with the values ``bound``.  ``kept``: columns read so far, of rows that are read often.
    ``writers``: what keeps the scratch tables alive that the query reads.
    """

    schema: Schema
    sql: str
    database: Database | None = None
    frames: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    bound: Mapping[str, object] = field(default_factory=dict)
    held: pl.DataFrame | None = None
    kept: dict[str, pl.Series] | None = None
    writers: tuple[object, ...] = ()

    @cached_property
    def height(self) -> int:
        """Number of rows."""
        if self.held is not None:
            return self.held.height
        return int(self._first_row(f"SELECT count(*) FROM ({self.sql})")[0])

    def is_empty(self) -> bool:
        """Whether it has no rows."""
        return self.height == 0

    def frame(self, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """All rows, with these columns (default: all columns)."""
        names = list(self.schema if columns is None else columns)
        if self.held is not None:
            return self.held.select(names)
        if self.kept is None:
            return self._read(names)
        if unread := [name for name in names if name not in self.kept]:
            self.kept.update(self._read(unread).to_dict())
        return pl.DataFrame([self.kept[name] for name in names])

    def _read(self, names: Sequence[str]) -> pl.DataFrame:
        with self._result(f"SELECT {_listed(names)} FROM ({self.sql})") as result:
            return self._typed(result_frame(result), names)

    def __getitem__(self, name: str) -> pl.Series:
        """One column."""
        if self.held is not None:
            return self.held.get_column(name)
        return self.frame([name]).to_series()

    def select(self, *columns: str | pl.Expr | Iterable[str | pl.Expr], **named: pl.Expr) -> pl.DataFrame:
        """Select with polars; only the columns that the expressions name are read."""
        listed = [one for some in columns for one in ([some] if isinstance(some, str | pl.Expr) else some)]
        exprs = [pl.col(one) if isinstance(one, str) else one for one in listed]
        every = (*exprs, *named.values())
        roots = list({name: None for expr in every for name in expr.meta.root_names()})
        several = any(expr.meta.has_multiple_outputs() for expr in every)
        return self.frame(None if several else roots).select(*exprs, **named)

    def aggregate(self, **columns: str) -> dict[str, Any]:
        """One value per SQL expression, over all rows."""
        listed = ", ".join(f"{sql} AS {name}" for name, sql in columns.items())
        return dict(zip(columns, self._first_row(f"SELECT {listed} FROM ({self.sql})"), strict=True))

    def batches(self, columns: Sequence[str] | None = None, rows: int = BATCH_ROWS) -> Iterator[pl.DataFrame]:
        """Frames of up to ``rows`` rows with these columns (default: all columns); at least one frame."""
        names = list(self.schema if columns is None else columns)
        if self.held is not None:
            yield from self.held.select(names).iter_slices(rows) if self.held.height else [self.held.select(names)]
            return
        with self._result(f"SELECT {_listed(names)} FROM ({self.sql})") as result:
            batch = None
            for batch in result.to_arrow_reader(rows):
                yield self._typed(pl.DataFrame(batch), names)
            if batch is None:
                yield pl.DataFrame(schema={name: self.schema[name] for name in names})

    def only(self, columns: Sequence[str]) -> Rows:
        """The rows with these columns."""
        schema = {name: self.schema[name] for name in columns}
        if self.held is not None:
            return rows_of(self.held.select(columns))
        return replace(self, schema=schema, sql=f"SELECT {_listed(columns)} FROM ({self.sql})")

    def where(self, condition: str, **bound: object) -> Rows:
        """The rows that meet an SQL condition; ``bound``: the values of ``$name`` in it."""
        if self.held is not None and self.held.is_empty():
            return self  # common: most recordings lack some of the tables
        return query(f"SELECT * FROM these WHERE {condition}", self.schema, bound, these=self)

    def between(self, column: str, first: int, last: int) -> Rows:
        """The rows whose integer ``column`` is from ``first`` to ``last``, both included."""
        if self.held is not None:
            return rows_of(self.held.filter(pl.col(column).is_between(first, last)))
        return self.where(f"{column} BETWEEN $first AND $last", first=first, last=last)

    def ordered(self, by: str) -> Rows:
        """The rows sorted by these SQL expressions; equal ones keep their order."""
        numbered = "SELECT *, row_number() OVER () AS row_number FROM these"
        return query(
            f"SELECT * EXCLUDE row_number FROM ({numbered}) ORDER BY {by}, row_number", self.schema, these=self
        )

    @contextmanager
    def reader(self) -> Iterator[Any]:
        """All rows as one stream of Arrow batches."""
        if self.held is not None:
            yield arrow(self.held).to_reader()
            return
        with self._result(f"SELECT {_listed(self.schema)} FROM ({self.sql})") as result:
            yield result.to_arrow_reader(BATCH_ROWS)

    @contextmanager
    def _result(self, sql: str) -> Iterator[duckdb.DuckDBPyRelation]:
        with self._connection() as connection:
            yield connection.sql(sql, params=dict(self.bound)) if self.bound else connection.sql(sql)

    def _first_row(self, sql: str) -> tuple[Any, ...]:
        """The only row of a query.  Executed, not as a relation: DuckDB would bind that twice."""
        with self._connection() as connection:
            row: tuple[Any, ...] = connection.execute(sql, dict(self.bound) or None).fetchall()[0]
            return row

    @contextmanager
    def _connection(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection in which the frames are registered by name."""
        with (self.database or _memory()).connection() as connection:
            for name, frame in self.frames.items():
                connection.register(name, arrow(frame))
            yield connection

    def _typed(self, frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
        wanted = pl.Schema({name: self.schema[name] for name in names})
        return frame if frame.schema == wanted else frame.cast(wanted)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle rows as a frame where another process cannot read their database."""
        if self.database is not None and not self.database.is_shared():
            return rows_of, (self.frame(),)
        return Rows, (self.schema, self.sql, self.database, self.frames, self.bound, self.held)


def result_frame(result: duckdb.DuckDBPyRelation) -> pl.DataFrame:
    """All rows of a result, read without PyArrow, whose import takes longer than most results do.

    Raises ``duckdb.Error`` as the result does.
    """
    try:
        # Not the result itself: polars keeps the type of what it reads, and DuckDB complains of that at the end.
        return pl.DataFrame(SimpleNamespace(__arrow_c_stream__=result.__arrow_c_stream__))
    except pl.exceptions.ComputeError as error:  # what polars makes of an error of DuckDB after the first rows
        import duckdb

        raise duckdb.OperationalError(str(error)) from error


def rows_of(frame: pl.DataFrame) -> Rows:
    """The rows of a frame."""
    name = f"frame_{next(_NAMES)}"
    return Rows(frame.schema, f"SELECT * FROM {name}", frames={name: frame}, held=frame)


def shaped(frame: pl.DataFrame, schema: Schema, columns: Mapping[str, pl.Expr] | None = None) -> pl.DataFrame:
    """``columns`` (default: its own) of a frame in the order and types of a schema; the others of these are null."""
    columns = {name: pl.col(name) for name in frame.columns} if columns is None else columns
    return frame.select(columns.get(name, pl.lit(None)).cast(kind).alias(name) for name, kind in schema.items())


def no_rows(schema: Schema) -> Rows:
    """An empty table of that schema."""
    return rows_of(pl.DataFrame(schema=schema))


def query(sql: str, schema: Schema, bound: Mapping[str, object] | None = None, /, **tables: Rows) -> Rows:
    """The result of SQL over ``tables``, which the SQL names like the arguments."""
    databases = {rows.database for rows in tables.values() if rows.database is not None}
    if len(databases) > 1:
        tables = {name: rows_of(rows.frame()) for name, rows in tables.items()}
        databases = set()
    number, bound = next(_NAMES), dict(bound or {})
    sql = _BOUND.sub(lambda match: f"${match[1]}_{number}", sql.strip())
    named = ", ".join(f"{name} AS ({rows.sql})" for name, rows in tables.items())
    return Rows(
        schema,
        f"WITH {named}, {sql.removeprefix('WITH ')}" if sql.startswith("WITH ") else f"WITH {named} {sql}",
        next(iter(databases), None),
        {name: frame for rows in tables.values() for name, frame in rows.frames.items()},
        {name: value for rows in tables.values() for name, value in rows.bound.items()}
        | {f"{name}_{number}": value for name, value in bound.items()},
        writers=tuple({writer: None for rows in tables.values() for writer in rows.writers}),
    )


class OwnDatabase:
    """A database of this process alone, with ``memory_bytes`` of memory; more goes to files in a folder of its own."""

    def __init__(self, memory_bytes: int = DATABASE_BYTES) -> None:
        self._memory_bytes = memory_bytes

    @cached_property
    def _root(self) -> duckdb.DuckDBPyConnection:
        import duckdb

        # Made by the database when it needs it: a worker ends without cleaning up.
        folder = Path(gettempdir()) / f"blis-replay-{uuid4().hex}"
        finalize(self, shutil.rmtree, folder, ignore_errors=True)
        # One thread: others would have buffers of their own, and change the order of rows.
        memory = f"{self._memory_bytes >> 20}MiB"
        return duckdb.connect(config={"memory_limit": memory, "temp_directory": str(folder), "threads": 1})

    @contextmanager
    def connection(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection to its tables."""
        cursor = self._root.cursor()
        try:
            yield cursor
        finally:
            cursor.close()

    def is_shared(self) -> bool:
        """Never."""
        return False


@cache
def _memory() -> OwnDatabase:
    """The database for SQL over frames alone."""
    return OwnDatabase()


def arrow(frame: pl.DataFrame) -> Any:
    """The frame as an Arrow table, without copying texts."""
    return frame.to_arrow(compat_level=pl.CompatLevel.newest())


def _listed(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(f'"{name}"' for name in names)
