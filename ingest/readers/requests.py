"""The frame that every reader of requests returns, and its way to the recording's own order and zero."""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.documents import US_PER_S
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.recording import (
    AGGREGATE_SCHEMA,
    ONE_TABLE,
    PROMPT_SCHEMA,
    REQUEST_PROMPT_SCHEMA,
    REQUEST_SCHEMA,
    PromptTree,
    Stage,
    TokenEvents,
)
from blis_replay.ingest.rows import Rows, query, rows_of
from blis_replay.ingest.scratch import Scratch

BATCH_ROWS = 20_000
# 2001: stamps before that count from a start of their own.
EARLIEST_EPOCH_US = 1_000_000_000_000_000

# What is known of a request before the recordings of one experiment are joined:
# REQUEST_SCHEMA plus the send time on the reader's own clock and where a decode length may come from.
READ_SCHEMA: dict[str, type[pl.DataType]] = {
    **REQUEST_SCHEMA,
    "sent_us": pl.Int64,  # on the recording's own clock
    "usage_output_tokens": pl.Int64,  # by the server's usage block
    "ignore_eos": pl.Boolean,  # of the request itself
}


@dataclass(frozen=True)
class RawPrompts:
    """Prompts as a file repeats them: request ``i`` of the frame, in file order, carries ``prompt[i]``, if any (-1).

    The other columns are those of ``PROMPT_SCHEMA``, a row for each prompt (no parent: -1).
    """

    source: str
    prompt: NDArray[np.int64]
    parent: NDArray[np.int64]
    shared_tokens: NDArray[np.int64]
    tokens: NDArray[np.int64]

    def in_order(self, order: NDArray[np.int64]) -> PromptTree:
        """The same as a tree, with the requests in send order; ``order`` as :func:`in_send_order` returns it."""
        columns = {name: getattr(self, name) for name in ("parent", "shared_tokens", "tokens")}
        prompts = pl.DataFrame({"prompt": np.arange(len(self.parent)), **columns}, schema=PROMPT_SCHEMA)
        requests = {"request_index": np.arange(len(order)), "prompt": self.prompt[order]}
        return PromptTree(
            self.source,
            prompts.with_columns(pl.col("parent").replace(NONE, None)),
            pl.DataFrame(requests, schema=REQUEST_PROMPT_SCHEMA).filter(pl.col("prompt") != NONE),
        )


@dataclass(frozen=True)
class RequestsRead:
    """Requests of one file in file order (``READ_SCHEMA``), their clock, and their raw events if it has any.

    ``version``: tool and version that wrote the file, as far as it tells (``guidellm 0.5.4``).  ``stages``: load stages
    that the file itself names.  ``aggregates``: what the tool itself reports in this file (``AGGREGATE_SCHEMA``), for
    the checks to compare with.  ``prefix``: identities of the prompts, if the file tells them.  ``remarks``: what of
    the file was not used.  ``configured_output_tokens`` and ``ignore_eos``: what all requests of the run asked for.
    ``lacks``: what such a file should have and this one does not, in words.  ``placed``: REBUILT or REBUILT_E2E, where
    send times were not recorded.  ``features``: what requests asked for that changes how they are scheduled, by vLLM's
    names.
    """

    rows: Rows
    clock_name: str  # client | server
    clock_kind: str  # epoch | monotonic | relative
    model: str | None = None
    events: TokenEvents | None = None
    version: str = ""
    stages: tuple[Stage, ...] = ()
    aggregates: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=AGGREGATE_SCHEMA))
    prefix: RawPrompts | None = None
    remarks: tuple[str, ...] = ()
    configured_output_tokens: int | None = None
    ignore_eos: bool | None = None
    lacks: tuple[str, ...] = ()
    placed: str = ""
    features: tuple[str, ...] = ()

    @property
    def frame(self) -> pl.DataFrame:
        """``rows`` all at once."""
        return self.rows.frame()


@dataclass(frozen=True)
class ServerFacts:
    """What a file called ``name`` says of the server: model, GPU, parallelism, engine arguments by vLLM's names.

    ``app``: what it served, in a word.
    """

    model: str | None = None
    tensor_parallelism: int | None = None
    engine: Mapping[str, object] = field(default_factory=dict)
    hardware: str | None = None
    name: str = "trace header"
    app: str | None = None


def prefixes_of_groups(groups: list[tuple[str, int | None]], source: str) -> tuple[RawPrompts | None, tuple[str, ...]]:
    """What requests share by the group and prefix length of each, and in words what is not known.

    Those of one group share the shorter of their lengths; of the rest of a prompt nothing is known.  An empty
    name stands for no shared prefix.
    """
    named = [(group, length) for group, length in groups if group]
    unknown = sum(length is None for _, length in named)
    remarks = (f"prefix identity of {unknown} requests: a group without the length that it shares",) if unknown else ()
    if unknown == len(named):
        return None, remarks
    numbers: dict[tuple[str, int], int] = {}
    longest: dict[str, tuple[int, int]] = {}  # of a group so far: tokens and prompt
    rows: list[tuple[int, int, int]] = []
    prompt = np.full(len(groups), NONE, np.int64)
    for i, (group, length) in enumerate(groups):
        if not group or length is None:
            continue
        prompt[i] = numbers.setdefault((group, length), len(numbers))
        if prompt[i] == len(rows):
            before, parent = longest.get(group, (0, NONE))
            rows.append((parent, min(before, length), length))
            longest[group] = max((before, parent), (length, len(rows) - 1))
    parents, shared, tokens_ = np.array(rows, np.int64).T
    return RawPrompts(source, prompt, parents, shared, tokens_), remarks


