"""Snapshots of vLLM's ``/metrics`` (Prometheus text): the cache configuration, counters and sums of latencies.

What happened between the first and the last snapshot is their difference; one snapshot alone says what
happened since the server started.  Names are those of 0.11 to 0.32; a counter of several engines is their sum.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from blis_replay.ingest.readers.documents import US_PER_S, WHOLE_RUN, aggregate_frame, finite, text, tokens, whole
from blis_replay.ingest.readers.files import RecordedFile, lines

MAX_LINE_BYTES = 64 << 10
MAX_SAMPLES = 200_000
_LABEL_TEXT = r'([a-zA-Z_]\w*+)="((?:[^"\\]|\\.)*+)",?+'
_LABEL = re.compile(_LABEL_TEXT, re.ASCII)
_LABELS = _LABEL_TEXT.replace("(?:", "<").replace("(", "(?:").replace("<", "(?:")
_SAMPLE = re.compile(rf"vllm:([a-z0-9_]++)(?:\{{((?:{_LABELS})*+)\}})? ++(\S++)(?: .*)?", re.ASCII)
_KNOWN = re.compile(rb"^(?:# (?:HELP|TYPE) )?vllm:[a-z0-9_]+", re.MULTILINE)

# Histogram -> the metric of its sum and count among the aggregates, the first name that is there.
_LATENCIES = {
    "server_ttft": ("time_to_first_token_seconds",),
    "server_itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "server_e2e": ("e2e_request_latency_seconds",),
    "server_queue": ("request_queue_time_seconds",),
    "server_prefill": ("request_prefill_time_seconds",),
    "server_decode": ("request_decode_time_seconds",),
}
_COUNTERS = {
    "server_prompt_tokens": ("prompt_tokens_total",),
    "server_output_tokens": ("generation_tokens_total",),
    "server_preemptions": ("num_preemptions_total",),
    "server_prefix_queries": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
    "server_prefix_hits": ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
}
_SUCCESS = "request_success_total"
_FAILED_REASONS = ("abort", "error")
_DRAFTS, _ACCEPTED = "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_per_pos_total"
_MAX_POSITIONS = 100


@dataclass
class Snapshot:
    """One file: ``totals`` by sample name, summed over engines; requests by the reason of their end.

    ``accepted``: drafted tokens that were accepted, by their position.  ``cache``: labels of ``cache_config_info`` by
    engine.
    """

    totals: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    accepted: dict[int, float] = field(default_factory=dict)
    cache: dict[str, dict[str, str]] = field(default_factory=dict)
    model: str | None = None

    def progress(self) -> float:
        """Grows as long as the server runs."""
        return sum(self.ended.values()) + sum(self.totals.get(names[0], 0) for names in _COUNTERS.values())


@dataclass(frozen=True)
class MetricsRead:
    """What the snapshots of a recording say.

    ``aggregates``: ``AGGREGATE_SCHEMA``, metrics ``server_...`` of the whole run.  ``engine``: engine arguments.
    ``prefix_hit_rate``: 0..1, of all prompt tokens.  ``remarks``: what could not be used.
    """

    aggregates: pl.DataFrame
    engine: Mapping[str, object]
    model: str | None
    prefix_hit_rate: float | None
    remarks: tuple[str, ...]


def recognises(head: bytes) -> bool:
    """Whether a file that begins like this is a snapshot of vLLM's metrics."""
    return _KNOWN.search(head) is not None


def read_metrics(files: Sequence[RecordedFile]) -> MetricsRead:
    """The difference of the last and the first snapshot, by what the server had done, and its configuration."""
    if not files:
        return MetricsRead(aggregate_frame(()), {}, None, None, ())
    snapshots = [(_snapshot(file), file.name) for file in files]
    snapshots.sort(key=lambda snapshot: snapshot[0].progress())
    (first, first_name), (last, last_name) = snapshots[0], snapshots[-1]
    remarks: list[str] = []
    is_before = len(snapshots) == 1 and last.totals.get(_COUNTERS["server_prompt_tokens"][0]) == 0
    if is_before:
        remarks.append(f"a second snapshot of /metrics: {first_name} is from before the first request")
    elif len(snapshots) == 1:
        remarks.append(f"a second snapshot of /metrics: {first_name} counts from the server's start")
        first = Snapshot()
    backwards = sorted(name for name, value in first.totals.items() if last.totals.get(name, value) < value)
    if backwards:
        remarks.append(
            f"what the server counted: {backwards[0]} is larger in {first_name} than in {last_name}, so the server was "
            "started again between them"
        )
    rows = (
        ()
        if backwards or is_before
        else (*_rows(first, last), (WHOLE_RUN, "server_snapshots", "count", float(len(snapshots))))
    )
    engines = list(last.cache.values())
    if any(cache_arguments(engine) != cache_arguments(engines[0]) for engine in engines):
        remarks.append(f"one cache configuration: the {len(engines)} engines of {last_name} differ, the first is used")
    of = {metric: value for _stage, metric, _statistic, value in rows}
    queries = of.get("server_prefix_queries")
    return MetricsRead(
        aggregate_frame(rows),
        {**(cache_arguments(engines[0]) if engines else {}), **({} if backwards else _speculation(first, last))},
        last.model,
        min(1.0, of.get("server_prefix_hits", 0.0) / queries) if queries else None,
        tuple(remarks),
    )


