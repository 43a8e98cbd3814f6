"""GuideLLM's ``benchmarks.json`` or ``.yaml`` (0.3 to 0.6, 0.8): a benchmark per load level, with a record per request.

Times are epoch seconds of the client, aggregates milliseconds (``request_latency``: seconds).  Only the first and the
last event with text are stamped, and requests that were never sent are not in it.  The tool's time per output token is
``(last token - send) / n`` from 0.4 on, with the time to the first token in it.  In 0.3 it was
``(last token - first token) / n``: n intervals where there are n - 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers import documents
from blis_replay.ingest.readers.documents import (
    US_PER_MS,
    US_PER_S,
    WHOLE_RUN,
    Metric,
    at,
    finite,
    microseconds,
    section,
    text,
    tokens,
    whole,
)
from blis_replay.ingest.readers.files import HEAD_BYTES, RecordedFile
from blis_replay.ingest.readers.records import JsonPath, place_of, wanted_values
from blis_replay.ingest.readers.requests import (
    RawPrompts,
    Request,
    RequestsRead,
    UnusableError,
    columns_of,
    failure,
    field_at,
    gathered,
    request_row,
    shared_by_all,
    stage_of_sends,
)
from blis_replay.ingest.recording import Stage

# An empty object is a benchmark, so a small file could have any number.
MAX_BENCHMARKS = 10_000
MAX_YAML_BYTES = 64 << 20  # a minute and a half; a larger report can be written as JSON
_YAML = re.compile(rb"^benchmarks:[ \t]*\r?\n[ ]*- ", re.MULTILINE)
_STATUS = {"successful": "ok", "errored": "error", "incomplete": "aborted"}
# Of a benchmark: where its strategy, length and metrics stand in one generation or the other.
_SECTIONS = ("args", "config", "duration", "request_loader", "worker")
_FIELDS = {
    "request_id": field_at(text, "response_id", "request_id"),
    "prompt_tokens": field_at(tokens, "prompt_tokens"),
    "output_tokens_reported": field_at(whole, "output_tokens"),
}
_error = field_at(text, "error", "info.error")
_REPORT = (
    Metric("e2e", ("request_latency",), US_PER_S),
    Metric("ttft", ("time_to_first_token_ms",), US_PER_MS),
    Metric("itl_reported", ("inter_token_latency_ms",), US_PER_MS),
    Metric("tpot", ("time_per_output_token_ms",), US_PER_MS),
    Metric("prompt_tokens", ("prompt_token_count",)),
    Metric("output_tokens_reported", ("output_token_count",)),
    Metric("requests", ("request_totals",), statistic="succeeded"),
)
_REPORTED = {metric.paths[0] for metric in _REPORT}
TPOT_OF_0_3, TPOT = "tpot_over_n_reported", "tpot_with_ttft_reported"
# request_args is Python's own notation as a string, and JSON in 0.8; what stands before the prompt is the tool's, not
# the user's.
_ARGUMENTS = re.compile(r"(.{0,4000}?)['\"](?:prompt|messages)['\"]:", re.DOTALL)
_MAX_TOKENS = re.compile(r"['\"]max_(?:completion_)?tokens['\"]: ?(\d{1,10})\b", re.ASCII)
_IGNORE_EOS = re.compile(r"['\"]ignore_eos['\"]: ?([Tt]rue|[Ff]alse)\b")
_MODEL = re.compile(r"['\"]model['\"]: ?['\"]([^'\"\\]{1,200})['\"]")
# Of synthetic data, as key=value or in Python's notation; of several prefixes it is not known who has which.
_PREFIX = re.compile(r"\bprefix_tokens'?\s{0,9}[=:]\s{0,9}(\d{1,9})\b", re.ASCII)
_MOST_REQUESTS = (  # 0.8, 0.4 to 0.6, 0.3
    "config.constraints.max_requests.args.count",
    "config.constraints.max_requests.max_num",
    "args.max_number",
)
_LENGTH = re.compile(r"(?:^|,)\s*output_tokens=(\d{1,10})\s*(?:,|$)", re.ASCII)


@dataclass
class _Results:
    """What has been read of the file besides the requests: values at its top, and by benchmark."""

    top: dict[str, Any] = field(default_factory=dict)
    data: list[Any] = field(default_factory=list)  # where the prompts are from: arguments of 0.4 and later
    benchmarks: dict[int, dict[str, Any]] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)  # requests by benchmark
    model: str | None = None
    timed: bool = False  # records have info.timings: 0.4 and later

    def request(self, found: tuple[JsonPath, Any]) -> Request:
        """The row of a record; :class:`UnusableError` if it has none."""
        path, record = found
        if not isinstance(record, Mapping):
            raise UnusableError("no object")
        timings = section(record, "info.timings")
        timed = bool(timings)
        self.timed = self.timed or timed
        sent_us, first_us, end_us = _times(record, timings)
        if sent_us is None:
            raise UnusableError("was never sent")
        benchmark, status = int(path[2]), _STATUS[str(path[4])]
        if status == "ok" and end_us is None:
            raise UnusableError("completed, and no end that is a usable time")
        arguments = _arguments(record.get("request_args"))
        self.model = self.model or _found(_MODEL, arguments)
        self.sent[benchmark] = self.sent.get(benchmark, 0) + 1
        ignored, error = _found(_IGNORE_EOS, arguments), _error(record)
        known = columns_of(record, _FIELDS)
        if status == "aborted" and not timed:
            known["prompt_tokens"] = None  # 0.3 states the configured length here
        of_benchmark = section(self.benchmarks.get(benchmark, {}), "config")  # 0.8; before it, of the run
        by_server = timed and False not in (one.get("prefer_response_metrics") for one in (self.top, of_benchmark))
        row = request_row(
            sent_us,
            failure(error) if status == "error" else status,
            error,
            stage=benchmark,
            usage_output_tokens=known["output_tokens_reported"] if by_server else None,
            max_tokens=tokens(_found(_MAX_TOKENS, arguments)),
            ttft_us=None if first_us is None else first_us - sent_us,
            e2e_us=None if end_us is None else end_us - sent_us,
            ignore_eos=None if ignored is None else ignored.lower() == "true",
            **known,
        )
        return row, ()


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this has GuideLLM's results."""
    if _YAML.search(head):
        return any(mark in head for mark in (b"strategy_type:", b"data_column_mapper:", b"guidellm"))
    marks = (b'"guidellm_version"', b'"generative_benchmark"', b'"data_column_mapper"')
    return head.lstrip()[:1] == b"{" and b'"benchmarks"' in head and any(mark in head for mark in marks)


