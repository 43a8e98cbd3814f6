"""How the error changes from one replay of a recording to another one of the same requests."""

from __future__ import annotations

from collections.abc import Iterable

from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.metrics.latency import MetricStatistic
from blis_replay.validate.metrics.observed import observed_requests, samples_of, simulated_samples
from blis_replay.validate.metrics.uncertainty import CONFIDENCE, Estimate, change_estimates, request_order


def error_changes(
    candidate: Comparison, baseline: ReplayRun, cells: Iterable[MetricStatistic], confidence: float = CONFIDENCE
) -> dict[MetricStatistic, Estimate]:
    """The change of each absolute error against the baseline, as ``change_estimates``; of numbers with an error."""
    run, recording = candidate.run, candidate.run.recording
    recorded = observed_requests(recording)
    chosen = run.simulated.completed & baseline.simulated.completed & (recording.requests["status"] == "ok").to_numpy()
    chosen = chosen & recorded if recorded.any() else chosen
    known = {cell: candidate.estimates[cell] for cell in cells if cell in candidate.estimates}
    observed = samples_of(recording, chosen) if recorded.any() else None
    sides = simulated_samples(run, chosen), simulated_samples(baseline, chosen), observed
    return change_estimates(request_order(recording, chosen, (observed or sides[0]).e2e_us), *sides, known, confidence)