def _snapshot(file: RecordedFile) -> Snapshot:
    snapshot = Snapshot()
    for number, raw in lines(file, MAX_LINE_BYTES):
        if not raw.startswith(b"vllm:"):
            continue
        match = _SAMPLE.fullmatch(raw.decode("utf-8", "replace").rstrip())
        value = finite(match[3]) if match else None
        if match is not None and value is not None and value >= 0 and file.tally.records < MAX_SAMPLES:
            file.tally.records += 1
            _take(snapshot, match[1], dict(_LABEL.findall(match[2] or "")), value)
        elif not raw.rstrip().lower().endswith(b"nan"):
            file.tally.reject(f"line {number}", "not a sample of Prometheus text with a value")
    return snapshot


def _take(snapshot: Snapshot, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == "cache_config_info":
        if len(snapshot.cache) < 1_000:
            snapshot.cache[labels.get("engine", "0")] = dict(labels)
    elif name == _SUCCESS:
        reason = labels.get("finished_reason", "")[:20]
        if reason in snapshot.ended or len(snapshot.ended) < 100:
            snapshot.ended[reason] = snapshot.ended.get(reason, 0) + value
    elif name == _ACCEPTED:
        position = whole(labels.get("position"))
        if position is not None and position < _MAX_POSITIONS:
            snapshot.accepted[position] = snapshot.accepted.get(position, 0) + value
    elif name.endswith(("_total", "_sum", "_count")):
        snapshot.totals[name] = snapshot.totals.get(name, 0) + value
    snapshot.model = snapshot.model or labels.get("model_name")


def _rows(first: Snapshot, last: Snapshot) -> Iterator[tuple[int, str, str, float]]:
    """``(stage, metric, statistic, value)``, in us for latencies."""
    ended = {reason: value - first.ended.get(reason, 0) for reason, value in last.ended.items()}
    if ended:
        failed = sum(ended.get(reason, 0) for reason in _FAILED_REASONS)
        yield WHOLE_RUN, "server_requests", "succeeded", sum(ended.values()) - failed
        yield WHOLE_RUN, "server_requests", "failed", failed
    for metric, names in _COUNTERS.items():
        if name := next((name for name in names if name in last.totals), ""):
            yield WHOLE_RUN, metric, "sum", last.totals[name] - first.totals.get(name, 0)
    for metric, names in _LATENCIES.items():
        name = next((name for name in names if f"{name}_count" in last.totals), "")
        count, total_s = (
            last.totals.get(f"{name}_{part}", 0) - first.totals.get(f"{name}_{part}", 0) for part in ("count", "sum")
        )
        if name and count > 0:
            yield WHOLE_RUN, metric, "count", count
            yield WHOLE_RUN, metric, "mean", total_s / count * US_PER_S


def _speculation(first: Snapshot, last: Snapshot) -> dict[str, object]:
    """What speculative decoding came to: how often each position was accepted, and how often anything was drafted.

    Every step of a request but the first verifies drafts if there are any; a step gives what it accepts and one more.
    """
    counted = {name: last.totals.get(name, 0) - first.totals.get(name, 0) for name in (*last.totals, _DRAFTS)}
    drafts, positions = counted[_DRAFTS], sorted(last.accepted)
    if drafts <= 0 or positions != list(range(len(positions))) or not positions:
        return {}
    accepted = [last.accepted[position] - first.accepted.get(position, 0) for position in positions]
    if min(accepted) < 0:
        return {}
    # Counters of one moment may be a draft apart.
    shares = np.minimum.accumulate(np.minimum(np.array(accepted) / drafts, 1)).round(4).tolist()
    said: dict[str, object] = {"speculative_acceptance": shares}
    ended = sum(last.ended.values()) - sum(first.ended.values())
    verifying = counted.get("generation_tokens_total", 0) - sum(accepted) - ended
    if ended > 0 and 0 < drafts < verifying:
        said["speculative_drafted_share"] = min(round(drafts / verifying, 4), 0.9999)
    return said


def cache_arguments(cache: Mapping[str, str]) -> dict[str, object]:
    """Engine arguments as the server resolved them; what it writes as ``None`` is not known."""
    caching = {"True": True, "False": False}.get(cache.get("enable_prefix_caching", ""))
    arguments: dict[str, object] = {name: tokens(cache.get(name)) for name in ("block_size", "num_gpu_blocks")}
    arguments |= {"enable_prefix_caching": caching, "kv_cache_dtype": text(cache.get("cache_dtype"))}
    return {name: value for name, value in arguments.items() if value is not None}
