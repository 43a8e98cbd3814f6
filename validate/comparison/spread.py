"""What the same load differs by without any error of a simulator.

Of some runs only aggregates were published.  When each request came is then drawn, and near the limit of a server
the mean TTFT depends on what was drawn: several reconstructions are replayed, and how they differ widens the interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp, hypot, sqrt

import numpy as np

from blis_replay.base.arrays import Bools
from blis_replay.base.errors import ReplayError
from blis_replay.blis.releases.fit import FitRecord
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.fixtures.bundled import RECONSTRUCTIONS, redrawn
from blis_replay.fixtures.catalogue import published_failures
from blis_replay.ingest.recording import PUBLISHED, GroundTruth, Recording
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import ReplayPlan, plan_replay
from blis_replay.replay.simulator import EmbeddedEngine, Simulator
from blis_replay.validate.judgement import Draws
from blis_replay.validate.metrics.latency import METRICS, LatencySamples, MetricStatistic, number, of_requests
from blis_replay.validate.metrics.observed import Selection, simulated_samples
from blis_replay.validate.metrics.uncertainty import Estimate, estimate, in_order, student_t

# -- The server's pace ----------------------------------------------------------------------


def server_pace(run: ReplayRun, selection: Selection) -> Estimate | None:
    """By which share the steps of this server take longer than the coefficients say, at equal batches.

    None where it did not record them, not all of the run is selected, or other requests or step times were replayed.
    """
    as_recorded = run.mode.arrivals == "recorded" and run.mode.rate == 1 and run.mode.loop is None
    plan, entry = run.plan, run.entry
    if entry is None or not (as_recorded and selection.everything) or (plan.cycles, plan.pace) != (None, None):
        return None
    if run.recording.steps.is_empty() and run.recording.iterations.is_empty():
        return None
    from blis_replay.replay.pace import recorded_pace  # it serves the requests, and few recordings have steps

    if (pace := recorded_pace(run.recording, plan.trace, plan.engine, entry)) is None:
        return None
    additions = (pace.recorded_us - pace.factor * pace.modelled_us) / pace.modelled_us.sum()
    return estimate(pace.factor - 1, additions, in_order(len(additions)))


# -- Coefficients ---------------------------------------------------------------------------

# Draws of the coefficients; half of an interval is then known to one part in seven.  Every replay has the same ones, so
# that what a change does is compared draw by draw.
_COEFFICIENT_DRAWS, _COEFFICIENT_SEED = 24, 45
# By which share (one standard deviation) mean steps of another load differ from a fit to one load only, whose own parts
# cannot show it.  Fits to one H100 run (vLLM 0.15.1) missed the mean E2E of another by 2.4 % root mean square
# (8 pairs), and by 0.8 % at its recorded pace (3 pairs).  ``_OF_LOAD`` sets these random numbers apart from others.
_OTHER_LOAD, _OTHER_LOAD_AT_PACE, _OF_LOAD = 0.024, 0.008, 1


def drawn_runs(run: ReplayRun) -> Iterator[ReplayRun]:
    """The replay once more with each of 24 other coefficients that the fit leaves possible.

    None where the release does not keep how its coefficients vary together, or they were not used.
    """
    entry = run.entry
    if entry is None or entry.fit is None or run.simulator != EmbeddedEngine.name or run.plan.cycles is not None:
        return
    if not entry.fit.correlation and sum(fit.status == "fitted" for fit in entry.fit.coefficients) > 1:
        return
    from blis_replay.blis.releases.draws import draws, scattered

    drawn = draws(entry.latency, entry.lifecycle, entry.fit, _COEFFICIENT_DRAWS, _COEFFICIENT_SEED)
    scatter, until_us = entry.fit.scatter, int((run.arrival_us + run.e2e_us).max(initial=0))
    if scatter is None and all(one == (entry.latency, entry.lifecycle) for one in drawn):
        return
    known = run.plan.pace is not None
    by = _OTHER_LOAD_AT_PACE if known else _OTHER_LOAD
    alone = len({score.experiment for score in entry.fit.scores}) == 1
    for place, (latency, lifecycle) in enumerate(drawn):
        other = replace(entry, latency=latency, lifecycle=lifecycle)
        plan = run.plan if not known else _at_its_pace(run, other)
        if alone:
            longer = exp(by * np.random.default_rng([_COEFFICIENT_SEED, place, _OF_LOAD]).standard_normal())
            plan = replace(plan, pace=longer * (plan.pace or 1.0))
        if scatter is not None:
            other = replace(other, latency=scattered(latency, scatter, until_us, (_COEFFICIENT_SEED, place), known))
        simulator = EmbeddedEngine(replace(run.release, models=(other,)), extrapolate=True)
        yield replace(run, entry=other, simulated=simulator.serve(plan))


def _at_its_pace(run: ReplayRun, other: ModelEntry) -> ReplayPlan:
    """The plan at the pace that other coefficients make of the recorded steps."""
    try:
        return replace(run.plan, pace=plan_replay(run.recording, run.mode, other).pace)
    except ReplayError:
        return run.plan  # with these it serves in other steps, which have no pace; so the one that was found stays


# How far a side reaches at most: in its farthest draw, and in half a standard deviation of a normal distribution over
# its median absolute one.  With 24 normal draws 94.7 % of 40,000 intervals hold another one (95.0 % without a bound).
_FARTHEST, _LEAST = 1.5, 1.4826 / 2


def prediction_interval(
    value: float, drawn: Sequence[float], unsure: float, missed: float
) -> tuple[float, float] | None:
    """The 95 % interval of a simulated number by what the draws of the coefficients made of it; None without draws.

    ``unsure``: see ``unsure_of``; ``missed``: see ``missed_by``.  Latencies near a limit of the server answer to
    the logarithm of a cost.  Draws that overload the server lie far off on one side, and say nothing of the other: no
    side is much longer than its own farthest draw.
    """
    known = np.array([one for one in drawn if one > 0])
    if len(known) < max(len(drawn), 2) or value <= 0:
        return None
    off, times = np.log(known / value), student_t(len(known))
    least, most = _LEAST * float(np.median(np.abs(off))), float(np.sqrt(np.mean(off**2)))
    below, above = (
        hypot(min(times * most, max(times * least, _FARTHEST * far)), times * missed) for far in (-off.min(), off.max())
    )
    return value * exp(-below) * (1 - unsure), value * exp(above) * (1 + unsure)


def missed_by(fit: FitRecord | None, cell: MetricStatistic) -> float:
    """By which share a fit missed a number of the parts of its recordings that it was tested on, root mean square.

    It is what a form cannot say, and no draw of its coefficients shows.  Without such parts, of those it was fitted to.
    """
    name = cell[0] if cell[1] == "mean" else f"{cell[0]}_{cell[1]}"
    scores = () if fit is None else fit.scores
    parts = [score for score in scores if score.part == "test"] or scores
    errors = [score.errors[name] for score in parts if name in score.errors]
    return float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0


def drawn_samples(run: ReplayRun, chosen: Bools) -> list[LatencySamples]:
    """Of each of the ``drawn_runs``, the latencies of the chosen requests (bool[n])."""
    return [simulated_samples(one, chosen) for one in drawn_runs(run)]


def predicted_us(
    run: ReplayRun, chosen: Bools, samples: Sequence[LatencySamples]
) -> dict[MetricStatistic, tuple[float, float]]:
    """Intervals of the simulated means and p99s over the chosen requests (bool[n]) by their ``drawn_samples``."""
    cells = [(metric, statistic) for metric in METRICS for statistic in ("mean", "p99")]
    cells = [cell for cell in cells if of_requests(cell)]
    drawn = [[number(one, cell) for cell in cells] for one in samples]
    values = numbers_us(run, chosen, cells) if drawn else []
    fit = None if run.entry is None else run.entry.fit
    found = {
        cells[i]: prediction_interval(us, [one[i] for one in drawn], unsure_of(run), missed_by(fit, cells[i]))
        for i, us in enumerate(values)
    }
    return {cell: between for cell, between in found.items() if between is not None}


def numbers_us(run: ReplayRun, chosen: Bools, cells: Sequence[MetricStatistic]) -> list[float]:
    """What is simulated of the chosen requests (bool[n]), us."""
    samples = simulated_samples(run, chosen)
    return [number(samples, cell) for cell in cells]


# -- Reconstructions ------------------------------------------------------------------------


def unsure_of(run: ReplayRun | None) -> float:
    """Possible error of a replay, as a share, from steps outside the range of the fit."""
    return 0.0 if run is None or run.outside is None else run.outside.unsure


# With more failures than this a reconstruction, which does not know whose they were, is not the load that was served.
_MOST_FAILED = 0.01


def load_is_known(slug: str, ground_truth: GroundTruth) -> bool:
    """Whether a replay can serve what was served: a reconstruction does not know who gave up, and when."""
    return ground_truth != PUBLISHED or published_failures(slug) <= _MOST_FAILED


def draw_errors(
    recording: Recording,
    release: CoefficientRelease,
    mode: ReplayMode,
    simulator: Simulator,
    published_us: Mapping[MetricStatistic, float | None],
) -> Draws | None:
    """Replay all reconstructions of a bundled experiment; None for a recording that is not reconstructed.

    ``published_us``: what each number is held against.  A simulator that reports no steps is started once only, so
    there is nothing to compare either.  Raises as ``replay`` does.
    """
    if not simulator.reports_steps or redrawn(recording, 1) is None:
        return None
    known = {cell: us for cell, us in published_us.items() if us and of_requests(cell)}
    cells = list(known)
    others = (other for draw in RECONSTRUCTIONS if (other := redrawn(recording, draw)) is not None)
    runs = (replay(other, release, mode, simulator) for other in others)
    rows = [numbers_us(run, run.simulated.completed, cells) for run in runs]
    errors = np.array(rows) / np.array([known[cell] for cell in cells]) - 1
    return Draws({cell: errors[:, i] for i, cell in enumerate(cells) if not np.isnan(errors[:, i]).any()})


# The recorded requests of nine runs, with 0.1 % failures at most, are in the 95 % intervals of 20 reconstructions once
# these are this many times as wide (1.0 without 70b-general, at its limit of sequences), and have this standard error
# besides (a share: arrivals and orders of prompts that no reconstruction draws).
_UNDER_DISPERSION, _RULE_ERROR = 2.0, 0.004


def drawn_estimates(draws: Draws, unsure: float) -> dict[MetricStatistic, Estimate]:
    """The error on the requests as they were sent, from those on their reconstructions.

    ``unsure``: see ``unsure_of``.
    """
    estimates = {}
    for cell, errors in draws.errors.items():
        middle, count = float(errors.mean()), len(errors)
        spread = _UNDER_DISPERSION * float(errors.std(ddof=1)) * sqrt(1 + 1 / count)
        half = student_t(count - 1) * hypot(spread, (1 + middle) * _RULE_ERROR)
        estimate = Estimate(middle, middle - half, middle + half, count, {"reconstructions": half})
        estimates[cell] = estimate.beyond(unsure) if cell[1] == "mean" else estimate
    return estimates
