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

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from blis_replay.ingest.readers.documents import (
    MAX_INTEGER,
    WHOLE_RUN,
    Reported,
    aggregate_frame,
    at,
    distribution,
    finite,
    json_mapping,
    reported_number,
    section,
    text,
    tokens,
    whole,
)
from blis_replay.ingest.readers.files import RecordedFile, begins_with
from blis_replay.ingest.readers.records import decoded_records, numbered_lines
from blis_replay.ingest.readers.requests import (
    Request,
    RequestsRead,
    Row,
    UnusableError,
    failure,
    gathered,
    no_requests,
)
from blis_replay.ingest.recording import Stage

# A list of empty arrays takes 25 times its text.
MAX_LINE_BYTES = 16 << 20
US_OF = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6, "sec": 1e6}
_LONGEST_US = 1e15
_NO_TIMES = np.empty(0)


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


_NONE = _Metric()
_RECORD = msgspec.json.Decoder(_Record)


# Its raw export has no metrics.
recognises = begins_with(b"{", "request_start_ns", "metrics", in_first_line=True)


def read_requests(file: RecordedFile, stamps_path: Path) -> RequestsRead:
    """The requests in file order (that of their ends); stamps go to the flat file ``stamps_path``.

    Warm-up requests are left out and counted as rejected.  A request that the tool itself
    cancelled is ``aborted``; failed ones keep no TTFT, their E2E is how long the client held on.
    """
    records = decoded_records(file, numbered_lines(file, MAX_LINE_BYTES), _RECORD)
    rows, events = gathered(file, records, _request, stamps_path)
    return RequestsRead(rows, "client", "epoch", events=events, version="aiperf")


def _request(record: _Record) -> Request:
    if record.metadata.benchmark_phase == "warmup":
        raise UnusableError("of the warm-up phase, left out")
    start_ns, end_ns = record.metadata.request_start_ns, record.metadata.request_end_ns
    if not 0 < start_ns < MAX_INTEGER or (end_ns is not None and not start_ns <= end_ns < MAX_INTEGER):
        raise UnusableError("a start or end that is not a usable time")
    metrics, status = record.metrics, _status(record)
    ttft_us, latency_us, gaps_us = (
        _times_us(metrics.get(name)) for name in ("time_to_first_token", "request_latency", "inter_chunk_latency")
    )
    if len(ttft_us) > 1 or len(latency_us) > 1:
        raise UnusableError("a latency that is not a usable time")
    ok, sent_us = status == "ok", _us(start_ns)
    if ok and not len(latency_us):
        raise UnusableError("completed, and no request_latency")
    after_us = np.rint(np.cumsum([*ttft_us, *gaps_us] if len(ttft_us) else [])).astype(np.int64)
    row: Row = {
        "request_id": text(record.metadata.x_request_id),
        "prompt_tokens": _tokens(metrics, "usage_prompt_tokens", "input_sequence_length", "error_isl"),
        "output_tokens_reported": whole(metrics.get("output_sequence_length", _NONE).value) if ok else None,
        "usage_output_tokens": _tokens(metrics, "usage_completion_tokens") if ok else None,
        "max_tokens": _requested_tokens(metrics),
        "ttft_us": int(after_us[0]) if ok and len(after_us) else None,
        "e2e_us": round(float(latency_us[0])) if ok else None if end_ns is None else _us(end_ns) - sent_us,
        "status": status,
        "error": None if ok else _message(record),
        "sent_us": sent_us,
    }
    return row, sent_us + after_us


def _us(ns: int) -> int:
    return (ns + 500) // 1000


def _times_us(metric: _Metric | None) -> NDArray[np.float64]:
    """The times of a metric in us, as its own unit says; none if it is absent."""
    if metric is None or metric.value is None:
        return _NO_TIMES
    values = metric.value if isinstance(metric.value, list) else [metric.value]
    unit_us = US_OF.get(metric.unit) if isinstance(metric.unit, str) else None
    if unit_us is None or not all(type(value) in (int, float) and 0 <= value < _LONGEST_US for value in values):
        raise UnusableError("a latency that is not a usable time")
    times_us = np.array(values, np.float64) * unit_us
    if times_us.sum() >= _LONGEST_US:
        raise UnusableError("a latency that is not a usable time")
    return times_us


