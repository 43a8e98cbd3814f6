"""inference-perf: ``per_request_lifecycle_metrics.json``, one array of any size, and its reports.

Three generations: up to 0.4 (``info.output_token_times``: a stamp per stream event, up to two per token), 0.5
(``info.response_info``), from 0.6 (``info.response_metrics``).  The later ones also have ``chunk_times``, the plain
arrival times, and the server's usage.  Stamps are kept as recorded; of prompts hashes are kept, of responses nothing.

Of its reports (``summary_lifecycle_metrics.json``, ``stage_N_lifecycle_metrics.json``) values are kept as reported,
including an inter-token latency that counted two events per token; the checks correct it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from blis_replay.base.arrays import Int64s
from blis_replay.ingest.readers import documents
from blis_replay.ingest.readers.clients.prompt_texts import HASH, PIECE_BYTES, Hashes, PromptTexts, raw_prompts
from blis_replay.ingest.readers.documents import (
    DECODE_ERRORS,
    MAX_INTEGER,
    US_PER_S,
    WHOLE_RUN,
    Metric,
    microseconds,
    text,
    tokens,
    whole,
)
from blis_replay.ingest.readers.files import RecordedFile, begins_with
from blis_replay.ingest.readers.records import json_objects
from blis_replay.ingest.readers.requests import (
    NONE,
    Request,
    RequestsRead,
    UnusableError,
    columns_of,
    failure,
    field_at,
    gathered,
    request_row,
)
from blis_replay.ingest.recording import SCHEDULE_DELAY, Stage

# A token of a captured stream takes some 700 bytes.
MAX_RECORD_BYTES = 64 << 20
# What a decoder makes of a record can be 16 times as large (a list of one-digit stamps).
MAX_DECODED_BYTES = 16 << 20


class _Response(Struct):
    output_tokens: Any = None
    output_token_times: list[float] | None = None
    chunk_times: list[float] | None = None
    server_usage: dict[str, Any] | None = None


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
    n: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    structured_outputs: Any = None


class _Message(Struct):
    content: Any = None


def _of_response(*names: str) -> list[str]:
    return [f"info.{response}.{name}" for name in names for response in ("response_metrics", "response_info")]


_FIELDS = {
    "prompt_tokens": field_at(tokens, *_of_response("server_usage.prompt_tokens"), "info.input_tokens"),
    "output_tokens_reported": field_at(whole, *_of_response("output_tokens"), "info.output_tokens"),
    "usage_output_tokens": field_at(tokens, *_of_response("server_usage.completion_tokens")),
    "cached_prompt_tokens": field_at(whole, *_of_response("server_usage.prompt_tokens_details.cached_tokens")),
}
_BODY_FIELDS = {
    "max_tokens": field_at(tokens, "max_tokens", "max_completion_tokens"),
    "ignore_eos": field_at(documents.switch, "ignore_eos"),
}
_stamps_s = field_at(
    lambda times: times or None, *_of_response("chunk_times", "output_token_times"), "info.output_token_times"
)
_RECORD = msgspec.json.Decoder(_Record)
_NULL = msgspec.Raw(b"null")
_MODEL = msgspec.json.Decoder(str)
_BODY = msgspec.json.Decoder(_Body)
_MESSAGES = msgspec.json.Decoder(list[_Message])
_MEDIA = re.compile(rb'"(?:input_)?(?:image|audio|video)')
_MEDIA_PART = re.compile(r"(?:input_)?(?:image|audio|video)")


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


def _model_of(body: _Body) -> str | None:
    """The model that a body names, if it names one."""
    try:
        return text(_MODEL.decode(body.model))
    except DECODE_ERRORS:
        return None


def _features_of(body: _Body) -> Iterator[str]:
    """What a body asks for that changes how its request is scheduled, other than by its lengths."""
    if (whole(body.n) or 1) > 1:
        yield "n"
    if body.prompt_logprobs is not None:
        yield "prompt_logprobs"
    if body.structured_outputs or documents.at({"format": body.response_format}, "format.type") not in (None, "text"):
        yield "structured_outputs"
    if _MEDIA.search(body.messages) and _has_media(body.messages):
        yield "multimodal"


def _has_media(messages: msgspec.Raw) -> bool:
    """Whether a part of a message is an image, a sound or a video, by its type or its field."""
    try:
        contents = [message.content for message in _MESSAGES.decode(messages)]
    except DECODE_ERRORS:
        return False
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return any(_MEDIA_PART.match(str(name)) for part in parts for name in (part.get("type"), *part))


def _body_of(request: str | None) -> _Body:
    """The fields of the request's body that matter; a body that is not JSON has none."""
    try:
        return _BODY.decode(request) if request else _Body()
    except DECODE_ERRORS:
        return _Body()


recognises = begins_with(b"[", "start_time", "end_time")


def read_requests(file: RecordedFile, stamps_path: Path) -> RequestsRead:
    """The requests in file order; their raw stream stamps go to the flat file ``stamps_path``.

    Times are on the client's monotonic clock.  Failed requests keep no TTFT; their E2E is the
    time for which the client held on.  A record that is there before, identical, is rejected.
    """
    hashes_path = stamps_path.with_suffix(".prompts")
    records = ((f"record {ordinal}", raw) for ordinal, raw in json_objects(file, MAX_RECORD_BYTES))
    with hashes_path.open("wb") as hashes:
        reading = _Reading(PromptTexts(hashes))
        rows, events = gathered(file, records, reading.request, stamps_path)
    prompts = np.array(reading.prompts, np.int64)
    prefix = raw_prompts(reading.texts, hashes_path, prompts, rows["prompt_tokens"].fill_null(0).to_numpy())
    features = tuple(sorted(reading.features))
    return RequestsRead(rows, "client", "monotonic", reading.model, events, prefix=prefix, features=features)


