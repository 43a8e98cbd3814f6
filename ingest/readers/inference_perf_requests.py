"""inference-perf's per-request records: ``per_request_lifecycle_metrics.json``, one array of any size.

Three generations: up to 0.4 (``info.output_token_times``: one stamp a stream event, of
which there can be two a token), 0.5 (``info.response_info``), from 0.6
(``info.response_metrics``).  The later ones also have ``chunk_times``, the plain arrival
times, and the server's usage.  Stamps are kept as recorded.  Prompts and responses are never kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Struct

from blis_replay.ingest.readers.documents import text
from blis_replay.ingest.readers.files import RecordedFile, json_objects
from blis_replay.ingest.readers.numbers import MAX_INTEGER, microseconds, tokens, whole
from blis_replay.ingest.readers.requests_frame import RawEvents, RequestsRead, frame_of, request_row

MAX_RECORD_BYTES = 256 << 20


class _Details(Struct):
    cached_tokens: Any = None


class _Usage(Struct):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: _Details | None = None


class _Response(Struct):
    output_tokens: Any = None
    output_token_times: list[float] | None = None
    chunk_times: list[float] | None = None
    server_usage: _Usage | None = None


class _Info(Struct):
    input_tokens: Any = None
    output_tokens: Any = None
    output_token_times: list[float] | None = None
    response_info: _Response | None = None  # 0.5
    response_metrics: _Response | None = None  # from 0.6


class _Record(Struct):
    start_time: float
    end_time: float
    info: _Info
    request: str | None = None
    error: Any = None


class _Body(Struct):
    model: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    ignore_eos: Any = None


_RECORD = msgspec.json.Decoder(_Record)
_BODY = msgspec.json.Decoder(_Body)
_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is a per-request report."""
    return head.lstrip()[:1] == b"[" and b'"start_time"' in head and b'"end_time"' in head


def read_requests(file: RecordedFile, events_path: Path) -> RequestsRead:
    """The requests in file order; their raw stream stamps go to the flat file ``events_path``.

    Times are on the client's monotonic clock.  Failed requests keep no TTFT; their E2E is the
    time for which the client held on.  Memory is bounded by a batch of requests.  A
    record that cannot be used is rejected and counted by its ordinal.
    """
    counts: list[int] = []
    models: list[str] = []
    with events_path.open("wb") as stream:
        frame = frame_of(_usable_rows(file, stream, counts, models))
    file.tally.records = len(frame)
    owned = np.array(counts, np.int64)
    events = RawEvents(events_path, np.cumsum(owned) - owned, owned)
    return RequestsRead(frame, "client", "monotonic", next(iter(models), None), events if owned.sum() else None)


def _usable_rows(
    file: RecordedFile, stream: BinaryIO, counts: list[int], models: list[str]
) -> Iterator[dict[str, object]]:
    seen: set[int] = set()
    for ordinal, raw in json_objects(file, MAX_RECORD_BYTES):
        place, content = f"record {ordinal}", hash(raw)
        if content in seen:
            file.tally.reject(place, "the same record again, identical")
            continue
        try:
            record = _RECORD.decode(raw)
        except _DECODE_ERRORS as error:
            file.tally.reject(place, str(error))
            continue
        body = _body(record.request)
        problem, row, stamps_us = _row(record, body)
        if problem:
            file.tally.reject(place, problem)
            continue
        seen.add(content)
        if not models and (model := text(body.model)):
            models.append(model)
        counts.append(len(stamps_us))
        stream.write(stamps_us.tobytes())
        yield row


def _row(record: _Record, body: _Body) -> tuple[str, dict[str, object], np.ndarray[Any, np.dtype[np.int64]]]:
    none = np.empty(0, np.int64)
    start_us, end_us = microseconds(record.start_time), microseconds(record.end_time)
    if start_us is None or end_us is None:
        return "a start or end that is no usable time", {}, none
    if end_us < start_us:
        return f"ends {start_us - end_us} us before it starts", {}, none
    info = record.info
    response = info.response_metrics or info.response_info or _Response()
    usage = response.server_usage or _Usage()
    stamps_s = np.array(
        response.chunk_times or response.output_token_times or info.output_token_times or [], np.float64
    )
    if not (np.abs(stamps_s) < MAX_INTEGER / 1e6).all():
        return "a stream stamp that is no usable time", {}, none
    stamps_us = np.rint(stamps_s * 1e6).astype(np.int64)
    if len(stamps_us) and stamps_us.min() < start_us:
        return f"a stream event {start_us - int(stamps_us.min())} us before the start", {}, none
    ok = not record.error
    reported = response.output_tokens if response.output_tokens is not None else info.output_tokens
    row = request_row(
        prompt_tokens=tokens(usage.prompt_tokens) or tokens(info.input_tokens),
        output_tokens_reported=whole(reported) if ok else None,
        max_tokens=tokens(body.max_tokens) or tokens(body.max_completion_tokens),
        ttft_us=int(stamps_us[0]) - start_us if ok and len(stamps_us) else None,
        e2e_us=end_us - start_us,
        cached_prompt_tokens=whole((usage.prompt_tokens_details or _Details()).cached_tokens),
        status="ok" if ok else _failure(record.error),
        error=None if ok else _message(record.error),
        sent_us=start_us,
        usage_output_tokens=tokens(usage.completion_tokens) if ok else None,
        ignore_eos=body.ignore_eos if isinstance(body.ignore_eos, bool) else None,
    )
    return "", row, stamps_us


def _body(request: str | None) -> _Body:
    """The fields of the request's body that matter; a body that is no JSON has none of them."""
    try:
        return _BODY.decode(request) if request else _Body()
    except _DECODE_ERRORS:
        return _Body()


def _message(error: object) -> str | None:
    if isinstance(error, dict):
        parts = (text(error.get(key)) for key in ("error_type", "error_msg"))
        return text(": ".join(part for part in parts if part))
    return text(error)


def _failure(error: object) -> str:
    named = str(error.get("error_type", "")) if isinstance(error, dict) else str(error)[:200]
    return "timeout" if "timeout" in named.lower() else "error"
