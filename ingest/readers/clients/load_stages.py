"""Which load stage each request belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.recording import Stage

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
