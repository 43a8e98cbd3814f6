"""NVIDIA AIPerf's records: ``profile_export.jsonl``, one request a line (0.2.0 to 0.13.0).

Stamps are epoch nanoseconds, metrics carry their unit.  A stream event with text is stamped
once (``inter_chunk_latency`` has the gaps), one without text not at all: neither the role of
a chat nor a token that shows no text yet.  ``request_latency`` goes to the last event with text.
``output_sequence_length`` is counted from the returned text, unless the server's count was
asked for (``--use-server-token-count``); 0.13 records the server's usage beside it.

Its aggregates, ``profile_export_aiperf.json``, also have its version and configuration.  Each metric is
``{unit, avg, p1 ... p99, min, max, std}``; unset ones are left out or null.  The inter-token latency is the mean of
``(request_latency - time_to_first_token) / (n - 1)`` over requests, with ``n`` as counted by the tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from blis_replay.ingest.readers.documents import (
    MAX_INTEGER,
    WHOLE_RUN,
    Reported,
    aggregate_frame,
    finite,
    json_mapping,
    reported_number,
    section,
    text,
    tokens,
    whole,
)
from blis_replay.ingest.readers.files import RecordedFile, has_keys
from blis_replay.ingest.readers.records import decoded_records, numbered_lines
from blis_replay.ingest.readers.requests import RequestsRead, frame_of, no_requests, raw_events, request_row
from blis_replay.ingest.recording import Stage
from blis_replay.ingest.rows import rows_of

# A list of empty arrays takes 25 times its text.
MAX_LINE_BYTES = 16 << 20
US_OF = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6, "sec": 1e6}
_LONGEST_US = 1e15
_NO_STAMPS = np.empty(0, np.int64)


class _Metadata(Struct):
    request_start_ns: int
    request_end_ns: int | None = None
    x_request_id: Any = None
    benchmark_phase: Any = None
    was_cancelled: Any = None


class _Metric(Struct):
    value: Any = None
    unit: Any = None


class _Error(Struct):
    code: Any = None
    type: Any = None
    message: Any = None


class _Record(Struct):
    metadata: _Metadata
    metrics: dict[str, _Metric]
    error: _Error | None = None


_RECORD = msgspec.json.Decoder(_Record)


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this has AIPerf's records (its raw export has no metrics)."""
    first = head.lstrip().partition(b"\n")[0]
    return first[:1] == b"{" and has_keys(first, "request_start_ns", "metrics")


def read_requests(file: RecordedFile, events_path: Path) -> RequestsRead:
    """The requests in file order (that of their ends); stamps go to the flat file ``events_path``.

    Warm-up requests are left out and counted as rejected.  A request that the tool itself
    cancelled is ``aborted``; failed ones keep no TTFT, their E2E is how long the client held on.
    Memory is bounded by a batch of requests.  A line that cannot be used is rejected.
    """
    counts: list[int] = []
    with events_path.open("wb") as stream:
        frame = frame_of(_usable_rows(file, stream, counts))
    file.tally.records = len(frame)
    return RequestsRead(rows_of(frame), "client", "epoch", events=raw_events(events_path, counts), version="aiperf")


def _usable_rows(file: RecordedFile, stream: BinaryIO, counts: list[int]) -> Iterator[dict[str, object]]:
    for place, record in decoded_records(file, numbered_lines(file, MAX_LINE_BYTES), _RECORD):
        if record.metadata.benchmark_phase == "warmup":
            file.tally.reject(place, "of the warm-up phase, left out")
            continue
        problem, row, stamps_us = _row(record)
        if problem:
            file.tally.reject(place, problem)
            continue
        counts.append(len(stamps_us))
        stream.write(stamps_us.tobytes())
        yield row


