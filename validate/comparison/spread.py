"""What the same load differs by without any error of a simulator.

A server, recorded once more under the same load, differs from itself: its interval then comes from all recordings.
And of some runs only aggregates were published.  When each request came is then drawn, and near the limit of a server
the mean TTFT depends on what was drawn: several reconstructions are replayed, and how they differ widens the interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, sqrt

import numpy as np

from blis_replay.base.arrays import Bools, Floats
from blis_replay.base.errors import NothingToJudgeError
from blis_replay.blis.releases.fit import FitRecord
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.fixtures.bundled import RECONSTRUCTIONS, redrawn
from blis_replay.ingest.recording import RECORDED, Recording
from blis_replay.ingest.store import Store, read_stored
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.simulator import EmbeddedEngine, Simulator
from blis_replay.validate.comparison.sides import recording_side
from blis_replay.validate.experiment import select_experiments
from blis_replay.validate.judgement import Draws
from blis_replay.validate.metrics.latency import METRICS, MetricStatistic, number, of_requests
from blis_replay.validate.metrics.observed import Numbers, Selection, pooled_gaps, simulated_samples
from blis_replay.validate.metrics.uncertainty import Estimate, estimate, in_order, student_t

# -- Repeated recordings -------------------------------------------------------------------

# Two loads are one if counts and lengths differ by less than this, and the time they take by less than that.
_LOAD, _SPAN = 0.01, 0.05


@dataclass(frozen=True)
class Repeats:
    """Recordings of one load on one server.

    ``recordings``: aliases (slugs, where they share one), the judged one first.  ``numbers_us``: by metric and
    statistic, what each observed, in that order; absent where a recording lacks the number.
    """

    recordings: tuple[str, ...]
    numbers_us: Mapping[MetricStatistic, tuple[float, ...]]

    @property
    def apart(self) -> dict[MetricStatistic, float]:
        """The largest difference of two of them over the value of the judged one."""
        return {cell: (max(us) - min(us)) / us[0] for cell, us in self.numbers_us.items()}


def repeats_of(store: Store, slugs: Sequence[str], repeats: Sequence[str]) -> dict[str, Repeats]:
    """By slug, the repeats of its load, where it has any.

    ``repeats``: as ``select_experiments``; each belongs to the experiments whose load it has.  Raises
    ``NothingToJudgeError`` for one that repeats none of them, ``UnknownExperimentError`` for an unknown name.
    """
    if not repeats:
        return {}
    others = [read_stored(store, slug) for slug in select_experiments(store, repeats)]
    of_slug, used = {}, set()
    for slug in slugs:
        recording = read_stored(store, slug)
        same = [other for other in others if other.slug != slug and not _differs(recording, other)]
        used |= {other.slug for other in same} | {slug}
        if same:
            of_slug[slug] = _repeats(store, [recording, *same])
    for other in others:
        if other.slug not in used:
            why = "; ".join(f"{slug}: {_differs(read_stored(store, slug), other)}" for slug in slugs)
            raise NothingToJudgeError(
                f"{other.slug} is not a repeat of an experiment that is judged ({why}); "
                "record the same load on the same server again"
            )
    return of_slug


def _repeats(store: Store, recordings: Sequence[Recording]) -> Repeats:
    numbers = [_numbers(store, recording) for recording in recordings]
    known = {}
    for metric, of_metric in numbers[0].items():
        for statistic in of_metric:
            values_us = [number[metric][statistic].value_us for number in numbers]
            if all(values_us):
                known[metric, statistic] = tuple(us for us in values_us if us)
    aliases = [recording.alias for recording in recordings]
    named = [r.alias if aliases.count(r.alias) == 1 else r.slug for r in recordings]
    return Repeats(tuple(named), known)


def _numbers(store: Store, recording: Recording) -> Numbers:
    side = recording_side(recording, pooled_gaps(store, recording.slug))
    samples = None if side.requests is None else side.latencies(side.requests)
    return side.measure(side.requests, samples, Selection())


def _differs(one: Recording, other: Recording) -> str:
    """What makes two recordings those of different loads or servers; empty if nothing does."""
    for what in ("model", "hardware", "tensor_parallelism"):
        sides = [getattr(recording, what) for recording in (one, other)]
        if None not in sides and sides[0] != sides[1]:
            return f"{what.replace('_', ' ')} {sides[1]}, not {sides[0]}"
    if RECORDED not in (one.ground_truth, other.ground_truth) or one.ground_truth != other.ground_truth:
        return "its requests were not recorded"
    for name in one.engine.keys() & other.engine.keys():
        values = [recording.engine[name].value for recording in (one, other)]
        if not _alike(*values):
            return f"{name} {values[1]}, not {values[0]}"
    loads = [_load(recording) for recording in (one, other)]
    for name, value in loads[0].items():
        if abs(loads[1][name] - value) > (_SPAN if name == "seconds of arrivals" else _LOAD) * max(value, 1e-9):
            return f"{loads[1][name]:,.6g} {name}, not {value:,.6g}"
    return ""


def _alike(one: object, other: object) -> bool:
    """Equal, or numbers that differ by less than 1 %: a server measures its memory anew each time."""
    if isinstance(one, bool) or not isinstance(one, int | float) or not isinstance(other, int | float):
        return one == other
    return abs(one - other) <= _LOAD * abs(one)


def _load(recording: Recording) -> dict[str, float]:
    totals = recording.requests.aggregate(
        prompt="sum(prompt_tokens)", output="sum(output_tokens)", span="max(arrival_us)"
    )
    return {
        "requests": float(recording.requests.height),
        "prompt tokens": float(totals["prompt"] or 0),
        "output tokens": float(totals["output"] or 0),
        "seconds of arrivals": float(totals["span"] or 0) / 1e6,
    }


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


def drawn_runs(run: ReplayRun) -> Iterator[ReplayRun]:
    """The replay once more with each of 24 other coefficients that the fit leaves possible.

    None where the release does not keep how its coefficients vary together, or they were not used.
    """
    entry = run.entry
    if entry is None or entry.fit is None or run.simulator != EmbeddedEngine.name or run.plan.cycles is not None:
        return
    if not entry.fit.correlation and sum(fit.status == "fitted" for fit in entry.fit.coefficients) > 1:
        return
    from blis_replay.blis.releases.draws import draws

    drawn = draws(entry.latency, entry.lifecycle, entry.fit, _COEFFICIENT_DRAWS, _COEFFICIENT_SEED)
    if all(one == (entry.latency, entry.lifecycle) for one in drawn):
        return
    for latency, lifecycle in drawn:
        other = replace(entry, latency=latency, lifecycle=lifecycle)
        simulator = EmbeddedEngine(replace(run.release, models=(other,)), extrapolate=True)
        yield replace(run, entry=other, simulated=simulator.serve(run.plan))


def prediction_interval(
    value: float, drawn: Sequence[float], unsure: float, missed: float
) -> tuple[float, float] | None:
    """The 95 % interval of a simulated number by what the draws of the coefficients made of it; None without draws.

    ``unsure``: see ``unsure_of``; ``missed``: see ``missed_by``.  Latencies near a limit of the server answer to
    the logarithm of a cost.
    """
    known = np.array([one for one in drawn if one > 0])
    if len(known) < max(len(drawn), 2) or value <= 0:
        return None
    half = student_t(len(known)) * hypot(float(np.sqrt(np.mean(np.log(known / value) ** 2))), missed)
    return value * exp(-half) * (1 - unsure), value * exp(half) * (1 + unsure)


def missed_by(fit: FitRecord | None, cell: MetricStatistic) -> float:
    """By which share a fit missed a number of the parts of its recordings that it was tested on, root mean square.

    It is what a form cannot say, and no draw of its coefficients shows.  Without such parts, of those it was fitted to.
    """
    name = cell[0] if cell[1] == "mean" else f"{cell[0]}_{cell[1]}"
    scores = () if fit is None else fit.scores
    parts = [score for score in scores if score.part == "test"] or scores
    errors = [score.errors[name] for score in parts if name in score.errors]
    return float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0


def predicted_us(run: ReplayRun, chosen: Bools) -> dict[MetricStatistic, tuple[float, float]]:
    """Intervals of the simulated means and p99s over the chosen requests (bool[n]); empty without draws."""
    cells = [(metric, statistic) for metric in METRICS for statistic in ("mean", "p99")]
    cells = [cell for cell in cells if of_requests(cell)]
    drawn = [_numbers_us(one, chosen, cells) for one in drawn_runs(run)]
    values = _numbers_us(run, chosen, cells) if drawn else []
    fit = None if run.entry is None else run.entry.fit
    found = {
        cells[i]: prediction_interval(us, [one[i] for one in drawn], unsure_of(run), missed_by(fit, cells[i]))
        for i, us in enumerate(values)
    }
    return {cell: between for cell, between in found.items() if between is not None}


def _numbers_us(run: ReplayRun, chosen: Bools, cells: Sequence[MetricStatistic]) -> list[float]:
    samples = simulated_samples(run, chosen)
    return [number(samples, cell) for cell in cells]


# -- Reconstructions ------------------------------------------------------------------------


def unsure_of(run: ReplayRun | None) -> float:
    """Possible error of a replay, as a share, from steps outside the range of the fit."""
    return 0.0 if run is None or run.outside is None else run.outside.unsure


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
    rows = [_redrawn_numbers(redrawn(recording, draw), release, mode, simulator, cells) for draw in RECONSTRUCTIONS]
    errors = np.array(rows) / np.array([known[cell] for cell in cells]) - 1
    return Draws({cell: errors[:, i] for i, cell in enumerate(cells) if not np.isnan(errors[:, i]).any()})


def _redrawn_numbers(
    recording: Recording | None,
    release: CoefficientRelease,
    mode: ReplayMode,
    simulator: Simulator,
    cells: Sequence[MetricStatistic],
) -> Floats:
    if recording is None:
        raise ValueError("this recording is not reconstructed")
    run = replay(recording, release, mode, simulator)
    return np.array(_numbers_us(run, run.simulated.completed, cells))


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
