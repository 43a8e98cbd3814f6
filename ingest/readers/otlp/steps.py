"""Engine steps and request snapshots out of the events of scope ``vllm.scheduler.step``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import polars as pl

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp.columns import STEP_EVENT_SCHEMA, TraceBatch
from blis_replay.ingest.readers.otlp.places import no_count, no_time, sound, with_texts_on_one_line
from blis_replay.ingest.recording import SNAPSHOT_SCHEMA
from blis_replay.ingest.row_parts import RowParts, by_ranges

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
        (no_share, pl.format("kv.usage_gpu_ratio is {}, which is no share", "kv_usage")),
        no_time("time_ns"),
    ]
    return _stamped(sound(batch, batch.steps, problems, file)).select(READ_STEP_SCHEMA.keys())


def snapshots_of(batch: TraceBatch, file: RecordedFile) -> pl.DataFrame:
    """The ``step.REQUEST_SNAPSHOT`` events of a batch as ``READ_SNAPSHOT_SCHEMA``; what makes no sense is rejected."""
    events = with_texts_on_one_line(batch.snapshots, ["request_id", "phase"])
    incomplete = pl.col("step_id").is_null() | pl.col("request_id").is_null()
    problems = [
        *no_count(_SNAPSHOT_COUNTS),
        (incomplete, pl.lit("a snapshot without step.id or request.id")),
        no_time("time_ns"),
    ]
    return _stamped(sound(batch, events, problems, file)).select(READ_SNAPSHOT_SCHEMA.keys())


def _stamped(events: pl.DataFrame) -> pl.DataFrame:
    return events.rename({"time_ns": "epoch_ns"})


def end_of_earlier_starts(steps: RowParts, part_rows: int) -> int | None:
    """When (epoch ns) the server was last seen before its last start, ``None`` if it started once.

    A start shows where, in the order of the epoch stamps, the step number goes down while
    monotonic time goes on, or falls back to another boot's.
    """
    stamps = replace(steps, schema={name: READ_STEP_SCHEMA[name] for name in ("epoch_ns", "ts_start_ns", "step_id")})
    moved_ns = pl.col("ts_start_ns") - pl.col("ts_start_ns").shift(1)
    restart = (pl.col("step_id") < pl.col("step_id").shift(1)) & ((moved_ns > 0) | (moved_ns < -_REBOOT_NS))
    ended_ns, last = None, pl.DataFrame(schema=stamps.schema)
    for frame in by_ranges(stamps, lambda part: part["epoch_ns"], ["epoch_ns"], part_rows):
        stamped = pl.concat([last, frame.sort("epoch_ns", "ts_start_ns")])
        before = stamped.select(pl.col("epoch_ns").shift(1).filter(restart)).to_series()
        ended_ns, last = int(before[-1]) if len(before) else ended_ns, stamped.tail(1)
    return ended_ns


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
    found = rows.filter(touched)
    distinct = found.unique()
    several = pl.struct(key).is_duplicated()
    contradicting = distinct.filter(several).sort(key)
    if dropped := len(found) - len(distinct):
        first = int(found.filter(found.is_duplicated())[key[0]].min())  # type: ignore[arg-type]
        repeats.first_step = first if repeats.first_step is None else min(repeats.first_step, first)
        repeats.dropped += dropped
    repeats.contradicting += contradicting[key[0]].to_list()
    return pl.concat([rows.filter(~touched), distinct.filter(~several)]).sort(key)
