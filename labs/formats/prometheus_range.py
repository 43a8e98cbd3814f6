"""A range of vLLM's ``/metrics`` as a Prometheus server answers it (``/api/v1/query_range``): production counters.

Nothing says when a single request came, so requests are rebuilt from what was counted between two samples.  Closer
samples place them better.  Each window of time is a load stage, with mean lengths and latencies as the server counted
them.  Ask for all of it in one answer, e.g. ``query={__name__=~"vllm:.*"}&start=...&end=...&step=1s``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.documents import US_PER_S, WHOLE_RUN, Reported, aggregate_frame, finite, text
from blis_replay.ingest.readers.files import RecordedFile, begins_with
from blis_replay.ingest.readers.formats import RequestFormat
from blis_replay.ingest.readers.records import wanted_values
from blis_replay.ingest.readers.requests import READ_SCHEMA, RequestsRead, ServerFacts
from blis_replay.ingest.readers.server.metrics import cache_arguments
from blis_replay.ingest.recording import ENDED, Stage
from blis_replay.ingest.rows import rows_of, shaped
from blis_replay_labs.formats.rebuilt_requests import (
    CACHED,
    ENDS,
    FAILURES,
    FIRST_TOKENS,
    OUTPUTS,
    PROMPTS,
    RUNNING,
    SUCCESS,
    WAITING,
    came,
    lost,
    rebuilt_requests,
)

_FAILED = ("abort", "error")
_GAUGES = (RUNNING, WAITING)
_SERVER = ("model_name", "namespace", "pod", "instance")  # labels of one server; its engines are added
# Histogram -> the metric of its mean; times in seconds, lengths in tokens.
_TIMES = {
    "ttft": FIRST_TOKENS,
    "e2e": ENDS,
    "server_queue": "request_queue_time_seconds",
    "server_prefill": "request_prefill_time_seconds",
    "server_decode": "request_decode_time_seconds",
}
_LENGTHS = {"prompt_tokens": "request_prompt_tokens", "output_tokens_reported": OUTPUTS}
_BOUNDED = ("ttft", "e2e")  # those whose quantiles lie in a bucket of a histogram
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_SHORTEST_WINDOW_S = 15.0  # of fewer requests a window says little
_MOST_WINDOWS = 100
_QUICKLY = 0.1  # quantile of the times between changes that shows how often a busy server is asked
_ALIKE = 0.7  # share of these times that are one number of steps, where scrapes keep pace with the steps
_MOST_SAMPLES = 5_000_000
_MOST_REQUESTS = 5_000_000
# Share of the requests, and requests, that may have failed; beyond both the load that was served is unknown.
_LOST_SHARE, _LOST = 0.01, 3
_TOO_SHORT = "fewer than two samples, or no requests", "ask for a longer range"

recognises = begins_with(b"{", "resultType", "matrix", "__name__")


def read_range(file: RecordedFile, _stamps_path: Path) -> RequestsRead:
    """Aggregates by window and of the whole range, and a load stage for each window.

    Raises :class:`RecordingError` for a range without two common samples, without requests, or in which a counter
    falls (the server was started again).
    """
    series, model = _series(file)
    wanted = [f"{name}_{part}" for name in (*_TIMES.values(), *_LENGTHS.values()) for part in ("sum", "count")]
    lacking = [name for name in (SUCCESS, *_GAUGES, PROMPTS, *wanted[:4], *wanted[-4:]) if name not in series]
    if lacking:
        problem = f"no samples of vllm:{lacking[0]}"
        raise RecordingError(file.path, "", problem, 'ask for all of the server: query={__name__=~"vllm:.*"}')
    common = sorted(set.intersection(*(set(of) for of in series.values())))
    if fallen := [name for name, of in series.items() if name not in _GAUGES and _falls([of[t] for t in common])]:
        problem = f"vllm:{fallen[0]} falls: the server was started again in this range"
        raise RecordingError(file.path, "", problem, "ask for a range without a restart")
    scrapes, stale_s = _scrapes(common, series)
    common = _begun(scrapes, series)
    edges = _edges(common, series)
    if len(edges) < 2:
        raise RecordingError(file.path, "", *_TOO_SHORT)
    samples = {name: np.array([of[time_s] for time_s in common]) for name, of in series.items()}
    gone = _refuse_what_cannot_be_rebuilt(file, samples)
    requests = rebuilt_requests(np.array(common), samples, stale_s)
    # Windows count from the first request on, as its arrival is the zero of all others.
    edges[0] = float(requests["sent_us"].min()) / US_PER_S  # type: ignore[arg-type]
    at = {name: np.concatenate([of[:1], of[np.searchsorted(common, edges[1:])]]) for name, of in samples.items()}
    stages = tuple(
        Stage(i, count / (end_s - start_s), round((end_s - start_s) * US_PER_S))
        for i, (start_s, end_s, count) in enumerate(zip(edges, edges[1:], np.diff(came(at)), strict=False))
    )
    rows = [(i, *row) for i in range(len(stages)) for row in _reported(at, slice(i, i + 2), slice(None))]
    rows += [(WHOLE_RUN, *row) for row in _reported(at, slice(None, None, len(stages)), slice(None))]
    rows += [(WHOLE_RUN, *row) for row in _bounds(at)]
    stage = np.searchsorted(np.array(edges[1:-1]), requests["sent_us"].to_numpy() / US_PER_S, side="right")
    columns = {name: pl.col(name) for name in requests.columns}
    columns |= {"stage": pl.lit(pl.Series(stage)), "status": pl.lit("ok")}
    columns["output_tokens_source"] = pl.lit("server usage")
    in_flight = float(at[RUNNING][0] + at[WAITING][0])
    remarks = [f"single requests: rebuilt from {len(common):,} samples of {file.name}"]
    remarks += ["the client's side: times are the server's"]
    remarks += [f"what {gone:g} requests got that failed or were given up; taken as served"] if gone else []
    remarks += [f"what {in_flight:g} requests were that were in flight when the range began"] if in_flight else []
    return RequestsRead(
        rows_of(shaped(requests, READ_SCHEMA, columns)),
        "server",
        "epoch",
        version="range of /metrics",
        aggregates=aggregate_frame(rows),
        remarks=tuple(remarks),
        stages=stages,
        model=model,
        placed="rebuilt from what a server counted between two samples",
    )


def _refuse_what_cannot_be_rebuilt(file: RecordedFile, samples: Mapping[str, Floats]) -> float:
    """Raise :class:`RecordingError` for too few, too many or unserved requests; how many were not served."""
    sent, gone = float(np.ptp(came(samples))), lost(samples)
    counted = [float(np.ptp(samples[f"{name}_count"])) for name in (FIRST_TOKENS, ENDS, OUTPUTS)]
    if min(counted) < 1:
        raise RecordingError(file.path, "", *_TOO_SHORT)
    if max(sent, *counted) > _MOST_REQUESTS:
        raise RecordingError(file.path, "", f"more than {_MOST_REQUESTS:,} requests", "ask for a shorter range")
    if gone > max(_LOST_SHARE * sent, _LOST):
        problem = f"{gone:,.0f} of {sent:,.0f} requests failed or were given up, so the load that was served is unknown"
        raise RecordingError(file.path, "", problem, "ask for a range in which requests are served")
    return gone


def server_of_range(file: RecordedFile) -> ServerFacts:
    """What the server says of its KV cache (``cache_config_info``), as far as all of its engines say the same."""
    said: list[dict[str, object]] = []
    for _path, labels in wanted_values(file, lambda path: len(path) == 5 and path[-1] == "metric"):
        if isinstance(labels, Mapping) and labels.get("__name__") == "vllm:cache_config_info" and len(said) < 1_000:
            said.append(cache_arguments({str(k): str(v) for k, v in labels.items()}))
    alike = {
        name: value for name, value in (said[0] if said else {}).items() if all(e.get(name) == value for e in said)
    }
    return ServerFacts(engine=alike, name=file.name)


def _series(file: RecordedFile) -> tuple[dict[str, dict[float, float]], str | None]:
    """Samples by name and time, summed over engines and labels, and the model.

    Raises :class:`RecordingError` for several servers or models, and for too many samples.
    """
    series: dict[str, dict[float, float]] = {}
    model, name = None, ""
    known = {
        *(SUCCESS, PROMPTS, *CACHED, *_GAUGES),
        *(f"{n}_{p}" for n in (*_TIMES.values(), *_LENGTHS.values()) for p in ("sum", "count")),
    }
    known |= {f"{_TIMES[metric]}_bucket" for metric in _BOUNDED}
    servers: set[tuple[object, ...]] = set()
    for path, value in wanted_values(file, lambda path: len(path) == 5 and path[-1] in ("metric", "values")):
        if path[-1] == "metric":
            labels = value if isinstance(value, Mapping) else {}
            name = str(labels.get("__name__", "")).removeprefix("vllm:")
            if name not in known or (labels.get("le", "+Inf") != "+Inf" and finite(labels["le"]) is None):
                name = ""
                continue
            servers.add(tuple(labels.get(label) for label in _SERVER))
            if len(servers) > 1:
                one, other = sorted(", ".join(map(str, filter(None, of))) for of in list(servers)[:2])
                problem = f"samples of several servers or models ({one}; {other})"
                raise RecordingError(file.path, "", problem, 'ask for one, e.g. {model_name="...", instance="..."}')
            failed = name == SUCCESS and labels.get("finished_reason") in _FAILED
            name = FAILURES if failed else f"{name} {labels['le']}" if "le" in labels else name
            model = model or text(labels.get("model_name"))
            continue
        for sample in value if isinstance(value, list) and name else ():
            time_s, number = map(finite, sample) if _is_pair(sample) else (None, None)
            if file.tally.records >= _MOST_SAMPLES:
                problem = f"more than {_MOST_SAMPLES:,} samples"
                raise RecordingError(file.path, "", problem, "ask for a shorter range, or a larger step")
            if time_s is None or number is None or number < 0:
                file.tally.reject(name, "not a sample: [time, value]")
                continue
            file.tally.records += 1
            of = series.setdefault(name, {})
            of[time_s] = of.get(time_s, 0.0) + number
    return series, model


def _is_pair(sample: object) -> bool:
    return isinstance(sample, list) and len(sample) == 2


def _falls(values: list[float]) -> bool:
    return any(after < before for before, after in pairwise(values))


def _scrapes(common: list[float], series: Mapping[str, Mapping[float, float]]) -> tuple[list[float], float]:
    """The samples with which the server was asked anew: until the next, Prometheus repeats the last.

    And how old one may be, in s: up to a step, unless scrapes are a whole number of steps apart.
    """
    state = {time_s: [of[time_s] for of in series.values()] for time_s in common}
    changed = [time_s for before, time_s in pairwise(common) if state[before] != state[time_s]]
    if len(changed) < 2:
        return common, 0.0
    gaps_s, step_s = np.diff(changed), float(np.diff(common).min())
    apart_s, steps = float(np.quantile(gaps_s, _QUICKLY)), np.rint(gaps_s / step_s)
    stale_s = 0.0 if np.unique(steps, return_counts=True)[1].max() > _ALIKE * len(steps) else step_s
    kept = common[:1]
    for time_s in common[1:]:
        if state[time_s] != state[kept[-1]] or time_s - kept[-1] >= apart_s:
            kept.append(time_s)
    return kept, stale_s


def _begun(common: list[float], series: Mapping[str, Mapping[float, float]]) -> list[float]:
    """The samples from the last on before something came or ended."""
    state = [tuple(series[name][time_s] for name in (SUCCESS, *_GAUGES)) for time_s in common]
    first = next((i for i, of in enumerate(state) if of != state[0]), 1)
    return common[max(first - 1, 0) :]


def _edges(common: list[float], series: Mapping[str, Mapping[float, float]]) -> list[float]:
    """Where windows begin and end: as short as they may be, each with a request that came and one that ended.

    The last goes on to the end of the range.
    """
    edges = common[:1]
    window_s = max(_SHORTEST_WINDOW_S, (common[-1] - common[0]) / _MOST_WINDOWS) if common else 0.0
    for time_s in common[1:]:
        at = {name: np.array([of[edges[-1]], of[time_s]]) for name, of in series.items()}
        if time_s - edges[-1] >= window_s and np.diff(came(at))[0] >= 1 and np.diff(at[SUCCESS])[0] >= 1:
            edges.append(time_s)
    return [*edges[:-1], common[-1]] if len(edges) > 1 else edges


def _reported(at: Mapping[str, Floats], window: slice, whole: slice) -> Iterator[Reported]:
    """What the counters say of a window; lengths of the ``whole`` range where nothing ended in it."""
    edges = {name: of[window] for name, of in at.items()}
    yield "requests", "sent", float(np.ptp(came(edges)[[0, -1]]))
    yield "requests", "succeeded", float(np.ptp(edges[SUCCESS]))
    yield "requests", ENDED, float(np.ptp(edges[SUCCESS]))
    for metric, name in {**_TIMES, **_LENGTHS}.items():
        unit = US_PER_S if metric in _TIMES else 1
        for of in (edges, {known: values[whole] for known, values in at.items()} if metric in _LENGTHS else {}):
            counts = of.get(f"{name}_count")
            if counts is not None and np.ptp(counts) > 0:
                yield metric, "mean", float(np.ptp(of[f"{name}_sum"]) / np.ptp(counts) * unit)
                break


def _bounds(at: Mapping[str, Floats]) -> Iterator[Reported]:
    """Between which bounds of its bucket each quantile of the whole range lies, us; nothing above the last bound."""
    for metric in _BOUNDED:
        name = f"{_TIMES[metric]}_bucket "
        buckets = sorted((float(key[len(name) :]), float(np.ptp(of))) for key, of in at.items() if key.startswith(name))
        edges_s, counts = [0.0, *(edge for edge, _ in buckets)], [count for _, count in buckets]
        for quantile, share in _QUANTILES.items():
            i = next((i for i, count in enumerate(counts) if count >= share * counts[-1] > 0), None)
            if i is not None and np.isfinite(edges_s[i + 1]):
                yield metric, f"{quantile} from", edges_s[i] * US_PER_S
                yield metric, f"{quantile} to", edges_s[i + 1] * US_PER_S


FORMAT = RequestFormat("prometheus-range", recognises, server=server_of_range, read=read_range)