def read_requests(file: RecordedFile, _stamps_path: Path) -> RequestsRead:
    """The requests in file order, a load stage for each benchmark, and the tool's own aggregates.

    Requests that the end of a benchmark cut off are ``aborted``.  Lengths are the server's from 0.4 on; 0.3 always
    asks for the configured length with EOS ignored.
    """
    results = _Results()
    rows, _events = gathered(file, _records(file, results), results.request)
    length = None if results.timed else _configured_length(results)
    of_backends = (text(at(benchmark, "worker.backend_model")) for benchmark in results.benchmarks.values())
    return RequestsRead(
        rows,
        "client",
        "epoch",
        text(results.top.get("model")) or next(filter(None, of_backends), results.model),
        version=_version(results),
        stages=tuple(stage for i in sorted(results.benchmarks) if (stage := _stage(i, results))),
        aggregates=documents.aggregate_frame(_aggregates(file, results)),
        configured_output_tokens=length,
        ignore_eos=True if length else None,
        prefix=_prefix_of(results, rows.height),
    )


def _wanted(path: JsonPath) -> bool:
    if len(path) == 3:
        return path[1:] in (("metadata", "guidellm_version"), ("args", "model"), ("args", "prefer_response_metrics"))
    if path[1:-1] in (("args", "data"), ("config", "spec", "data")):
        return True
    if path[1:2] != ("benchmarks",) or len(path) < 4 or not isinstance(path[2], int):
        return False
    if len(path) == 4:
        return path[3] in _SECTIONS
    if path[3] == "requests":
        return len(path) == 6 and path[4] in _STATUS and isinstance(path[5], int)
    if path[3] == "request_totals":  # 0.3: beside the metrics
        return path[4:] == ("successful",)
    return len(path) == 6 and path[3:6:2] == ("metrics", "successful") and path[4] in _REPORTED


def _in_yaml(path: JsonPath, value: Any) -> Iterator[tuple[JsonPath, Any]]:
    """The wanted values of a document, as ``wanted_values`` finds them in JSON."""
    if _wanted(path):
        yield path, value
    elif isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _in_yaml((*path, key), inner)


def _records(file: RecordedFile, results: _Results) -> Iterator[tuple[str, tuple[JsonPath, Any]]]:
    """The records of requests with their places; what else is wanted goes to ``results``."""
    if _YAML.search(file.head(HEAD_BYTES)):
        wanted = _in_yaml((0,), documents.yaml_mapping(file, MAX_YAML_BYTES))
    else:
        wanted = wanted_values(file, _wanted)
    for path, value in wanted:
        if len(path) == 3:
            results.top[str(path[2])] = _small(value)
            continue
        if path[1] in ("args", "config"):
            if len(results.data) < 2:  # several sources do not say which prompt is whose
                results.data.append(_source(value) if path[1] == "config" else _small(value))
            continue
        benchmark = int(path[2])
        if benchmark >= MAX_BENCHMARKS:
            raise RecordingError(
                file.path, place_of(path), f"more than {MAX_BENCHMARKS:,} benchmarks", "give the file of one run"
            )
        known = results.benchmarks.setdefault(benchmark, {})
        if path[3] == "requests":
            yield place_of(path), (path, value)
        else:
            known[str(path[4] if path[3] == "metrics" else path[3])] = _small(value, 4 if path[3] == "config" else 2)


def _small(value: Any, depth: int = 2) -> Any:
    """A value without what is deep in it or long: it is kept until the end of the file."""
    if isinstance(value, Mapping):
        return {key: _small(inner, depth - 1) for key, inner in islice(value.items(), 100)} if depth else {}
    if isinstance(value, str):
        return value[:500]
    return value if value is None or isinstance(value, int | float) else ()


