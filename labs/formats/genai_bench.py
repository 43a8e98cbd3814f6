"""genai-bench, whose file does not say when a request was sent.

Such requests cannot be placed, so they are summed up: what is kept are aggregates of those that succeeded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from blis_replay.ingest.readers.documents import US_PER_MS, US_PER_S, WHOLE_RUN, aggregate_frame, finite, text
from blis_replay.ingest.readers.files import RecordedFile, begins_with
from blis_replay.ingest.readers.formats import RequestFormat
from blis_replay.ingest.readers.records import wanted_values
from blis_replay.ingest.readers.requests import RequestsRead, no_requests

_QUANTILES = (25, 50, 75, 90, 95, 99)
_LONGEST_US = 1e15
# Metric -> its field, in the file's unit of time or in tokens.
_TIMES = {"ttft": "ttft", "e2e": "e2e_latency", "tpot_reported": "tpot"}
_COUNTS = {"prompt_tokens": "num_input_tokens", "output_tokens_reported": "num_output_tokens"}
_REQUESTS = (0, "individual_request_metrics")

recognises = begins_with(b"{", "aggregated_metrics", "num_concurrency")


def read_requests(file: RecordedFile, _stamps_path: Path) -> RequestsRead:
    """No requests, but the aggregates of those that have no error code."""
    unit = next((value for path, value in wanted_values(file, lambda path: path == (0, "_time_unit"))), "s")
    unit_us = US_PER_MS if unit == "ms" else US_PER_S
    place = (0, "aggregated_metrics", "num_concurrency")
    clients = next((finite(value) for path, value in wanted_values(file, lambda path: path == place)), None)
    fields = {name: (key, unit_us) for name, key in _TIMES.items()} | {n: (key, 1.0) for n, key in _COUNTS.items()}
    values: dict[str, list[float]] = {name: [] for name in fields}
    sent = failed = 0
    for path, record in wanted_values(file, lambda path: path[:-1] == _REQUESTS and isinstance(path[-1], int)):
        if not isinstance(record, Mapping):
            file.tally.reject(f"request {path[-1]}", "not an object with the numbers of a request")
            continue
        sent += 1
        if record.get("error_code") is not None or text(record.get("error_msg")):
            failed += 1
            continue
        for metric, (key, unit) in fields.items():
            value = finite(record.get(key))
            if value is not None and 0 <= value * unit < _LONGEST_US:
                values[metric].append(value * unit)
    file.tally.records = sent
    asked = [("concurrency", "asked", clients)] if clients and clients >= 1 else []
    aggregates = aggregate_frame((WHOLE_RUN, *row) for row in [*_aggregates(values, sent, failed), *asked])
    lacks = f"requests: genai-bench does not say when it sent them, so they cannot be placed; {file.name} is summed up"
    return no_requests("genai-bench", aggregates, lacks)


def _aggregates(values: Mapping[str, list[float]], sent: int, failed: int) -> Iterator[tuple[str, str, float]]:
    for statistic, count in (("sent", sent), ("succeeded", sent - failed), ("failed", failed)):
        yield "requests", statistic, count
    for metric, of in values.items():
        if of:
            column = np.array(of, np.float64)
            yield from ((metric, name, float(getattr(column, name)())) for name in ("mean", "min", "max"))
            for quantile, value in zip(_QUANTILES, np.percentile(column, _QUANTILES), strict=True):
                yield metric, f"p{quantile}", float(value)


FORMAT = RequestFormat("genai-bench", recognises, read=read_requests)
