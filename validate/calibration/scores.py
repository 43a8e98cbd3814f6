"""What coefficients score on the parts of the runs that they were fitted on, chosen by, and never saw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blis_replay.blis.engine import simulate
from blis_replay.blis.release import ModelEntry
from blis_replay.blis.release_fit import Part, PartScore
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import plan_replay
from blis_replay.validate.calibration.evidence import with_lengths
from blis_replay.validate.metrics import LatencySamples, relative_error, statistics
from blis_replay.validate.observed import Selection, observed_requests, samples_of


def part_windows(fitted_until: float, chosen_until: float) -> dict[Part, tuple[float, float]]:
    """The parts of a temporal split that are not empty, as shares of a run."""
    edges: dict[Part, tuple[float, float]] = {
        "fit": (0.0, fitted_until),
        "choose": (fitted_until, chosen_until),
        "test": (chosen_until, 1.0),
    }
    return {part: (low, high) for part, (low, high) in edges.items() if high > low}


def part_scores(
    recordings: Sequence[Recording], entry: ModelEntry, asynchronous: bool, fitted_until: float, chosen_until: float
) -> tuple[PartScore, ...]:
    """Scores of an entry, under a scheduling mode, on each part of each recording that has latencies in it.

    Raises ``ReplayError`` as ``plan_replay`` does.
    """
    scores = []
    for recording in recordings:
        known = (recording.requests["output_tokens"] > 0).fill_null(False).to_numpy()
        recorded = observed_requests(recording) & known
        if not recorded.any():
            continue
        plan = plan_replay(
            with_lengths(recording), ReplayMode(scheduling="asynchronous" if asynchronous else "synchronous")
        )
        result = simulate(plan.trace, plan.engine, entry.latency, entry.lifecycle)
        for part, window in part_windows(fitted_until, chosen_until).items():
            chosen = recorded & result.completed & Selection(window=window).of(recording.requests)
            simulated = LatencySamples(result.ttft_us[chosen], result.e2e_us[chosen], result.output_tokens[chosen])
            if chosen.any():
                errors = _errors(samples_of(recording, chosen), simulated)
                scores.append(PartScore(recording.slug, part, window, int(np.count_nonzero(chosen)), errors))
    return tuple(scores)


def _errors(observed: LatencySamples, simulated: LatencySamples) -> dict[str, float]:
    e2e = statistics(observed.e2e_us), statistics(simulated.e2e_us)
    ttft = statistics(observed.ttft_us), statistics(simulated.ttft_us)
    pairs = {
        "e2e": (e2e[0]["mean"], e2e[1]["mean"]),
        "ttft": (ttft[0]["mean"], ttft[1]["mean"]),
        "itl": (observed.itl_mean_us, simulated.itl_mean_us),
        "e2e_p99": (e2e[0]["p99"], e2e[1]["p99"]),
        "ttft_p99": (ttft[0]["p99"], ttft[1]["p99"]),
    }
    errors = {name: relative_error(*pair) for name, pair in pairs.items()}
    return {name: round(error, 6) for name, error in errors.items() if error is not None}
