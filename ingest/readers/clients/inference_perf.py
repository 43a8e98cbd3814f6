"""inference-perf's per-request records, ``per_request_lifecycle_metrics.json``, one array of any size; its reports.

Three generations: up to 0.4 (``info.output_token_times``: one stamp a stream event, of
which there can be two a token), 0.5 (``info.response_info``), from 0.6
(``info.response_metrics``).  The later ones also have ``chunk_times``, the plain arrival
times, and the server's usage.  Stamps are kept as recorded.  Of prompts hashes are kept, of
responses nothing.

Of its reports (``summary_lifecycle_metrics.json``, ``stage_N_lifecycle_metrics.json``) values are kept as reported,
including an inter-token latency that counted two events a token; the checks correct it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from blis_replay.base.arrays import Int64s
from blis_replay.ingest.readers.clients.prompt_texts import HASH, PIECE_BYTES, Hashes, PromptTexts, raw_prompts
from blis_replay.ingest.readers.documents import (
    DECODE_ERRORS,
    MAX_INTEGER,
    US_PER_S,
    WHOLE_RUN,
    Reported,
    aggregate_frame,
    json_mapping,
    microseconds,
    reported_number,
    section,
    text,
    tokens,
    whole,
)
from blis_replay.ingest.readers.files import RecordedFile, has_keys
from blis_replay.ingest.readers.records import json_objects
from blis_replay.ingest.readers.requests import NONE, RequestsRead, frame_of, raw_events, request_row
from blis_replay.ingest.recording import Stage
from blis_replay.ingest.rows import rows_of

# A token of a captured stream takes some 700 bytes.
MAX_RECORD_BYTES = 64 << 20
# What a decoder makes of a record can be 16 times as large (a list of one-digit stamps).
MAX_DECODED_BYTES = 16 << 20


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
    model: msgspec.Raw = msgspec.Raw()
    max_tokens: Any = None
    max_completion_tokens: Any = None
    ignore_eos: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()


_RECORD = msgspec.json.Decoder(_Record)
_NULL = msgspec.Raw(b"null")
_MODEL = msgspec.json.Decoder(str)
_BODY = msgspec.json.Decoder(_Body)


def _prompt_hashes(parts: Sequence[bytes]) -> tuple[int, Hashes]:
    """A hash of a prompt, and those of all up to each whole piece of it (``prompt_texts``).

    ``parts``: its text, then all else that sets prompts apart.
    """
    prompt, others = parts[0], hash(tuple(parts[1:]))
    pieces = (prompt[at : at + PIECE_BYTES] for at in range(0, len(prompt) - PIECE_BYTES + 1, PIECE_BYTES))
    chain = accumulate(pieces, lambda before, piece: hash((before, piece)), initial=others)
    return hash(tuple(parts)), np.array(list(chain)[1:], np.int64).astype(HASH)


def _prompt_of(body: _Body, texts: PromptTexts) -> int:
    """The number of a body's prompt, or of its messages; ``NONE`` if it has neither."""
    prompt, messages, *others = (
        b"" if raw == _NULL else bytes(raw)
        for raw in (body.prompt, body.messages, body.model, body.tools, body.cache_salt)
    )
    if not prompt and not messages:
        return NONE
    digest, chain = _prompt_hashes([prompt or messages, *others])
    return texts.number(digest, len(prompt or messages), chain.data)


def _decoded(raw: bytes) -> tuple[str, dict[str, object], Int64s, _Body]:
    """Why a record cannot be used (``""`` if it can), its row, its stamps and its body."""
    nothing = np.empty(0, np.int64)
    if len(raw) > MAX_DECODED_BYTES:
        return f"{len(raw)} bytes in an unusual form", {}, nothing, _Body()
    try:
        record = _RECORD.decode(raw)
    except DECODE_ERRORS as error:
        return str(error), {}, nothing, _Body()
    body = _body_of(record.request)
    return *_row(record, body), body


