"""inference-perf's aggregate reports: ``summary_lifecycle_metrics.json``, ``stage_N_lifecycle_metrics.json``.

Latencies are in seconds there and in microseconds here.  Values are kept as reported,
including an inter-token latency that counted two events a token; the checks correct it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.readers.documents import (
    US_PER_S,
    WHOLE_RUN,
    Reported,
    aggregate_frame,
    json_mapping,
    reported_number,
    section,
)
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.recording import Stage

_LATENCIES = {
    "request_latency": "e2e",
    "time_to_first_token": "ttft",
    "inter_token_latency": "itl_reported",
    "time_per_output_token": "tpot_reported",
    "normalized_time_per_output_token": "normalized_tpot_reported",
}
_LENGTHS = {"prompt_len": "prompt_tokens", "output_len": "output_tokens_reported"}
_RATES = ("requested_rate", "achieved_rate")


def read_aggregates(file: RecordedFile, stage: int = WHOLE_RUN) -> pl.DataFrame:
    """The report as ``AGGREGATE_SCHEMA`` rows; ``stage`` -1 is the whole run.

    Metrics: e2e, ttft, itl_reported, tpot_reported, normalized_tpot_reported,
    schedule_delay, send_duration (us); prompt_tokens, output_tokens_reported (tokens);
    requests (``succeeded``, ``failed``, ``sent``); requested_rate, achieved_rate (1/s).
    Raises :class:`RecordingError` if the file is no JSON object.  A statistic that is no
    finite number is rejected and counted.
    """
    document = json_mapping(file)
    file.tally.records = 0
    rows = [(stage, *row) for row in _rows(file, document)]
    file.tally.records = len(rows)
    return aggregate_frame(rows)


def count_of(aggregates: pl.DataFrame, stage: int) -> int | None:
    """How many requests a stage sent, by its report, or ``None``."""
    found = aggregates.filter(
        (pl.col("stage") == stage) & (pl.col("metric") == "requests") & (pl.col("statistic") == "sent")
    )
    return int(found["value"][0]) if len(found) else None


def _rows(file: RecordedFile, document: Mapping[str, Any]) -> Iterator[Reported]:
    load, good, bad = (section(document, key) for key in ("load_summary", "successes", "failures"))
    yield from reported_number(file, "requests", "sent", load.get("count"))
    yield from reported_number(file, "requests", "succeeded", good.get("count"))
    yield from reported_number(file, "requests", "failed", bad.get("count"))
    for rate in _RATES:
        yield from reported_number(file, rate, "mean", load.get(rate))
    yield from reported_number(file, "send_duration", "mean", load.get("send_duration"), US_PER_S)
    yield from _distribution(file, "schedule_delay", load.get("schedule_delay"), US_PER_S)
    latency = section(good, "latency")
    for key, metric in _LATENCIES.items():
        # 0.1 has no level "latency" between.
        yield from _distribution(file, metric, latency.get(key, good.get(key)), US_PER_S)
    for key, metric in _LENGTHS.items():
        yield from _distribution(file, metric, good.get(key), 1.0)


def _distribution(file: RecordedFile, metric: str, found: object, unit: float) -> Iterator[Reported]:
    if not isinstance(found, Mapping):
        if found is not None:
            file.tally.reject(metric, "not an object of statistics")
        return
    for statistic, value in found.items():
        name = "p50" if statistic == "median" else str(statistic)
        if name == "p50" and statistic != "median" and "median" in found:
            continue
        yield from reported_number(file, metric, name[:20], value, unit)


# inference-perf pauses 4 to 7 s between two stages, and its stages end late rather than early.
_EARLY_US = 2_000_000
_LATE_US = 15_000_000
_PAUSE_US = 1_000_000


def stage_of_requests(
    arrival_us: NDArray[np.int64], stages: Sequence[Stage], counts: Sequence[int | None]
) -> NDArray[np.int64] | None:
    """The stage number of each request in send order, or ``None`` if no stages are configured.

    ``counts``: the requests of each stage by its own report.  Where they add up, they
    decide; else time does: a stage ends at the pause nearest to its configured end.
    """
    if not stages:
        return None
    numbers = np.array([stage.stage for stage in stages], np.int64)
    known = [count for count in counts if count is not None]
    if len(known) == len(stages) and sum(known) == len(arrival_us):
        return np.repeat(numbers, known)
    starts = _stage_starts(arrival_us, stages)
    return numbers[np.searchsorted(starts, arrival_us, side="right") - 1]


def _stage_starts(arrival_us: NDArray[np.int64], stages: Sequence[Stage]) -> list[int]:
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
