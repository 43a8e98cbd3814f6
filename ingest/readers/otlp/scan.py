"""OTLP traces by compiled scans, of JSON lines and of protobuf; what these do not take goes to the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from blis_replay.ingest.readers.files import RecordedFile, lines_of
from blis_replay.ingest.readers.otlp.columns import TraceBatch
from blis_replay.ingest.readers.otlp.decode import is_protobuf, read_record
from blis_replay.ingest.readers.otlp.framing import MAX_RECORD_BYTES, Records, records_in_lines
from blis_replay.ingest.readers.otlp.scan_columns import Found
from blis_replay.ingest.scan import otlp_rows
from blis_replay.ingest.scan.json_text import PADDING_BYTES
from blis_replay.ingest.scan.otlp_lines import scan_lines
from blis_replay.ingest.scan.otlp_messages import scan_message
from blis_replay.ingest.scan.otlp_rows import FULL
from blis_replay.ingest.scan.window import Window


def scanned_lines(file: RecordedFile) -> Iterator[TraceBatch]:
    """The spans and events of a file of JSON lines in batches, equal to what the decoder makes of them."""
    window, found, line = Window(file.chunks()), Found("line", floats_as_texts=True), 1
    while window.end - window.at <= MAX_RECORD_BYTES and window.refill():
        why = FULL
        while why < 0:
            scanned = (window.text, window.words, window.at, window.end, line)
            why, window.at, line = scan_lines(*scanned, *found.rows())
            if why == FULL and not found.is_empty():
                yield found.taken()
            elif why == FULL and found.can_grow():
                found.grow()
            elif why < 0:
                end = int(found.state[otlp_rows.LINE_END])
                yield from _decoded(file, records_in_lines([(line, window.take(window.at, end - 1))]), found)
                window.at, line = end, line + 1
    rest = lines_of(file, window.rest(), MAX_RECORD_BYTES, line)
    yield from _decoded(file, records_in_lines(rest), found)
    yield found.taken()


def scanned_messages(file: RecordedFile, framing: Records) -> Iterator[TraceBatch]:
    """The spans and events of a file of protobuf messages in batches, equal to what the decoder makes of them."""
    found, padding = Found(framing.unit, floats_as_texts=False), bytes(PADDING_BYTES)
    for number, content in framing.items:
        text = np.frombuffer(content + padding, np.uint8)
        why = FULL
        while why == FULL and is_protobuf(content):
            why = scan_message(text, len(content), number, *found.rows())
            if why == FULL and not found.is_empty():
                yield found.taken()
            elif why == FULL and found.can_grow():
                found.grow()
            elif why == FULL:
                break
        if why < 0:
            yield from _decoded(file, [(number, content)], found)
    yield found.taken()


def _decoded(file: RecordedFile, records: Iterable[tuple[int, bytes]], found: Found) -> Iterator[TraceBatch]:
    """Add records by the decoder; a batch whenever there are enough rows."""
    for number, content in records:
        for _ in read_record(content, f"{found.unit} {number}", number, found.decoded, file):
            if found.decoded.full:
                yield found.taken()
