"""BurstGPT: requests to ChatGPT and GPT-4 over two months, releases 1 and 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from blis_replay.ingest.readers.documents import microseconds, whole
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.records import named_rows
from blis_replay.ingest.readers.requests import RequestsRead, arrival_row, frame_of
from blis_replay.ingest.rows import rows_of

_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
# Release 2 has two more columns between the first and the others.
_HEADER = re.compile(rb"(?:\xef\xbb\xbf)?Timestamp,[^\r\n]*\bRequest tokens,Response tokens\b")


def recognises(head: bytes) -> bool:
    """Whether the first line names the columns that both releases have."""
    return _HEADER.match(head) is not None


def read_requests(file: RecordedFile, _stamps_path: Path | None = None) -> RequestsRead:
    """The requests in file order, on a clock that counts from midnight of the first day.

    A response of 0 tokens marks a failure: such rows are rejected and counted, as is what
    could not be served.  ``Elapsed time`` and ``Model`` are those of a hosted service and are not
    taken.  Raises :class:`RecordingError` if a column is missing.
    """
    frame = frame_of(_usable_rows(file))
    file.tally.records = len(frame)
    return RequestsRead(rows_of(frame), "client", "relative")


def _usable_rows(file: RecordedFile) -> Iterator[dict[str, object]]:
    for place, _cells, values in named_rows(file, _COLUMNS, "take the trace as it was published"):
        stamp, request, response = (values[name] for name in _COLUMNS)
        arrival_us = microseconds(stamp)
        early = arrival_us is not None and arrival_us < 0
        problem, row = arrival_row(None if early else arrival_us, request, response)
        if whole(response) == 0:
            problem = "a failure: its response has 0 tokens"
        if problem:
            file.tally.reject(place, problem)
        else:
            yield row