def _row(record: _Record) -> tuple[str, dict[str, object], NDArray[np.int64]]:
    start_ns, end_ns = record.metadata.request_start_ns, record.metadata.request_end_ns
    if not 0 < start_ns < MAX_INTEGER or (end_ns is not None and not start_ns <= end_ns < MAX_INTEGER):
        return "a start or end that is not a usable time", {}, _NO_STAMPS
    metrics, status = record.metrics, _status(record)
    ttft_us, latency_us, gaps_us = (
        _times_us(metrics.get(name)) for name in ("time_to_first_token", "request_latency", "inter_chunk_latency")
    )
    if ttft_us is None or latency_us is None or gaps_us is None or len(ttft_us) > 1 or len(latency_us) > 1:
        return "a latency that is not a usable time", {}, _NO_STAMPS
    ok, sent_us = status == "ok", _us(start_ns)
    if ok and not len(latency_us):
        return "completed, and no request_latency", {}, _NO_STAMPS
    stamps_us = sent_us + np.rint(np.cumsum([*ttft_us, *gaps_us])).astype(np.int64) if len(ttft_us) else _NO_STAMPS
    row = request_row(
        request_id=text(record.metadata.x_request_id),
        prompt_tokens=_tokens(metrics, "usage_prompt_tokens", "input_sequence_length", "error_isl"),
        output_tokens_reported=whole(_value(metrics, "output_sequence_length")) if ok else None,
        usage_output_tokens=_tokens(metrics, "usage_completion_tokens") if ok else None,
        max_tokens=_requested_tokens(metrics),
        ttft_us=int(stamps_us[0]) - sent_us if ok and len(stamps_us) else None,
        e2e_us=round(float(latency_us[0])) if ok else None if end_ns is None else _us(end_ns) - sent_us,
        status=status,
        error=None if ok else _message(record),
        sent_us=sent_us,
    )
    return "", row, stamps_us


def _us(ns: int) -> int:
    return (ns + 500) // 1000


def _times_us(metric: _Metric | None) -> NDArray[np.float64] | None:
    """The times of a metric in us, as its own unit says; none if it is absent, ``None`` if they are unusable."""
    if metric is None or metric.value is None:
        return np.empty(0, np.float64)
    values = metric.value if isinstance(metric.value, list) else [metric.value]
    unit_us = US_OF.get(metric.unit) if isinstance(metric.unit, str) else None
    if unit_us is None or not all(type(value) in (int, float) and 0 <= value < _LONGEST_US for value in values):
        return None
    times_us = np.array(values, np.float64) * unit_us
    return times_us if times_us.sum() < _LONGEST_US else None


def _value(metrics: Mapping[str, _Metric], name: str) -> object:
    metric = metrics.get(name)
    return None if metric is None else metric.value


def _tokens(metrics: Mapping[str, _Metric], *names: str) -> int | None:
    """The first of these that is a number of tokens."""
    return next((count for name in names if (count := tokens(_value(metrics, name)))), None)


def _requested_tokens(metrics: Mapping[str, _Metric]) -> int | None:
    """The length asked for: the count is said to differ from it by so many percent (from 0.6)."""
    percent, counted = (
        finite(_value(metrics, "osl_mismatch_diff_pct")),
        whole(_value(metrics, "output_sequence_length")),
    )
    if percent is None or not counted or percent <= -100:
        return None
    requested = counted / (1 + percent / 100)
    nearest = round(requested)
    return tokens(nearest) if abs(requested - nearest) < 1e-3 else None


def _status(record: _Record) -> str:
    if record.metadata.was_cancelled is True:
        return "aborted"
    if record.error is None:
        return "ok"
    return "timeout" if "timeout" in f"{record.error.type} {record.error.message}"[:2000].lower() else "error"


def _message(record: _Record) -> str | None:
    if record.error is None:
        return "cancelled by the client"
    return text(": ".join(part for part in (text(record.error.type), text(record.error.message)) if part))


_LATENCIES = {"request_latency": "e2e", "time_to_first_token": "ttft", "inter_token_latency": "itl_reported"}
_LENGTHS = {"input_sequence_length": "prompt_tokens", "output_sequence_length": "output_tokens_reported"}
_COUNTS = {"request_count": "succeeded", "error_request_count": "failed"}
# A load generator sends no more, and no slower or faster; beyond it is a slip.
_MOST_SENT = 1e9  # requests
_RATES = (1e-6, 1e6)  # requests/s
_STATISTIC = re.compile(r"avg|min|max|p\d{1,2}(?:\.\d{1,4})?", re.ASCII)


def recognises_summary(head: bytes) -> bool:
    """Whether a file that begins like this is AIPerf's summary of a run."""
    return head.lstrip()[:1] == b"{" and has_keys(head, "request_throughput", "request_latency", "unit")


