"""Engine steps out of ``step.BATCH_SUMMARY`` events (scope ``vllm.scheduler.step``)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import polars as pl
from msgspec import Raw, Struct

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.numbers import MAX_INTEGER, finite, whole
from blis_replay.ingest.readers.otlp_values import DECODE_ERRORS, MAX_NS, Attribute, scalars

STEP_SCOPE = "vllm.scheduler.step"
STEP_EVENT = "step.BATCH_SUMMARY"
BATCH_STEPS = 50_000

# Attribute -> column, in the order in which the tracing code sets them.
_COUNTS_BEFORE_USAGE = {
    "step.id": "step_id",
    "step.ts_start_ns": "ts_start_ns",
    "step.ts_end_ns": "ts_end_ns",
    "step.duration_us": "duration_us",
    "queue.running_depth": "running_depth",
    "queue.waiting_depth": "waiting_depth",
    "batch.num_prefill_reqs": "prefill_requests",
    "batch.num_decode_reqs": "decode_requests",
    "batch.scheduled_tokens": "scheduled_tokens",
    "batch.prefill_tokens": "prefill_tokens",
    "batch.decode_tokens": "decode_tokens",
    "batch.num_finished": "finished_requests",
    "batch.num_preempted": "preempted_requests",
}
_USAGE = "kv.usage_gpu_ratio"
_COUNTS_AFTER_USAGE = {"kv.blocks_total_gpu": "kv_blocks_total", "kv.blocks_free_gpu": "kv_blocks_free"}
_COUNTS = {**_COUNTS_BEFORE_USAGE, **_COUNTS_AFTER_USAGE}

# Steps as read: on the server's monotonic clock, with the event's epoch stamp.
READ_STEP_SCHEMA: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(_COUNTS.values(), pl.Int64),
    "kv_usage": pl.Float64,
    "epoch_ns": pl.Int64,
}

StepRow = tuple[int | float | None, ...]  # the columns above

# The collector prints every summary in one way.  That way is read by its digits, which is
# faster than by its structure; any other is decoded attribute by attribute.
_DIGITS = b"0123456789"
_ONLY_DIGITS = bytes(c if c in _DIGITS else ord(" ") for c in range(256))


def _printed(names: Iterable[str]) -> bytes:
    return ",".join(f'{{"key":"{name}","value":{{"intValue":""}}}}' for name in names).encode()


_USAGE_MARK = b'"doubleValue":'
_TEMPLATE = b"".join(
    (
        b"[" + _printed(_COUNTS_BEFORE_USAGE),
        b',{"key":"' + _USAGE.encode() + b'","value":{' + _USAGE_MARK,
        b"}}," + _printed(_COUNTS_AFTER_USAGE) + b"]",
    )
)
_LONGEST = len(_TEMPLATE) + 19 * len(_COUNTS)  # 19 digits are 64 bits


class Event(Struct, gc=False):
    """A span event; its attributes are read only where it is a summary."""

    name: str
    timeUnixNano: int = 0
    attributes: Raw = Raw(b"[]")


class StepSpan(Struct):
    """A container of step events."""

    events: list[Event] | None = None
    traceId: str = ""
    spanId: str = ""
    droppedEventsCount: int = 0


_ATTRIBUTES = msgspec.json.Decoder(list[Attribute], strict=False)


def step_of(event: Event) -> tuple[str, StepRow]:
    """Why a ``step.BATCH_SUMMARY`` cannot be used (``""`` if it can), and its ``READ_STEP_SCHEMA`` row."""
    if row := _by_digits(event):
        return "", row
    try:
        return _by_structure(event)
    except DECODE_ERRORS as error:
        return str(error), ()


def frame_of_steps(rows: list[StepRow]) -> pl.DataFrame:
    """Rows as a frame of ``READ_STEP_SCHEMA``."""
    if not rows:
        return pl.DataFrame(schema=READ_STEP_SCHEMA)
    # Column by column: twice as fast as by row.
    columns = zip(READ_STEP_SCHEMA.items(), zip(*rows, strict=True), strict=True)
    return pl.DataFrame([pl.Series(name, values, kind) for (name, kind), values in columns])


def without_duplicates(file: RecordedFile, steps: pl.DataFrame) -> pl.DataFrame:
    """Steps by id: identical duplicates dropped, contradicting ones rejected, both counted in ``file``."""
    if steps["step_id"].n_unique() == len(steps):
        return steps.sort("step_id")
    distinct = steps.unique()
    dropped = len(steps) - len(distinct)
    contradicting = distinct.filter(pl.col("step_id").is_duplicated())["step_id"].sort()
    file.tally.records -= dropped + len(contradicting)
    if dropped:
        first = int(steps.filter(steps.is_duplicated())["step_id"].sort()[0])
        for _ in range(dropped):
            file.tally.reject(f"step {first} and following", "the same step again, identical")
    for step_id in contradicting:
        file.tally.reject(f"step {step_id}", "recorded more than once with other values")
    return distinct.filter(~pl.col("step_id").is_duplicated()).sort("step_id")


def _by_digits(event: Event) -> StepRow | None:
    """The row of a sound summary printed as the collector does, ``None`` for any other."""
    printed = bytes(event.attributes)
    mark = printed.rfind(_USAGE_MARK) + len(_USAGE_MARK)
    end = printed.find(b"}", mark)
    around = printed[:mark] + printed[end:]
    # With its digits taken out, the text must be the template to the letter; then a value
    # has one run of digits or none, and the number of runs shows that none is empty.
    if len(around) > _LONGEST or around.translate(None, _DIGITS) != _TEMPLATE:
        return None
    counts = [int(run) for run in around.translate(_ONLY_DIGITS).split()]
    try:
        usage = float(printed[mark:end])
    except ValueError:
        return None
    sound = (
        len(counts) == len(_COUNTS)
        and max(counts) < MAX_INTEGER
        and 0 <= usage <= 1
        and 0 <= event.timeUnixNano < MAX_NS
    )
    return (*counts, usage, event.timeUnixNano) if sound else None


def _by_structure(event: Event) -> tuple[str, StepRow]:
    """The row of any summary; what it does not say is null, what it says wrongly is a problem."""
    values = scalars(_ATTRIBUTES.decode(event.attributes))
    counts = [whole(values.get(name)) for name in _COUNTS]
    wrong = [name for name, count in zip(_COUNTS, counts, strict=True) if count is None and name in values]
    if wrong:
        return f"{wrong[0]} is {values[wrong[0]]!r:.30}, which is no count", ()
    if counts[0] is None or counts[1] is None:
        return "a step without step.id or step.ts_start_ns", ()
    usage = finite(values.get(_USAGE))
    if _USAGE in values and (usage is None or not 0 <= usage <= 1):
        return f"{_USAGE} is {values[_USAGE]!r:.30}, which is no share", ()
    if not 0 <= event.timeUnixNano < MAX_NS:
        return "a timeUnixNano that is no epoch time", ()
    return "", (*counts, usage, event.timeUnixNano)
