"""The first seconds of a server: its kernels are compiled or tuned on the first batches, which no step time knows.

The first prefills of a mixture of experts take half a second each, those of a dense model on four GPUs the first one.
It shows as first tokens that come much later than in the replay, and from some request on no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.compiled.arrays import Floats
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.metrics.observed import Selection, observed_requests
from blis_replay.validate.text.cells import percent

# So many requests in order of arrival are looked at together; in a run of fewer than this, p99 is not of them.
_TOGETHER, _FEWEST = 10, 200
# Late by this many times what 90 % of the run's requests are within, and so many times what the replay says.
_TIMES, _TIMES_REPLAYED = 3.0, 1.0
# A server may be done with one batch size and not with the next: so many groups on time do not end it.
_ON_TIME = 2


@dataclass(frozen=True)
class WarmUp:
    """The first ``requests`` with latencies, the last of which came at ``until_us`` of the run.

    ``late_us``: by how much the median of them came later than simulated.  ``p99_without``: error of TTFT at p99 over
    the others.
    """

    requests: int
    until_us: int
    late_us: float
    p99_without: float

    def __str__(self) -> str:
        """In a sentence."""
        return (
            f"warm-up: the first {self.requests} requests (until second {self.until_us / 1e6:.1f}) got first tokens "
            f"{self.late_us / 1e6:.2f} s later than simulated, for want of a warm-up; without them the TTFT error at "
            f"p99 is {percent(self.p99_without)}"
        )


def warm_up(run: ReplayRun, selection: Selection) -> WarmUp | None:
    """The warm-up that a recording shows beside its replay.

    None where it shows none, has too few requests, or not all of it is selected.
    """
    chosen = observed_requests(run.recording) & run.simulated.completed
    if chosen.sum() < _FEWEST or not selection.everything:
        return None
    observed_us = run.recording.requests["ttft_us"].to_numpy()[chosen].astype(np.float64)
    simulated_us = run.ttft_us[chosen].astype(np.float64)
    count = _slow(observed_us, simulated_us) * _TOGETHER
    if not count or len(observed_us) - count < _FEWEST:
        return None
    arrival_us = run.recording.requests["arrival_us"].to_numpy()[chosen]
    p99 = [float(np.quantile(us[count:], 0.99)) for us in (observed_us, simulated_us)]
    late_us = float(np.median((observed_us - simulated_us)[:count]))
    return WarmUp(count, int(arrival_us[count - 1] - arrival_us[0]), late_us, p99[1] / p99[0] - 1)


def _slow(observed_us: Floats, simulated_us: Floats) -> int:
    """How many groups from the first on belong to it: up to the last late one before ``_ON_TIME`` in time follow."""
    late_us = observed_us - simulated_us
    usual_us = float(np.quantile(np.abs(late_us), 0.9))
    last = 0
    for group in range(len(late_us) // _TOGETHER):
        if group - last >= _ON_TIME + bool(last):
            break
        of = slice(group * _TOGETHER, (group + 1) * _TOGETHER)
        replayed_us = float(np.median(simulated_us[of]))
        if float(np.median(late_us[of])) > max(_TIMES * usual_us, _TIMES_REPLAYED * replayed_us):
            last = group + 1
    return last
