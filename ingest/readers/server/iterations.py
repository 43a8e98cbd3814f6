"""Iteration lines of a vLLM server's log (``--enable-logging-iteration-details``): what every step computed.

From December 2025 to June 2026 the engine core writes them (``vllm/v1/engine/core.py``), since then the API server
(``vllm/v1/metrics/loggers.py``), with the engine's number and the usage of its KV cache.  A request is in
prefill ("context") as long as it has no output token (``compute_iteration_details`` of ``vllm/v1/utils.py``): one
that was preempted and computes its tokens again counts as a decode with many tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

import polars as pl

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.recording import ITERATION_SCHEMA
from blis_replay.ingest.rows import Rows, no_rows, query, rows_of
from blis_replay.ingest.scratch import Scratch

BATCH_ROWS = 20_000
MAX_ENGINES = 4096
_MARK = b"Iteration("
_COUNTS = ("context requests", "context tokens", "generation requests", "generation tokens")
_LINE = re.compile(
    r"(?:\bEngine (\d{1,6}): )?Iteration\((\d{1,15})\): "
    + "".join(rf"(\d{{1,15}}) {name}, " for name in _COUNTS)
    + r"iteration elapsed time: (\d{1,9}(?:\.\d{1,9})?) ms( \(dummy\))?"
    + r"(?:, \w{1,20} KV cache usage: (\d{1,3}(?:\.\d{1,9})?)%)?([^\n]{0,1000})",
)
# The engine core's own line does not name the engine; where there are several, the name of its process does.
_PROCESS = re.compile(r"EngineCore_DP(\d{1,6})\b")
# vLLM's own prefix: month, day and whole seconds of the server's local time, no year.
_STAMP = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_PREFIX_CHARS = 200
_YEAR_S = 366 * 86_400
_NEW_YEAR = datetime(2000, 1, 1)  # of a year with 29 February

# As read: the engine's start that wrote the line, and its stamp in seconds from a beginning of its own.
_READ_SCHEMA: dict[str, type[pl.DataType]] = {
    "start": pl.Int64,
    "stamp_s": pl.Int64,
    **{name: kind for name, kind in ITERATION_SCHEMA.items() if not name.endswith("_us") or name == "elapsed_us"},
}

_LAST_STARTS = """
SELECT steps.* EXCLUDE (start, stamp_s), (stamp_s - min(stamp_s) OVER ()) * 1000000 AS logged_us,
       NULL::BIGINT AS start_us, NULL::BIGINT AS uncertainty_us
FROM steps JOIN engines ON engines.engine = steps.engine AND engines.start = steps.start
ORDER BY steps.engine, iteration
"""


def begins_with_iterations(head: str) -> bool:
    """Whether there is an iteration line: a part of a rotated log has nothing else that is known."""
    return _LINE.search(head) is not None


@dataclass(frozen=True)
class IterationsRead:
    """``rows``: ``ITERATION_SCHEMA`` of every engine's last start, not placed yet; ``remarks``: what is missing."""

    rows: Rows
    remarks: tuple[str, ...] = ()


@dataclass
class LogStamps:
    """Reads the stamps of log lines in turn, in seconds from the beginning of the year of the first."""

    _year_s: int = 0
    _last_s: int = 0

    def seconds(self, line: str) -> int | None:
        """Of a line; None without a stamp."""
        stamp = _STAMP.search(line[:_PREFIX_CHARS])
        if stamp is None:
            return None
        try:
            month, day, hour, minute, second = map(int, stamp.groups())
            within_s = _of_year(datetime(2000, month, day, hour, minute, second))
        except ValueError:
            return None
        if within_s < self._last_s - _YEAR_S // 2:  # a new year
            self._year_s += _YEAR_S
        self._last_s = within_s
        return self._year_s + within_s

    @staticmethod
    def of_unix(unix_s: float) -> float | None:
        """The same of a Unix time, in UTC; None beyond the calendar."""
        try:
            at = datetime.fromtimestamp(unix_s, UTC).replace(tzinfo=None)
        except (ValueError, OverflowError, OSError):
            return None
        return _of_year(at.replace(year=2000)) + at.microsecond / 1e6


