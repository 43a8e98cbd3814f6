"""The rows of a table as mappings from column to value: CSV, JSON lines, an array of JSON objects, Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ijson
import msgspec

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.records import cells_of, decoded_records, json_objects, named_rows, numbered_lines
from blis_replay.ingest.readers.tables.columns import Columns, tells

Record = Mapping[str, object]

PARQUET_MAGIC = b"PAR1"
# A request with a million token times fits.
MAX_RECORD_BYTES = 32 << 20
_SEPARATORS = (",", ";", "\t")
_BOM = b"\xef\xbb\xbf"
# Of the database that reads Parquet: what is more is refused, whatever the file says of itself.
_PARQUET_MEMORY = "500MB"
_PARQUET_ROWS = 2_000
_MAX_HEAD_EVENTS = 20_000


def first_record(head: bytes) -> Record:
    """The first row of a table that begins like this, as far as it is there; empty for other content.

    Of CSV the values are those of the second line.  JSON lists and objects are left out.
    """
    start = head.removeprefix(_BOM).lstrip()
    if start[:1] in (b"{", b"["):
        return _first_object(start)
    if start.startswith(PARQUET_MAGIC) or b"\0" in head[:1000]:
        return {}
    header, _, rest = start.partition(b"\n")
    names = _cells(header, (separator := separator_of(header)))
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        return {}
    values = _cells(rest.partition(b"\n")[0], separator)
    return dict(zip(names, [*values, *[""] * len(names)], strict=False))


def may_have(head: bytes, columns: Columns) -> bool:
    """Whether a table that begins like this has one of these columns; of Parquet that is not seen here."""
    sample = first_record(head)
    ways = {way for column in columns.values() for way in (column.name, column.name.partition(".")[0])}
    return head.startswith(PARQUET_MAGIC) or not ways.isdisjoint(sample) or tells(sample, columns)


def separator_of(header: bytes) -> str:
    """The character between the cells of a header: a comma, a semicolon or a tab."""
    return max(_SEPARATORS, key=lambda separator: header.count(separator.encode()))


def _cells(line: bytes, separator: str) -> list[str]:
    try:
        return [cell.strip() for cell in cells_of(line.decode("utf-8", "replace").strip("\r\n"), separator)]
    except csv.Error:
        return []


def _first_object(head: bytes) -> Record:
    record: dict[str, object] = {}
    depth, key, base = 0, "", 2 if head[:1] == b"[" else 1
    try:
        for number, (event, value) in enumerate(ijson.basic_parse(head, use_float=True, multiple_values=True)):
            depth += (event in ("start_map", "start_array")) - (event in ("end_map", "end_array"))
            if (depth < base and number) or number > _MAX_HEAD_EVENTS:
                break
            if event == "map_key" and depth == base:
                key = value
                record[key] = None
            elif depth == base and event in ("string", "number", "boolean"):
                record[key] = value
    except (ijson.JSONError, ValueError, OverflowError):
        pass  # cut off: what came before is what there is
    return record


class Table(NamedTuple):
    """The rows of a table with their places; ``alike``: whether all have the same columns."""

    rows: Iterator[tuple[str, Record]]
    alike: bool


def table_of(file: RecordedFile, scratch: Path) -> Table:
    """The rows of a file; anything else is rejected and counted.

    ``scratch``: a path beside which a link to the file can be put.  Raises :class:`RecordingError` (also while rows are
    read) if the table is not sound.
    """
    head = file.head(1 << 16).removeprefix(_BOM).lstrip()
    if head.startswith(PARQUET_MAGIC):
        return Table(_parquet(file, scratch.with_name("table.parquet")), alike=True)
    if head.startswith(b"["):
        objects = ((f"record {number}", raw) for number, raw in json_objects(file, MAX_RECORD_BYTES))
        return Table(decoded_records(file, objects, _OBJECT, "not a JSON object"), alike=False)
    if head.startswith(b"{"):
        numbered = numbered_lines(file, MAX_RECORD_BYTES)
        return Table(decoded_records(file, numbered, _OBJECT, "not a JSON object"), alike=False)
    separator = separator_of(head.partition(b"\n")[0])
    rows = named_rows(file, (), "write a line with the names of the columns", separator)
    named = ((place, {name.strip(): cell for name, cell in values.items()}) for place, values in rows)
    return Table(named, alike=True)


_OBJECT = msgspec.json.Decoder(dict[str, Any])


def _parquet(file: RecordedFile, link: Path) -> Iterator[tuple[str, Record]]:
    import duckdb

    # A path can have characters that stand for patterns.
    link.unlink(missing_ok=True)
    link.symlink_to(file.path.resolve())
    number = 0
    try:
        with duckdb.connect(config={"memory_limit": _PARQUET_MEMORY, "threads": 1, "temp_directory": ""}) as connection:
            result = connection.execute("SELECT * FROM read_parquet(?)", [str(link)])
            names = [column[0] for column in result.description or ()]
            while rows := result.fetchmany(_PARQUET_ROWS):
                for row in rows:
                    number += 1
                    yield f"row {number}", dict(zip(names, row, strict=True))
    except (duckdb.Error, ValueError, OverflowError) as error:
        problem = " ".join(str(error).split())[:120].replace(str(link), file.name)
        raise RecordingError(
            file.path, f"row {number + 1}", f"no sound Parquet ({problem})", "write it again"
        ) from error
