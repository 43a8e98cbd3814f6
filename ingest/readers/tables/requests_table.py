"""A table of requests of a user's own, a row each: CSV, JSON lines, a JSON array or Parquet.

Which column is what is said by its name, where that has a unit (``ttft_ms``), or by ``--columns``.  All
stamps are of one clock, that of the arrivals.  Lengths are taken as the server's own counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from blis_replay.ingest.readers.documents import MAX_INTEGER, MAX_TOKENS, US_OF, finite, quoted_value, text, whole
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import (
    Request,
    RequestsRead,
    Row,
    UnusableError,
    clock_kind_of,
    failure,
    gathered,
    prefixes_of_groups,
    request_row,
)
from blis_replay.ingest.readers.tables.columns import (
    COUNT,
    DURATION,
    DURATIONS,
    FIELDS,
    IN_FLIGHT,
    ISO,
    STAMP,
    STAMPS,
    WORD,
    Column,
    Columns,
    TableColumns,
    date_us,
    given_columns,
    listed,
    tells,
    value_of,
)
from blis_replay.ingest.readers.tables.records import Record, first_record, table_of
from blis_replay.ingest.recording import REBUILT

_LONGEST_US = 1e15
_ABSENT = frozenset(("", "nan", "null", "none", "na", "n/a", "-"))
_STATUS = {
    **dict.fromkeys(("ok", "success", "succeeded", "successful", "completed", "complete", "finished", "done"), "ok"),
    **dict.fromkeys(("true", "1", "stop", "stopped", "length"), "ok"),
    **dict.fromkeys(("error", "errored", "failed", "failure", "fail", "false", "0"), "error"),
    **dict.fromkeys(("timeout", "timed_out", "timedout"), "timeout"),
    **dict.fromkeys(("aborted", "abort", "cancelled", "canceled", "incomplete"), "aborted"),
}
_EXCEPTIONS = ("error", "exception", "timeout")  # how names of Python's exceptions end
_GAPS = re.compile(r"[\s,;]+")


def recognises(head: bytes) -> bool:
    """Whether the names of the columns, or of a first object's keys, say that this is a table of requests."""
    return tells(first_record(head), {})


def read_requests(file: RecordedFile, stamps_path: Path, columns: Columns | None = None) -> RequestsRead:
    """The requests in file order; token times go to the flat file ``stamps_path``.

    ``columns``: what is known of the columns, else what ``file.columns`` says.  A row that cannot be used is rejected
    and counted.  Raises :class:`RecordingError` if a column is missing, a time says no unit, or no table is sound.
    """
    reading = _Reading(TableColumns(file.path, given_columns(file.columns) if columns is None else columns))
    rows, events = gathered(file, _records(file, stamps_path, reading.table), reading.request, stamps_path)
    reading.table.check()
    prefix, remarks = prefixes_of_groups(reading.groups, "prefix and prefix_tokens of the table")
    return RequestsRead(
        rows,
        "client",
        clock_kind_of(rows),
        reading.model,
        events,
        version=f"table ({reading.table.said()})",
        prefix=prefix,
        remarks=(
            *remarks,
            *_remarks(file, reading.table),
            *_rebuilt(reading.in_flight, rows["usage_output_tokens"].drop_nulls()),
        ),
        placed=REBUILT if reading.in_flight else "",
    )


def _records(file: RecordedFile, stamps_path: Path, table: TableColumns) -> Iterator[tuple[str, Record]]:
    rows = table_of(file, stamps_path)
    for number, (place, record) in enumerate(rows.rows):
        table.learn(record)
        if rows.alike and not number:
            table.check()
        yield place, record


