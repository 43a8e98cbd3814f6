"""Scores of a fit on each part of its recordings, misses of its training data, and the time of recurring stalls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.base.errors import counted
from blis_replay.blis.latency.models import FirstUse
from blis_replay.blis.releases.fit import CoefficientFit, Part, PartScore, StepRange, range_of
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.result import SimResult
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import ReplayPlan, plan_replay
from blis_replay.replay.warm_up import Stalls, seen_warm_up
from blis_replay.validate.fit.evidence import (
    SCALE,
    Gathered,
    LoadLevel,
    is_load_level,
    known_architecture,
    load_level,
    with_lengths,
)
from blis_replay.validate.fit.model_fit import Fitted
from blis_replay.validate.fit.step_form import INTERCEPT
from blis_replay.validate.metrics.latency import LatencySamples, latency_statistics, relative_error
from blis_replay.validate.metrics.observed import Selection, observed_requests, samples_of

# The largest error of a mean on what was fitted to: half of what a gate allows for E2E and ITL, all of it for TTFT,
# which a warm-up moves that no coefficient stands for.
MOST_MISSED = {"e2e": 0.05, "itl": 0.075, "ttft": 0.15}
# The largest mean absolute error of a window of step cycles, percent.
MOST_MISSED_CYCLE_PERCENT = 10.0


def missed(
    scores: Sequence[PartScore], agreement: Mapping[str, float], recordings: Sequence[Recording], *, later: bool = False
) -> tuple[str, ...]:
    """In words, each number of the training data that a fit misses by more than allowed; empty for a good fit.

    ``agreement``: as in ``ModelFit``; latencies count only where they were fitted to.  ``later``: of the test parts,
    which the fit has not seen, and with twice the limits, instead.  A load level has few requests, and their draw moves
    its TTFT by a tenth: the mean absolute error over levels counts.
    """
    misses = []
    aliases = {recording.slug: recording.alias for recording in recordings if not is_load_level(recording)}
    levels = [score.errors for score in scores if score.experiment not in aliases] if "e2e" in agreement else []
    levels = [] if later else levels
    for metric, most in MOST_MISSED.items() if levels else ():
        off = float(np.mean([abs(errors.get(metric, 0.0)) for errors in levels]))
        if off > most:
            named = counted(len(levels), "load level")
            misses.append(f"{named}: mean {metric.upper()} by {off:.1%} on average (at most {most:.1%})")
    if agreement.get("cycle", 0.0) > MOST_MISSED_CYCLE_PERCENT:
        misses.append(
            f"step cycles by {agreement['cycle']:.1f} % of a window (at most {MOST_MISSED_CYCLE_PERCENT:g} %)"
        )
    for score in scores if "e2e" in agreement else ():
        for metric, limit in MOST_MISSED.items() if score.experiment in aliases else ():
            error, most = score.errors.get(metric), 2 * limit if later else limit
            if (score.part == "test") == later and error is not None and abs(error) > most:
                named = f"{aliases[score.experiment]} ({score.part})"
                misses.append(f"{named}: mean {metric.upper()} by {error:+.1%} (at most {most:.1%})")
    return tuple(misses)


# Pieces of each run: a stall that recurs is in most of them.
_PIECES = 10
# Least share of E2E that recurring stalls must take; less is within the interval of a run of many minutes.
_RECURS = 0.003


def with_stalls(gathered: Gathered, fitted: Fitted) -> tuple[Fitted, float]:
    """The fit with the time of recurring stalls, and how much that adds to each step, us; 0 where none recur.

    A robust fit is the level between stalls.  A single stall is in few pieces of the run and stays out.  Recurring
    stalls are in most pieces: the mean of their middle half is longer than the fit.  Bounds then reach from the level
    without stalls to the one with them.
    """
    off = _of_pieces(gathered, fitted.minimum.residuals)
    if not len(off) or not fitted.free[INTERCEPT]:
        return fitted, 0.0
    per_us = float(_of_pieces(gathered, fitted.minimum.slopes.mean(axis=0)[:, INTERCEPT]).mean())
    quarter = len(off) // 4
    missing = -float(np.sort(off)[quarter : len(off) - quarter].mean())
    if missing < _RECURS or per_us <= 0:
        return fitted, 0.0
    more_us = missing / per_us
    vector, high = fitted.minimum.vector.copy(), fitted.bounds.high.copy()
    vector[INTERCEPT] += more_us
    high[INTERCEPT] += more_us
    minimum, bounds = replace(fitted.minimum, vector=vector), replace(fitted.bounds, high=high)
    return replace(fitted, minimum=minimum, bounds=bounds), more_us


def _of_pieces(gathered: Gathered, rows: Floats) -> Floats:
    """float64[pieces]: residuals of E2E (or slopes of them), as fractions of the mean E2E of each piece of a run."""
    first, fractions = sum(len(part.decodes) for part in gathered.cycles), []
    for part in gathered.latencies:
        windows = len(part.decodes)
        if not part.of_levels:  # those have no pieces of time
            weight = part.observed_us[0] * np.bincount(part.window[part.window >= 0])
            e2e = SCALE["e2e"] * rows[first : first + windows]
            pieces = np.array_split(np.arange(windows), min(_PIECES, windows))
            fractions += [float(np.average(e2e[piece], weights=weight[piece])) for piece in pieces]
        first += len(part.metrics) * windows
    return np.array(fractions)


# Edges of a temporal split, as shares of a run: begin, fitted until, form chosen until, end.
Edges = tuple[float, float, float, float]
_PARTS: tuple[Part, ...] = ("fit", "choose", "test")


def part_scores(
    recordings: Sequence[Recording],
    entry: ModelEntry,
    mode: ReplayMode,
    edges: Edges,
    stalls: Mapping[str, Stalls] = MappingProxyType({}),
) -> tuple[tuple[PartScore, ...], StepRange | None]:
    """Scores of an entry on each part of each recording with latencies, and the range of the replayed steps.

    ``stalls``: by slug, replayed beside the coefficients.  The range has the steps up to where the form was chosen.
    Raises ``ReplayError`` as ``plan_replay`` does.
    """
    scores, steps = [], []
    for recording in recordings:
        if is_load_level(recording):
            level, result = served(recording, entry, mode.scheduling)
            simulated = LatencySamples(result.ttft_us, result.e2e_us, result.output_tokens)
            steps.append(result.steps)
            errors = _errors(level.numbers, simulated)
            scores.append(PartScore(recording.slug, "fit", 0.0, 1.0, len(result.e2e_us), errors))
            continue
        has_tokens = (recording.requests["output_tokens"] > 0).fill_null(False).to_numpy()
        recorded = observed_requests(recording) & has_tokens
        if not recorded.any():
            continue
        plan, result = _replayed(recording, entry, mode, None if entry.first_use else stalls.get(recording.slug))
        arrival_us = plan.trace.arrival_us[Selection(window=(edges[0], edges[2])).of(recording.requests)]
        start_us = result.steps["start_us"]
        steps.append(result.steps[(start_us >= arrival_us[:1].sum()) & (start_us <= arrival_us.max(initial=-1))])
        for part, window in zip(_PARTS, pairwise(edges), strict=True):
            if window[0] == window[1]:
                continue
            chosen = recorded & result.completed & Selection(window=window).of(recording.requests)
            simulated = LatencySamples(result.ttft_us[chosen], result.e2e_us[chosen], result.output_tokens[chosen])
            if chosen.any():
                errors = _errors(latency_statistics(samples_of(recording, chosen), None), simulated)
                scores.append(PartScore(recording.slug, part, *window, int(np.count_nonzero(chosen)), errors))
    return tuple(scores), range_of(steps)


def first_use_of(
    recordings: Sequence[Recording], entry: ModelEntry, mode: ReplayMode
) -> tuple[FirstUse, CoefficientFit] | None:
    """How long a new server waits for each kernel of a mixture of experts, and the record of it.

    The median of the stalls that first tokens show beside a replay.  Those shorter than half the longest may be a
    prefill of all that waited, and do not count.  None for a dense or unknown model, and without stalls.
    """
    architecture = known_architecture(recordings[0])
    if architecture is None or not architecture.experts:
        return None
    stalls_us, seen_in = [], []
    for recording in recordings:
        if is_load_level(recording) or not (recorded := observed_requests(recording)).any():
            continue
        _, result = _replayed(recording, entry, mode)
        warm_up = seen_warm_up(recording, recorded & result.completed, result.ttft_us)
        if warm_up is not None:
            stalls_us += [*warm_up.stalls.longer_us]
            seen_in.append(recording.alias)
    kernels_us = np.array([us for us in stalls_us if 2 * us >= max(stalls_us)])
    if not len(kernels_us):
        return None
    # Hundredths of a second: stalls of one kernel differ by that.
    value_us, low_us, high_us = (round(float(us), -4) for us in np.quantile(kernels_us, [0.5, 0, 1]))
    runs = " and ".join(seen_in)
    remark = f"median of {len(kernels_us)} stalls in the first seconds of {runs}; bounds of single stalls"
    fit = CoefficientFit("first_use", value_us, low_us, high_us, "measured", remark)
    return FirstUse(round(value_us), architecture.experts, architecture.experts_per_token, remark), fit


def _replayed(
    recording: Recording, entry: ModelEntry, mode: ReplayMode, stalls: Stalls | None = None
) -> tuple[ReplayPlan, SimResult]:
    """The replay of a recording by an entry, with stalls if there are any."""
    plan = replace(plan_replay(with_lengths(recording), mode, entry), stalls=stalls)
    return plan, plan.served(plan.latency(entry.latency), entry.lifecycle)


def served(
    recording: Recording, entry: ModelEntry, scheduling: Literal["recorded", "asynchronous", "synchronous"]
) -> tuple[LoadLevel, SimResult]:
    """A load level, and its simulation."""
    level = load_level(recording, scheduling)
    return level, level.plan.served(entry.latency, entry.lifecycle)


def _errors(observed: Mapping[str, Mapping[str, float]], simulated: LatencySamples) -> dict[str, float]:
    expected, errors = latency_statistics(simulated, None), {}
    for metric, statistic in (("e2e", "mean"), ("ttft", "mean"), ("itl", "mean"), ("e2e", "p99"), ("ttft", "p99")):
        error = relative_error(observed[metric].get(statistic), expected[metric].get(statistic))
        if error is not None:
            # A hundredth of a per cent: the recordings do not tell errors any closer.
            errors[metric if statistic == "mean" else f"{metric}_{statistic}"] = round(error, 4)
    return errors
