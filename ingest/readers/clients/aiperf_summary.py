"""AIPerf's aggregates: ``profile_export_aiperf.json``, which also has its version and configuration.

Each metric is ``{unit, avg, p1 ... p99, min, max, std}``; unset ones are left out or null.  The
inter-token latency is the mean of ``(request_latency - time_to_first_token) / (n - 1)`` over
requests, with ``n`` as counted by the tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blis_replay.ingest.readers.clients.aiperf import US_OF
from blis_replay.ingest.readers.documents import (
    WHOLE_RUN,
    Reported,
    aggregate_frame,
    finite,
    json_mapping,
    reported_number,
    section,
    text,
    tokens,
)
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import RequestsRead, frame_of
from blis_replay.ingest.rows import rows_of

_LATENCIES = {"request_latency": "e2e", "time_to_first_token": "ttft", "inter_token_latency": "itl_reported"}
_LENGTHS = {"input_sequence_length": "prompt_tokens", "output_sequence_length": "output_tokens_reported"}
_COUNTS = {"request_count": "succeeded", "error_request_count": "failed"}
_STATISTIC = re.compile(r"avg|min|max|p\d{1,2}(?:\.\d{1,4})?", re.ASCII)


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is AIPerf's summary of a run."""
    keys = (b'"request_throughput"', b'"request_latency"', b'"unit"')
    return head.lstrip()[:1] == b"{" and all(key in head for key in keys)


def read_requests(file: RecordedFile, _events_path: Path) -> RequestsRead:
    """No requests, but the aggregates of the run, its version, model and what its requests asked for.

    Raises :class:`RecordingError` if the file is no JSON object.
    """
    document = json_mapping(file)
    document.update(section(document, "records"))  # 0.1
    aggregates = aggregate_frame((WHOLE_RUN, *row) for row in _reported(file, document))
    file.tally.records = len(aggregates)
    configured = section(document, "input_config")
    length = _configured_length(configured)
    version = text(document.get("aiperf_version"))
    return RequestsRead(
        rows_of(frame_of(())),
        "client",
        "epoch",
        _model(configured),
        version=f"aiperf {version}" if version else "aiperf",
        aggregates=aggregates,
        configured_output_tokens=length,
        ignore_eos=_ignores_eos(configured),
        lacks=("requests: AIPerf's summary has aggregates only; profile_export.jsonl has the requests",),
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
        extra = {pair[0]: pair[1] for pair in extra if isinstance(pair, list) and len(pair) == 2 and _is_text(pair[0])}
    asked = extra.get("ignore_eos") if isinstance(extra, Mapping) else None
    return asked if isinstance(asked, bool) else None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _configured_length(configured: Mapping[str, Any]) -> int | None:
    """The length that every request asked for, if all asked for the same."""
    lengths = section(configured, "input", "prompt", "output_tokens") or section(
        {"dataset": _first(configured.get("datasets"))}, "dataset", "prompts", "osl"
    )
    return tokens(lengths.get("mean")) if finite(lengths.get("stddev") or 0) == 0 else None
