"""llmperf and genai-bench, whose files do not say when a request was sent.

Such requests cannot be placed, so they are summed up: what is kept are aggregates of those that succeeded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from blis_replay.ingest.readers.documents import WHOLE_RUN, aggregate_frame, finite, text
from blis_replay.ingest.readers.files import RecordedFile, begins_with
from blis_replay.ingest.readers.formats import RequestFormat
from blis_replay.ingest.readers.records import JsonPath, wanted_values
from blis_replay.ingest.readers.requests import RequestsRead, no_requests

_QUANTILES = (25, 50, 75, 90, 95, 99)
_LONGEST_US = 1e15
# Metric -> the names of its field, which are in seconds (genai-bench: in its `_time_unit`) or tokens.
_TIMES = {
    "ttft": ("ttft_s", "ttft"),
    "e2e": ("end_to_end_latency_s", "e2e_latency"),
    "itl_reported": ("inter_token_latency_s",),
    "tpot_reported": ("tpot",),
}
_COUNTS = {
    "prompt_tokens": ("number_input_tokens", "num_input_tokens"),
    "output_tokens_reported": ("number_output_tokens", "num_output_tokens"),
}


recognises_llmperf = begins_with(b"[", "error_code", "ttft_s", "end_to_end_latency_s", "number_input_tokens")


recognises_genai_bench = begins_with(b"{", "aggregated_metrics", "num_concurrency")


def read_llmperf(file: RecordedFile, _stamps_path: Path) -> RequestsRead:
    """No requests, but the aggregates of those that have no error."""
    return _summed_up(file, "llmperf", (0,), 1e6)


def read_genai_bench(file: RecordedFile, _stamps_path: Path) -> RequestsRead:
    """No requests, but the aggregates of those that have no error code."""
    unit = next((value for path, value in wanted_values(file, lambda path: path == (0, "_time_unit"))), "s")
    place = (0, "aggregated_metrics", "num_concurrency")
    clients = next((finite(value) for path, value in wanted_values(file, lambda path: path == place)), None)
    return _summed_up(file, "genai-bench", (0, "individual_request_metrics"), 1e3 if unit == "ms" else 1e6, clients)


def _summed_up(
    file: RecordedFile, tool: str, where: JsonPath, unit_us: float, clients: float | None = None
) -> RequestsRead:
    values: dict[str, list[float]] = {name: [] for name in (*_TIMES, *_COUNTS)}
    sent = failed = 0
    for path, record in wanted_values(file, lambda path: path[:-1] == where and isinstance(path[-1], int)):
        if not isinstance(record, Mapping):
            file.tally.reject(f"request {path[-1]}", "not an object with the numbers of a request")
            continue
        sent += 1
        if record.get("error_code") is not None or text(record.get("error_msg")):
            failed += 1
            continue
        for metric, value in _numbers(record, unit_us):
            values[metric].append(value)
    file.tally.records = sent
    asked = [("concurrency", "asked", clients)] if clients and clients >= 1 else []
    aggregates = aggregate_frame((WHOLE_RUN, *row) for row in [*_aggregates(values, sent, failed), *asked])
    lacks = f"requests: {tool} does not say when it sent them, so they cannot be placed; {file.name} is summed up"
    return no_requests(tool, aggregates, lacks)


def _numbers(record: Mapping[str, Any], unit_us: float) -> Iterator[tuple[str, float]]:
    for fields, unit in ((_TIMES, unit_us), (_COUNTS, 1.0)):
        for metric, names in fields.items():
            value = next((number for name in names if (number := finite(record.get(name))) is not None), None)
            if value is not None and 0 <= value * unit < _LONGEST_US:
                yield metric, value * unit


def _aggregates(values: Mapping[str, list[float]], sent: int, failed: int) -> Iterator[tuple[str, str, float]]:
    for statistic, count in (("sent", sent), ("succeeded", sent - failed), ("failed", failed)):
        yield "requests", statistic, count
    for metric, of in values.items():
        if of:
            column = np.array(of, np.float64)
            yield metric, "mean", float(column.mean())
            yield metric, "min", float(column.min())
            yield metric, "max", float(column.max())
            for quantile, value in zip(_QUANTILES, np.percentile(column, _QUANTILES), strict=True):
                yield metric, f"p{quantile}", float(value)


LLMPERF = RequestFormat("llmperf", recognises_llmperf, read=read_llmperf)
GENAI_BENCH = RequestFormat("genai-bench", recognises_genai_bench, read=read_genai_bench)
