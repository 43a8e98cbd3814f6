"""Rows of CSV files: cells by column name or by line, every loss counted with its line."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.files import RecordedFile, lines

MAX_LINE_BYTES = 1 << 20
# Beyond it an unclosed quote has swallowed the rows that follow.
_MAX_CELL_CHARS = 1 << 17


def named_rows(
    file: RecordedFile, required: Sequence[str], mend: str
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Each data row with its place, its cells, and its cells by column name.

    Raises :class:`RecordingError`, with ``mend``, if a ``required`` column is missing.  Rows that
    are no CSV or have another number of cells than the header are rejected and counted by line;
    empty lines are no rows.
    """
    reader = csv.reader(text for _number, text in text_lines(file, MAX_LINE_BYTES))
    header = _next_row(file, reader)
    if header is None:
        raise RecordingError(file.path, "line 1", "no header line", "copy the file again")
    missing = [name for name in required if name not in header]
    if missing:
        raise RecordingError(file.path, "line 1", f"columns {', '.join(missing)} are missing", mend)
    while (cells := _next_row(file, reader)) is not None:
        place = f"line {reader.line_num}"
        if len(cells) == len(header):
            yield place, cells, dict(zip(header, cells, strict=True))
        elif cells:
            file.tally.reject(place, f"{len(cells)} columns where the header has {len(header)}")


def text_lines(file: RecordedFile, limit_bytes: int) -> Iterator[tuple[int, str]]:
    """``(line number from 1, line as text that ends in a newline)``; longer lines are rejected."""
    for number, line in lines(file, limit_bytes):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        # A lone carriage return inside a line is data damage, not a line end of ours.
        yield number, text.decode("utf-8", "replace").rstrip("\r").replace("\r", " ") + "\n"


def cells_of(line: str) -> list[str]:
    """The cells of a row that is one line, of whatever length; raises ``csv.Error``."""
    # The limit is the process's, so it is raised for no longer than a row.
    limit = csv.field_size_limit(len(line) + 1)
    try:
        return next(csv.reader([line]), [])
    finally:
        csv.field_size_limit(limit)


def _next_row(file: RecordedFile, reader: csv._reader) -> list[str] | None:  # type: ignore[name-defined]
    while True:
        limit = csv.field_size_limit(_MAX_CELL_CHARS)
        try:
            row: list[str] | None = next(reader, None)
            return row
        except csv.Error as error:
            file.tally.reject(f"line {reader.line_num}", f"no valid CSV ({error})")
        finally:
            csv.field_size_limit(limit)
