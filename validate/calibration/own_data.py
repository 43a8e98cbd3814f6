"""What a fit scores on each part of its recordings, and whether it misses what it was fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from blis_replay.blis.engine import simulate
from blis_replay.blis.releases.fit import Part, PartScore, StepRange, range_of
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import plan_replay
from blis_replay.validate.calibration.evidence import with_lengths
from blis_replay.validate.metrics.latency import LatencySamples, relative_error, statistics
from blis_replay.validate.metrics.observed import Selection, observed_requests, samples_of

# The largest error of a mean on what was fitted to: half of what a gate allows for E2E and ITL, all of it for TTFT,
# which a warm-up moves that no coefficient stands for.
MOST_MISSED = {"e2e": 0.05, "itl": 0.075, "ttft": 0.15}
# The largest mean absolute error of a window of step cycles, percent.
MOST_MISSED_CYCLE_PERCENT = 10.0


def missed(scores: Sequence[PartScore], agreement: Mapping[str, float], aliases: Mapping[str, str]) -> tuple[str, ...]:
    """In words, each number of the training data that a fit misses by more than it may; empty for a good fit.

    ``agreement``: as in ``ModelFit``; latencies count only where they were fitted to.  What only tested is left out.
    """
    found = []
    if agreement.get("cycle", 0.0) > MOST_MISSED_CYCLE_PERCENT:
        found.append(f"step cycles by {agreement['cycle']:.1f} % of a window (at most {MOST_MISSED_CYCLE_PERCENT:g} %)")
    for score in scores if "e2e" in agreement else ():
        for metric, most in MOST_MISSED.items():
            error = score.errors.get(metric)
            if score.part != "test" and error is not None and abs(error) > most:
                alias = aliases.get(score.experiment, score.experiment)
                found.append(f"{alias} ({score.part}): mean {metric.upper()} by {error:+.1%} (at most {most:.1%})")
    return tuple(found)


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
) -> tuple[tuple[PartScore, ...], StepRange | None]:
    """Scores of an entry, under a scheduling mode, on each part of each recording that has latencies in it.

    And the range of the replayed steps that came before ``chosen_until``.  Raises ``ReplayError`` as ``plan_replay``
    does.
    """
    scores, steps = [], []
    for recording in recordings:
        known = (recording.requests["output_tokens"] > 0).fill_null(False).to_numpy()
        recorded = observed_requests(recording) & known
        if not recorded.any():
            continue
        plan = plan_replay(
            with_lengths(recording), ReplayMode(scheduling="asynchronous" if asynchronous else "synchronous")
        )
        result = simulate(plan.trace, plan.engine, entry.latency, entry.lifecycle)
        trained = Selection(window=(0.0, chosen_until)).of(recording.requests)
        steps.append(result.steps[result.steps["start_us"] <= plan.trace.arrival_us[trained].max(initial=-1)])
        for part, window in part_windows(fitted_until, chosen_until).items():
            chosen = recorded & result.completed & Selection(window=window).of(recording.requests)
            simulated = LatencySamples(result.ttft_us[chosen], result.e2e_us[chosen], result.output_tokens[chosen])
            if chosen.any():
                errors = _errors(samples_of(recording, chosen), simulated)
                scores.append(PartScore(recording.slug, part, window, int(np.count_nonzero(chosen)), errors))
    return tuple(scores), range_of(steps)


def _errors(observed: LatencySamples, simulated: LatencySamples) -> dict[str, float]:
    values = []
    for side in (observed, simulated):
        e2e, ttft = statistics(side.e2e_us), statistics(side.ttft_us)
        means = {"e2e": e2e["mean"], "ttft": ttft["mean"], "itl": side.itl_mean_us}
        values.append(means | {"e2e_p99": e2e["p99"], "ttft_p99": ttft["p99"]})
    errors = {name: relative_error(value, values[1][name]) for name, value in values[0].items()}
    # A hundredth of a per cent: the recordings do not tell errors any closer.
    return {name: round(error, 4) for name, error in errors.items() if error is not None}


def lacking_ttft_us(recording: Recording, release: CoefficientRelease) -> float:
    """Median of observed less simulated TTFT, without a delay before the queue."""
    run = replay(recording, release)
    both = observed_requests(recording) & run.simulated.completed
    return float(np.median(recording.requests["ttft_us"].to_numpy()[both] - run.ttft_us[both]))
