"""Rows of which there can be more than memory should hold: in parts, of which the large ones stand in files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.part_files import Part, give_back_pages, kept

Schema = Mapping[str, pl.DataType | type[pl.DataType]]

# What works part by part holds a few times this many rows.
PART_ROWS = 100_000
# Ranges are laid by every so many of the sorted keys of a part: all keys together would be as large as a column.
_EVERY = 64


@dataclass(frozen=True)
class RowParts:
    """Rows of one schema in parts, in order.

    Parts that stand in files live as long as the scratch folder of these.
    ``height``: rows of all parts.  ``made``: columns that are worked out of those of the parts when they are read.
    """

    schema: Schema
    parts: tuple[Part, ...]
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
            yield self._as_asked(part.frame(roots), names)
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


def slices_of(frame: pl.DataFrame, further: int = 0) -> Iterator[pl.DataFrame]:
    """Some rows of a frame after the others, with so many ``further`` ones, which are those of the next slice too.

    Once a slice was looked at, the system has its pages back where the frame stands in files.
    """
    for first in range(0, max(frame.height, 1), PART_ROWS):
        yield frame.slice(first, PART_ROWS + further)
        give_back_pages()


def in_one_part(frame: pl.DataFrame) -> RowParts:
    """The rows of a frame."""
    return RowParts(frame.schema, (Part(frame),), frame.height)


@dataclass
class PartWriter:
    """Gathers rows; ``part_rows`` of them are a part, which stands in a file of ``folder`` named after ``name``.

    They do so only if there are too many for the memory (``part_files``); without a folder they stay there.  Frames are
    of ``schema``, or of types that can be cast to it.
    """

    schema: Schema
    folder: Path | None
    name: str
    part_rows: int = PART_ROWS
    _parts: list[Part] = field(default_factory=list)
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
            self._parts.append(kept(self._taken(), self.folder / f"{self.name}-{len(self._parts)}.arrow"))

    def done(self) -> RowParts:
        """The rows; the last ones stay in memory."""
        if self._held:
            last = self._taken().select(pl.col(name).cast(kind) for name, kind in self.schema.items())
            self._parts.append(Part(last))
        return RowParts(self.schema, tuple(self._parts), self._height)

    def _taken(self) -> pl.DataFrame:
        whole = pl.concat(self._held)
        self._held.clear()
        self._held_rows = 0
        # Where the pieces of columns differ, whoever looks at some of them copies all.
        alike = len({tuple(column.chunk_lengths()) for column in whole.iter_columns()}) == 1
        return whole if alike else whole.rechunk()


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