@dataclass
class _Reading:
    """What is gathered beside the rows.

    ``groups``: of each request the name and length of its shared prefix.  ``ends_us``: a heap of when the requests in
    flight end, where the table has no arrivals.
    """

    table: TableColumns
    groups: list[tuple[str, int | None]] = field(default_factory=list)
    model: str | None = None
    ends_us: list[int] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        """How many requests the client kept in flight, where the table has no arrivals; else 0."""
        arrival = self.table.by_field.get("arrival")
        return int(arrival.name) if arrival is not None and arrival.unit == IN_FLIGHT else 0

    def request(self, record: Record) -> Request:
        """The row of a record and its stamps; :class:`UnusableError` if it has none."""
        columns, limit, sent_us = self.table.by_field, self.in_flight, None
        if limit:
            columns = {name: column for name, column in columns.items() if FIELDS[name].kind not in (STAMP, STAMPS)}
            sent_us = self.ends_us[0] if len(self.ends_us) >= limit else 0
        row, stamps_us, of = _request(record, columns, sent_us)
        if sent_us is not None:
            e2e_us = row["e2e_us"]
            if not isinstance(e2e_us, int):
                raise UnusableError("no E2E, by which the next one would be sent")
            if len(self.ends_us) >= limit:
                heappop(self.ends_us)
            heappush(self.ends_us, sent_us + e2e_us)
        self.model = self.model or text(of.get("model"))
        group = of.get("prefix") or ""
        self.groups.append((group, of.get("prefix_tokens") or None if group else None))
        return row, stamps_us


def _remarks(file: RecordedFile, table: TableColumns) -> Iterator[str]:
    """Columns that were not read, and what no column has."""
    if unread := table.unread():
        yield f"columns of {file.name} that were not read: {listed(unread)}"
    absent = [name for name in ("prompt_tokens", "output_tokens") if name not in table.by_field]
    timed = {"ttft": ("ttft", "first_token", "token_times"), "e2e": ("e2e", "end", "token_times", "token_gaps")}
    absent += [name for name, sources in timed.items() if not any(source in table.by_field for source in sources)]
    if absent:
        yield f"{', '.join(absent)} of the requests: no column of {file.name} has them"


# Standard errors of a correlation of ranks; the first clients' lengths grow by chance less than once in 10,000 files.
_CERTAIN = 4.0


def _rebuilt(in_flight: int, tokens: pl.Series) -> Iterator[str]:
    if in_flight:
        yield f"send times: {REBUILT} ({in_flight:,} at once, as --columns says)"
        first, others = _growth(tokens.head(in_flight)), _growth(tokens.slice(in_flight))
        if first * math.sqrt(max(in_flight - 1, 1)) > _CERTAIN and first > 2 * others:
            yield (
                f"order of sends: outputs of the first {in_flight:,} rows grow from row to row (rank correlation "
                f"{first:.2f}), so the file is in the order of ends, and send times are approximate"
            )


def _growth(values: pl.Series) -> float:
    """Correlation of the ranks of values with their places; 0 of too few, or of equal ones."""
    if len(values) < 3 or values.n_unique() == 1:
        return 0.0
    return float(np.corrcoef(values.rank().to_numpy(), np.arange(len(values)))[0, 1])


def _request(record: Record, columns: Columns, sent_us: int | None) -> tuple[Row, list[int], dict[str, Any]]:
    """A row of ``READ_SCHEMA``, the stamps of its tokens, and the values of the fields that it has.

    ``sent_us``: when it was sent, where no column says so.
    """
    of = {
        name: _READ[FIELDS[name].kind](value, name, column.unit)
        for name, column in columns.items()
        if (value := _plain(record, column)) is not None
    }
    sent_us = of.get("arrival", sent_us)
    if sent_us is None:
        raise UnusableError("no arrival")
    stamps_us = _token_stamps(of, sent_us)
    if stamps_us:
        of = {"first_token": stamps_us[0], "end": stamps_us[-1]} | of
    since_us = {name: of[name] - sent_us for name in ("first_token", "end", "scheduled") if name in of}
    ttft_us, e2e_us = of.get("ttft", since_us.get("first_token")), of.get("e2e", since_us.get("end"))
    if ttft_us is not None and e2e_us is not None and ttft_us > e2e_us >= 0:
        raise UnusableError(f"the first token comes {ttft_us - e2e_us} us after the end")
    status, error = _status(of)
    row = request_row(
        sent_us,
        status,
        error,
        request_id=text(of.get("request_id")),
        stage=of.get("stage"),
        prompt_tokens=of.get("prompt_tokens") or None,
        output_tokens_reported=of.get("output_tokens"),
        usage_output_tokens=of.get("output_tokens") or None,
        max_tokens=of.get("max_tokens") or None,
        cached_prompt_tokens=of.get("cached_prompt_tokens"),
        ttft_us=ttft_us,
        e2e_us=e2e_us,
        queue_us=of.get("queue", since_us.get("scheduled")),
    )
    return row, stamps_us, of


