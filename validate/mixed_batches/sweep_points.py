"""The points of a load sweep: from the load stages of a recording, else from when its requests came.

A sweep of GuideLLM sends its requests one at a time (``synchronous``), then all at once (``throughput``), then
at constant rates between the two.  Server spans alone do not name the points, but the arrivals show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.trace import Int64s
from blis_replay.ingest.recording import Recording

LoadKind = Literal["synchronous", "constant", "throughput"]
LOAD_KINDS: tuple[LoadKind, ...] = ("synchronous", "constant", "throughput")

# Fewer requests are the rest of a point whose spans were lost.
FEWEST_REQUESTS = 10

# Requests that a client sends at once arrive within this of each other.
_AT_ONCE_US = 500_000
# A lost span doubles a gap; what is longer and leaves the server idle is the pause between two points.
_PAUSE_GAPS = 2.5
# Of the requests of a point that are sent one at a time, some are stamped a little before the end of the last one.
_MOST_SYNCHRONOUS = 0.9
_BURST_SHARE = 0.1


@dataclass(frozen=True)
class SweepPoint:
    """A load of a sweep: ``requests``, their places in the recording, int64[n].

    ``rate_per_s``: as they arrived; of a constant load that of its median gap, which lost spans do not change.
    """

    kind: LoadKind
    rate_per_s: float
    requests: Int64s


def sweep_points(recording: Recording) -> tuple[SweepPoint, ...]:
    """The points of a sweep in order of time, without those of fewer than ``FEWEST_REQUESTS`` requests."""
    requests = recording.requests
    arrival_us = requests["arrival_us"].to_numpy()
    duration_us = requests["e2e_us"].fill_null(0).to_numpy()
    if recording.stages:
        stage = requests["stage"].fill_null(-1).to_numpy()
        parts = [np.flatnonzero(stage == known.stage) for known in recording.stages]
    else:
        edges = [0, *_starts(arrival_us, arrival_us + duration_us), len(arrival_us)]
        parts = [np.arange(low, high) for low, high in pairwise(edges)]
    return tuple(_point(part, arrival_us, duration_us) for part in parts if len(part) >= FEWEST_REQUESTS)


def load_kind(arrival_us: Int64s, end_us: Int64s) -> LoadKind:
    """All within a tenth of the time that serving them takes: ``throughput``; one after the other:
    ``synchronous``; else ``constant``.
    """
    if np.ptp(arrival_us) < _BURST_SHARE * (end_us.max() - arrival_us.min()):
        return "throughput"
    alone = arrival_us[1:] >= np.maximum.accumulate(end_us)[:-1]
    return "synchronous" if alone.mean() >= _MOST_SYNCHRONOUS else "constant"


def _point(part: NDArray[np.int64], arrival_us: Int64s, duration_us: Int64s) -> SweepPoint:
    arrivals = arrival_us[part]
    kind = load_kind(arrivals, arrivals + duration_us[part])
    gap_us = np.median(np.diff(arrivals)) if kind == "constant" else np.ptp(arrivals) / (len(part) - 1)
    return SweepPoint(kind, 1e6 / max(float(gap_us), 1.0), part.astype(np.int64))


def _starts(arrival_us: Int64s, end_us: Int64s) -> list[int]:
    """Places at which a point begins, the first one left out: before and after a burst, and after each pause."""
    burst = _burst(arrival_us)
    first = [burst[0]] if burst and burst[0] > 0 else []
    begin = burst[1] if burst else 0
    starts = [*first, *([begin] if 0 < begin < len(arrival_us) else [])]
    gap_us, served_us = np.diff(arrival_us), np.maximum.accumulate(end_us)
    for i in range(begin + 1, len(arrival_us)):
        # Two gaps tell a constant rate: the third cannot be longer by chance.
        if i - begin < 3 or arrival_us[i] <= served_us[i - 1]:
            continue
        if gap_us[i - 1] > _PAUSE_GAPS * np.median(gap_us[begin : i - 1]):
            starts.append(i)
            begin = i
    return starts


def _burst(arrival_us: Int64s) -> tuple[int, int] | None:
    """The longest run of requests that were sent at once, if it is one."""
    breaks = [0, *(np.flatnonzero(np.diff(arrival_us) > _AT_ONCE_US) + 1).tolist(), len(arrival_us)]
    longest = max(pairwise(breaks), key=lambda run: run[1] - run[0])
    return longest if longest[1] - longest[0] >= FEWEST_REQUESTS else None
