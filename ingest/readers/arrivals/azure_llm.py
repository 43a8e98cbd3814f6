"""Azure LLM inference traces of 2023 and 2024: when requests came, and how long they were."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.records import named_rows
from blis_replay.ingest.readers.requests import RequestsRead, arrival_row, frame_of
from blis_replay.ingest.rows import rows_of

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_HEADER = re.compile(rb"(?:\xef\xbb\xbf)?[^\r\n]*\bTIMESTAMP,ContextTokens,GeneratedTokens\b")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\s?(?:(Z)|([+-])(\d\d):?(\d\d))?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def recognises(head: bytes) -> bool:
    """Whether the first line names the three columns."""
    return _HEADER.match(head) is not None


def read_requests(file: RecordedFile, _stamps_path: Path | None = None) -> RequestsRead:
    """The requests in file order.

    Stamps are wall-clock times (UTC where none is named) of 100 ns, rounded to us.  Raises
    :class:`RecordingError` if a column is missing; a row that could not be served is rejected
    and counted by line.
    """
    frame = frame_of(_usable_rows(file))
    file.tally.records = len(frame)
    return RequestsRead(rows_of(frame), "server", "epoch")


def _usable_rows(file: RecordedFile) -> Iterator[dict[str, object]]:
    for place, _cells, values in named_rows(file, _COLUMNS, "take the trace as it was published"):
        stamp, context, generated = (values[name] for name in _COLUMNS)
        problem, row = arrival_row(epoch_us(stamp), context, generated)
        if problem:
            file.tally.reject(place, problem)
        else:
            yield row


def epoch_us(stamp: str) -> int | None:
    """``YYYY-MM-DD HH:MM:SS`` with 0 to 9 decimals and an optional offset as us of the epoch, else ``None``."""
    match = _STAMP.fullmatch(stamp.strip())
    if match is None:
        return None
    day, clock, decimals, _utc, sign, hours, minutes = match.groups()
    offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0)) * (-1 if sign == "-" else 1)
    try:
        whole = datetime.fromisoformat(f"{day} {clock}").replace(tzinfo=timezone(offset))
    except ValueError:
        return None
    ns = int((decimals or "").ljust(9, "0"))
    return (whole - _EPOCH) // timedelta(microseconds=1) + (ns + 500) // 1000
