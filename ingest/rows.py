"""Rows of one schema, wherever they are: few in a frame, many in a DuckDB database, or the result of SQL on either.

The database is a scratch one while a recording is read, and the store afterwards.  Nothing is read before it is asked
for, and only the columns that are asked for.
"""

from __future__ import annotations

import ctypes
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
from weakref import WeakSet, finalize

import polars as pl

if TYPE_CHECKING:
    import duckdb

Schema = Mapping[str, pl.DataType | type[pl.DataType]]

BATCH_ROWS = 100_000  # rows worked on at a time; requests then take some 20 MB
FEW_ROWS = BATCH_ROWS  # tables of up to this many rows may be kept in memory
MEMORY_BYTES = 250 << 20  # of all rows of one reading that are kept in memory; more go to a scratch database
_DATABASE_BYTES = 300 << 20  # memory of that database; more goes to files in its folder
_BESIDE_BYTES = 64 << 20  # of rows that are kept in memory beside such a database
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
    ``writers``: keep alive the scratch tables that the query reads.
    """

    schema: Schema
    sql: str
    database: Database | None = None
    frames: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    bound: Mapping[str, object] = field(default_factory=dict)
    held: pl.DataFrame | None = None
    kept: dict[str, pl.Series] | None = None
    writers: tuple[Writer, ...] = ()

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
            yield _arrow(self.held).to_reader()
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
                connection.register(name, _arrow(frame))
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


def shaped(frame: pl.DataFrame, schema: Schema, columns: Mapping[str, pl.Expr]) -> pl.DataFrame:
    """The ``columns`` of a frame in the order and types of a schema; those without an expression are null."""
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


def give_back() -> None:
    """Return free memory to the system; the C library keeps what lies below the last block in use."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)


def whole_groups(batches: Iterator[pl.DataFrame], key: str) -> Iterator[pl.DataFrame]:
    """Batches sorted by ``key``, cut again so that rows of one key are in one batch; at least one frame."""
    rest: pl.DataFrame | None = None
    for batch in batches:
        rows = batch if rest is None else pl.concat([rest, batch])
        if rows.is_empty():
            rest = rows
            continue
        cut = int(rows[key].ne_missing(rows[key][-1]).sum())
        if cut:
            yield rows.head(cut)
        rest = rows.slice(cut)
    if rest is not None:
        yield rest


class Scratch:
    """The rows of one reading: in memory, and beyond ``MEMORY_BYTES`` in a database of its own.

    It lives as long as its rows.  ``share``: how many scratches exist at one time and divide the memory.
    """

    def __init__(self, share: int = 1) -> None:
        self._memory_bytes, self._database_bytes = MEMORY_BYTES // share, _DATABASE_BYTES // share
        self._held: WeakSet[Rows] = WeakSet()
        self._writers: WeakSet[Writer] = WeakSet()

    @cached_property
    def _root(self) -> duckdb.DuckDBPyConnection:
        import duckdb

        # Made by the database when it needs it: a worker ends without cleaning up.
        folder = Path(gettempdir()) / f"blis-replay-{uuid4().hex}"
        finalize(self, shutil.rmtree, folder, ignore_errors=True)
        # One thread: others would have buffers of their own, and change the order of rows.
        memory = f"{self._database_bytes >> 20}MiB"
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
        """Never: the database is this process's own."""
        return False

    def is_full(self) -> bool:
        """Whether the rows in memory, those of unfinished writers included, take more than they may."""
        held = sum(rows.held.estimated_size() for rows in self._held if rows.held is not None)
        return held + sum(writer.held_bytes for writer in self._writers) > self._memory_bytes

    def empty_writers(self) -> None:
        """Move the rows of all writers to the database, and those that they get from now on; keep less in memory."""
        self._memory_bytes = min(self._memory_bytes, _BESIDE_BYTES)
        for writer in list(self._writers):
            writer.to_table()

    def hold(self, frame: pl.DataFrame) -> Rows:
        """The rows of a frame, counted as rows in memory."""
        rows = rows_of(frame)
        self._held.add(rows)
        return rows

    def writer(self, schema: Schema) -> Writer:
        """A writer for rows that come frame by frame."""
        writer = Writer(self, schema)
        self._writers.add(writer)
        return writer

    def drop(self, table: str) -> None:
        """Drop a table that no rows refer to."""
        with self.connection() as connection:
            connection.execute(f"DROP TABLE {table}")

    def kept(self, rows: Rows) -> Rows:
        """A copy of the rows in this scratch, so that their query runs once."""
        return self.gathered(rows.schema, rows.batches())

    def gathered(self, schema: Schema, batches: Iterable[pl.DataFrame]) -> Rows:
        """The rows of all batches in this scratch."""
        writer = self.writer(schema)
        for batch in batches:
            writer.add(batch)
        return writer.done()


@dataclass(eq=False)
class Writer:
    """Gathers rows in ``scratch``; frames have ``schema``, or types that can be cast to it."""

    scratch: Scratch
    schema: Schema
    held_bytes: int = 0
    _frames: list[pl.DataFrame] = field(default_factory=list)
    _table: str = ""

    def add(self, frame: pl.DataFrame) -> None:
        """Append rows."""
        if frame.is_empty():
            return
        # Columns whose chunks differ would be copied by every query.
        kept = frame.select(_alone(name, kind) for name, kind in self.schema.items()).rechunk()
        self._frames.append(kept)
        self.held_bytes += int(kept.estimated_size())
        if self._table:
            self.to_table()
        elif self.scratch.is_full():
            self.scratch.empty_writers()

    def done(self) -> Rows:
        """The rows."""
        if self._table:
            return Rows(self.schema, f"SELECT * FROM {self._table}", self.scratch, writers=(self,))
        frame = pl.concat([pl.DataFrame(schema=self.schema), *self._frames], rechunk=False)
        self._frames, self.held_bytes = [], 0
        return self.scratch.hold(frame)

    def to_table(self) -> None:
        """Move the rows so far to the database; later ones go there too."""
        if not self._frames:
            return
        texts = {name: pl.String for name, kind in self.schema.items() if isinstance(kind, pl.Enum)}
        with self.scratch.connection() as connection:
            for frame in self._frames:
                connection.register("added", _arrow(frame.cast(texts)))  # type: ignore[arg-type]
                begin = f"INSERT INTO {self._table}" if self._table else f"CREATE TABLE {self._new_name()} AS"
                connection.execute(f"{begin} SELECT * FROM added")
        self._frames, self.held_bytes = [], 0

    def _new_name(self) -> str:
        self._table = f"rows_{next(_NAMES)}"
        finalize(self, self.scratch.drop, self._table).atexit = False
        return self._table


def _alone(name: str, kind: pl.DataType | type[pl.DataType]) -> pl.Expr:
    """A column with memory of its own: polars keeps texts as views, which would keep all texts read with them."""
    column = pl.col(name).cast(kind)
    return pl.concat_str(column, pl.lit("")).alias(name) if kind == pl.String else column


@cache
def _memory() -> Scratch:
    """The database for SQL over frames alone."""
    return Scratch()


def _arrow(frame: pl.DataFrame) -> Any:
    """The frame as an Arrow table, without copying texts."""
    return frame.to_arrow(compat_level=pl.CompatLevel.newest())


def _listed(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(f'"{name}"' for name in names)
