"""The one rule by which a hypothesis explains an error, with its tolerances.

An error is the mean absolute difference of single requests, relative to the latencies; of a schedule, the share of its
steps that are not reached equal.  Tolerances are those that distinguish the planted faults (research/faults.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

MIN_ERROR = 0.0025  # a smaller error needs no explanation: a step caught or missed makes as much
MIN_GAIN = 0.01  # an explanation takes away at least this much
MAX_LEFT = 0.6  # an explanation leaves at most this share of the error
TIE_FACTOR = 1.3  # explanations that leave up to this factor more than the best ...
TIE_MARGIN = 0.004  # ... and this much more explain the error equally well


class _Scored(Protocol):
    @property
    def left(self) -> float:
        """The error that is left, relative."""


S = TypeVar("S", bound=_Scored)


def tie_limit(least: float) -> float:
    """The largest error left that is a tie with ``least``."""
    return TIE_FACTOR * least + TIE_MARGIN


def explains(before: float, left: float) -> bool:
    """Whether a change that leaves ``left`` of an error explains it."""
    return left <= MAX_LEFT * before and before - left >= MIN_GAIN


def worsens(before: float, left: float) -> bool:
    """Whether a change makes an error larger, by more than a step caught or missed does."""
    return left > before + MIN_ERROR


def best_first(scored: Iterable[S], most: float, *, exact: bool = False) -> list[S]:
    """The best if it leaves at most ``most``, then its ties; empty if none does.

    ``exact``: errors have no noise, so only equal ones are ties.
    """
    ranked = sorted(scored, key=lambda one: one.left)
    if not ranked or ranked[0].left > most:
        return []
    limit = ranked[0].left if exact else tie_limit(ranked[0].left)
    return [one for one in ranked if one.left <= limit]
