"""OTLP JSON traces: engine steps (``step.BATCH_SUMMARY``) and upstream ``llm_request`` spans.

A file is JSON lines, one JSON object or an array of them; spans come in any order and
are told apart by (scope, name).  Numbers may be JSON numbers or decimal strings; 64-bit
integers stay exact.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import polars as pl
from msgspec import Raw, Struct

from blis_replay.ingest.readers.files import RecordedFile, json_objects, lines
from blis_replay.ingest.readers.otlp_requests import REQUEST_SCOPE, REQUEST_SPAN, RequestSpan, request_of
from blis_replay.ingest.readers.otlp_steps import (
    BATCH_STEPS,
    STEP_EVENT,
    STEP_SCOPE,
    Event,
    StepRow,
    StepSpan,
    frame_of_steps,
    step_of,
    without_duplicates,
)
from blis_replay.ingest.readers.otlp_values import DECODE_ERRORS
from blis_replay.ingest.readers.requests_frame import RequestsRead, frame_of

MAX_LINE_BYTES = 512 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _LooseStepSpan(Struct):
    """A step span one of whose events is malformed: its events one by one."""

    events: list[Raw] | None = None
    traceId: str = ""
    spanId: str = ""
    droppedEventsCount: int = 0


class _OtherSpan(Struct):
    name: str = ""


class _Scope(Struct):
    name: str = ""


class _ScopeSpans(Struct):
    spans: Raw = Raw(b"[]")
    scope: _Scope | None = None
    instrumentationLibrary: _Scope | None = None  # before opentelemetry-proto 0.15


class _ResourceSpans(Struct):
    scopeSpans: list[_ScopeSpans] | None = None
    instrumentationLibrarySpans: list[_ScopeSpans] | None = None


class _Traces(Struct):
    resourceSpans: list[_ResourceSpans]


# Not strict: protobuf JSON prints 64-bit integers as strings, and readers must take both.
_TRACES = msgspec.json.Decoder(_Traces)
_RAWS = msgspec.json.Decoder(list[Raw])
_EVENT = msgspec.json.Decoder(Event, strict=False)
_LOOSE_STEP = msgspec.json.Decoder(_LooseStepSpan, strict=False)


@dataclass(frozen=True)
class _SpanDecoder:
    many: msgspec.json.Decoder[Any]
    one: msgspec.json.Decoder[Any]


_STEP_SPANS = _SpanDecoder(
    msgspec.json.Decoder(list[StepSpan], strict=False), msgspec.json.Decoder(StepSpan, strict=False)
)
_REQUEST_SPANS = _SpanDecoder(
    msgspec.json.Decoder(list[RequestSpan], strict=False), msgspec.json.Decoder(RequestSpan, strict=False)
)
_OTHER_SPANS = _SpanDecoder(msgspec.json.Decoder(list[_OtherSpan]), msgspec.json.Decoder(_OtherSpan))


@dataclass(frozen=True)
class TracesRead:
    """What OTLP files hold.

    ``steps``: ``READ_STEP_SCHEMA``, by step id, none twice.  ``requests``: upstream
    ``llm_request`` spans, ``None`` if there are none.  ``dropped_events``: events that the
    tracing SDK says it discarded.  ``other_spans``: spans that are not read, by (scope, name).
    ``sequential_span_ids``: the ids of the step spans are small counting numbers, so somebody made them up.
    """

    steps: pl.DataFrame
    requests: RequestsRead | None
    dropped_events: int
    other_spans: dict[tuple[str, str], int]
    sequential_span_ids: bool


@dataclass
class _Collected:
    step_rows: list[StepRow] = field(default_factory=list)
    step_frames: list[pl.DataFrame] = field(default_factory=list)
    request_rows: list[dict[str, object]] = field(default_factory=list)
    request_spans: dict[tuple[str, str], int] = field(default_factory=dict)
    dropped: dict[tuple[str, str], int] = field(default_factory=dict)
    other: Counter[tuple[str, str]] = field(default_factory=Counter)

    def flush(self) -> None:
        self.step_frames.append(frame_of_steps(self.step_rows))
        self.step_rows = []


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this holds OTLP JSON."""
    return re.match(rb'(?:\xef\xbb\xbf)?[\s\[]*\{\s*"resourceSpans"', head) is not None


def read_traces(files: list[RecordedFile]) -> TracesRead:
    """Steps and request spans of all OTLP JSON files of a recording (the collector rotates them).

    Malformed lines, spans and events are rejected and counted with their line; identical
    duplicates are dropped and counted, records that contradict each other are rejected.
    """
    collected = _Collected()
    for file in files:
        for place, document in _documents(file):
            _read_document(file, place, document, collected)
    collected.flush()
    steps = pl.concat(collected.step_frames)
    if len(steps):
        steps = without_duplicates(files[0], steps)
    requests = RequestsRead(frame_of(collected.request_rows), "server", "epoch") if collected.request_rows else None
    return TracesRead(
        steps=steps,
        requests=requests,
        dropped_events=sum(collected.dropped.values()),
        other_spans=dict(collected.other),
        sequential_span_ids=_counting(collected.dropped),
    )


