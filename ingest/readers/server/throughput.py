"""How many tokens a server generated, by its throughput lines: what it did for all of its clients.

vLLM prints one every 10 s, unless it was idle: ``Avg generation throughput: 934.6 tokens/s``, of the time since the
line before it (v1/metrics/loggers.py).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from math import inf

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.ingest.readers.server.iterations import LogStamps

_LINE = re.compile(
    r"(?:\bEngine (\d{1,6}): )?Avg prompt throughput: [\d.]{1,20} tokens/s, "
    r"Avg generation throughput: (\d{1,12}(?:\.\d{1,9})?) tokens/s"
)
MAX_LINES = 1_000_000  # of ten years at the usual interval
_FEWEST = 3  # lines of one engine, whose distance is the interval
# A server's stamps are of its local time without a zone: whole quarters of an hour from UTC, at most 14 hours.
_ZONE_S, _MOST_ZONES = 900, 56
_SKEW_S = 5.0  # between the clocks of two hosts, and for stamps in whole seconds
_COVERED = 0.5  # share of a run; lines of less say nothing of it


@dataclass
class ThroughputLines:
    """Gathers the throughput lines of a log that is read line by line."""

    _stamps: LogStamps = field(default_factory=LogStamps)
    _lines: list[tuple[int, int, float]] = field(default_factory=list)  # second, engine, tokens/s

    def take(self, line: str) -> None:
        """Read a line, if it is one."""
        match = _LINE.search(line)
        stamp_s = None if match is None else self._stamps.seconds(line)
        if match is not None and stamp_s is not None and len(self._lines) < MAX_LINES:
            self._lines.append((stamp_s, int(match[1] or 0), float(match[2])))

    def served(self, begin_s: float, end_s: float, tokens: float, *, placed: bool) -> tuple[float, float] | None:
        """The least and the most output tokens that the server generated in a run; None if that is not known.

        ``begin_s``, ``end_s``: of the run, in Unix time if ``placed``, else on any clock.  ``tokens``: what its client
        got.  The server's zone is not known, and of a clock of its own nothing is: of all places in the log that hold
        as much of the run, the one that agrees best counts.
        """
        if len(self._lines) < _FEWEST:
            return None
        at_s, engine, rate = (np.array(values, np.float64) for values in zip(*self._lines, strict=True))
        gaps_s = np.concatenate([np.diff(at_s[engine == one]) for one in np.unique(engine)])
        every_s = Counter(gaps_s[gaps_s > 0].tolist()).most_common(1)
        if not every_s:
            return None
        interval_s = every_s[0][0]
        if placed:
            of_year_s = float(LogStamps.of_unix(begin_s))
            begins = of_year_s + _ZONE_S * np.arange(-_MOST_ZONES, _MOST_ZONES + 1.0)
        else:
            begins = np.unique(np.concatenate([at_s - interval_s, at_s - interval_s / 2]))
        places = [_Place.of(at_s, rate, interval_s, begin, begin + end_s - begin_s) for begin in begins.tolist()]
        whole = max(place.covered for place in places)
        if whole < _COVERED:
            return None
        best = min((place for place in places if place.covered == whole), key=lambda place: place.off(tokens))
        return best.least, best.most


@dataclass(frozen=True)
class _Place:
    """A run at some place in a log: which share of it the lines cover, and how many tokens were generated in it."""

    covered: float
    least: float
    most: float

    @classmethod
    def of(cls, at_s: Floats, rate: Floats, interval_s: float, begin_s: float, end_s: float) -> _Place:
        """``at_s``, ``rate``: float64[n] of the lines, each about the ``interval_s`` before it."""
        first_s, last_s = at_s.min() - interval_s - _SKEW_S, at_s.max() + _SKEW_S
        held_s = max(min(last_s, end_s) - max(first_s, begin_s), 0.0)
        covered = round(held_s / max(end_s - begin_s, 1.0), 2)
        within = (at_s - interval_s >= begin_s + _SKEW_S) & (at_s <= end_s - _SKEW_S)
        near = (at_s > begin_s - _SKEW_S) & (at_s - interval_s < end_s + _SKEW_S)
        least, most = (float(rate[of].sum()) * interval_s for of in (within, near))
        return cls(covered, least, most if first_s <= begin_s and end_s <= last_s else inf)

    def off(self, tokens: float) -> float:
        """By how much these tokens lie outside."""
        return max(self.least - tokens, tokens - self.most, 0.0)
