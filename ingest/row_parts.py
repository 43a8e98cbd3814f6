"""Rows of which there can be more than memory should hold: in parts, of which the large ones stand in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import polars as pl

Schema = Mapping[str, pl.DataType | type[pl.DataType]]

# What works part by part holds a few times this many rows.
PART_ROWS = 100_000


@dataclass(frozen=True)
class RowParts:
    """Rows of one schema in parts, in order.

    A part is a frame, or the path of an Arrow file that lives as long as the scratch folder in which it stands.
    ``height``: rows of all parts.
    """

    schema: Schema
    parts: tuple[pl.DataFrame | Path, ...]
    height: int

    def is_empty(self) -> bool:
        """Whether there are no rows."""
        return self.height == 0

    def frames(self, columns: Sequence[str] | None = None) -> Iterator[pl.DataFrame]:
        """One part after the other with these columns, or all; at least one."""
        names = list(self.schema) if columns is None else list(columns)
        for part in self.parts:
            if isinstance(part, pl.DataFrame):
                yield part.select(names)
            else:
                # Types that the file has narrower, such as names of events by number, become those of the schema.
                read = pl.read_ipc(part, columns=names)
                yield read.select(pl.col(name).cast(self.schema[name]) for name in names)
        if not self.parts:
            yield pl.DataFrame(schema={name: self.schema[name] for name in names})

    def whole(self, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """All parts as one frame."""
        return pl.concat(self.frames(columns))


def in_one_part(frame: pl.DataFrame) -> RowParts:
    """The rows of a frame."""
    return RowParts(frame.schema, (frame,), frame.height)


@dataclass
class PartWriter:
    """Gathers rows; as soon as there are ``part_rows`` of them, they go to a file of ``folder`` named after ``name``.

    Without a folder they stay in memory.  Frames are of ``schema``, or of types that can be cast to it.
    """

    schema: Schema
    folder: Path | None
    name: str
    part_rows: int = PART_ROWS
    _parts: list[pl.DataFrame | Path] = field(default_factory=list)
    _held: list[pl.DataFrame] = field(default_factory=list)
    _held_rows: int = 0
    _height: int = 0

    def add(self, frame: pl.DataFrame) -> None:
        """Add rows behind the others."""
        if frame.is_empty():
            return
        self._held.append(frame)
        self._held_rows += frame.height
        self._height += frame.height
        if self.folder is not None and self._held_rows >= self.part_rows:
            path = self.folder / f"{self.name}-{len(self._parts)}.arrow"
            self._taken().write_ipc(path)
            self._parts.append(path)

    def done(self) -> RowParts:
        """The rows; the last ones stay in memory."""
        if self._held:
            last = self._taken()
            self._parts.append(last.select(pl.col(name).cast(kind) for name, kind in self.schema.items()))
        return RowParts(self.schema, tuple(self._parts), self._height)

    def _taken(self) -> pl.DataFrame:
        whole = pl.concat(self._held)
        self._held.clear()
        self._held_rows = 0
        return whole


def by_ranges(
    rows: RowParts, key: Callable[[pl.DataFrame], pl.Series], key_columns: Sequence[str], part_rows: int
) -> Iterator[pl.DataFrame]:
    """The rows by ranges of a key, lowest first, about ``part_rows`` at a time; in a range they stand as they stood.

    ``key``: of each row of a part with ``key_columns``, whole numbers; rows whose key is null are left out.  All rows
    of one key are in one range.  A part is read again for each range of which it has rows: rows that come nearly in
    order are read once or twice.
    """
    if len(rows.parts) <= 1:
        (frame,) = rows.frames()
        yield frame.filter(key(frame.select(key_columns)).is_not_null())
        return
    keys = [key(frame) for frame in rows.frames(key_columns)]
    spans = [(low, high) for low, high in ((series.min(), series.max()) for series in keys)]
    for low, high in _ranges(pl.concat(keys), part_rows):
        within = []
        for part, (first, last) in zip(rows.parts, spans, strict=True):
            if first is not None and first <= high and last >= low:  # type: ignore[operator]
                (frame,) = RowParts(rows.schema, (part,), 0).frames()
                within.append(frame.filter(key(frame.select(key_columns)).is_between(low, high)))
        yield pl.concat(within)


def _ranges(keys: pl.Series, part_rows: int) -> Iterator[tuple[int, int]]:
    """Lowest and highest key of ranges of about so many rows."""
    ordered = keys.drop_nulls().sort()
    lowest = ordered.gather_every(part_rows).unique(maintain_order=True).to_list()
    if lowest:
        yield from ((low, following - 1) for low, following in pairwise([*lowest, int(ordered[-1]) + 1]))


def in_order(rows: RowParts, keys: Sequence[str]) -> pl.DataFrame:
    """The rows as one frame by these keys, nulls last, equal ones as they stood.

    It is put together column by column, so that parts in files are in memory only once.
    """
    order = rows.whole(keys).select(pl.arg_sort_by(keys, nulls_last=True, maintain_order=True)).to_series()
    as_they_stand = order.is_sorted()
    columns = (rows.whole([name]).to_series() for name in rows.schema)
    return pl.DataFrame([column.rechunk() if as_they_stand else column.gather(order) for column in columns])


def by_hash(rows: RowParts, column: str, folder: Path | None, name: str, part_rows: int) -> Iterator[pl.DataFrame]:
    """The rows by a hash of a column, about ``part_rows`` at a time, all of one value together, as they stood."""
    count = -(-rows.height // part_rows)
    if folder is None or count <= 1:
        yield rows.whole()
        return
    # Together they hold as much as one part.
    writers = [PartWriter(rows.schema, folder, f"{name}-{part}", -(-part_rows // count)) for part in range(count)]
    for frame in rows.frames():
        which = frame[column].hash() % count
        for part, writer in enumerate(writers):
            writer.add(frame.filter(which == part))
    for place, writer in enumerate(writers):
        taken = writer.done()
        writers[place] = PartWriter({}, None, "")  # lets go of what it held
        yield taken.whole()
        for path in taken.parts:
            if isinstance(path, Path):
                path.unlink()
