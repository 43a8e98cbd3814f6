"""From the rows of a scan to columns."""

from __future__ import annotations

import numpy as np

from blis_replay.ingest.scan.compiled import entry
from blis_replay.ingest.scan.json_text import Bytes
from blis_replay.ingest.scan.otlp_rows import NULL, Int64s
from blis_replay.ingest.scan.words import Words

_FIRST_LETTERS, _INLINE_LETTERS = 4, 12


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
def view_texts(begins: Int64s, ends: Int64s, texts: Bytes, views: Words) -> None:
    """Fill ``views`` (uint64[n, 2]) with Arrow's views of the texts between these positions, 0 for no text.

    A view is the length (32 bits) and up to 12 letters, or the first 4 letters, buffer 0 and the position (32 bits
    each).
    """
    for row in range(len(begins)):
        begin = begins[row]
        first = second = np.uint64(0)
        if begin != NULL:
            length = ends[row] - begin
            first = np.uint64(length)
            for place in range(min(length, _FIRST_LETTERS)):
                first |= np.uint64(texts[begin + place]) << np.uint64(32 + 8 * place)
            if length > _INLINE_LETTERS:
                second = np.uint64(begin) << np.uint64(32)
            else:
                for place in range(length - _FIRST_LETTERS):
                    second |= np.uint64(texts[begin + _FIRST_LETTERS + place]) << np.uint64(8 * place)
        views[row, 0], views[row, 1] = first, second
