"""What the columns of a table mean: by names that say their unit, or as a user says it (``--columns``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from blis_replay.base.document import nearest
from blis_replay.base.errors import RecordingError, printable
from blis_replay.ingest.readers.documents import at, quoted, text, whole

# A date and time of ISO 8601 states its unit itself.
UNITS = ("ns", "us", "ms", "s")
ISO = "iso"
# In place of a unit: ``arrival=8:in-flight`` says that no column has the arrivals, and that 8 were always in flight.
IN_FLIGHT = "in-flight"
_UNIT_NAMES = {
    **{unit: unit for unit in UNITS},
    **{"nanos": "ns", "nanoseconds": "ns", "micros": "us", "microseconds": "us"},
    **{"millis": "ms", "msec": "ms", "milliseconds": "ms", "sec": "s", "secs": "s", "seconds": "s"},
}
# A time on the clock of the arrivals, a duration, a list of either, a count, a text.
STAMP, DURATION, STAMPS, DURATIONS, COUNT, WORD = "stamp", "duration", "stamps", "durations", "count", "word"
TIMES = (STAMP, DURATION, STAMPS, DURATIONS)
MAX_COLUMNS = 4_096
MAX_IN_FLIGHT = 1_000_000


@dataclass(frozen=True)
class Field:
    """What a column can hold: its ``kind``, and the names by which it is known (beside its own), without a unit."""

    kind: str
    names: tuple[str, ...]


_NAMES = {
    STAMP: {
        "arrival": "arrival_time arrived arrived_at start start_time started_at request_start request_start_time "
        "send_time sent sent_at submit_time request_time timestamp ts",
        "scheduled": "scheduled_time scheduled_at scheduled_ts",
        "first_token": "first_token_time first_token_at first_token_ts first_chunk_time",
        "end": "end_time ended_at finish_time finished_at last_token_time last_token_ts request_end",
    },
    DURATION: {
        "ttft": "time_to_first_token first_token_latency ttft_latency",
        "e2e": "e2e_latency e2el end_to_end end_to_end_latency latency request_latency total_latency total_time "
        "e2e_time response_time",
        "queue": "queue_time queue_wait queueing_time time_in_queue wait_time",
    },
    STAMPS: {"token_times": "token_timestamps token_stamps"},
    DURATIONS: {"token_gaps": "itls inter_token_latencies token_latencies"},
    COUNT: {
        "prompt_tokens": "input_tokens prompt_len prompt_length input_len input_length num_prompt_tokens "
        "num_input_tokens number_input_tokens input_toks isl input_sequence_length",
        "output_tokens": "completion_tokens generated_tokens output_len output_length num_output_tokens "
        "num_completion_tokens number_output_tokens output_toks osl output_sequence_length",
        "max_tokens": "max_output_tokens max_new_tokens requested_output_tokens",
        "cached_prompt_tokens": "cached_tokens num_cached_tokens prefix_hit_tokens",
        "prefix_tokens": "prefix_length prefix_len shared_prefix_tokens",
        "stage": "load_stage",
    },
    WORD: {
        "prefix": "prefix_group prefix_id shared_prefix",
        "request_id": "id req_id request",
        "status": "state outcome success",
        "error": "error_message error_msg exception",
        "model": "model_name model_id",
    },
}
FIELDS = {name: Field(kind, tuple(known.split())) for kind, of in _NAMES.items() for name, known in of.items()}
# By these a table is known to be one of requests, if nobody says that it is.
_TELLTALES = ("arrival", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Column:
    """A column of a table: its ``name`` (dots lead into nested JSON), and of a time its ``unit``."""

    name: str
    unit: str = ""

    def said(self) -> str:
        """As it stands in ``--columns``."""
        return f"{self.name}:{self.unit}" if self.unit else self.name


Columns = Mapping[str, Column]
Fields = Mapping[str, Field]


def given_columns(said: str, fields: Fields = FIELDS) -> dict[str, Column]:
    """``ttft=time_to_first_token_ms:ms,arrival=start:s`` by field; :class:`RecordingError` if not of that form."""
    if printable(said) != said:
        raise _refused(printable(said), "names of columns that are not plain text", "rename them")
    columns: dict[str, Column] = {}
    for part in filter(None, (part.strip() for part in said.split(","))):
        name, equals, column = (piece.strip() for piece in part.partition("="))
        if not equals or not column:
            raise _refused(part, "expected FIELD=COLUMN, or FIELD=COLUMN:UNIT", "e.g. ttft=time_to_first_token:ms")
        if name not in fields:
            raise _refused(part, f"{quoted(name)} is not a field of a request", nearest(name, list(fields)))
        if name in columns:
            raise _refused(part, f"{name} has a column already, {columns[name].name}", "give each field once")
        kind = fields[name].kind
        columns[name] = _with_unit(name, kind, column, part) if kind in TIMES else Column(column)
    return columns


def _with_unit(field_name: str, kind: str, said: str, part: str) -> Column:
    name, _, unit = said.rpartition(":")
    is_stamp = kind == STAMP
    units = ", ".join((*UNITS, ISO) if is_stamp else UNITS)
    if not name:
        say = f"add one of {units}, e.g. {field_name}={said}:ms"
        raise _refused(part, f"{field_name} is a time, and its unit is not said", say)
    if field_name == "arrival" and unit.lower() == IN_FLIGHT:
        if not 1 <= (whole(name) or 0) <= MAX_IN_FLIGHT:
            raise _refused(part, f"{quoted(name)} is not a number of requests", f"e.g. arrival=8:{IN_FLIGHT}")
        return Column(name, IN_FLIGHT)
    known = _UNIT_NAMES.get(unit.lower(), unit.lower() if is_stamp else "")
    if known not in (*UNITS, ISO):
        raise _refused(part, f"{quoted(unit)} is not a known unit of time", f"use one of {units}")
    return Column(name, known)


def _refused(part: str, problem: str, mend: str) -> RecordingError:
    return RecordingError(f"--columns {part[:80]}", "", problem, mend)


@dataclass
class TableColumns:
    """The columns of one table by field, as they come up: as ``given``, the others by their names.

    Objects of JSON need not all have the same ones.  ``seen``: all names so far, up to ``MAX_COLUMNS``.
    """

    path: Path
    given: Columns
    by_field: dict[str, Column] = field(default_factory=dict)
    seen: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_field.update(self.given)

    def learn(self, record: Mapping[str, object]) -> None:
        """Take the columns of a record; :class:`RecordingError` if times among them say no unit."""
        if record.keys() <= self.seen.keys():
            return
        new = {name: value for name, value in record.items() if name not in self.seen}
        for name in islice(new, MAX_COLUMNS - len(self.seen)):
            self.seen[name] = None
        for name, column in recognised(new, self.given).items():
            self.by_field.setdefault(name, column)
        times = {name: column for name, column in self.by_field.items() if FIELDS[name].kind in TIMES}
        if unclear := {name: column.name for name, column in times.items() if not column.unit}:
            names = ", ".join(map(quoted, unclear.values()))
            say = ",".join(f"{name}={column}:UNIT" for name, column in unclear.items())
            problem = f"columns {names} say" if len(unclear) > 1 else f"column {names} says"
            remedy = f"add --columns {say} with one of {', '.join(UNITS)}"
            raise RecordingError(self.path, "", f"{problem} no unit of time", remedy)

    def check(self) -> None:
        """:class:`RecordingError` if a given column was in no record, or nothing is the arrival."""
        for name, column in self.given.items():
            if column.unit != IN_FLIGHT and not any(
                way in self.seen for way in (column.name, column.name.partition(".")[0])
            ):
                near = nearest(column.name, [other[:60] for other in islice(self.seen, 20)])
                problem = f"no column {quoted(column.name)}, which --columns gives to {name}"
                raise RecordingError(self.path, "", problem, near)
        if "arrival" not in self.by_field:
            problem = f"no column is the arrival of a request; its columns are {listed(self.seen)}"
            raise RecordingError(self.path, "", problem, HOW_TO_SAY)

    def unread(self) -> list[str]:
        """The columns that are not a field of a request."""
        used = {way for column in self.by_field.values() for way in (column.name, column.name.partition(".")[0])}
        return [name for name in self.seen if name not in used]

    def said(self) -> str:
        """As ``--columns`` has them, for :func:`given_columns`."""
        named = ((name, self.by_field[name]) for name in FIELDS if name in self.by_field)
        return ",".join(f"{name}={column.said()}" for name, column in named)


# What to do about a table whose columns are not known.
EXAMPLE = "--columns arrival=COLUMN:s,prompt_tokens=COLUMN,output_tokens=COLUMN,ttft=COLUMN:ms"
HOW_TO_SAY = (
    f"say which is which, e.g. {EXAMPLE}; if no column has the arrival and a client kept 8 requests in flight, in the "
    f"order of the table: arrival=8:{IN_FLIGHT}"
)


def tells(sample: Mapping[str, object], given: Columns) -> bool:
    """Whether the names of these columns say that their table is one of requests."""
    stated = {name for name, column in given.items() if column.unit == IN_FLIGHT}
    return all(field in recognised(sample, {}) or field in stated for field in _TELLTALES)


def value_of(record: Mapping[str, object], name: str) -> object:
    """A value by its name; dots lead into nested JSON, ``None`` where nothing is."""
    return record[name] if name in record else at(record, name) if "." in name else None


def listed(names: Iterable[str]) -> str:
    """Names for an error or a remark, the first ten of them."""
    every = [text(name) or "''" for name in names]
    more = f" and {len(every) - 10} more" if len(every) > 10 else ""
    return ", ".join(name[:60] for name in every[:10]) + more


_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")


def recognised(record: Mapping[str, object], given: Columns, fields: Fields = FIELDS) -> dict[str, Column]:
    """Fields by the names of their columns, the first of each; of a time without a unit if no name says one."""
    by_name = {name: field for field, of in fields.items() for name in (field, *of.names)}
    found: dict[str, Column] = {}
    taken = {column.name for column in given.values()}
    for name in islice(record, MAX_COLUMNS):
        if name in taken or len(name) > 100 or printable(name) != name:
            continue
        plain = "_".join(filter(None, _WORDS.split(name))).lower()
        stem, _, last = plain.rpartition("_")
        known, unit = by_name.get(plain, ""), ""
        if not known and (known := by_name.get(stem, "")):
            unit = _UNIT_NAMES.get(last, "")
            known = known if unit and fields[known].kind in TIMES else ""
        if known and fields[known].kind == STAMP and not unit and date_us(record[name]) is not None:
            unit = ISO
        if known and known not in given and (known not in found or (unit and not found[known].unit)):
            found[known] = Column(name, unit)
    return found


def date_us(value: object) -> int | None:
    """A date and time of ISO 8601 as us of the Unix epoch, in UTC where it names no zone; else ``None``."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip()) if 10 <= len(value) <= 40 else None
        except ValueError:
            return None
    if not isinstance(value, datetime):
        return None
    aware = value if value.tzinfo else value.replace(tzinfo=UTC)
    since = aware - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
