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
MAX_LINES = 1_000_000  # of 116 days at the usual interval
_FEWEST = 3  # lines of one engine, whose distance is the interval
# A server's stamps are of its local time without a zone: hours from UTC that are in use somewhere.
_ZONES_H = (*range(-12, 15), -9.5, -3.5, -2.5, 3.5, 4.5, 5.5, 5.75, 6.5, 8.75, 9.5, 10.5, 12.75, 13.75)
_LATE = 1.5  # intervals since the line before
_REGULAR = 0.6  # share of the lines that follow another after one interval, to a second
_SKEW_S = 5.0  # between the clocks of two hosts, and for stamps in whole seconds
_COVERED = 0.5  # share of a run; lines of less say nothing of it


@dataclass
class ThroughputLines:
    """Gathers the throughput lines of a log that is read line by line."""

    _stamps: LogStamps = field(default_factory=LogStamps)
    _lines: list[tuple[int, int, float]] = field(default_factory=list)  # whole second, engine, tokens/s

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
        # A line that a terminal or a second handler printed twice counts once.
        at_s, engine, rate = (np.array(of) for of in zip(*sorted(set(self._lines)), strict=True))
        since_s = np.zeros(len(at_s))
        for one in np.unique(engine):
            since_s[engine == one] = np.diff(at_s[engine == one], prepend=at_s[engine == one][0])
        every_s = Counter(since_s[since_s > 0].tolist()).most_common(1)
        if not every_s:
            return None
        interval_s = every_s[0][0]
        regular = np.abs(since_s[since_s > 0] - interval_s) <= 1
        if regular.mean() < _REGULAR or (since_s == 0).sum() > 2 * len(np.unique(engine)):
            return None  # of several servers that print alike, or more often than stamps tell apart
        # A busy server prints late, and a line before which it was idle is of one interval.
        late_s = max(_LATE * interval_s, interval_s + 1)
        lasts_s = np.where((since_s > 0) & (since_s <= late_s), since_s, interval_s)
        begins = np.unique([at_s - interval_s, at_s - interval_s / 2])
        in_utc_s = LogStamps.of_unix(begin_s) if placed else None
        if in_utc_s is not None:
            begins = in_utc_s + 3600 * np.array(_ZONES_H)
        ends = begins + (end_s - begin_s)
        so_far = np.cumsum([0.0, *lasts_s * rate])

        def before(second: Floats) -> Floats:
            found: Floats = so_far[np.searchsorted(at_s, second, "left")]
            return found

        least = np.maximum(before(ends - _SKEW_S) - before(begins + interval_s + _SKEW_S), 0)
        most = before(ends + interval_s + _SKEW_S) - before(begins - _SKEW_S)
        first_s, last_s = at_s[0] - interval_s - _SKEW_S, at_s[-1] + _SKEW_S
        held_s = np.minimum(last_s, ends) - np.maximum(first_s, begins)
        covered = (held_s / max(end_s - begin_s, 1.0)).round(2)
        if covered.max() < _COVERED:
            return None
        # A server that is stopped prints no last line, so where the lines end within a run they bound it from below.
        skew_s = _SKEW_S if in_utc_s is None else 0
        most[(begins < at_s[0] - interval_s - skew_s) | (ends > at_s[-1] + skew_s)] = inf
        off = np.maximum(np.maximum(least - tokens, tokens - most), 0)
        as_much = covered >= covered.max() - interval_s / max(end_s - begin_s, 1.0)
        best = int(np.where(as_much, off, inf).argmin())
        return float(least[best]), float(most[best])
