"""A line of the benchmark table, and the time of a function."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the table: what, median seconds, peak memory in MB, a rate or remark."""

    what: str
    seconds: float
    peak_mb: float | None = None
    remark: str = ""


def timed(work: Callable[[], object]) -> float:
    """Median seconds of a function over 20 calls, after one that is not counted."""
    work()
    durations = []
    for _ in range(20):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)