@dataclass
class _Reading:
    """What is known beside the rows of requests.

    ``prompts``: of each request the number of its prompt, or ``NONE``; ``digests``: hashes of the records so far;
    ``model``: the first that a record names; ``features``: of all.
    """

    texts: PromptTexts
    prompts: array[int] = field(default_factory=lambda: array("q"))
    digests: set[int] = field(default_factory=set)
    model: str | None = None
    features: set[str] = field(default_factory=set)

    def request(self, raw: bytes) -> Request:
        """The row of a record and its stamps; :class:`UnusableError` if it has none."""
        if len(raw) > MAX_DECODED_BYTES:
            raise UnusableError(f"{len(raw)} bytes in an unusual form")
        try:
            record = _RECORD.decode(raw)
        except DECODE_ERRORS as error:
            raise UnusableError(str(error)) from error
        body = _body_of(record.request)
        row, stamps_us = _request(record, body)
        if (digest := hash(raw)) in self.digests:
            raise UnusableError("the same record again, identical")
        self.digests.add(digest)
        self.model = self.model or _model_of(body)
        self.features.update(_features_of(body))
        self.prompts.append(_prompt_of(body, self.texts))
        return row, stamps_us


def _request(record: _Record, body: _Body) -> Request:
    start_us, end_us = microseconds(record.start_time), microseconds(record.end_time)
    if start_us is None or end_us is None:
        raise UnusableError("a start or end that is not a usable time")
    stamps_s = np.array(_stamps_s(record) or [], np.float64)
    if not (np.abs(stamps_s) < MAX_INTEGER / 1e6).all():
        raise UnusableError("a stream stamp that is not a usable time")
    stamps_us = np.rint(stamps_s * 1e6).astype(np.int64)
    if len(stamps_us) and stamps_us.min() < start_us:
        raise UnusableError(f"a stream event {start_us - int(stamps_us.min())} us before the start")
    error = record.error
    named = isinstance(error, dict)
    row = request_row(
        start_us,
        failure(error.get("error_type") if named else error) if error else "ok",
        documents.texts(error, "error_type", "error_msg") if named else text(error),
        ttft_us=int(stamps_us[0]) - start_us if len(stamps_us) else None,
        e2e_us=end_us - start_us,
        **columns_of(record, _FIELDS),
        **columns_of(body, _BODY_FIELDS),
    )
    return row, stamps_us


# -- Reports: latencies are in seconds there and in microseconds here -----------------------

_REPORT = (
    *(
        Metric("requests", (f"{path}.count",), statistic=statistic)
        for statistic, path in (("sent", "load_summary"), ("succeeded", "successes"), ("failed", "failures"))
    ),
    *(Metric(rate, (f"load_summary.{rate}",), statistic="mean") for rate in ("requested_rate", "achieved_rate")),
    Metric("send_duration", ("load_summary.send_duration",), US_PER_S, "mean"),
    Metric(SCHEDULE_DELAY, (f"load_summary.{SCHEDULE_DELAY}",), US_PER_S),
    # 0.1 has no level "latency" between.
    *(
        Metric(name, (f"successes.latency.{key}", f"successes.{key}"), US_PER_S)
        for name, key in (
            ("e2e", "request_latency"),
            ("ttft", "time_to_first_token"),
            ("itl_reported", "inter_token_latency"),
            ("tpot_reported", "time_per_output_token"),
            ("normalized_tpot_reported", "normalized_time_per_output_token"),
        )
    ),
    Metric("prompt_tokens", ("successes.prompt_len",)),
    Metric("output_tokens_reported", ("successes.output_len",)),
)


def read_aggregates(file: RecordedFile, stage: int = WHOLE_RUN) -> pl.DataFrame:
    """The report as ``AGGREGATE_SCHEMA`` rows; ``stage`` -1 is the whole run.

    Metrics: those of ``_REPORT`` in us, tokens and 1/s.  Raises :class:`RecordingError` if the file is not a JSON
    object.  A statistic that is not a finite number is rejected and counted.
    """
    document = documents.json_mapping(file)
    file.tally.records = 0
    rows = [(stage, *row) for row in documents.reported(file, document, _REPORT)]
    file.tally.records = len(rows)
    return documents.aggregate_frame(rows)


# inference-perf pauses 4 to 7 s between two stages, and its stages end late rather than early.
_EARLY_US = 2_000_000
_LATE_US = 15_000_000
_PAUSE_US = 1_000_000


def stage_of_requests(arrival_us: Int64s, stages: Sequence[Stage], counts: Sequence[float | None]) -> Int64s | None:
    """The stage number of each request in send order, or ``None`` if no stages are configured.

    ``counts``: requests of each stage by its own report.  If they add up, they decide; else a stage ends at the pause
    nearest to its configured end.
    """
    if not stages:
        return None
    numbers = np.array([stage.stage for stage in stages], np.int64)
    known = [int(count) for count in counts if count is not None]
    if len(known) == len(stages) and sum(known) == len(arrival_us):
        return np.repeat(numbers, known)
    starts = _stage_starts(arrival_us, stages)
    return numbers[np.searchsorted(starts, arrival_us, side="right") - 1]


def _stage_starts(arrival_us: Int64s, stages: Sequence[Stage]) -> list[int]:
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
