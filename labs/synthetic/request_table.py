"""Request tables: what to simulate without a recording, from CSV, Parquet, JSON lines or an array of JSON objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import RecordingError, printable
from blis_replay.blis.trace import NEVER_US, BlockKeys, RequestTrace
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.tables.records import PARQUET_MAGIC, first_record, table_of
from blis_replay.replay.prefix import recorded_block_keys
from blis_replay_labs.formats.arrival_traces import prompts_of_blocks

# Microseconds in a unit; a table has one of these columns.
ARRIVALS = {"arrival_us": 1, "arrival_ms": 1_000, "arrival_s": 1_000_000}
BLOCK_COLUMNS = ("block_keys", "hash_ids")
_OPTIONAL = ("priority", "cached_tokens", "request_id", "session")
_KNOWN = {"prompt_tokens", "output_tokens", *_OPTIONAL, *ARRIVALS, *BLOCK_COLUMNS}
_MOST_REQUESTS = 10_000_000
_LATEST_US = 1 << 60
_MOST_TOKENS = 1 << 31
_WHOLE = re.compile(r"[-+]?[0-9]{1,40}(\.0*)?")
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class RequestTable:
    """Requests of a file or a recording (``path`` is its name then), ready for the simulator.

    ``trace``: in order of arrival.  ``rows``: int64[n], the place of each of them in the file,
    from 0.  ``request_ids``: the file's own names in the order of the file, None without
    that column.  ``ignored``: columns that mean nothing to the simulator.  ``numbers``:
    int64[n], where each row of ``path`` stands, in what ``word`` names (line, row).  ``sessions``: int64[n] in the
    order of ``trace``, equal for the turns of one session; None without that column.
    """

    trace: RequestTrace
    rows: Int64s
    request_ids: list[str] | None
    ignored: tuple[str, ...]
    path: Path
    word: str
    numbers: Int64s
    sessions: Int64s | None = None

    def of_open_load(self) -> RequestTable:
        """The table where requests come at their arrivals: sessions mean nothing then."""
        if self.sessions is None:
            return self
        return replace(self, sessions=None, ignored=tuple(sorted((*self.ignored, "session"))))

    def refuse(self, request: int, problem: str, remedy: str) -> NoReturn:
        """Raise ``RecordingError`` at a request, numbered as in ``trace``."""
        raise RecordingError(self.path, f"{self.word} {self.numbers[self.rows[request]]}", problem, remedy)


def read_request_table(path: Path, block_size: int, *, arrivals: bool = True) -> RequestTable:
    """The requests of a table of any form that ``ingest`` reads.

    Columns: ``arrival_us``, ``arrival_ms`` or ``arrival_s``, ``prompt_tokens``, ``output_tokens``; optional
    ``request_id``, ``priority`` (lower first), ``cached_tokens`` (of the prompt, known beforehand), ``session`` (its
    requests are turns of one client in a closed loop), and ``block_keys`` or ``hash_ids``.  These hold an integer per
    full block of ``block_size`` tokens, equal for blocks with equal tokens; in CSV separated by spaces.
    ``arrivals``: whether requests need one; without, and if one has none, all come at 0 in the order of the file.
    Raises ``RecordingError``, one line with file and line, for what is amiss.
    """
    file = RecordedFile(path, path.name)
    head = file.head(_HEAD_BYTES)
    if head and not head.startswith(PARQUET_MAGIC) and not first_record(head):
        raise RecordingError(path, "line 1", "no columns that each have a name of their own", "name each once")
    builder = _Builder(path, block_size, arrivals=arrivals)
    with TemporaryDirectory(prefix="blis-replay-") as scratch:
        for place, record in table_of(file, Path(scratch) / "rows").rows:
            builder.add(place, record)
    if file.tally.rejected:
        place, problem = file.tally.rejected[0]
        raise RecordingError(path, place, problem, "correct it")
    return builder.build()


class _Builder:
    """Checks rows one by one and gathers them as columns."""

    def __init__(self, path: Path, block_size: int, *, arrivals: bool) -> None:
        self.path, self.block_size, self.arrivals = path, block_size, arrivals
        self.in_order_of_file = False
        self.word = "line"
        self.numbers: list[int] = []
        self.arrival_us: list[int] = []
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.priority: list[int] = []
        self.cached: list[int] = []
        self.ids: list[str] = []
        self.sessions: list[int] = []
        self.session_numbers: dict[str, int] = {}
        self.keys: list[int] = []
        self.key_count: list[int] = []
        self.seen: set[str] = set()

    def build(self) -> RequestTable:
        if not self.prompt:
            raise RecordingError(self.path, "", "no requests", "write one per line")
        arrival_us = np.array(self.arrival_us, np.int64)
        if self.in_order_of_file:
            arrival_us[:] = 0
        order = np.argsort(arrival_us, kind="stable")
        prompt = np.array(self.prompt, np.int64)
        trace = RequestTrace(
            arrival_us=arrival_us[order],
            prompt_tokens=prompt[order],
            prefill_tokens=(prompt - np.array(self.cached, np.int64))[order],
            output_tokens=np.array(self.output, np.int64)[order],
            abort_us=np.full(len(order), NEVER_US, np.int64),
            priority=np.array(self.priority, np.int64)[order] if "priority" in self.seen else None,
            block_keys=self.block_keys(order) if self.seen & set(BLOCK_COLUMNS) else None,
        )
        ids = self.ids if "request_id" in self.seen else None
        ignored = tuple(sorted(self.seen - _KNOWN))
        sessions = np.array(self.sessions, np.int64)[order] if "session" in self.seen else None
        numbers = np.array(self.numbers, np.int64)
        return RequestTable(trace, order, ids, ignored, self.path, self.word, numbers, sessions)

    def add(self, row: str, record: Mapping[str, object]) -> None:
        """``row``: its place, such as line 3."""
        if len(self.prompt) >= _MOST_REQUESTS:
            self.refuse(row, f"more than {_MOST_REQUESTS:,} requests", "simulate them in parts")
        stripped = {name: value.strip() if isinstance(value, str) else value for name, value in record.items()}
        values = {name: value for name, value in stripped.items() if value is not None and value != ""}
        self.seen |= values.keys()
        self.word, _, number = row.partition(" ")
        self.numbers.append(int(number))
        self.arrival_us.append(self.arrival(row, values))
        prompt = self.whole(row, values, "prompt_tokens", 1, _MOST_TOKENS)
        output = self.whole(row, values, "output_tokens", 1, _MOST_TOKENS)
        cached = self.whole(row, values, "cached_tokens", 0, _MOST_TOKENS, 0)
        if cached >= prompt:
            self.refuse(row, f"cached_tokens is {cached} of {prompt}", "the last prompt token is always computed")
        self.prompt.append(prompt)
        self.output.append(output)
        self.cached.append(cached)
        self.priority.append(self.whole(row, values, "priority", -(2**31), 2**31, 0))
        self.ids.append(str(values.get("request_id", "")))
        # A request without one is a session of its own.
        name = f"in session {values['session']}" if "session" in values else f"of row {len(self.ids)}"
        self.sessions.append(self.session_numbers.setdefault(name, len(self.session_numbers)))
        keys = self.blocks(row, values)
        full = (prompt + output) // self.block_size
        if len(keys) > full:
            self.refuse(
                row,
                f"{len(keys)} block identities, but its {prompt + output} tokens fill {full} blocks of "
                f"{self.block_size}",
                "give one for each full block",
            )
        if keys and cached:
            self.refuse(row, "both block identities and cached_tokens", "give one of the two")
        self.keys += keys
        self.key_count.append(len(keys))

    def arrival(self, row: str, values: Mapping[str, object]) -> int:
        names = [name for name in ARRIVALS if name in values]
        if not names and not self.arrivals:
            self.in_order_of_file = True
            return 0
        if len(names) != 1:
            problem = f"has {' and '.join(names)}" if names else "has no arrival"
            self.refuse(row, problem, f"give one of {', '.join(ARRIVALS)}")
        text, unit_us = values[names[0]], ARRIVALS[names[0]]
        if unit_us == 1:
            return self.whole(row, values, names[0], 0, _LATEST_US)
        try:
            value = float(text) if isinstance(text, str | int | float) and not isinstance(text, bool) else -1.0
        except (ValueError, OverflowError):
            value = -1.0
        if not 0 <= value * unit_us < _LATEST_US:
            self.refuse(row, f"{names[0]} is {_short(text)}, expected a time from 0 on", "count from the first arrival")
        return round(value * unit_us)

    def whole(
        self, row: str, values: Mapping[str, object], name: str, low: int, high: int, default: int | None = None
    ) -> int:
        value = values.get(name, default)
        if value is None:
            self.refuse(row, f"{name} is missing", "every request needs it")
        number = _whole(value)
        if number is None or not low <= number <= high:
            self.refuse(row, f"{name} is {_short(value)}", f"write a whole number from {low} on")
        return number

    def blocks(self, row: str, values: Mapping[str, object]) -> list[int]:
        names = [name for name in BLOCK_COLUMNS if name in values]
        if len(names) > 1:
            self.refuse(row, "has block_keys and hash_ids", "give one of the two")
        if not names:
            return []
        value = values[names[0]]
        items = value.split() if isinstance(value, str) else value
        if not isinstance(items, list):
            self.refuse(row, f"{names[0]} is {_short(value)}", "write a list of whole numbers")
        keys = [_whole(item) for item in items]
        for item, key in zip(items, keys, strict=True):
            if key is None:
                self.refuse(row, f"{names[0]} holds {_short(item)}", "write a list of whole numbers")
        return [key for key in keys if key is not None]

    def block_keys(self, order: Int64s) -> BlockKeys:
        """Identities as keys: a key stands for a block and all before it, so equal keys are equal tokens so far."""
        small: dict[int, int] = {}  # identities may be hashes of any length
        keys = np.array([small.setdefault(key, len(small)) for key in self.keys], np.int64)
        prompts = prompts_of_blocks(str(self.path), self.block_size, np.array(self.key_count, np.int64), keys)
        tree = prompts.in_order(np.arange(len(self.key_count)))
        chained = recorded_block_keys(tree, len(self.key_count), self.block_size)
        return replace(chained, start=chained.start[order], count=chained.count[order])

    def refuse(self, row: str, problem: str, remedy: str) -> NoReturn:
        raise RecordingError(self.path, row, printable(problem), remedy)


def _whole(value: object) -> int | None:
    """A whole number in any of its spellings, else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value.split(".")[0])
    return None


def _short(value: object) -> str:
    return ascii(value)[:40] if not isinstance(value, str) else repr(value[:40])
