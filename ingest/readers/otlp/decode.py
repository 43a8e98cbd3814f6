"""One record of an OTLP file of either encoding: its spans and events as rows."""

from __future__ import annotations

from collections.abc import Iterator

from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp.json_decoder import read_json
from blis_replay.ingest.readers.otlp.rows import BatchRows


def is_protobuf(content: bytes) -> bool:
    """Whether a record is protobuf and not JSON, by its first byte: the tag of field 1, 2 or 3 of a message."""
    return content[:1] in (b"\n", b"\x12", b"\x1a")


def read_record(content: bytes, place: str, number: int, rows: BatchRows, file: RecordedFile) -> Iterator[None]:
    """Add the spans of a record to ``rows``, with a pause after each; what is malformed is rejected."""
    if is_protobuf(content):
        # A protobuf library takes a moment to load, and most files are JSON.
        from blis_replay.ingest.readers.otlp.protobuf_decoder import read_protobuf

        return read_protobuf(content, place, number, rows, file.tally)
    return read_json(content, place, number, rows, file.tally)