def _documents(file: RecordedFile) -> Iterator[tuple[str, bytes]]:
    if _is_lines(file):
        for number, line in lines(file, MAX_LINE_BYTES):
            content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if content.strip():
                yield f"line {number}", content
    else:
        for ordinal, document in json_objects(file, MAX_LINE_BYTES):
            yield f"object {ordinal}", document


def _is_lines(file: RecordedFile) -> bool:
    """JSON lines unless the file starts with an array or with an object spread over indented lines."""
    head = next(file.chunks(), b"").removeprefix(_BYTE_ORDER_MARK).lstrip()
    file.damage = ""
    first, newline, rest = head.partition(b"\n")
    spread = newline and first.rstrip()[-1:] in (b"{", b"[", b",", b":") and rest[:1] in (b" ", b"\t", b"\r", b"\n")
    return not (head.startswith(b"[") or spread)


def _read_document(file: RecordedFile, place: str, document: bytes, collected: _Collected) -> None:
    try:
        traces = _TRACES.decode(document)
    except DECODE_ERRORS as error:
        file.tally.reject(place, f"no OTLP JSON ({error})")
        return
    for resource in traces.resourceSpans:
        for scoped in (*(resource.scopeSpans or ()), *(resource.instrumentationLibrarySpans or ())):
            scope = (scoped.scope or scoped.instrumentationLibrary or _Scope()).name
            if scope == STEP_SCOPE:
                for span_place, step_span in _spans(file, place, scoped.spans, _STEP_SPANS):
                    _read_step_span(file, span_place, step_span, collected)
            elif scope == REQUEST_SCOPE:
                for span_place, span in _spans(file, place, scoped.spans, _REQUEST_SPANS):
                    _read_request_span(file, span_place, span, collected)
            else:
                for _place, other in _spans(file, place, scoped.spans, _OTHER_SPANS):
                    collected.other[scope[:100], other.name[:100]] += 1


def _spans(file: RecordedFile, place: str, spans: Raw, decoder: _SpanDecoder) -> Iterator[tuple[str, Any]]:
    """The spans of one scope; a malformed one costs itself only."""
    try:
        yield from ((place, span) for span in decoder.many.decode(spans))
        return
    except DECODE_ERRORS as error:
        problem = str(error)
    try:
        pieces = _RAWS.decode(spans)
    except DECODE_ERRORS:
        file.tally.reject(place, f"spans that cannot be read ({problem})")
        return
    for index, piece in enumerate(pieces):
        span_place = f"{place}, span {index + 1}"
        try:
            span = decoder.one.decode(piece)
        except DECODE_ERRORS as error:
            span = _loose_step_span(file, span_place, piece) if decoder is _STEP_SPANS else None
            if span is None:
                file.tally.reject(span_place, str(error))
                continue
        yield span_place, span


def _loose_step_span(file: RecordedFile, place: str, piece: Raw) -> StepSpan | None:
    """A step span without those of its events that are malformed."""
    try:
        loose = _LOOSE_STEP.decode(piece)
    except DECODE_ERRORS:
        return None
    events = []
    for index, event in enumerate(loose.events or ()):
        try:
            events.append(_EVENT.decode(event))
        except DECODE_ERRORS as error:
            file.tally.reject(f"{place}, event {index + 1}", str(error))
    return StepSpan(events, loose.traceId, loose.spanId, loose.droppedEventsCount)


def _read_step_span(file: RecordedFile, place: str, span: StepSpan, collected: _Collected) -> None:
    collected.dropped[span.traceId, span.spanId] = max(0, span.droppedEventsCount)
    for event in span.events or ():
        if event.name != STEP_EVENT:
            continue
        problem, row = step_of(event)
        if problem:
            file.tally.reject(place, problem)
            continue
        file.tally.records += 1
        collected.step_rows.append(row)
    if len(collected.step_rows) >= BATCH_STEPS:
        collected.flush()


def _read_request_span(file: RecordedFile, place: str, span: RequestSpan, collected: _Collected) -> None:
    if span.name != REQUEST_SPAN:
        collected.other[REQUEST_SCOPE, span.name[:100]] += 1
        return
    content = hash(msgspec.json.encode(span))
    known = collected.request_spans.get((span.traceId, span.spanId))
    if span.spanId and known is not None:
        again = "identical" if known == content else "with other values"
        file.tally.reject(place, f"span {span.spanId[:40]} again, {again}")
        return
    problem, row = request_of(span)
    if problem:
        file.tally.reject(place, problem)
        return
    collected.request_spans[span.traceId, span.spanId] = content
    collected.request_rows.append(row)
    file.tally.records += 1


def _counting(spans: dict[tuple[str, str], int]) -> bool:
    """Whether span ids count 1, 2, 3, ...: real ones are random."""
    ids = {span_id for _trace, span_id in spans}
    try:
        numbers = {int(span_id, 16) for span_id in ids}
    except ValueError:
        return False
    return bool(numbers) and max(numbers) <= 2 * len(numbers)
