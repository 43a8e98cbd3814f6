"""NVIDIA AIPerf: ``profile_export.jsonl``, one request per line (0.2.0 to 0.13.0), and ``profile_export_aiperf.json``.

Stamps are epoch nanoseconds, and each metric states its unit.  A stream event with text is stamped once
(``inter_chunk_latency`` has the gaps).  The role of a chat, and a token that shows no text yet, have no stamp.
``request_latency`` goes to the last event with text.  ``output_sequence_length`` is counted from the returned text,
unless the server's count was asked for (``--use-server-token-count``); 0.13 also records the server's usage.

In the summary a metric is ``{unit, avg, p1 ... p99, min, max, std}``; unset ones are left out or null.  Its
inter-token latency is the mean of ``(request_latency - time_to_first_token) / (n - 1)``, with ``n`` as the tool counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from blis_replay.ingest.readers import documents
from blis_replay.ingest.readers.documents import MAX_INTEGER, US_OF, WHOLE_RUN, Metric, at, finite, text, tokens, whole
from blis_replay.ingest.readers.files import RecordedFile, begins_with
from blis_replay.ingest.readers.records import decoded_records, numbered_lines
from blis_replay.ingest.readers.requests import (
    Request,
    RequestsRead,
    UnusableError,
    columns_of,
    failure,
    field_at,
    gathered,
    no_requests,
    request_row,
)
from blis_replay.ingest.recording import Stage

# A list of empty arrays takes 25 times its text.
MAX_LINE_BYTES = 16 << 20
_LONGEST_US = 1e15
_FIELDS = {
    "prompt_tokens": field_at(tokens, "usage_prompt_tokens", "input_sequence_length", "error_isl"),
    "output_tokens_reported": field_at(whole, "output_sequence_length"),
    "usage_output_tokens": field_at(tokens, "usage_completion_tokens"),
}


class _Metadata(Struct):
    request_start_ns: int
    request_end_ns: int | None = None
    x_request_id: Any = None
    benchmark_phase: Any = None
    was_cancelled: Any = None


class _Metric(Struct):
    value: Any = None
    unit: Any = None


class _Record(Struct):
    metadata: _Metadata
    metrics: dict[str, _Metric]
    error: dict[str, Any] | None = None


_NONE = _Metric()
_RECORD = msgspec.json.Decoder(_Record)


# Its raw export has no metrics.
recognises = begins_with(b"{", "request_start_ns", "metrics", in_first_line=True)


def read_requests(file: RecordedFile, stamps_path: Path) -> RequestsRead:
    """The requests in file order (that of their ends); stamps go to the flat file ``stamps_path``.

    Warm-up requests are left out and counted as rejected.  A request that the tool itself cancelled is ``aborted``;
    the E2E of a failed one is how long the client held on.
    """
    records = decoded_records(file, numbered_lines(file, MAX_LINE_BYTES), _RECORD)
    rows, events = gathered(file, records, _request, stamps_path)
    return RequestsRead(rows, "client", "epoch", events=events, version="aiperf")


def _request(record: _Record) -> Request:
    metadata, metrics, error = record.metadata, record.metrics, record.error
    if metadata.benchmark_phase == "warmup":
        raise UnusableError("of the warm-up phase, left out")
    start_ns, end_ns = metadata.request_start_ns, metadata.request_end_ns
    if not 0 < start_ns < MAX_INTEGER or (end_ns is not None and not start_ns <= end_ns < MAX_INTEGER):
        raise UnusableError("a start or end that is not a usable time")
    ttft_us, latency_us, gaps_us = (
        _times_us(metrics.get(name, _NONE))
        for name in ("time_to_first_token", "request_latency", "inter_chunk_latency")
    )
    if len(ttft_us) > 1 or len(latency_us) > 1:
        raise UnusableError("a latency that is not a usable time")
    cancelled = metadata.was_cancelled is True
    status = (
        "aborted" if cancelled else "ok" if error is None else failure(f"{error.get('type')} {error.get('message')}")
    )
    ok, sent_us = status == "ok", _us(start_ns)
    if ok and not len(latency_us):
        raise UnusableError("completed, and no request_latency")
    values = {name: metric.value for name, metric in metrics.items()}
    after_us = np.rint(np.cumsum([*ttft_us, *gaps_us] if len(ttft_us) else [])).astype(np.int64)
    row = request_row(
        sent_us,
        status,
        "cancelled by the client" if error is None else documents.texts(error, "type", "message"),
        request_id=text(metadata.x_request_id),
        max_tokens=_requested_tokens(values),
        ttft_us=int(after_us[0]) if len(after_us) else None,
        e2e_us=round(float(latency_us[0])) if ok else None if end_ns is None else _us(end_ns) - sent_us,
        **columns_of(values, _FIELDS),
    )
    return row, sent_us + after_us


def _us(ns: int) -> int:
    return (ns + 500) // 1000


def _times_us(metric: _Metric) -> NDArray[np.float64]:
    """The times of a metric in us, by its own unit; none if it is absent."""
    values = metric.value if isinstance(metric.value, list) else [] if metric.value is None else [metric.value]
    unit_us = US_OF.get(str(metric.unit)[:20], 0.0)
    usable = all(type(value) in (int, float) and 0 <= value < _LONGEST_US for value in values)
    times_us = np.array(values if usable else [], np.float64) * unit_us
    if metric.value is not None and not (usable and unit_us and times_us.sum() < _LONGEST_US):
        raise UnusableError("a latency that is not a usable time")
    return times_us


def _requested_tokens(values: Mapping[str, Any]) -> int | None:
    """The length asked for, from the percentage by which the count differs from it (from 0.6)."""
    percent, counted = finite(values.get("osl_mismatch_diff_pct")), whole(values.get("output_sequence_length"))
    if percent is None or not counted or percent <= -100:
        return None
    requested = counted / (1 + percent / 100)
    nearest = round(requested)
    return tokens(nearest) if abs(requested - nearest) < 1e-3 else None


_REPORT = (
    Metric("requests", ("request_count.avg",), statistic="succeeded"),
    Metric("requests", ("error_request_count.avg",), statistic="failed"),
    Metric("e2e", ("request_latency",), None),
    Metric("ttft", ("time_to_first_token",), None),
    Metric("itl_reported", ("inter_token_latency",), None),
    Metric("prompt_tokens", ("input_sequence_length",)),
    Metric("output_tokens_reported", ("output_sequence_length",)),
)
# A load generator sends no more requests, and no slower or faster (requests/s); a number beyond is a mistake.
_MOST_SENT = 1e9
_SLOWEST_PER_S, _FASTEST_PER_S = 1e-6, 1e6


recognises_summary = begins_with(b"{", "request_throughput", "request_latency", "unit")


def read_summary(file: RecordedFile, _events_path: Path) -> RequestsRead:
    """No requests, but the aggregates of the run, its version, model and what its requests asked for.

    Raises :class:`RecordingError` if the file is not a JSON object.
    """
    document = documents.json_mapping(file)
    document.update(documents.section(document, "records"))  # 0.1
    configured = documents.section(document, "input_config")
    rate, clients = _load(configured)
    count = finite(at(document, "request_count.avg"))
    reported = [(WHOLE_RUN, *row) for row in documents.reported(file, document, _REPORT)]
    file.tally.records = len(reported)
    if clients is not None:
        reported.append((WHOLE_RUN, "concurrency", "asked", clients))
    version = text(document.get("aiperf_version"))
    return no_requests(
        f"aiperf {version}" if version else "aiperf",
        documents.aggregate_frame(reported),
        "requests: AIPerf's summary has aggregates only; profile_export.jsonl has the requests",
        # Up to 0.6, and in 0.13.
        model=text(at(configured, "endpoint.model_names.0", "models.items.0.name")),
        stages=(Stage(0, rate, round(count * 1e6 / rate)),) if rate and count and 1 <= count <= _MOST_SENT else (),
        configured_output_tokens=_configured_length(configured),
        ignore_eos=_ignores_eos(configured),
    )


def _load(configured: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Requests per second, or clients of a closed loop: ``loadgen`` up to 0.6, the measured phase from 0.10 on.

    0.10 names a phase (``name``), 0.13 states its ``kind``.  Neither number where both are given: then clients hold
    back what the rate would send.
    """
    phases = at(configured, "phases")
    listed = phases if isinstance(phases, list) else []
    measured = (phase for phase in listed if at(phase, "kind", "name") == "profiling")
    asked = documents.section(configured, "loadgen") or next(measured, {})
    rate, clients = finite(at(asked, "request_rate", "rate")), finite(at(asked, "concurrency"))
    if rate is not None and clients is not None:
        return None, None
    within = rate is not None and _SLOWEST_PER_S <= rate <= _FASTEST_PER_S
    return rate if within else None, clients if clients is not None and 1 <= clients <= _MOST_SENT else None


def _ignores_eos(configured: Mapping[str, Any]) -> bool | None:
    """Whether ``ignore_eos`` was among the extra inputs: pairs up to 0.6, a mapping in 0.13."""
    extra = at(configured, "endpoint.extra", "input.extra")
    if isinstance(extra, list):
        extra = {pair[0]: pair[1] for pair in extra if isinstance(pair, list) and len(pair) == 2 and text(pair[0])}
    return documents.switch(at(extra, "ignore_eos"))


def _configured_length(configured: Mapping[str, Any]) -> int | None:
    """The length that every request asked for, if all asked for the same."""
    lengths = at(configured, "input.prompt.output_tokens", "datasets.0.prompts.osl")
    return tokens(at(lengths, "mean")) if finite(at(lengths, "stddev") or 0) == 0 else None