def _row(record: _Record, body: _Body) -> tuple[str, dict[str, object], Int64s]:
    none = np.empty(0, np.int64)
    start_us, end_us = microseconds(record.start_time), microseconds(record.end_time)
    if start_us is None or end_us is None:
        return "a start or end that is not a usable time", {}, none
    if end_us < start_us:
        return f"ends {start_us - end_us} us before it starts", {}, none
    info = record.info
    response = info.response_metrics or info.response_info or _Response()
    usage = response.server_usage or _Usage()
    stamps_s = np.array(
        response.chunk_times or response.output_token_times or info.output_token_times or [], np.float64
    )
    if not (np.abs(stamps_s) < MAX_INTEGER / 1e6).all():
        return "a stream stamp that is not a usable time", {}, none
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
        status="ok" if ok else _failure_of(record.error),
        error=None if ok else _message_of(record.error),
        sent_us=start_us,
        usage_output_tokens=tokens(usage.completion_tokens) if ok else None,
        ignore_eos=body.ignore_eos if isinstance(body.ignore_eos, bool) else None,
    )
    return "", row, stamps_us


def _model_of(body: _Body) -> str | None:
    """The model that a body names, if it names one."""
    try:
        return text(_MODEL.decode(body.model))
    except DECODE_ERRORS:
        return None


def _body_of(request: str | None) -> _Body:
    """The fields of the request's body that matter; a body that is no JSON has none of them."""
    try:
        return _BODY.decode(request) if request else _Body()
    except DECODE_ERRORS:
        return _Body()


def _message_of(error: object) -> str | None:
    """An error in words, if it has any."""
    if isinstance(error, dict):
        parts = (text(error.get(key)) for key in ("error_type", "error_msg"))
        return text(": ".join(part for part in parts if part))
    return text(error)


