"""How the time of some work grows with its size."""

from __future__ import annotations

import time
from collections.abc import Callable

# Four times the work takes four times as long in one pass, and 16 times if each place looks at all others.
ONE_PASS, LARGER = 10, 4
_TOO_SHORT_S = 1e-3


def growth(work: Callable[[int], object], size: int) -> float:
    """How many times as long the work of four times a size takes, by the least processor time of three of each."""
    small_s, large_s = (min(_seconds(work, times * size) for _ in range(3)) for times in (1, LARGER))
    return large_s / max(small_s, _TOO_SHORT_S)


def _seconds(work: Callable[[int], object], size: int) -> float:
    begin = time.process_time()
    work(size)
    return time.process_time() - begin