def read_summary(file: RecordedFile, _events_path: Path) -> RequestsRead:
    """No requests, but the aggregates of the run, its version, model and what its requests asked for.

    Raises :class:`RecordingError` if the file is no JSON object.
    """
    document = json_mapping(file)
    document.update(section(document, "records"))  # 0.1
    configured = section(document, "input_config")
    rate, clients = _load(configured)
    count = finite(section(document, "request_count").get("avg"))
    reported = [(WHOLE_RUN, *row) for row in _reported(file, document)]
    file.tally.records = len(reported)
    if clients is not None:
        reported.append((WHOLE_RUN, "concurrency", "asked", clients))
    version = text(document.get("aiperf_version"))
    return no_requests(
        f"aiperf {version}" if version else "aiperf",
        aggregate_frame(reported),
        "requests: AIPerf's summary has aggregates only; profile_export.jsonl has the requests",
        model=_model(configured),
        stages=(Stage(0, rate, round(count * 1e6 / rate)),) if rate and count and 1 <= count <= _MOST_SENT else (),
        configured_output_tokens=_configured_length(configured),
        ignore_eos=_ignores_eos(configured),
    )


def _reported(file: RecordedFile, document: Mapping[str, Any]) -> Iterator[Reported]:
    for key, statistic in _COUNTS.items():
        yield from reported_number(file, "requests", statistic, section(document, key).get("avg"))
    for key, metric in {**_LATENCIES, **_LENGTHS}.items():
        found = section(document, key)
        unit = 1.0 if key in _LENGTHS else US_OF.get(str(found.get("unit"))[:20])
        if found and unit is None:
            file.tally.reject(key, "a unit that is not a unit of time")
            continue
        for name, value in found.items():
            if _STATISTIC.fullmatch(name):
                yield from reported_number(file, metric, "mean" if name == "avg" else name, value, unit or 1.0)


def _load(configured: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Requests a second, or clients of a closed loop: ``loadgen`` up to 0.6, the phase that is measured in 0.13.

    Neither where there are both: then clients hold back what the rate would send.
    """
    phases = configured.get("phases")
    listed = phases if isinstance(phases, list) else []
    measured = [phase for phase in listed if isinstance(phase, Mapping) and phase.get("kind") == "profiling"]
    asked = section(configured, "loadgen") or section({"phase": _first(measured)}, "phase")
    rate = finite(asked.get("request_rate", asked.get("rate")))
    clients = finite(asked.get("concurrency"))
    if rate is not None and clients is not None:
        return None, None
    low, high = _RATES
    within = rate is not None and low <= rate <= high
    return rate if within else None, clients if clients is not None and 1 <= clients <= _MOST_SENT else None


def _model(configured: Mapping[str, Any]) -> str | None:
    """The first model: ``endpoint.model_names`` up to 0.6, ``models.items[].name`` in 0.13."""
    names = section(configured, "endpoint").get("model_names")
    items = section(configured, "models").get("items")
    first = _first(names) or section({"item": _first(items)}, "item").get("name")
    return text(first)


def _first(values: object) -> object:
    return values[0] if isinstance(values, list) and values else None


def _ignores_eos(configured: Mapping[str, Any]) -> bool | None:
    """Whether ``ignore_eos`` was among the extra inputs: pairs up to 0.6, a mapping in 0.13."""
    extra: object = section(configured, "endpoint").get("extra") or section(configured, "input").get("extra")
    if isinstance(extra, list):
        pairs = [pair for pair in extra if isinstance(pair, list) and len(pair) == 2]
        extra = {name: value for name, value in pairs if isinstance(name, str)}
    asked = extra.get("ignore_eos") if isinstance(extra, Mapping) else None
    return asked if isinstance(asked, bool) else None


def _configured_length(configured: Mapping[str, Any]) -> int | None:
    """The length that every request asked for, if all asked for the same."""
    lengths = section(configured, "input", "prompt", "output_tokens") or section(
        {"dataset": _first(configured.get("datasets"))}, "dataset", "prompts", "osl"
    )
    return tokens(lengths.get("mean")) if finite(lengths.get("stddev") or 0) == 0 else None
