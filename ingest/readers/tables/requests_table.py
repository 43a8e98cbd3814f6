"""A table of requests of a user's own, a row each: CSV, JSON lines, a JSON array or Parquet.

Which column is what is said by its name, where that has a unit (``ttft_ms``), or by ``--columns``.  All
stamps are of one clock, that of the arrivals.  Lengths are taken as the server's own counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate
from pathlib import Path

from blis_replay.ingest.readers.documents import MAX_INTEGER, finite, quoted_value, text, tokens, whole
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import (
    EARLIEST_EPOCH_US,
    Request,
    RequestsRead,
    Row,
    UnusableError,
    failure,
    gathered,
    prefixes_of_groups,
)
from blis_replay.ingest.readers.tables.columns import (
    ISO,
    UNITS,
    Columns,
    TableColumns,
    date_us,
    given_columns,
    listed,
    tells,
    value_of,
)
from blis_replay.ingest.readers.tables.records import Record, first_record, table_of

_LONGEST_US = 1e15
_ABSENT = frozenset(("", "nan", "null", "none", "na", "n/a", "-"))
_STATUS = {
    **dict.fromkeys(("ok", "success", "succeeded", "successful", "completed", "complete", "finished", "done"), "ok"),
    **dict.fromkeys(("true", "1", "stop", "stopped", "length"), "ok"),
    **dict.fromkeys(("error", "errored", "failed", "failure", "fail", "false", "0"), "error"),
    **dict.fromkeys(("timeout", "timed_out", "timedout"), "timeout"),
    **dict.fromkeys(("aborted", "abort", "cancelled", "canceled", "incomplete"), "aborted"),
}
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
        "epoch" if (rows.aggregate(first="min(sent_us)")["first"] or 0) >= EARLIEST_EPOCH_US else "relative",
        reading.model,
        events,
        version=f"table ({reading.table.said()})",
        prefix=prefix,
        remarks=(*remarks, *_remarks(file, reading.table)),
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
    """What is gathered beside the rows; ``groups``: of each request the name and length of its shared prefix."""

    table: TableColumns
    groups: list[tuple[str, int | None]] = field(default_factory=list)
    model: str | None = None

    def request(self, record: Record) -> Request:
        """The row of a record and its stamps; :class:`UnusableError` if it has none."""
        columns = self.table.by_field
        row, stamps_us = _request(record, columns)
        self.model = self.model or text(_word(record, columns, "model"))
        group = _word(record, columns, "prefix") or ""
        self.groups.append((group, tokens(_plain(record, columns, "prefix_tokens")) if group else None))
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


def _request(record: Record, columns: Columns) -> tuple[Row, list[int]]:
    """A row of ``READ_SCHEMA``, and the stamps of its tokens."""
    sent_us = _stamp(record, columns, "arrival")
    if sent_us is None:
        raise UnusableError("no arrival")
    scheduled_us, first_us, end_us = (_stamp(record, columns, name) for name in ("scheduled", "first_token", "end"))
    ttft_us, e2e_us, queue_us = (_duration(record, columns, name) for name in ("ttft", "e2e", "queue"))
    stamps_us = _token_stamps(record, columns, sent_us, ttft_us)
    first_us = stamps_us[0] if first_us is None and stamps_us else first_us
    end_us = stamps_us[-1] if end_us is None and stamps_us else end_us
    ttft_us = _since(sent_us, first_us, "the first token") if ttft_us is None else ttft_us
    e2e_us = _since(sent_us, end_us, "the end") if e2e_us is None else e2e_us
    if queue_us is None:
        queue_us = _since(sent_us, scheduled_us, "the scheduling")
    if ttft_us is not None and e2e_us is not None and ttft_us > e2e_us:
        raise UnusableError(f"the first token comes {ttft_us - e2e_us} us after the end")
    status, error = _status(record, columns)
    ok = status == "ok"
    output_tokens = _count(record, columns, "output_tokens")
    row: Row = {
        "request_id": text(_word(record, columns, "request_id")),
        "stage": _count(record, columns, "stage"),
        "prompt_tokens": _count(record, columns, "prompt_tokens") or None,
        "output_tokens_reported": output_tokens if ok else None,
        "usage_output_tokens": output_tokens or None if ok else None,
        "max_tokens": _count(record, columns, "max_tokens") or None,
        "cached_prompt_tokens": _count(record, columns, "cached_prompt_tokens"),
        "ttft_us": ttft_us if ok else None,
        "e2e_us": e2e_us,
        "queue_us": queue_us,
        "status": status,
        "error": error,
        "sent_us": sent_us,
    }
    return row, stamps_us


def _since(sent_us: int, then_us: int | None, what: str) -> int | None:
    if then_us is None:
        return None
    if then_us < sent_us:
        raise UnusableError(f"{what} comes {sent_us - then_us} us before the arrival")
    return then_us - sent_us


def _plain(record: Record, columns: Columns, name: str) -> object:
    """The value of a field, ``None`` where the table has no column or nothing in it."""
    column = columns.get(name)
    value = None if column is None else value_of(record, column.name)
    if isinstance(value, str) and value.strip().lower() in _ABSENT:
        return None
    if isinstance(value, float) and value != value:  # NaN is how data frames write "unknown"
        return None
    return float(value) if isinstance(value, Decimal) else value


def _word(record: Record, columns: Columns, name: str) -> str | None:
    value = _plain(record, columns, name)
    return None if value is None or isinstance(value, list | Mapping) else str(value)[:500]


def _count(record: Record, columns: Columns, name: str) -> int | None:
    value = _plain(record, columns, name)
    if value is None:
        return None
    count = whole(float(value) if isinstance(value, str) and value.strip().endswith(".0") else value)
    if count is None or count >= 1 << 31:
        raise UnusableError(
            f"{name} {quoted_value(value)} is not a number of tokens" if name != "stage" else "no stage number"
        )
    return count


def _us(value: object, name: str, unit: str) -> float:
    number = finite(value)
    if number is None or abs(number * UNITS[unit]) >= MAX_INTEGER:
        raise UnusableError(f"{name} {quoted_value(value)} is not a number of {unit}")
    # Whole nanoseconds of the epoch have more digits than a float.
    return (value + 500) // 1000 if unit == "ns" and isinstance(value, int) else number * UNITS[unit]


def _stamp(record: Record, columns: Columns, name: str) -> int | None:
    value = _plain(record, columns, name)
    if value is None:
        return None
    return _stamp_us(value, name, columns[name].unit)


def _stamp_us(value: object, name: str, unit: str) -> int:
    if unit == ISO or not isinstance(value, int | float | str):
        stamp_us = date_us(value)
        if stamp_us is None:
            raise UnusableError(f"{name} {quoted_value(value)} is not a date and time of ISO 8601")
    else:
        stamp_us = round(_us(value, name, unit))
    if stamp_us < 0:
        raise UnusableError(f"{name} {quoted_value(value)} is before the clock's zero")
    return stamp_us


def _duration(record: Record, columns: Columns, name: str) -> int | None:
    value = _plain(record, columns, name)
    if value is None:
        return None
    duration_us = round(_us(value, name, columns[name].unit))
    if not 0 <= duration_us < _LONGEST_US:
        raise UnusableError(f"{name} {quoted_value(value)} is not a duration")
    return duration_us


def _token_stamps(record: Record, columns: Columns, sent_us: int, ttft_us: int | None) -> list[int]:
    """When each token came: as stamped, or by the gaps behind the first."""
    name = next((name for name in ("token_times", "token_gaps") if name in columns), "")
    value = _plain(record, columns, name) if name else None
    if value is None or (name == "token_gaps" and ttft_us is None):
        return []
    values = _listed(value, name)
    unit = columns[name].unit
    if name == "token_times":
        stamps_us = [_stamp_us(one, name, unit) for one in values]
    else:
        gaps_us = [_us(one, name, unit) for one in values]
        if gaps_us and not (min(gaps_us) >= 0 and sum(gaps_us) < _LONGEST_US):
            raise UnusableError("token_gaps that are not durations")
        stamps_us = [sent_us + round((ttft_us or 0) + after_us) for after_us in accumulate(gaps_us, initial=0.0)]
    if any(later < earlier for earlier, later in zip([sent_us, *stamps_us], stamps_us, strict=False)):
        raise UnusableError(f"{name} that are not in order, or begin before the arrival")
    return stamps_us


def _listed(value: object, name: str) -> list[object]:
    """A list, or a text of numbers with brackets, commas, semicolons or spaces between them."""
    if isinstance(value, str):
        return [part for part in _GAPS.split(value.strip().strip("[]()")) if part]
    if not isinstance(value, list):
        raise UnusableError(f"{name} {quoted_value(value)} is not a list of times")
    return value


def _status(record: Record, columns: Columns) -> tuple[str, str | None]:
    """The status and the error; where no column has a status, a request with an error is one that failed."""
    error, said = text(_word(record, columns, "error")), _word(record, columns, "status")
    status = "error" if error else "ok"
    if said is not None:
        word = said.strip().lower().replace(" ", "_").replace("-", "_")
        code = whole(word)
        known = _STATUS.get(word) or (("ok" if code < 400 else "error") if code and 100 <= code < 600 else None)
        if known is None:
            raise UnusableError(
                f"status {quoted_value(said)} is not one of {', '.join(dict.fromkeys(_STATUS.values()))}"
            )
        status = known
    status = failure(error) if status == "error" else status
    return status, None if status == "ok" else error
