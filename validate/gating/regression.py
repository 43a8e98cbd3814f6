"""Whether a candidate is worse than the baseline: the change of the absolute error, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.bootstrap import interval
from blis_replay.validate.comparison.compare import Comparison, simulated_samples
from blis_replay.validate.comparison.resampling import Cell, Floats, cell_values, resampled_values
from blis_replay.validate.gating.policy import Policy
from blis_replay.validate.gating.verdicts import Check, Interval, Outcome
from blis_replay.validate.metrics import LatencySamples
from blis_replay.validate.observed import observed_requests, samples_of


def regressions(candidate: Comparison, baseline: ReplayRun, policy: Policy) -> list[Check]:
    """The change of each absolute error of the policy against the baseline, and whether it is too much.

    Recorded requests are drawn with their two simulated twins.  Of published aggregates
    there are none to draw: the simulated twins are, and the published number stands fixed.
    """
    changes = _changes(candidate, baseline, policy)
    return [_regression(policy, candidate, cell, changes[i]) for i, cell in enumerate(policy.regression.cells)]


@dataclass(frozen=True)
class _Change:
    before: float
    after: float
    interval: Interval

    @property
    def value(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class _Numbers:
    point: Floats  # [cells]
    draws: Floats  # [resamples, cells]


def _changes(candidate: Comparison, baseline: ReplayRun, policy: Policy) -> list[_Change]:
    cells = policy.regression.cells
    new, old, observed = _sides(candidate, baseline, cells)
    after, before = np.abs(new.point / observed.point - 1), np.abs(old.point / observed.point - 1)
    spread = np.abs(new.draws / observed.draws - 1) - np.abs(old.draws / observed.draws - 1)
    return [
        _Change(float(before[i]), float(after[i]), interval(spread[:, i], policy.regression.confidence))
        for i in range(len(cells))
    ]


def _sides(candidate: Comparison, baseline: ReplayRun, cells: Sequence[Cell]) -> list[_Numbers]:
    """The numbers of the candidate, the baseline and the recording, under the same draws."""
    run, recording = candidate.run, candidate.run.recording
    recorded = observed_requests(recording)
    chosen = run.simulated.completed & baseline.simulated.completed & (recording.requests["status"] == "ok").to_numpy()
    if not recorded.any():
        twins = [simulated_samples(run, chosen), simulated_samples(baseline, chosen)]
        published = [candidate.metrics[metric][statistic].observed_us for metric, statistic in cells]
        fixed = np.array([np.nan if value is None else value for value in published])
        return [*_numbers(twins, cells), _Numbers(fixed, fixed[np.newaxis, :])]
    chosen = chosen & recorded
    sides = [simulated_samples(run, chosen), simulated_samples(baseline, chosen), samples_of(recording, chosen)]
    return _numbers(sides, cells)


def _numbers(sides: Sequence[LatencySamples], cells: Sequence[Cell]) -> list[_Numbers]:
    draws = resampled_values(sides, cells, paired=True)
    return [_Numbers(cell_values(side, cells), drawn) for side, drawn in zip(sides, draws, strict=True)]


def _regression(policy: Policy, candidate: Comparison, cell: Cell, change: _Change) -> Check:
    metric, statistic = cell
    observed, named, margin = (
        candidate.metrics[metric][statistic],
        f"{metric.upper()} {statistic}",
        policy.regression.margin,
    )
    if observed.unusable or np.isnan(change.value):
        message = f"{named}: {observed.reason or 'nothing observed'}"
        return Check("regression", candidate.alias, metric, statistic, "not judged", message, limit=margin)
    low, high = change.interval
    outcome: Outcome = "fail" if low > margin else "pass"
    message = (
        f"{named}: |error| {100 * change.before:.2f} % with the baseline, {100 * change.after:.2f} % now, "
        f"change {100 * change.value:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}] points, at most {100 * margin:g}"
    )
    return Check(
        "regression", candidate.alias, metric, statistic, outcome, message, change.value, margin, change.interval
    )
