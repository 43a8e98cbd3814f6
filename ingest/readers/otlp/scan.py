"""OTLP JSON lines by a compiled scan; what it does not take goes to the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

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
    FULL,
    NULL,
)
from blis_replay.ingest.scan.words import Bytes

# Of a scan they are cheap: larger batches than the decoders' spare a fifth of the work on columns.
BATCH_ROWS = 100_000
_ROOM_FOR_TEXTS = 16 << 20
_MOST_TEXTS = 10 * BATCH_ROWS
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
    offsets: Int64s = field(default_factory=lambda: np.zeros(_MOST_TEXTS, np.int64))
    decoded: BatchRows = field(default_factory=BatchRows)

    def scan(self, text: Bytes) -> otlp_rows.Scan:
        """What the scan goes on filling, with what it reads."""
        return otlp_rows.Scan(
            text=text,
            state=self.state,
            spans=self.spans.reshape(-1),
            events=self.events.reshape(-1),
            texts=self.texts,
            offsets=self.offsets,
        )

    def is_empty(self) -> bool:
        """Whether the scan has added nothing yet."""
        return not self.state[: otlp_rows.LINE_END].any()

    def grow(self) -> None:
        """Make twice the room; what is in it is lost."""
        self.spans, self.events = (
            np.empty((2 * len(rows), rows.shape[1]), np.int64) for rows in (self.spans, self.events)
        )
        self.texts, self.offsets = np.empty(2 * len(self.texts), np.uint8), np.zeros(2 * len(self.offsets), np.int64)

    def taken(self) -> TraceBatch:
        """The batch, which is empty afterwards."""
        span_count, event_count = int(self.state[otlp_rows.SPANS]), int(self.state[otlp_rows.EVENTS])
        count, size = int(self.state[otlp_rows.TEXTS]) + 1, int(self.state[otlp_rows.TEXT_BYTES])
        # Memory of its own: columns of texts are views of it, and there the next ones are filled in.
        buffers = (pa.py_buffer(of.copy()) for of in (self.offsets[: count + 1], self.texts[:size]))
        texts = pl.Series(pa.LargeStringArray.from_buffers(count, *buffers))
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


_JOURNEY_NAMES = pl.Series(
    "name", [name if name in EVENT_SEQUENCE else None for name in EVENTS], JOURNEY_EVENT_SCHEMA["name"]
)


def _spans(rows: Int64s, texts: pl.Series) -> pl.DataFrame:
    message = pl.col("status_message")
    frame = _frame(SPAN_SCHEMA, otlp_rows.SPAN_COLUMNS, rows, np.arange(len(rows)), texts)
    return with_plain_ids(frame.with_columns(pl.when(message != "").then(message)))


def _events(rows: Int64s, texts: pl.Series) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """The steps, the snapshots and the events of journeys."""
    names = rows[:, otlp_rows.EVENT_COLUMNS.index("name")]
    steps, snapshots = (names == EVENTS.index(name) for name in (STEP_EVENT, SNAPSHOT_EVENT))
    schemas = (STEP_EVENT_SCHEMA, SNAPSHOT_EVENT_SCHEMA, JOURNEY_EVENT_SCHEMA | {"name": pl.Int64})
    of_steps, of_snapshots, of_journeys = (
        _frame(schema, otlp_rows.EVENT_COLUMNS, rows, np.flatnonzero(which), texts)
        for schema, which in zip(schemas, (steps, snapshots, ~(steps | snapshots)), strict=True)
    )
    return of_steps, of_snapshots, of_journeys.with_columns(_JOURNEY_NAMES[of_journeys["name"]])


def _frame(schema: _Schema, columns: list[str], rows: Int64s, chosen: Int64s, texts: pl.Series) -> pl.DataFrame:
    """The columns of a schema, of the chosen ones of some rows; ``texts``: by their numbers."""
    # Memory of its own: a frame can keep it, and the rows are filled again.
    fields = np.array([columns.index(name) for name in schema])
    values = np.ascontiguousarray(rows[np.ix_(chosen, fields)].T)
    numbers = (pl.Series(name, of) for name, of in zip(schema, values, strict=True))
    known = (one.set(one == NULL, None) for one in numbers)
    return pl.DataFrame(
        [one if schema[one.name] == pl.Int64 else texts.gather(one).alias(one.name) for one in known]
    ).cast(pl.Schema(schema))


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