def _of_year(at: datetime) -> int:
    return int((at.replace(microsecond=0) - _NEW_YEAR).total_seconds())


@dataclass
class _Engine:
    """The lines of one engine so far: its starts, the last line, and what is odd in its last start."""

    start: int = 0
    last: tuple[int, ...] = (-1,)
    missing: int = 0
    first_missing: int = -1
    repeated: int = 0

    def is_new(self, line: tuple[int, ...]) -> bool:
        """Count an iteration, from its index to its elapsed us; whether it is not the last line again."""
        if line == self.last:
            self.repeated += 1
            return False
        if line[0] <= self.last[0]:
            self.start += 1
            self.missing, self.last = 0, (-1,)
        if between := line[0] - self.last[0] - 1:
            self.first_missing = self.first_missing if self.missing else self.last[0] + 1
            self.missing += between
        self.last = line
        return True


@dataclass
class IterationLines:
    """Gathers the iteration lines of a log that is read line by line; a batch of rows is in memory."""

    scratch: Scratch
    _stamps: LogStamps = field(default_factory=LogStamps)
    _engines: dict[int, _Engine] = field(default_factory=dict)
    _rows: list[tuple[object, ...]] = field(default_factory=list)
    _further: int = 0

    def __post_init__(self) -> None:
        self._writer = self.scratch.writer(_READ_SCHEMA)

    def take(self, file: RecordedFile, number: int, line: bytes) -> bool:
        """Whether line ``number`` is an iteration line; one that cannot be read is rejected in the file."""
        if _MARK not in line:
            return False
        text = line.decode("utf-8", "replace")
        match = _LINE.search(text)
        if match is None:
            is_iteration = _COUNTS[0] in text
            if is_iteration:
                file.tally.reject(f"line {number}", "an iteration line that is cut off, or of another form")
            return is_iteration
        process = None if match[1] else _PROCESS.search(text[:_PREFIX_CHARS])
        engine = int(match[1] or (process[1] if process else 0))
        if engine not in self._engines and len(self._engines) == MAX_ENGINES:
            file.tally.reject(f"line {number}", f"an iteration of more than {MAX_ENGINES:,} engines")
        else:
            counted = (*(int(match[group]) for group in range(2, 7)), round(float(match[7]) * 1000))
            kv_usage = min(float(match[9]) / 100, 1.0) if match[9] else None
            self._further += bool(match[10].strip(" .\r"))
            stamp_s, state = self._stamps.seconds(text), self._engines.setdefault(engine, _Engine())
            if state.is_new(counted):
                self._rows.append((state.start, stamp_s, engine, *counted, kv_usage, match[8] is not None))
            if len(self._rows) >= BATCH_ROWS:
                self._flush()
            file.tally.records += 1
        return True

    def _flush(self) -> None:
        self._writer.add(pl.DataFrame(self._rows, schema=_READ_SCHEMA, orient="row"))
        self._rows = []

    def done(self) -> IterationsRead:
        """The iterations of the last start of every engine, by engine and index."""
        if not self._engines:
            return IterationsRead(no_rows(ITERATION_SCHEMA))
        self._flush()
        steps = self._writer.done()
        starts = [(engine, state.start) for engine, state in self._engines.items()]
        engines = pl.DataFrame(starts, schema={"engine": pl.Int64, "start": pl.Int64}, orient="row")
        rows = self.scratch.kept(query(_LAST_STARTS, ITERATION_SCHEMA, steps=steps, engines=rows_of(engines)))
        return IterationsRead(rows, tuple(self._remarks(steps.height - rows.height)))

    def _remarks(self, earlier: int) -> list[str]:
        remarks = []
        if earlier:
            remarks.append(f"{earlier:,} iterations of earlier starts of the server: not used, the last one is")
        if repeated := sum(state.repeated for state in self._engines.values()):
            remarks.append(f"{repeated:,} iteration lines that stand there twice: counted once")
        for engine, state in sorted(self._engines.items()):
            if state.missing:
                remarks.append(f"{state.missing:,} iterations of engine {engine}, the first {state.first_missing:,}")
        if self._further:
            remarks.append(f"what follows the KV usage in {self._further:,} iteration lines: not read")
        return remarks