def _tokens(metrics: Mapping[str, _Metric], *names: str) -> int | None:
    """The first of these that is a number of tokens."""
    return next((count for name in names if (count := tokens(metrics.get(name, _NONE).value))), None)


def _requested_tokens(metrics: Mapping[str, _Metric]) -> int | None:
    """The length asked for, from the percentage by which the count differs from it (from 0.6)."""
    percent = finite(metrics.get("osl_mismatch_diff_pct", _NONE).value)
    counted = whole(metrics.get("output_sequence_length", _NONE).value)
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
    return failure(f"{record.error.type} {record.error.message}")


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


recognises_summary = begins_with(b"{", "request_throughput", "request_latency", "unit")


def read_summary(file: RecordedFile, _events_path: Path) -> RequestsRead:
    """No requests, but the aggregates of the run, its version, model and what its requests asked for.

    Raises :class:`RecordingError` if the file is not a JSON object.
    """
    document = json_mapping(file)
    document.update(section(document, "records"))  # 0.1
    configured = section(document, "input_config")
    rate, clients = _load(configured)
    count = finite(at(document, "request_count.avg"))
    reported = [(WHOLE_RUN, *row) for row in _reported(file, document)]
    file.tally.records = len(reported)
    if clients is not None:
        reported.append((WHOLE_RUN, "concurrency", "asked", clients))
    version = text(document.get("aiperf_version"))
    return no_requests(
        f"aiperf {version}" if version else "aiperf",
        aggregate_frame(reported),
        "requests: AIPerf's summary has aggregates only; profile_export.jsonl has the requests",
        # Up to 0.6, and in 0.13.
        model=text(at(configured, "endpoint.model_names.0", "models.items.0.name")),
        stages=(Stage(0, rate, round(count * 1e6 / rate)),) if rate and count and 1 <= count <= _MOST_SENT else (),
        configured_output_tokens=_configured_length(configured),
        ignore_eos=_ignores_eos(configured),
    )


def _reported(file: RecordedFile, document: Mapping[str, Any]) -> Iterator[Reported]:
    for key, statistic in _COUNTS.items():
        yield from reported_number(file, "requests", statistic, at(document, f"{key}.avg"))
    for key, metric in {**_LATENCIES, **_LENGTHS}.items():
        found = section(document, key)
        unit = 1.0 if key in _LENGTHS else US_OF.get(str(found.get("unit"))[:20])
        if found and unit is None:
            file.tally.reject(key, "a unit that is not a unit of time")
            continue
        yield from distribution(file, metric, found, unit or 1.0)


def _load(configured: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Requests per second, or clients of a closed loop: ``loadgen`` up to 0.6, the phase that is measured from 0.10 on.

    0.10 names a phase (``name``), 0.13 says its ``kind``.  Neither number where there are both: then clients hold back
    what the rate would send.
    """
    phases = at(configured, "phases")
    listed = phases if isinstance(phases, list) else []
    measured = (phase for phase in listed if at(phase, "kind", "name") == "profiling")
    asked = section(configured, "loadgen") or next(measured, {})
    rate, clients = finite(at(asked, "request_rate", "rate")), finite(at(asked, "concurrency"))
    if rate is not None and clients is not None:
        return None, None
    low, high = _RATES
    within = rate is not None and low <= rate <= high
    return rate if within else None, clients if clients is not None and 1 <= clients <= _MOST_SENT else None


def _ignores_eos(configured: Mapping[str, Any]) -> bool | None:
    """Whether ``ignore_eos`` was among the extra inputs: pairs up to 0.6, a mapping in 0.13."""
    extra = at(configured, "endpoint.extra", "input.extra")
    if isinstance(extra, list):
        extra = {pair[0]: pair[1] for pair in extra if isinstance(pair, list) and len(pair) == 2 and text(pair[0])}
    asked = at(extra, "ignore_eos")
    return asked if isinstance(asked, bool) else None


def _configured_length(configured: Mapping[str, Any]) -> int | None:
    """The length that every request asked for, if all asked for the same."""
    lengths = at(configured, "input.prompt.output_tokens", "datasets.0.prompts.osl")
    return tokens(at(lengths, "mean")) if finite(at(lengths, "stddev") or 0) == 0 else None