def _source(value: object) -> dict[str, Any]:
    """What is used of where the prompts of 0.8 are from: the first two of their prefix buckets."""
    buckets = value.get("prefix_buckets") if isinstance(value, Mapping) else None
    return {"prefix_buckets": [_small(bucket) for bucket in islice(buckets, 2)] if isinstance(buckets, list) else []}


def _times(record: Mapping[str, Any], timings: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Send, first token and end in us.  A request that was cut off has no end of its own, but the tool's."""
    sent, first, *ends = (
        (record.get("start_time"), record.get("first_token_time"), record.get("end_time"))
        if not timings
        else map(timings.get, ("request_start", "first_token_iteration", "request_end", "resolve_end"))
    )
    end_us = next((end for value in ends if (end := microseconds(value)) is not None), None)
    return microseconds(sent), microseconds(first), end_us


def _arguments(value: object) -> str:
    """The part of ``request_args`` before the prompt."""
    if not isinstance(value, str):
        return ""
    match = _ARGUMENTS.match(value)
    return match[1] if match else ""


def _found(pattern: re.Pattern[str], within: str) -> str | None:
    match = pattern.search(within)
    return match[1] if match else None


def _stage(number: int, results: _Results) -> Stage | None:
    """The benchmark as a load stage; its rate is the achieved one where none was asked for (``throughput``)."""
    benchmark = results.benchmarks[number]
    duration_us = microseconds(benchmark.get("duration"))
    if duration_us is None or duration_us <= 0:
        return None
    asked = finite(section(benchmark, "config.strategy", "args.strategy").get("rate"))
    if not asked or asked <= 0:
        return Stage(number, results.sent.get(number, 0) / (duration_us / US_PER_S), duration_us)
    most = finite(at(benchmark, *_MOST_REQUESTS))
    return stage_of_sends(number, asked, duration_us, most)


def _prefix_of(results: _Results, requests: int) -> RawPrompts | None:
    """The prefix that all synthetic prompts begin with, behind which each is drawn anew; None if that is not said."""
    said = results.data or [at(b, "request_loader.data") for b in results.benchmarks.values()]
    data = said[0] if said and said.count(said[0]) == len(said) and (len(said) == 1 or not results.data) else None
    if isinstance(data, Mapping):  # 0.8
        buckets = data.get("prefix_buckets")
        only = buckets[0] if isinstance(buckets, list) and len(buckets) == 1 and isinstance(buckets[0], Mapping) else {}
        length = whole(only.get("prefix_tokens")) if only.get("prefix_count") == 1 else None
    elif not isinstance(data, str) or "prompt_tokens" not in data or "prefix_count" in data or "buckets" in data:
        return None
    else:
        length = whole(_found(_PREFIX, data))
    source = "prompt tokens that all share, by the arguments of guidellm (prefix_tokens)"
    return None if length is None else shared_by_all(requests, length, f"{length:,} {source}")


def _configured_length(results: _Results) -> int | None:
    """The output length of 0.3's synthetic data (``prompt_tokens=80,output_tokens=35``), if all benchmarks share it."""
    asked = [at(b, "request_loader.data") for b in results.benchmarks.values()]
    lengths = {
        _found(_LENGTH, data) if isinstance(data, str) and "output_tokens_" not in data else None for data in asked
    }
    return tokens(lengths.pop()) if len(lengths) == 1 else None


def _version(results: _Results) -> str:
    """``guidellm 0.5.4``; 0.4 and 0.3 do not write their version, but their records differ."""
    return f"guidellm {text(results.top.get('guidellm_version')) or ('0.4' if results.timed else '0.3')}"


def _aggregates(file: RecordedFile, results: _Results) -> Iterator[tuple[int, str, str, float]]:
    """What each benchmark reports; for the whole run that of the only one, or means over all of them."""
    tpot = TPOT if results.timed else TPOT_OF_0_3
    metrics = [metric._replace(name=tpot) if metric.name == "tpot" else metric for metric in _REPORT]
    for number, benchmark in sorted(results.benchmarks.items()):
        for row in documents.reported(file, benchmark, metrics):
            yield number, *row
            if len(results.benchmarks) == 1:
                yield WHOLE_RUN, *row
    if len(results.benchmarks) > 1:
        yield from _pooled_means(list(results.benchmarks.values()), metrics)


def _pooled_means(
    benchmarks: Sequence[Mapping[str, Any]], metrics: Sequence[Metric]
) -> Iterator[tuple[int, str, str, float]]:
    """Means over all benchmarks, from the sums and counts that each reports."""
    for name, (key,), unit, _statistic in metrics:
        counted = [b[key] for b in benchmarks if at(b, f"{key}.count")]
        totals, counts = [finite(c.get("total_sum")) for c in counted], [whole(c["count"]) for c in counted]
        if counted and all(counts) and None not in totals:
            yield WHOLE_RUN, name, "mean", (unit or 1.0) * sum(filter(None, totals)) / sum(filter(None, counts))
