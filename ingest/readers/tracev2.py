"""TraceV2, the request trace of BLIS: ``trace.yaml`` and ``trace.csv``.

Columns are read by name, so both generations of the header (with and without the
newer columns) are one.  Stamps of a real run are Unix epoch microseconds; those of a
generated or replayed one count from its start.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.documents import quoted, section, text, yaml_mapping
from blis_replay.ingest.readers.experiment_config import ENGINE_KEYS
from blis_replay.ingest.readers.files import RecordedFile, lines
from blis_replay.ingest.readers.numbers import tokens, whole
from blis_replay.ingest.readers.requests_frame import RequestsRead, frame_of, request_row

MAX_LINE_BYTES = 1 << 20
_REQUIRED = ("input_tokens", "output_tokens", "send_time_us", "first_chunk_time_us", "last_chunk_time_us", "status")
# 2001: stamps before that count from the start of the trace (of a generated or replayed one).
_EARLIEST_EPOCH_US = 1_000_000_000_000_000
_STATUS = {"ok": "ok", "error": "error", "timeout": "timeout", "incomplete": "error"}


@dataclass(frozen=True)
class TraceHeader:
    """What ``trace.yaml`` says of the server: model, parallelism and engine arguments."""

    model: str | None = None
    tensor_parallelism: int | None = None
    engine: tuple[tuple[str, object], ...] = ()


def read_header(file: RecordedFile) -> TraceHeader:
    """The header; :class:`RecordingError` if it is no YAML mapping or its time unit is not microseconds."""
    document = yaml_mapping(file)
    unit = document.get("time_unit", "us")
    if unit not in ("us", "microseconds"):
        raise RecordingError(
            file.path, "field time_unit", f"{quoted(unit)} is no unit of TraceV2", "give the times in us"
        )
    server = section(document, "server")
    return TraceHeader(
        model=text(server.get("model")),
        tensor_parallelism=tokens(server.get("tensor_parallel")),
        engine=tuple((key, server[key]) for key in ENGINE_KEYS if server.get(key) is not None),
    )


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is a TraceV2 table."""
    header = head.partition(b"\n")[0]
    return all(name.encode() in header for name in ("send_time_us", "first_chunk_time_us", "last_chunk_time_us"))


def read_requests(file: RecordedFile, _stamps_path: Path | None = None) -> RequestsRead:
    """The requests of ``trace.csv`` in file order; the table has no stream stamps.

    Failed requests have no TTFT, and as E2E the time for which the client held on.  The
    column ``output_tokens`` is kept as reported.  Raises :class:`RecordingError` if a needed
    column is missing; rows that cannot be used are rejected and counted by line.
    """
    models: list[str] = []
    frame = frame_of(_usable_rows(file, models))
    file.tally.records = len(frame)
    sent_us = frame["sent_us"].min() or 0
    kind = "epoch" if sent_us >= _EARLIEST_EPOCH_US else "relative"  # type: ignore[operator]  # the column is int64
    return RequestsRead(frame, "client", kind, next(iter(models), None))


def _usable_rows(file: RecordedFile, models: list[str]) -> Iterator[dict[str, object]]:
    seen: dict[str, int] = {}
    for place, cells, values in _records(file):
        name, content = values.get("request_id", ""), hash(tuple(cells))
        if name and name in seen:
            again = "identical" if seen[name] == content else "with other values"
            file.tally.reject(place, f"request {name[:60]} again, {again}")
            continue
        problem, row = _row(values)
        if problem:
            file.tally.reject(place, problem)
            continue
        seen[name] = content
        if not models and (model := text(values.get("model"))):
            models.append(model)
        yield row


def _records(file: RecordedFile) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Each data row with its place, its cells, and its cells by column name."""
    reader = csv.reader(_text_lines(file))
    header = _next_row(file, reader)
    if header is None:
        raise RecordingError(file.path, "line 1", "no header line", "copy the file again")
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise RecordingError(file.path, "line 1", f"columns {', '.join(missing)} are missing", "write it as TraceV2")
    while (cells := _next_row(file, reader)) is not None:
        place = f"line {reader.line_num}"
        if len(cells) == len(header):
            yield place, cells, dict(zip(header, cells, strict=True))
        elif cells:
            file.tally.reject(place, f"{len(cells)} columns where the header has {len(header)}")


def _next_row(file: RecordedFile, reader: csv._reader) -> list[str] | None:  # type: ignore[name-defined]
    while True:
        try:
            row: list[str] | None = next(reader, None)
            return row
        except csv.Error as error:
            file.tally.reject(f"line {reader.line_num}", f"no valid CSV ({error})")


def _text_lines(file: RecordedFile) -> Iterator[str]:
    for _number, line in lines(file, MAX_LINE_BYTES):
        # A lone carriage return inside a line is data damage, not a line end of ours.
        yield line.decode("utf-8", "replace").rstrip("\r").replace("\r", " ") + "\n"


def _row(values: dict[str, str]) -> tuple[str, dict[str, object]]:
    status = _STATUS.get(values["status"])
    sent_us, first_us, last_us = (whole(values[f"{event}_time_us"]) for event in ("send", "first_chunk", "last_chunk"))
    if status is None:
        return f"status {values['status'][:40]!r} is none of {', '.join(_STATUS)}", {}
    if sent_us is None or first_us is None or last_us is None:
        return "a time that is no whole number of microseconds", {}
    ok = status == "ok"
    if last_us < sent_us and (ok or last_us > 0):
        return f"the last chunk comes {sent_us - last_us} us before the send", {}
    if ok and first_us and not sent_us <= first_us <= last_us:
        return "the first chunk does not lie between the send and the last chunk", {}
    incomplete = "not finished at the horizon" if values["status"] == "incomplete" else None
    return "", request_row(
        request_id=values.get("request_id") or None,
        prompt_tokens=tokens(values.get("server_input_tokens")) or tokens(values["input_tokens"]),
        output_tokens_reported=whole(values["output_tokens"]) if ok else None,
        ttft_us=first_us - sent_us if ok and first_us else None,
        e2e_us=last_us - sent_us if last_us else None,
        sent_us=sent_us,
        status=status,
        error=None if ok else text(values.get("error_message")) or incomplete,
    )
