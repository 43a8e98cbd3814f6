"""Whether the server scheduled asynchronously, told from its latencies.

A batch that is scheduled while the one before runs gives every first token one more whole cycle to
wait.  So TTFT has about 2.5 cycles of an asynchronous server (half a running step, one whole, its
own), 1.5 of a synchronous one, and a delay that does not depend on the cycle.  Where the cycle
varies, with the load, the two can be told apart, whatever the delay; provided that no other wait
grows with the load as the cycle does.  The delay that each mode would need is reported too: one
that is a cycle longer than requests take to a server's queue speaks against synchronous scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.release_fit import Scheduling, Told
from blis_replay.blis.trace import Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.validate.bootstrap import RESAMPLES, resampled
from blis_replay.validate.calibration.minimise import Floats, losses

# Share of resamples that one mode has to win.
_SURE_FROM = 0.975


@dataclass(frozen=True)
class SchedulingEvidence:
    """``told``: ``asynchronous``, ``synchronous`` or ``not told apart``; ``configured``: as the recording says, and
    by what source.

    ``cost``: mean robust cost of a window when all is fitted under (asynchronous, synchronous) scheduling, and
    the pre-queue delays that come out.  ``asynchronous_share``: of resamples of the windows, those in which
    asynchronous scheduling fits better.
    """

    told: Told
    configured: Scheduling
    configured_source: str
    cost: tuple[float, float]
    pre_queue_us: tuple[float, float]
    asynchronous_share: float

    @property
    def used(self) -> Scheduling:
        """The mode to fit with: what the recording says, unless that is only a default and the latencies tell."""
        if self.told == "not told apart" or self.configured_source != "default":
            return self.configured
        return self.told

    @property
    def contradicts(self) -> bool:
        """Whether the latencies say otherwise than the recording."""
        return self.told not in ("not told apart", self.configured)

    @property
    def text(self) -> str:
        """The evidence in a sentence."""
        best = [
            f"{mode} {cost:.2f} with a pre-queue delay of {delay / 1000:.1f} ms"
            for mode, cost, delay in zip(("asynchronous", "synchronous"), self.cost, self.pre_queue_us, strict=True)
        ]
        return (
            f"cost of a window: {best[0]}, {best[1]}; asynchronous fits better in "
            f"{self.asynchronous_share:.0%} of resamples"
        )


def configured_scheduling(recording: Recording) -> tuple[Scheduling, str]:
    """``asynchronous`` or ``synchronous`` as the engine arguments have it, and the source of that argument."""
    setting = recording.engine["async_scheduling"]
    return ("asynchronous" if setting.value else "synchronous"), setting.source


def scheduling_evidence(
    residuals: tuple[Floats, Floats],
    pre_queue_us: tuple[float, float],
    window: Int64s,
    configured: tuple[Scheduling, str],
    seed: int,
) -> SchedulingEvidence:
    """Tell the mode from two fits, one under asynchronous and one under synchronous scheduling.

    ``residuals``: float64[rows] each, and ``window``: int64[rows], rows that are drawn together.
    """
    cost = [np.bincount(window, losses(part)) for part in residuals]
    gain = cost[1] - cost[0]
    share = float(np.mean([gain[draw].sum() > 0 for draw in resampled(len(gain), RESAMPLES, seed)]))
    told: Told = (
        "asynchronous" if share >= _SURE_FROM else "synchronous" if share <= 1 - _SURE_FROM else "not told apart"
    )
    return SchedulingEvidence(
        told=told,
        configured=configured[0],
        configured_source=configured[1],
        cost=(float(cost[0].mean()), float(cost[1].mean())),
        pre_queue_us=pre_queue_us,
        asynchronous_share=share,
    )