def shared_by_all(requests: int, prefix_tokens: int, source: str) -> RawPrompts:
    """Prompts that begin with the same tokens; of the rest nothing is known."""
    none, root, length = (np.full(1, value, np.int64) for value in (0, NONE, prefix_tokens))
    return RawPrompts(source, np.zeros(requests, np.int64), root, none, length)


def with_summary(found: RequestsRead, summary: RequestsRead) -> RequestsRead:
    """The requests together with what another file of the same tool says of the run as a whole; not how they came."""
    return replace(
        found,
        model=found.model or summary.model,
        aggregates=summary.aggregates,
        configured_output_tokens=summary.configured_output_tokens,
        ignore_eos=summary.ignore_eos,
    )


def together(parts: Mapping[str, RequestsRead], scratch: Scratch, said_by: str | None) -> RequestsRead:
    """The requests of several clients' files, by name, with what the file ``said_by`` says of them all.

    Raises :class:`RecordingError` where their clocks have nothing in common.
    """
    first, *others = parts
    if not others:
        return parts[first]
    if len(kinds := {part.clock_kind for part in parts.values()}) > 1 or kinds == {"relative"}:
        problem = f"it has no clock in common with {', '.join(others)}"
        raise RecordingError(first, "", problem, ONE_TABLE)
    writer, before = scratch.writer(READ_SCHEMA), 0
    counts, offsets = [], []
    for part in parts.values():
        for batch in part.rows.batches():
            writer.add(batch)
        none = np.zeros(part.rows.height, np.int64)
        counts.append(none if part.events is None else part.events.counts)
        offsets.append(none if part.events is None else part.events.offsets + before)
        if part.events is not None and part.events.path.exists():
            before += part.events.path.stat().st_size // 8
    paths = [part.events.path for part in parts.values() if part.events is not None]
    for path in paths[1:]:
        with paths[0].open("ab") as stream, path.open("rb") as more:
            shutil.copyfileobj(more, stream)
    speaker = parts[said_by] if said_by else RequestsRead(parts[first].rows, "client", kinds.pop())
    return replace(
        speaker,
        rows=writer.done(),
        model=speaker.model or parts[first].model,
        events=TokenEvents(paths[0], np.concatenate(offsets), np.concatenate(counts)) if paths else None,
        prefix=None,
        remarks=tuple(dict.fromkeys(remark for part in parts.values() for remark in part.remarks)),
    )


def stage_of_sends(number: int, rate_per_s: float, duration_us: int, requests: float | None) -> Stage:
    """A stage at a rate that was asked for, until its last send.

    The duration that tools report goes on until the last answer, which a queue puts off by minutes; the last of
    ``requests`` at that rate is sent earlier.
    """
    if requests is not None and requests > 0:
        duration_us = round(min(duration_us, max(requests / rate_per_s * US_PER_S, 1)))
    return Stage(number, rate_per_s, duration_us)


def no_requests(version: str, aggregates: pl.DataFrame, *lacks: str, **others: Any) -> RequestsRead:
    """What a file has of a run without its single requests; ``others``: further fields of :class:`RequestsRead`."""
    rows = rows_of(pl.DataFrame(schema=READ_SCHEMA))
    return RequestsRead(rows, "client", "relative", version=version, aggregates=aggregates, lacks=lacks, **others)


Row = dict[str, object]
Request = tuple[Row, Sequence[int] | Int64s]
Record = TypeVar("Record")


class UnusableError(ValueError):
    """Why a record cannot be used, in words."""


def gathered(
    file: RecordedFile,
    records: Iterable[tuple[str, Record]],
    request_of: Callable[[Record], Request],
    stamps_path: Path | None = None,
) -> tuple[Rows, TokenEvents | None]:
    """The requests of a file in its order, and their stream stamps in the flat file ``stamps_path``.

    ``records``: each with its place.  ``request_of``: the columns of ``READ_SCHEMA`` that are known, and the stamps in
    us; a record for which it raises :class:`UnusableError` is rejected and counted.  Memory is bounded by a batch.
    """
    writer = Scratch(share=2).writer(READ_SCHEMA)  # there are as many again once they are in send order
    counts, rows = array("q"), list[Row]()
    with Path(stamps_path or os.devnull).open("wb") as stream:
        for place, record in records:
            try:
                row, stamps_us = request_of(record)
            except UnusableError as problem:
                file.tally.reject(place, str(problem))
                continue
            rows.append(row)
            counts.append(len(stamps_us))
            stream.write(np.asarray(stamps_us, np.int64).tobytes())
            if len(rows) == BATCH_ROWS:
                writer.add(pl.DataFrame(rows, schema=READ_SCHEMA))
                rows.clear()
    writer.add(pl.DataFrame(rows, schema=READ_SCHEMA))
    requests = writer.done()
    file.tally.records = requests.height
    owned = np.array(counts, np.int64)
    if stamps_path is None or not owned.any():
        return requests, None
    return requests, TokenEvents(stamps_path, np.cumsum(owned) - owned, owned)


