"""Engine steps and request snapshots out of the events of scope ``vllm.scheduler.step``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from blis_replay.ingest.readers.documents import MAX_INTEGER, MAX_TOKENS
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import READ_SCHEMA
from blis_replay.ingest.recording import LIFECYCLE_SCHEMA, SNAPSHOT_SCHEMA
from blis_replay.ingest.rows import Rows, query, shaped
from blis_replay.ingest.scan.otlp_columns import ENGINE_SCOPES, STEP_EVENT_SCHEMA, TraceBatch

# Where a row came from: the number of its file, what a record of that file is called, and which one it is in.
PLACE_COLUMNS = ("file", "unit", "record", "span")
_LONGEST_TEXT = 500
_MAX_NS = 1 << 62  # epoch stamps stay below it until 2116

# When a row cannot be used, and why.  Texts are made of the rows that cannot, which hardly ever are any.
Problem = tuple[pl.Expr, pl.Expr]


def placed_spans(batch: TraceBatch, number: int) -> pl.DataFrame:
    """The spans of a batch of file ``number`` with their place (``PLACE_COLUMNS``) and ``span_row``."""
    rows = pl.int_range(pl.len(), dtype=pl.Int64).alias("span_row")
    return batch.spans.with_columns(rows, pl.lit(number, pl.Int64).alias("file"), pl.lit(batch.unit).alias("unit"))


def _in_words(row: Mapping[str, object]) -> str:
    place = f"{row['unit']} {row['record']}, span {row['span']}"
    return f"{place}, event {row['event']}" if "event" in row else place


def no_count(columns: Sequence[str]) -> list[Problem]:
    """That one of these columns holds no number from 0 to 2^61."""
    return [
        (
            (pl.col(name) < 0) | (pl.col(name) >= MAX_INTEGER),
            pl.format("{} is {}, expected a count", pl.lit(name), name),
        )
        for name in columns
    ]


def no_time(column: str) -> Problem:
    """That a column holds no epoch time."""
    return pl.col(column) >= _MAX_NS, pl.lit("a timeUnixNano that is not an epoch time")


def sound(batch: TraceBatch, rows: pl.DataFrame, problems: Sequence[Problem], file: RecordedFile) -> pl.DataFrame:
    """The rows without a problem; the others are rejected in the file of the batch, the sound ones counted there.

    ``rows``: spans or events of the batch with ``span_row``, events with ``event`` too.
    """
    wrong = rows.select(pl.any_horizontal(pl.lit(False), *(when.fill_null(False) for when, _why in problems)))
    flags = wrong.to_series()
    kept = rows
    if flags.any():
        kept = rows.filter(~flags)
        reason = pl.coalesce(pl.when(when).then(why) for when, why in problems).alias("reason")
        names = [name for name in ("span_row", "event") if name in rows.columns]
        for row in rows.filter(flags).select(*names, reason).iter_rows(named=True):
            span = batch.spans.select("record", "span").row(row["span_row"], named=True)
            file.tally.reject(_in_words({"unit": batch.unit, **span, **row}), row["reason"])
    file.tally.records += kept.height
    return kept


def first_spans(spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The first span of each (trace, span) id, and the later ones (for :func:`reject_repeated`).

    ``spans`` has its place, ``trace_id``, ``span_id`` and ``records`` (how many records of its file were counted for
    it).  A span without an id is kept.
    """
    key = ["trace_id", "span_id"]
    marked = spans.with_row_index("row").with_columns(
        (pl.col("span_id").is_not_null() & (pl.col("row") != pl.col("row").min().over(key))).alias("repeated"),
    )
    repeated = marked.filter("repeated").select(*PLACE_COLUMNS, "span_id", "records")
    return spans.filter(~marked["repeated"]) if len(repeated) else spans, repeated


def reject_repeated(repeated: Sequence[pl.DataFrame], files: Sequence[RecordedFile]) -> None:
    """Reject the later spans of :func:`first_spans`."""
    for row in pl.concat(repeated).sort("file", "record", "span").iter_rows(named=True):
        files[row["file"]].tally.reject(_in_words(row), f"span {row['span_id'][:40]} again")
        files[row["file"]].tally.records -= row["records"]


