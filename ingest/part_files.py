"""Where some of many rows stand: in memory as long as all of them are few, else in an Arrow file that is mapped."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import polars as pl

# Of all parts together.  Rows of a larger recording come back more slowly, but memory does not grow with them.
MEMORY_BYTES = 300 << 20
_VIEW_BYTES = 16
# What a map needs after it was made is not its file: there can be more parts than a process may have files open.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


@dataclass(eq=False)
class Part:
    """Some rows in memory, or in a file that lives as long as its folder.

    ``file``: where they go if there are too many, ``None``: they stay in memory.
    """

    rows: pl.DataFrame | None
    file: Path | None = None

    def frame(self, columns: Sequence[str]) -> pl.DataFrame:
        """At least these columns of the rows."""
        return _mapped(cast("Path", self.file), columns) if self.rows is None else self.rows

    def held_bytes(self) -> int:
        """What the rows take in memory."""
        if self.rows is None:
            return 0
        texts = sum(kind == pl.String for kind in self.rows.dtypes)  # whose letters polars counts, not where they are
        return int(self.rows.estimated_size()) + _VIEW_BYTES * texts * self.rows.height


# Parts that something looks at, and the files that are mapped for it.
_IN_MEMORY: WeakSet[Part] = WeakSet()
_IN_FILES: WeakSet[Part] = WeakSet()
_MAPS: WeakSet[mmap.mmap] = WeakSet()


def kept(rows: pl.DataFrame, file: Path) -> Part:
    """The rows as a part, in memory if there is room for all parts: as soon as one stands in a file, all do."""
    part = Part(rows, file)
    _IN_MEMORY.add(part)
    if len(_IN_FILES) or sum(held.held_bytes() for held in _IN_MEMORY) > MEMORY_BYTES:
        for held in list(_IN_MEMORY):
            _to_file(held)
        give_back_pages()
    return part


def _to_file(part: Part) -> None:
    if part.rows is not None and part.file is not None:
        part.rows.write_ipc(part.file)
        part.rows = None
        _IN_FILES.add(part)
    _IN_MEMORY.discard(part)


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
