"""Rows of which there can be more than memory should hold: in parts, of which the large ones stand in files."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import polars as pl
from numpy.typing import NDArray

Schema = Mapping[str, pl.DataType | type[pl.DataType]]

# What works part by part holds a few times this many rows.
PART_ROWS = 100_000
# Files that are mapped as long as something looks at their rows.
_MAPS: WeakSet[mmap.mmap] = WeakSet()
# What a map needs after it was made is not its file: there can be more parts than a process may have files open.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
# Ranges are laid by every so many of the sorted keys of a part: all keys together would be as large as a column.
_EVERY = 64


@dataclass(frozen=True)
class RowParts:
    """Rows of one schema in parts, in order.

    A part is a frame, or the path of an Arrow file that lives as long as the scratch folder in which it stands.
    ``height``: rows of all parts.  ``made``: columns that are worked out of those of the parts when they are read.
    """

    schema: Schema
    parts: tuple[pl.DataFrame | Path, ...]
    height: int
    made: Mapping[str, pl.Expr] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Whether there are no rows."""
        return self.height == 0

    def frames(self, columns: Sequence[str] | None = None) -> Iterator[pl.DataFrame]:
        """One part after the other with these columns, or all; at least one."""
        names = list(self.schema) if columns is None else list(columns)
        exprs = [self.made.get(name, pl.col(name)) for name in names]
        roots = list(dict.fromkeys(root for column in exprs for root in column.meta.root_names()))
        for part in self.parts:
            yield self._as_asked(part if isinstance(part, pl.DataFrame) else _mapped(part, roots), names)
        if not self.parts:
            yield pl.DataFrame(schema={name: self.schema[name] for name in names})

    def _as_asked(self, part: pl.DataFrame, names: list[str]) -> pl.DataFrame:
        # Mostly a part is as it should be; types that a file has narrower, such as names by number, are widened.
        if part.columns == names and not self.made and part.schema == {name: self.schema[name] for name in names}:
            return part
        return part.select(self.made.get(name, pl.col(name)).cast(self.schema[name]).alias(name) for name in names)

    def whole(self, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """All parts as one frame."""
        return pl.concat(self.frames(columns), rechunk=False)

    def column(self, name: str) -> pl.Series:
        """One column of all parts."""
        return self.whole([name]).to_series()

    def only(self, columns: Sequence[str]) -> RowParts:
        """The rows with these columns."""
        return replace(self, schema={name: self.schema[name] for name in columns})

    def where(self, chosen: pl.Expr) -> RowParts:
        """The rows for which that is so, in memory."""
        return in_one_part(pl.concat(frame.filter(chosen) for frame in self.frames()))


def _mapped(path: Path, columns: Sequence[str]) -> pl.DataFrame:
    """Columns of an Arrow file where they are: pages of a file can go from memory, and are not copied."""
    import pyarrow as pa

    give_back_pages()
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **_UNTRACKED)
    _MAPS.add(mapped)
    table = pa.ipc.open_file(pa.py_buffer(mapped)).read_all().select(list(columns))  # asked for alone, they are copied
    return cast("pl.DataFrame", pl.from_arrow(table))


def give_back_pages() -> None:
    """Let the system have back what was read of mapped files; looked at again, it mostly comes from its cache."""
    if hasattr(mmap, "MADV_DONTNEED"):
        for mapped in list(_MAPS):
            mapped.madvise(mmap.MADV_DONTNEED)


def slices_of(frame: pl.DataFrame, further: int = 0) -> Iterator[pl.DataFrame]:
    """Some rows of a frame after the others, with so many ``further`` ones, which are those of the next slice too.

    Once a slice was looked at, the system has its pages back where the frame stands in files.
    """
    for first in range(0, max(frame.height, 1), PART_ROWS):
        yield frame.slice(first, PART_ROWS + further)
        give_back_pages()


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
            give_back_pages()

    def done(self) -> RowParts:
        """The rows; the last ones stay in memory."""
        if self._held:
            # In one piece: where the pieces of columns differ, whoever looks at some of them copies all.
            last = self._taken().rechunk()
            self._parts.append(last.select(pl.col(name).cast(kind) for name, kind in self.schema.items()))
        return RowParts(self.schema, tuple(self._parts), self._height)

    def _taken(self) -> pl.DataFrame:
        whole = pl.concat(self._held)
        self._held.clear()
        self._held_rows = 0
        return whole


def in_files(frames: Iterable[pl.DataFrame], schema: Schema, folder: Path | None, name: str) -> pl.DataFrame:
    """The rows of all frames as one of ``schema``, which stands in files of ``folder`` but for the last rows."""
    writer = PartWriter(schema, folder, name)
    for frame in frames:
        writer.add(frame)
    return writer.done().whole()


def gathered(frame: pl.DataFrame, rows: NDArray[np.int64], folder: Path | None, name: str) -> pl.DataFrame:
    """These rows of a frame in their order, which stand :func:`in_files`; the frame itself if they are all as it is."""
    if len(rows) == frame.height and (rows[1:] > rows[:-1]).all():
        return frame
    slices = (rows[first : first + PART_ROWS] for first in range(0, len(rows), PART_ROWS))
    return in_files((_gathered(frame, part) for part in slices), frame.schema, folder, name)


def _gathered(frame: pl.DataFrame, rows: NDArray[np.int64]) -> pl.DataFrame:
    # Of a frame of many parts all would be copied into one to pick rows; mostly these are near each other.
    first, last = int(rows.min()), int(rows.max())
    return frame.slice(first, last - first + 1)[rows - first]


def by_ranges(
    rows: RowParts | Sequence[RowParts],
    key: Callable[[pl.DataFrame], pl.Series],
    key_columns: Sequence[str],
    part_rows: int,
) -> Iterator[pl.DataFrame]:
    """The rows by ranges of a key, lowest first, about ``part_rows`` at a time; at least one range.

    In a range they stand as they stood; of several ``rows`` (of one schema) those of the first before the others.
    ``key``: of each row of a part with ``key_columns``, whole numbers; rows whose key is null are left out.  All rows
    of one key are in one range.  A part is read again for each range of which it has rows: rows that come nearly in
    order are read once or twice.
    """
    several = [rows] if isinstance(rows, RowParts) else rows
    parts = [replace(one, parts=(part,)) for one in several for part in one.parts]
    if len(parts) <= 1:
        (frame,) = (parts or several)[0].frames()
        yield frame.filter(key(frame.select(key_columns)).is_not_null())
        return
    samples, spans = [], []
    for part in parts:
        (frame,) = part.frames(key_columns)
        keys = key(frame).drop_nulls().sort()
        samples.append(keys.gather_every(_EVERY))
        spans.append((keys[0], keys[-1]) if len(keys) else None)
    ends = [span for span in spans if span is not None]
    if not ends:
        yield pl.DataFrame(schema=several[0].schema)
        return
    highest = max(high for _low, high in ends)
    for low, high in _ranges(pl.concat(samples), highest, max(1, part_rows // _EVERY)):
        within = []
        for part, span in zip(parts, spans, strict=True):
            if span is not None and span[0] <= high and span[1] >= low:
                (frame,) = part.frames()
                within.append(frame.filter(key(frame.select(key_columns)).is_between(low, high)))
        yield pl.concat(within)


def _ranges(sampled: pl.Series, highest: int, sampled_rows: int) -> Iterator[tuple[int, int]]:
    """Lowest and highest key of ranges of about so many sampled rows."""
    lowest = sampled.sort().gather_every(sampled_rows).unique(maintain_order=True).to_list()
    yield from ((low, following - 1) for low, following in pairwise([*lowest, highest + 1]))
