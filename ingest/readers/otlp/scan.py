"""OTLP JSON lines by a compiled scan; what it does not take goes to the decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from blis_replay.base.arrays import Int64s
from blis_replay.ingest.readers.files import RecordedFile, lines_of
from blis_replay.ingest.readers.otlp.decode import BatchRows, read_json
from blis_replay.ingest.readers.otlp.framing import MAX_RECORD_BYTES, records_in_lines
from blis_replay.ingest.scan import otlp_rows
from blis_replay.ingest.scan.json_text import PADDING_BYTES
from blis_replay.ingest.scan.otlp_columns import (
    EVENT_SEQUENCE,
    EVENTS,
    JOURNEY_EVENT_SCHEMA,
    SNAPSHOT_EVENT,
    SNAPSHOT_EVENT_SCHEMA,
    SPAN_SCHEMA,
    STEP_EVENT,
    STEP_EVENT_SCHEMA,
    TraceBatch,
    with_plain_ids,
)
from blis_replay.ingest.scan.otlp_lines import scan_lines
from blis_replay.ingest.scan.otlp_rows import (
    EVENT_COUNTS,
    FULL,
    NULL,
    SPAN_COUNTS,
    event_field,
    span_field,
    view_texts,
)
from blis_replay.ingest.scan.words import Bytes

# Of a scan they are cheap: larger batches than the decoders' spare a fifth of the work on columns.
BATCH_ROWS = 100_000
_ROOM_FOR_TEXTS = 16 << 20
_UNIT = "line"  # what a record of the file is called
# A record that needs more room is taken by the decoder, which does it in batches.
_MOST_ROWS = 4 * BATCH_ROWS

_Schema = Mapping[str, pl.DataType | type[pl.DataType]]


@dataclass
class ScannedBatch:
    """The rows of a batch so far: of the scan as ``spans``, ``events`` and ``texts``, and of the decoder.

    Floats are texts in it.
    """

    state: Int64s = field(default_factory=lambda: np.zeros(otlp_rows.STATE_WORDS, np.int64))
    spans: Int64s = field(default_factory=lambda: np.empty((BATCH_ROWS, otlp_rows.SPAN_WIDTH), np.int64))
    events: Int64s = field(default_factory=lambda: np.empty((BATCH_ROWS, otlp_rows.EVENT_WIDTH), np.int64))
    texts: Bytes = field(default_factory=lambda: np.empty(_ROOM_FOR_TEXTS, np.uint8))
    decoded: BatchRows = field(default_factory=BatchRows)

    def scan(self, text: Bytes) -> otlp_rows.Scan:
        """What the scan goes on filling, with what it reads."""
        spans, events = self.spans.reshape(-1), self.events.reshape(-1)
        return otlp_rows.Scan(text=text, state=self.state, spans=spans, events=events, texts=self.texts)

    def is_empty(self) -> bool:
        """Whether the scan has added nothing yet."""
        return not self.state[: otlp_rows.LINE_END].any()

    def grow(self) -> None:
        """Make twice the room; what is in it is lost."""
        self.spans, self.events = (
            np.empty((2 * len(rows), rows.shape[1]), np.int64) for rows in (self.spans, self.events)
        )
        self.texts = np.empty(2 * len(self.texts), np.uint8)

    def taken(self) -> TraceBatch:
        """The batch, which is empty afterwards."""
        span_count, event_count = int(self.state[otlp_rows.SPANS]), int(self.state[otlp_rows.EVENTS])
        # Memory of its own: columns of texts are views of it, and there the next ones are filled in.
        texts = self.texts[: self.state[otlp_rows.TEXT_BYTES]].copy()
        spans, events = self.spans[:span_count], self.events[:event_count]
        batch = TraceBatch(_UNIT, _spans(spans, texts), *_events(events, texts))
        if self.decoded.spans:
            batch = _in_file_order(batch, self.decoded.batch(_UNIT))
        self.state[: otlp_rows.TEXT_BYTES + 1] = 0
        self.decoded.spans, self.decoded.events = [], []
        return batch


def _in_file_order(scanned: TraceBatch, decoded: TraceBatch) -> TraceBatch:
    """Both batches as one; no record has spans in both."""
    spans = pl.concat([scanned.spans, decoded.spans])
    order = np.argsort(spans["record"].to_numpy(), kind="stable")
    places = pl.Series("span_row", np.argsort(order), pl.Int64)

    def joined(first: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
        events = pl.concat([first, second.with_columns(pl.col("span_row") + len(scanned.spans))])
        return events.with_columns(places[events["span_row"]]).sort("span_row", maintain_order=True)

    return TraceBatch(
        scanned.unit,
        spans[order],
        joined(scanned.steps, decoded.steps),
        joined(scanned.snapshots, decoded.snapshots),
        joined(scanned.journey_events, decoded.journey_events),
    )


class _Columns(NamedTuple):
    """Columns of a schema: the counts, the texts, and their fields in a row (of a text: begin and end)."""

    schema: _Schema
    counts: tuple[str, ...]
    texts: tuple[str, ...]
    fields: Int64s


def _columns(schema: _Schema, all_counts: tuple[str, ...], place: Callable[[str], int]) -> _Columns:
    counts, texts = (tuple(n for n in schema if (n in all_counts) is counted) for counted in (True, False))
    fields = [*map(place, counts), *(field for name in texts for field in (place(name), place(name) + 1))]
    return _Columns(schema, counts, texts, np.array(fields))


_SPAN = _columns(SPAN_SCHEMA, SPAN_COUNTS, span_field)
_STEP, _SNAPSHOT, _JOURNEY = (
    _columns(schema | {"name": pl.Int64} if "name" in schema else schema, EVENT_COUNTS, event_field)
    for schema in (STEP_EVENT_SCHEMA, SNAPSHOT_EVENT_SCHEMA, JOURNEY_EVENT_SCHEMA)
)
_JOURNEY_NAMES = pl.Series(
    "name", [name if name in EVENT_SEQUENCE else None for name in EVENTS], JOURNEY_EVENT_SCHEMA["name"]
)


def _spans(rows: Int64s, texts: Bytes) -> pl.DataFrame:
    message = pl.col("status_message")
    frame = _frame(_SPAN, rows, texts, np.arange(len(rows)))
    return with_plain_ids(frame.with_columns(pl.when(message != "").then(message)))


def _events(rows: Int64s, texts: Bytes) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """The steps, the snapshots and the events of journeys."""
    names = rows[:, event_field("name")]
    steps, snapshots = (EVENTS.index(name) for name in (STEP_EVENT, SNAPSHOT_EVENT))
    chosen = names == steps, names == snapshots, (names != steps) & (names != snapshots)
    of_steps, of_snapshots, of_journeys = (
        _frame(columns, rows, texts, np.flatnonzero(which))
        for columns, which in zip((_STEP, _SNAPSHOT, _JOURNEY), chosen, strict=True)
    )
    return of_steps, of_snapshots, of_journeys.with_columns(_JOURNEY_NAMES[of_journeys["name"]])


def _frame(wanted: _Columns, rows: Int64s, texts: Bytes, chosen: Int64s) -> pl.DataFrame:
    if not len(chosen):
        return pl.DataFrame(schema=wanted.schema)
    # Memory of its own: a frame can keep it, and the rows are filled again.
    values = np.ascontiguousarray(rows[np.ix_(chosen, wanted.fields)].T)
    counts = [pl.Series(name, of, pl.Int64) for name, of in zip(wanted.counts, values, strict=False)]
    series = [one.set(one == NULL, None) for one in counts]
    for name, (begins, ends) in zip(wanted.texts, values[len(counts) :].reshape(-1, 2, len(chosen)), strict=True):
        series.append(_texts(name, begins, ends, texts))
    return pl.DataFrame(series).select(wanted.schema.keys()).cast(pl.Schema(wanted.schema))


def _texts(name: str, begins: Int64s, ends: Int64s, texts: Bytes) -> pl.Series:
    views = np.empty((len(begins), 2), np.uint64)
    view_texts(begins, ends, texts, views)
    buffers = [pa.array(begins != NULL).buffers()[1], pa.py_buffer(views), pa.py_buffer(texts)]
    return pl.Series(name, pa.Array.from_buffers(pa.string_view(), len(begins), buffers), pl.String)


def scanned_lines(file: RecordedFile) -> Iterator[TraceBatch]:
    """The spans and events of a file of JSON lines in batches, equal to what the decoder makes of them."""
    chunks, batch, line = file.chunks(), ScannedBatch(), 1
    unread: list[bytes] = []
    for chunk in chunks:
        unread.append(chunk)
        if b"\n" not in chunk:
            if sum(map(len, unread)) > MAX_RECORD_BYTES:
                break
            continue
        text = np.frombuffer(bytearray().join([*unread, bytes(PADDING_BYTES)]), np.uint8)
        end = len(text) - PADDING_BYTES
        why, at = FULL, 0
        while why < 0:
            why, at, line = scan_lines(batch.scan(text), at, end, line)
            if why == FULL and not batch.is_empty():
                yield batch.taken()
            elif why == FULL and len(batch.spans) < _MOST_ROWS:
                batch.grow()
            elif why < 0:
                stop = int(batch.state[otlp_rows.LINE_END])
                yield from _decoded(file, records_in_lines([(line, text[at : stop - 1].tobytes())]), batch)
                at, line = stop, line + 1
        unread = [text[at:end].tobytes()]
    rest = lines_of(file, chain(unread, chunks), MAX_RECORD_BYTES, line)
    yield from _decoded(file, records_in_lines(rest), batch)
    yield batch.taken()


def _decoded(file: RecordedFile, records: Iterable[tuple[int, bytes]], batch: ScannedBatch) -> Iterator[TraceBatch]:
    """Add records by the decoder; a batch whenever there are enough rows."""
    for number, content in records:
        for _ in read_json(content, f"{_UNIT} {number}", number, batch.decoded, file.tally):
            if batch.decoded.full:
                yield batch.taken()