def _plain(record: Record, column: Column) -> object:
    """The value of a column, ``None`` where nothing is in it."""
    value = value_of(record, column.name)
    if isinstance(value, str) and value.strip().lower() in _ABSENT:
        return None
    if isinstance(value, float) and value != value:  # NaN is how data frames write "unknown"
        return None
    return float(value) if isinstance(value, Decimal) else value


# -- What each kind of field is read as: ``(value, name of the field, unit)`` ---------------------


def _word(value: object, _name: str, _unit: str) -> str | None:
    return None if isinstance(value, list | Mapping) else str(value)[:500]


def _count(value: object, name: str, _unit: str) -> int:
    count = whole(float(value) if isinstance(value, str) and value.strip().endswith(".0") else value)
    if count is None or count >= MAX_TOKENS:
        of = "number of tokens" if name != "stage" else "number"
        raise UnusableError(f"{name} {quoted_value(value)} is not a {of}")
    return count


def _us(value: object, name: str, unit: str) -> float:
    number = finite(value)
    if number is None or abs(number * US_OF[unit]) >= MAX_INTEGER:
        raise UnusableError(f"{name} {quoted_value(value)} is not a number of {unit}")
    # Whole nanoseconds of the epoch have more digits than a float.
    return (value + 500) // 1000 if unit == "ns" and isinstance(value, int) else number * US_OF[unit]


def _stamp(value: object, name: str, unit: str) -> int:
    if unit == ISO or not isinstance(value, int | float | str):
        stamp_us = date_us(value)
        if stamp_us is None:
            raise UnusableError(f"{name} {quoted_value(value)} is not a date and time of ISO 8601")
    else:
        stamp_us = round(_us(value, name, unit))
    if stamp_us < 0:
        raise UnusableError(f"{name} {quoted_value(value)} is before the clock's zero")
    return stamp_us


def _duration(value: object, name: str, unit: str) -> int:
    duration_us = round(_us(value, name, unit))
    if not 0 <= duration_us < _LONGEST_US:
        raise UnusableError(f"{name} {quoted_value(value)} is not a duration")
    return duration_us


def _listed(value: object, name: str) -> list[object]:
    """A list, or a text of numbers with brackets, commas, semicolons or spaces between them."""
    if isinstance(value, str):
        return [part for part in _GAPS.split(value.strip().strip("[]()")) if part]
    if not isinstance(value, list):
        raise UnusableError(f"{name} {quoted_value(value)} is not a list of times")
    return value


_READ: dict[str, Callable[[object, str, str], Any]] = {
    STAMP: _stamp,
    DURATION: _duration,
    STAMPS: lambda value, name, unit: [_stamp(one, name, unit) for one in _listed(value, name)],
    DURATIONS: lambda value, name, unit: [_us(one, name, unit) for one in _listed(value, name)],
    COUNT: _count,
    WORD: _word,
}


def _token_stamps(of: Mapping[str, Any], sent_us: int) -> list[int]:
    """When each token came: as stamped, or by the gaps behind the first."""
    stamps_us: list[int] | None = of.get("token_times")
    gaps_us: list[float] | None = of.get("token_gaps") if "ttft" in of else None
    if stamps_us is None:
        if gaps_us is None:
            return []
        if gaps_us and not (min(gaps_us) >= 0 and sum(gaps_us) < _LONGEST_US):
            raise UnusableError("token_gaps that are not durations")
        stamps_us = [sent_us + round(of["ttft"] + after_us) for after_us in accumulate(gaps_us, initial=0.0)]
    if any(later < earlier for earlier, later in zip([sent_us, *stamps_us], stamps_us, strict=False)):
        raise UnusableError("token times that are not in order, or begin before the arrival")
    return stamps_us


def _status(of: Mapping[str, Any]) -> tuple[str, str | None]:
    """The status and the error; where no column has a status, a request with an error is one that failed."""
    error, said = text(of.get("error")), of.get("status")
    status = "error" if error else "ok"
    if said is not None:
        word = said.strip().lower().replace(" ", "_").replace("-", "_")
        code = whole(word)
        known = _STATUS.get(word) or (("ok" if code < 400 else "error") if code and 100 <= code < 600 else None)
        if known is None and word.endswith(_EXCEPTIONS):
            known, error = "error", error or said
        if known is None:
            names = ", ".join(dict.fromkeys(_STATUS.values()))
            raise UnusableError(f"status {quoted_value(said)} is not one of {names}")
        status = known
    return (failure(error) if status == "error" else status), error
