"""Rows while a recording is read: few in memory, many in tables of a scratch database."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakSet, finalize

import polars as pl

from blis_replay.ingest.rows import DATABASE_BYTES, OwnDatabase, Rows, Schema, arrow, rows_of

MEMORY_BYTES = 250 << 20  # of all rows of one reading that are kept in memory; more go to a scratch database
_BESIDE_BYTES = 64 << 20  # of rows that are kept in memory beside such a database
_TABLES = count()


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


class Scratch(OwnDatabase):
    """The rows of one reading: in memory, and beyond ``MEMORY_BYTES`` in this database.

    It lives as long as its rows.  ``share``: how many scratches exist at one time and divide the memory.
    """

    def __init__(self, share: int = 1) -> None:
        super().__init__(DATABASE_BYTES // share)
        self._most_bytes = MEMORY_BYTES // share
        self._held: WeakSet[Rows] = WeakSet()
        self._writers: WeakSet[Writer] = WeakSet()

    def is_full(self) -> bool:
        """Whether the rows in memory, those of unfinished writers included, take more than they may."""
        held = sum(rows.held.estimated_size() for rows in self._held if rows.held is not None)
        return held + sum(writer.held_bytes for writer in self._writers) > self._most_bytes

    def empty_writers(self) -> None:
        """Move the rows of all writers to the database, and those that they get from now on; keep less in memory."""
        self._most_bytes = min(self._most_bytes, _BESIDE_BYTES)
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
                connection.register("added", arrow(frame.cast(texts)))  # type: ignore[arg-type]
                begin = f"INSERT INTO {self._table}" if self._table else f"CREATE TABLE {self._new_name()} AS"
                connection.execute(f"{begin} SELECT * FROM added")
        self._frames, self.held_bytes = [], 0

    def _new_name(self) -> str:
        self._table = f"rows_{next(_TABLES)}"
        finalize(self, self.scratch.drop, self._table).atexit = False
        return self._table


def _alone(name: str, kind: pl.DataType | type[pl.DataType]) -> pl.Expr:
    """A column with memory of its own: polars keeps texts as views, which would keep all texts read with them."""
    column = pl.col(name).cast(kind)
    return pl.concat_str(column, pl.lit("")).alias(name) if kind == pl.String else column
