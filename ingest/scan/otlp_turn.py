"""From the rows of a scan to columns."""

from __future__ import annotations

from blis_replay.ingest.scan.compiled import entry
from blis_replay.ingest.scan.json_text import Bytes
from blis_replay.ingest.scan.otlp_rows import NULL, Int64s


@entry
def turn_rows(rows: Int64s, chosen: Int64s, fields: Int64s, columns: Int64s, known: Int64s) -> None:
    """Fill ``columns`` (int64[fields, chosen]) with some fields of some rows, and count what is not null (from 0)."""
    for place in range(len(chosen)):
        row = chosen[place]
        for column in range(len(fields)):
            value = rows[row, fields[column]]
            columns[column, place] = value
            known[column] += value != NULL


@entry
def place_texts(begins: Int64s, ends: Int64s, offsets: Int64s) -> int:
    """How long these texts are one behind the other; where each begins, and the last ends, goes to ``offsets``."""
    length = 0
    for row in range(len(begins)):
        offsets[row] = length
        length += ends[row] - begins[row] if begins[row] != NULL else 0
    offsets[len(begins)] = length
    return length


@entry
def gather_texts(begins: Int64s, texts: Bytes, offsets: Int64s, gathered: Bytes) -> None:
    """Put the texts, which begin at ``begins`` among all, to their places (``offsets``)."""
    for row in range(len(begins)):
        for place in range(offsets[row + 1] - offsets[row]):
            gathered[offsets[row] + place] = texts[begins[row] + place]
