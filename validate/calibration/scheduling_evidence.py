"""Whether the server scheduled asynchronously, told from its latencies.

A batch that is scheduled while the one before runs gives every first token one more whole cycle to
wait.  So TTFT has about 2.5 cycles of an asynchronous server (half a running step, one whole, its
own), 1.5 of a synchronous one, and a delay that does not depend on the cycle.  Where the cycle
varies, with the load, the two can be told apart, whatever the delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blis_replay.blis.latency import Lifecycle
from blis_replay.validate.bootstrap import RESAMPLES, resampled
from blis_replay.validate.calibration.evidence import LatencyEvidence
from blis_replay.validate.calibration.minimise import Floats, losses, minimise, soft_l1
from blis_replay.validate.calibration.step_form import INTERCEPT, PRE_QUEUE, StepForm

# Share of resamples that one mode has to win.
_SURE_FROM = 0.975
_START_US = (500.0, 5_000.0, 15_000.0, 30_000.0)


@dataclass(frozen=True)
class SchedulingEvidence:
    """``detected``: ``asynchronous``, ``synchronous`` or ``not told apart``; ``configured``: as the recording says.

    ``cost``: mean robust cost of a window's TTFT under (asynchronous, synchronous) scheduling, each with the
    pre-queue delay that suits it best (``pre_queue_us``).  ``asynchronous_share``: of resamples of the
    windows, those in which asynchronous scheduling fits better.
    """

    detected: str
    configured: str
    configured_source: str
    cost: tuple[float, float]
    pre_queue_us: tuple[float, float]
    asynchronous_share: float

    @property
    def contradicts(self) -> bool:
        """Whether the latencies say otherwise than the recording."""
        return self.detected not in ("not told apart", self.configured)

    @property
    def text(self) -> str:
        """The evidence in a sentence."""
        best = [
            f"{mode} {cost:.2f} with a pre-queue delay of {delay / 1000:.1f} ms"
            for mode, cost, delay in zip(("asynchronous", "synchronous"), self.cost, self.pre_queue_us, strict=True)
        ]
        return (
            f"cost of a window's TTFT: {best[0]}, {best[1]}; asynchronous fits better in "
            f"{self.asynchronous_share:.0%} of resamples"
        )


def scheduling_evidence(
    latencies: Sequence[LatencyEvidence],
    configured: str,
    configured_source: str,
    form: StepForm,
    vector: Floats,
    seed: int,
) -> SchedulingEvidence:
    """Tell the mode from TTFT, given the step time (``vector`` of ``form``).

    Raises ``ValueError`` without latencies.
    """
    tried = [_best_delay(latencies, asynchronous, form, vector) for asynchronous in (True, False)]
    cost = [losses(residuals) for _, residuals in tried]
    gain = cost[1] - cost[0]
    share = float(np.mean([gain[draw].sum() > 0 for draw in resampled(len(gain), RESAMPLES, seed)]))
    detected = "asynchronous" if share >= _SURE_FROM else "synchronous" if share <= 1 - _SURE_FROM else "not told apart"
    return SchedulingEvidence(
        detected=detected,
        configured=configured,
        configured_source=configured_source,
        cost=(float(cost[0].mean()), float(cost[1].mean())),
        pre_queue_us=(tried[0][0], tried[1][0]),
        asynchronous_share=share,
    )


def _best_delay(
    latencies: Sequence[LatencyEvidence], asynchronous: bool, form: StepForm, vector: Floats
) -> tuple[float, Floats]:
    """The pre-queue delay (us) that suits a mode best, and the TTFT residuals with it."""
    forced = [part.with_scheduling(asynchronous) for part in latencies]

    def residuals(x: Floats) -> Floats:
        return np.concatenate([p.residuals(form, x, Lifecycle()).reshape(2, -1)[1] for p in forced])

    starts = [np.where(np.arange(len(vector)) == PRE_QUEUE, start_us, vector) for start_us in _START_US]
    start = min(starts, key=lambda x: soft_l1(residuals(x)))
    found = minimise(residuals, start, form.probe_us(vector[INTERCEPT]), np.arange(len(vector)) == PRE_QUEUE)
    return float(found.vector[PRE_QUEUE]), found.residuals
