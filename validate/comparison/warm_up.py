"""What the first seconds of a server, which a replay has not, do to its error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from blis_replay.base.arrays import Int64s
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.simulator import EmbeddedEngine
from blis_replay.replay.warm_up import seen_warm_up
from blis_replay.validate.metrics.observed import Selection, on_both_sides


@dataclass(frozen=True)
class WarmUp:
    """The first ``requests`` with latencies, until ``until_us`` (arrival of the last one in the run).

    ``late_us``: by how much the median of them came later than simulated.  ``p99_without``: error of TTFT at p99 over
    the others.  ``stalls``, ``stalled_us``: how many stalls they show, and how long together; ``p99_replayed``: error
    of TTFT at p99 over all requests with these replayed, None from a simulator that cannot.
    """

    requests: int
    until_us: int
    late_us: float
    p99_without: float
    stalls: int
    stalled_us: int
    p99_replayed: float | None


def warm_up(run: ReplayRun, selection: Selection) -> WarmUp | None:
    """The warm-up that a recording shows beside its replay.

    None where it shows none, has too few requests, not all of it is selected, or it is replayed.
    """
    if not selection.everything or run.plan.stalls is not None:
        return None
    chosen = on_both_sides(run)
    seen = seen_warm_up(run.recording, chosen, run.ttft_us)
    if seen is None:
        return None
    requests = run.recording.requests
    observed_us = requests["ttft_us"].fill_null(0).to_numpy()
    arrival_us, first = requests["arrival_us"].to_numpy(), np.flatnonzero(chosen)[0]
    last, others = np.flatnonzero(seen.requests)[-1], chosen & ~seen.requests
    replayed = None
    if run.simulator == EmbeddedEngine.name and run.plan.cycles is None:
        engine, plan = EmbeddedEngine(run.release, extrapolate=True), replace(run.plan, stalls=seen.stalls)
        replayed = _p99_error(engine.serve(plan).ttft_us[chosen], observed_us[chosen])
    return WarmUp(
        requests=int(seen.requests.sum()),
        until_us=int(arrival_us[last] - arrival_us[first]),
        late_us=float(np.median((observed_us - run.ttft_us)[seen.requests])),
        p99_without=_p99_error(run.ttft_us[others], observed_us[others]),
        stalls=len(seen.stalls.at_us),
        stalled_us=int(seen.stalls.longer_us.sum()),
        p99_replayed=replayed,
    )


def _p99_error(simulated_us: Int64s, observed_us: Int64s) -> float:
    return float(np.quantile(simulated_us, 0.99) / np.quantile(observed_us, 0.99) - 1)