# -- Records as data: which field of a tool's record is which column, and as what it is read ----

Read = Callable[[Any], Any]
# What only a completed request has.
_OF_COMPLETED = dict.fromkeys(("ttft_us", "output_tokens_reported", "usage_output_tokens"))


def field_at(kind: Read, *paths: str) -> Read:
    """Reads the first value of a record, a mapping or a struct, that ``kind`` can use; dots lead into nested ones."""
    ways = [path.split(".") for path in paths]

    def read(record: Any) -> Any:
        for steps in ways:
            value = record
            for step in steps:
                value = value.get(step) if type(value) is dict else getattr(value, step, None)
            if (usable := kind(value)) is not None:
                return usable
        return None

    return read


def columns_of(record: Any, fields: Mapping[str, Read]) -> dict[str, Any]:
    """The columns of a record by the table of its format."""
    return {name: read(record) for name, read in fields.items()}


def request_row(sent_us: int, status: str, error: str | None, **columns: Any) -> Row:
    """A row of ``READ_SCHEMA``: of a completed request without an error, else without TTFT and output length.

    Raises :class:`UnusableError` for what comes before the request was sent.
    """
    for name, what in (("ttft_us", "its first token comes"), ("e2e_us", "it ends"), ("queue_us", "it is scheduled")):
        if (after_us := columns.get(name)) is not None and after_us < 0:
            raise UnusableError(f"{what} {-after_us} us before it was sent")
    columns |= {"sent_us": sent_us, "status": status, "error": None}
    if status != "ok":
        columns |= _OF_COMPLETED | {"error": error}
    return columns


def clock_kind_of(requests: Rows) -> str:
    """``epoch`` where sends are times of this century, else ``relative``: they count from a start of their own."""
    first_us = requests.aggregate(first="min(sent_us)")["first"] or 0
    return "epoch" if first_us >= EARLIEST_EPOCH_US else "relative"


def failure(error: object) -> str:
    """The status of a request that ended with this error."""
    return "timeout" if "timeout" in str(error)[:2000].lower() else "error"


_NUMBERED = """
SELECT * REPLACE (row_number() OVER () - 1 AS request_index, sent_us - $zero_us AS arrival_us) FROM requests
"""


def in_send_order(requests: Rows) -> tuple[Rows, NDArray[np.int64], int]:
    """The requests in send order with ``request_index`` and ``arrival_us``; the order; the clock's zero (us).

    The order is stable: equal send times keep their order in the file.
    """
    sent_us = requests["sent_us"].to_numpy()
    order = np.argsort(sent_us, kind="stable").astype(np.int64)
    zero_us = int(sent_us[order[0]]) if len(order) else 0
    in_order = bool((order[1:] > order[:-1]).all())
    if requests.held is not None:
        frame = requests.held if in_order else requests.held[order]
        numbered = pl.int_range(pl.len()).alias("request_index"), (pl.col("sent_us") - zero_us).alias("arrival_us")
        return rows_of(frame.with_columns(numbered)), order, zero_us
    ordered = requests if in_order else requests.ordered("sent_us")
    return query(_NUMBERED, requests.schema, {"zero_us": zero_us}, requests=ordered), order, zero_us


# -- Which prompts begin alike: each hangs on an earlier one whose beginning it shares ---------

NONE = -1


def shared_units(offsets: Int64s, counts: Int64s, units: NDArray[Any]) -> tuple[Int64s, Int64s]:
    """For each sequence the first that shares the most leading units with it, and how many these are.

    Sequence i has ``counts[i]`` of ``units`` from ``offsets[i]``; only sequences before it count, and the first has
    none (``NONE``, 0).  All are followed unit by unit while they share them: memory is a few numbers per sequence.
    """
    parent, shared = np.full(len(counts), NONE, np.int64), np.zeros(len(counts), np.int64)
    active = np.flatnonzero(counts > 0)
    group = np.zeros(len(active), np.int64)
    depth = 0
    while len(active):
        unit = units[offsets[active] + depth]
        order = np.lexsort((active, unit, group))
        active, unit, group = active[order], unit[order], group[order]
        first = np.append(True, (unit[1:] != unit[:-1]) | (group[1:] != group[:-1]))
        starts = np.flatnonzero(first)
        sizes = np.diff(np.append(starts, len(active)))
        group = np.repeat(active[starts], sizes)
        later = active[~first]
        depth += 1
        parent[later], shared[later] = group[~first], depth
        going_on = np.repeat(sizes > 1, sizes) & (counts[active] > depth)
        active, group = active[going_on], group[going_on]
    return parent, shared