def _failure_of(error: object) -> str:
    """The status of a request that ended with ``error``."""
    named = str(error.get("error_type", "")) if isinstance(error, dict) else str(error)[:200]
    return "timeout" if "timeout" in named.lower() else "error"


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is a per-request report."""
    return head.lstrip()[:1] == b"[" and has_keys(head, "start_time", "end_time")


def read_requests(file: RecordedFile, events_path: Path) -> RequestsRead:
    """The requests in file order; their raw stream stamps go to the flat file ``events_path``.

    Times are on the client's monotonic clock.  Failed requests keep no TTFT; their E2E is the
    time for which the client held on.  Memory is bounded by a batch of requests.  A
    record that cannot be used is rejected and counted by its ordinal, and so is one that is there before, identical.
    """
    hashes_path = events_path.with_suffix(".prompts")
    with events_path.open("wb") as stream, hashes_path.open("wb") as hashes:
        reading = _Reading(file, stream, PromptTexts(hashes))
        frame = frame_of(reading.rows())
        reading.texts.flush()
    file.tally.records = len(frame)
    prompts = np.array(reading.prompts, np.int64)
    prefix = raw_prompts(reading.texts, hashes_path, prompts, frame["prompt_tokens"].fill_null(0).to_numpy())
    events = raw_events(events_path, reading.counts)
    return RequestsRead(rows_of(frame), "client", "monotonic", reading.model, events, prefix=prefix)


@dataclass
class _Reading:
    """One reading of a file: what is known beside the rows of its requests, one entry a request.

    ``counts``: stamps; ``prompts``: the number of the prompt, or ``NONE``; ``digests``: hashes of the records so far;
    ``model``: the first that a record names.
    """

    file: RecordedFile
    stream: BinaryIO
    texts: PromptTexts
    counts: array[int] = field(default_factory=lambda: array("q"))
    prompts: array[int] = field(default_factory=lambda: array("q"))
    digests: set[int] = field(default_factory=set)
    model: str | None = None

    def rows(self) -> Iterator[dict[str, object]]:
        """The rows of the requests that can be used."""
        for ordinal, raw in json_objects(self.file, MAX_RECORD_BYTES):
            problem, row, stamps_us, body = _decoded(raw)
            digest = hash(raw)
            if not problem and digest in self.digests:
                problem = "the same record again, identical"
            if problem:
                self.file.tally.reject(f"record {ordinal}", problem)
                continue
            self.digests.add(digest)
            self.model = self.model or _model_of(body)
            self.counts.append(len(stamps_us))
            self.prompts.append(_prompt_of(body, self.texts))
            self.stream.write(stamps_us.tobytes())
            yield row


# -- Reports: latencies are in seconds there and in microseconds here -----------------------

_LATENCIES = {
    "request_latency": "e2e",
    "time_to_first_token": "ttft",
    "inter_token_latency": "itl_reported",
    "time_per_output_token": "tpot_reported",
    "normalized_time_per_output_token": "normalized_tpot_reported",
}
_LENGTHS = {"prompt_len": "prompt_tokens", "output_len": "output_tokens_reported"}
_RATES = ("requested_rate", "achieved_rate")


def read_aggregates(file: RecordedFile, stage: int = WHOLE_RUN) -> pl.DataFrame:
    """The report as ``AGGREGATE_SCHEMA`` rows; ``stage`` -1 is the whole run.

    Metrics: e2e, ttft, itl_reported, tpot_reported, normalized_tpot_reported,
    schedule_delay, send_duration (us); prompt_tokens, output_tokens_reported (tokens);
    requests (``succeeded``, ``failed``, ``sent``); requested_rate, achieved_rate (1/s).
    Raises :class:`RecordingError` if the file is no JSON object.  A statistic that is no
    finite number is rejected and counted.
    """
    document = json_mapping(file)
    file.tally.records = 0
    rows = [(stage, *row) for row in _rows(file, document)]
    file.tally.records = len(rows)
    return aggregate_frame(rows)


def count_of(aggregates: pl.DataFrame, stage: int) -> int | None:
    """How many requests a stage sent, by its report, or ``None``."""
    found = aggregates.filter(
        (pl.col("stage") == stage) & (pl.col("metric") == "requests") & (pl.col("statistic") == "sent")
    )
    return int(found["value"][0]) if len(found) else None


def _rows(file: RecordedFile, document: Mapping[str, Any]) -> Iterator[Reported]:
    load, good, bad = (section(document, key) for key in ("load_summary", "successes", "failures"))
    yield from reported_number(file, "requests", "sent", load.get("count"))
    yield from reported_number(file, "requests", "succeeded", good.get("count"))
    yield from reported_number(file, "requests", "failed", bad.get("count"))
    for rate in _RATES:
        yield from reported_number(file, rate, "mean", load.get(rate))
    yield from reported_number(file, "send_duration", "mean", load.get("send_duration"), US_PER_S)
    yield from _distribution(file, "schedule_delay", load.get("schedule_delay"), US_PER_S)
    latency = section(good, "latency")
    for key, metric in _LATENCIES.items():
        # 0.1 has no level "latency" between.
        yield from _distribution(file, metric, latency.get(key, good.get(key)), US_PER_S)
    for key, metric in _LENGTHS.items():
        yield from _distribution(file, metric, good.get(key), 1.0)


def _distribution(file: RecordedFile, metric: str, found: object, unit: float) -> Iterator[Reported]:
    if not isinstance(found, Mapping):
        if found is not None:
            file.tally.reject(metric, "not an object of statistics")
        return
    for statistic, value in found.items():
        name = "p50" if statistic == "median" else str(statistic)
        if name == "p50" and statistic != "median" and "median" in found:
            continue
        yield from reported_number(file, metric, name[:20], value, unit)


# inference-perf pauses 4 to 7 s between two stages, and its stages end late rather than early.
_EARLY_US = 2_000_000
_LATE_US = 15_000_000
_PAUSE_US = 1_000_000


def stage_of_requests(
    arrival_us: NDArray[np.int64], stages: Sequence[Stage], counts: Sequence[int | None]
) -> NDArray[np.int64] | None:
    """The stage number of each request in send order, or ``None`` if no stages are configured.

    ``counts``: the requests of each stage by its own report.  Where they add up, they
    decide; else time does: a stage ends at the pause nearest to its configured end.
    """
    if not stages:
        return None
    numbers = np.array([stage.stage for stage in stages], np.int64)
    known = [count for count in counts if count is not None]
    if len(known) == len(stages) and sum(known) == len(arrival_us):
        return np.repeat(numbers, known)
    starts = _stage_starts(arrival_us, stages)
    return numbers[np.searchsorted(starts, arrival_us, side="right") - 1]


def _stage_starts(arrival_us: NDArray[np.int64], stages: Sequence[Stage]) -> list[int]:
    starts = [0]
    for stage in stages[:-1]:
        end_us = starts[-1] + stage.duration_us
        first, last = np.searchsorted(arrival_us, [end_us - _EARLY_US, end_us + _LATE_US])
        around = arrival_us[first:last]
        gaps = np.diff(around)
        widest = int(np.argmax(gaps)) if len(gaps) else 0
        paused = len(gaps) > 0 and gaps[widest] >= _PAUSE_US
        starts.append(max(starts[-1], int(around[widest + 1]) if paused else end_us))
    return starts