def with_texts_on_one_line(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The texts of these columns on one line, at most 500 characters, null if nothing is left (``documents.text``)."""
    line = pl.col(columns).str.slice(0, _LONGEST_TEXT).str.replace_all(r"[\p{C}\p{Z}]", " ").str.strip_chars()
    return frame.with_columns(pl.when(line != "").then(line))


_PLACE = ("span_row", "event", "time_ns")
_COUNTS = tuple(name for name, kind in STEP_EVENT_SCHEMA.items() if kind == pl.Int64 and name not in _PLACE)
# Steps as read: on the server's monotonic clock, with the event's epoch stamp.
READ_STEP_SCHEMA: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(_COUNTS, pl.Int64),
    "kv_usage": pl.Float64,
    "epoch_ns": pl.Int64,
}
READ_SNAPSHOT_SCHEMA: dict[str, type[pl.DataType]] = {**SNAPSHOT_SCHEMA, "epoch_ns": pl.Int64}
_SNAPSHOT_COUNTS = tuple(name for name, kind in SNAPSHOT_SCHEMA.items() if kind == pl.Int64)

# Two starts of a server on one host share the monotonic clock, which no step runs against; after a
# reboot it starts near 0.  Smaller steps back are those of the epoch clock that orders the events.
_REBOOT_NS = 1_000_000_000


def steps_of(batch: TraceBatch, file: RecordedFile) -> pl.DataFrame:
    """The ``step.BATCH_SUMMARY`` events of a batch as ``READ_STEP_SCHEMA``; what makes no sense is rejected."""
    no_step = pl.col("step_id").is_null() | pl.col("ts_start_ns").is_null()
    no_share = ~pl.col("kv_usage").is_between(0, 1)
    problems = [
        *no_count(_COUNTS),
        (no_step, pl.lit("a step without step.id or step.ts_start_ns")),
        (no_share, pl.format("kv.usage_gpu_ratio is {}, expected a share from 0 to 1", "kv_usage")),
        no_time("time_ns"),
    ]
    return sound(batch, batch.steps, problems, file).rename({"time_ns": "epoch_ns"}).select(READ_STEP_SCHEMA.keys())


def snapshots_of(batch: TraceBatch, file: RecordedFile) -> pl.DataFrame:
    """The ``step.REQUEST_SNAPSHOT`` events of a batch as ``READ_SNAPSHOT_SCHEMA``; what makes no sense is rejected."""
    events = with_texts_on_one_line(batch.snapshots, ["request_id"])
    incomplete = pl.col("step_id").is_null() | pl.col("request_id").is_null()
    problems = [
        *no_count(_SNAPSHOT_COUNTS),
        (incomplete, pl.lit("a snapshot without step.id or request.id")),
        no_time("time_ns"),
    ]
    return sound(batch, events, problems, file).rename({"time_ns": "epoch_ns"}).select(READ_SNAPSHOT_SCHEMA.keys())


_RESTARTS = """
SELECT * FROM (
    SELECT lag(epoch_ns) OVER by_stamp AS before_ns, step_id < lag(step_id) OVER by_stamp AS smaller,
           ts_start_ns - lag(ts_start_ns) OVER by_stamp AS moved_ns
    FROM steps WHERE epoch_ns IS NOT NULL WINDOW by_stamp AS (ORDER BY epoch_ns, ts_start_ns)
)
WHERE smaller AND (moved_ns > 0 OR moved_ns < -$reboot_ns)
"""


def end_of_earlier_starts(steps: Rows) -> int | None:
    """When (epoch ns) the server was last seen before its last start, ``None`` if it started once.

    A start shows where, in the order of the epoch stamps, the step number goes down while
    monotonic time goes on, or falls back to another boot's.
    """
    if steps.held is not None and all(_rise(steps.held[name]) for name in ("step_id", "epoch_ns", "ts_start_ns")):
        return None
    restarts = query(_RESTARTS, {"before_ns": pl.Int64}, {"reboot_ns": _REBOOT_NS}, steps=steps)
    last: int | None = restarts.aggregate(last="max(before_ns)")["last"]
    return last


def _rise(numbers: pl.Series) -> bool:
    return not numbers.null_count() and bool((numbers.diff() > 0).all())


@dataclass
class Repeats:
    """Steps or snapshots that were recorded again.

    ``dropped``: identical ones, ``first_step`` the lowest step of any; ``contradicting``: step of each that has
    others values than another one.
    """

    dropped: int = 0
    first_step: int | None = None
    contradicting: list[int] = field(default_factory=list)

    def reject(self, file: RecordedFile, what: str) -> None:
        """Count them in the file; ``what``: what they are called."""
        file.tally.records -= self.dropped + len(self.contradicting)
        for _ in range(self.dropped):
            file.tally.reject(f"{what} {self.first_step} and following", f"the same {what} again, identical")
        for number in self.contradicting:
            file.tally.reject(f"{what} {number}", "recorded more than once with other values")


def without_repeats(rows: pl.DataFrame, key: Sequence[str], repeats: Repeats) -> pl.DataFrame:
    """Steps or snapshots in order of ``key``, which begins with the step: identical ones once, contradicting ones not.

    What is left out is noted in ``repeats``.
    """
    again = rows.select(pl.all_horizontal(pl.col(name) == pl.col(name).shift() for name in key).fill_null(False))
    repeated = again.to_series()
    if not repeated.any():
        return rows
    touched = repeated | repeated.shift(-1, fill_value=False)
    alike = rows.filter(touched)
    distinct = alike.unique()
    several = pl.struct(key).is_duplicated()
    contradicting = distinct.filter(several).sort(key)
    if dropped := len(alike) - len(distinct):
        first = int(alike.filter(alike.is_duplicated())[key[0]].min())  # type: ignore[arg-type]
        repeats.first_step = first if repeats.first_step is None else min(repeats.first_step, first)
        repeats.dropped += dropped
    repeats.contradicting += contradicting[key[0]].to_list()
    return pl.concat([rows.filter(~touched), distinct.filter(~several)]).sort(key)


REQUEST_SPAN = "llm_request"
_LATENCIES = {f"{name}_us": f"{name}_s" for name in ("ttft", "e2e", "queue", "prefill", "decode")}


def is_request_span() -> pl.Expr:
    """Whether a span is upstream vLLM's of a finished request."""
    return pl.col("scope").is_in(ENGINE_SCOPES) & (pl.col("name") == REQUEST_SPAN)


def request_spans_of(batch: TraceBatch, number: int, file: RecordedFile) -> pl.DataFrame:
    """The request spans of a batch as ``READ_SCHEMA`` with what ``first_spans`` needs; ``number``: of the file.

    The arrival is the start of the span (epoch), to the microsecond; latencies are those the server
    measured.  What makes no sense is rejected.
    """
    spans = placed_spans(batch, number).filter(is_request_span())
    timed = spans.with_columns(_microseconds(seconds).alias(name) for name, seconds in _LATENCIES.items())
    negative = pl.any_horizontal(pl.col(name) < 0 for name in _LATENCIES)
    problems = [
        (pl.col("start_ns").is_null(), pl.lit("a start that is not an epoch time")),
        no_time("start_ns"),
        (pl.col("e2e_us").is_null(), pl.lit("no usable gen_ai.latency.e2e")),
        (negative, pl.lit("a negative latency")),
    ]
    kept = sound(batch, timed, problems, file)
    kept = with_texts_on_one_line(kept, ["request_id"])
    columns = {
        "request_id": pl.col("request_id"),
        "prompt_tokens": tokens("prompt_tokens"),
        "output_tokens_reported": tokens("completion_tokens"),
        "usage_output_tokens": tokens("completion_tokens"),
        "max_tokens": tokens("max_tokens"),
        "cached_prompt_tokens": tokens("cached_tokens"),
        "sent_us": pl.col("start_ns") // 1000,
        "status": pl.lit("ok"),
        **{name: pl.col(name) for name in _LATENCIES},
    }
    place = kept.select(*PLACE_COLUMNS, "trace_id", "span_id", pl.lit(1).alias("records"))
    return place.hstack(shaped(kept, READ_SCHEMA, columns))


def tokens(column: str) -> pl.Expr:
    """A column's number of tokens of at least 1, else null (``documents.tokens`` on columns)."""
    return pl.when(pl.col(column).is_between(1, MAX_TOKENS - 1)).then(pl.col(column))


def _microseconds(column: str) -> pl.Expr:
    """Seconds as whole us, null for NaN and beyond 2^61 us (``documents.microseconds`` on columns)."""
    micro = pl.col(column) * 1e6
    return pl.when(micro.is_finite() & (micro.abs() < MAX_INTEGER)).then(micro.round()).cast(pl.Int64)


def lifecycles_of_spans(spans: pl.DataFrame, request_index: pl.Series, zero_us: int) -> pl.DataFrame:
    """Request spans (``READ_SCHEMA``) as ``LIFECYCLE_SCHEMA``, in order of arrival.

    They stamp arrival, first token and end at the API server, and no moment in the engine.  ``request_index``: of
    the request each belongs to; ``zero_us``: what their clock shows at the experiment's zero.
    """
    arrived = pl.col("sent_us") - zero_us
    columns = {
        "journey": pl.int_range(pl.len(), dtype=pl.Int64),
        "request_index": pl.col("owner"),
        "api_request_id": pl.col("request_id"),
        "arrived_us": arrived,
        "first_response_us": arrived + pl.col("ttft_us"),
        "departed_us": arrived + pl.col("e2e_us"),
        "status": pl.lit("ok"),
        "prompt_tokens": pl.col("prompt_tokens"),
        "max_tokens": pl.col("max_tokens"),
        "output_tokens": pl.col("usage_output_tokens"),
        "cached_prompt_tokens": pl.col("cached_prompt_tokens"),
    }
    owned = spans.with_columns(request_index.alias("owner")).sort("sent_us", maintain_order=True)
    return shaped(owned, LIFECYCLE_SCHEMA, columns)
