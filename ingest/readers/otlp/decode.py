"""OTLP files of any framing and encoding as bounded batches of columns."""

from __future__ import annotations

from collections.abc import Iterator

from blis_replay.ingest.readers.files import RecordedFile, is_large
from blis_replay.ingest.readers.otlp.columns import TraceBatch
from blis_replay.ingest.readers.otlp.framing import records
from blis_replay.ingest.readers.otlp.json_decoder import read_json
from blis_replay.ingest.readers.otlp.rows import Rows


def trace_batches(file: RecordedFile) -> Iterator[TraceBatch]:
    """The spans and events of a file in batches of about 50,000 rows, scanned ones of 100,000; at least one batch.

    What cannot be used is rejected with its place in the file.  Raises
    :class:`RecordingError` if the file cannot be read at all.
    """
    framing = records(file)
    if framing.unit != "object" and is_large(file):
        from blis_replay.ingest.readers.otlp.scan import scanned_lines, scanned_messages

        yield from scanned_lines(file) if framing.unit == "line" else scanned_messages(file, framing)
        return
    rows = Rows()
    for number, content in framing.items:
        for _ in read_record(content, f"{framing.unit} {number}", number, rows, file):
            if rows.full:
                yield rows.batch(framing.unit)
                rows.spans, rows.events = [], []
    yield rows.batch(framing.unit)


def is_protobuf(content: bytes) -> bool:
    """Whether a record is protobuf and not JSON, by its first byte: the tag of field 1, 2 or 3 of a message."""
    return content[:1] in (b"\n", b"\x12", b"\x1a")


def read_record(content: bytes, place: str, number: int, rows: Rows, file: RecordedFile) -> Iterator[None]:
    """Add the spans of a record to ``rows``, with a pause after each; what is malformed is rejected."""
    if is_protobuf(content):
        # A protobuf library takes a moment to load, and most files are JSON.
        from blis_replay.ingest.readers.otlp.protobuf_decoder import read_protobuf

        return read_protobuf(content, place, number, rows, file.tally)
    return read_json(content, place, number, rows, file.tally)
