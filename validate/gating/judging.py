"""One experiment under a gate: thresholds, and the change against the baseline with its interval."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isclose, isfinite

from blis_replay.base.errors import ExperimentError, faults_named
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.simulator import EmbeddedEngine
from blis_replay.validate.comparison.changes import error_changes
from blis_replay.validate.comparison.compare import compare_replay, with_draws, with_repeats
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.held_out import use_of
from blis_replay.validate.comparison.repeats import Repeats
from blis_replay.validate.comparison.verdict_text import held_text
from blis_replay.validate.gating.policy import Check, Gated, Ordered, Policy, Standing
from blis_replay.validate.judgement import FITTED, HELD_OUT, OUTCOMES, Judgement, quantity_decides, what_decides
from blis_replay.validate.metrics.latency import METRIC_NAMES, MetricStatistic, of_requests
from blis_replay.validate.metrics.observed import Observed, observed_requests, samples_of
from blis_replay.validate.metrics.uncertainty import Estimate, half_width, request_order
from blis_replay.validate.text.messages import words


def regressions(candidate: Comparison, baseline: ReplayRun, policy: Policy) -> list[Check]:
    """The change of each absolute error of the policy against the baseline, and whether it is too much."""
    cells = policy.regression.numbers
    changes = error_changes(candidate, baseline, cells, policy.regression.confidence)
    return [_regression(policy, candidate, cell, changes.get(cell)) for cell in cells]


def _regression(policy: Policy, candidate: Comparison, cell: MetricStatistic, change: Estimate | None) -> Check:
    metric, statistic = cell
    observed, named = candidate.metrics[metric][statistic], f"{metric.upper()} {statistic}"
    margin = policy.regression.margin
    if observed.unusable or change is None:
        message = f"{named}: {observed.reason or 'nothing observed'}"
        return Check("regression", candidate.alias, metric, statistic, "NOT JUDGED", message, limit=margin)
    grew = f"{'grew' if change.error > 0 else 'changed'} by {100 * change.error:+.2f} points"
    if 1e-9 < change.high < inf and isclose(change.low, -change.high):  # it is not known on which side of 0 they lie
        grew = f"changed by up to {100 * change.high:.2f} points, better or worse"
    elif isfinite(change.half):
        level = f"{100 * policy.regression.confidence:g} %"
        grew += f" ({level}: {100 * change.low:+.2f} .. {100 * change.high:+.2f})"
    if observed.error is not None and candidate.draws is None and change.error > 0:
        grew += f", from {100 * (abs(observed.error) - change.error):.1f} %"
    message = f"{named}: |error| {grew}, at most {100 * margin:+g}"
    message += "" if observed.error is None else f"; it is {100 * observed.error:+.1f} % now"
    outcome = policy.regression.verdict(change)
    if outcome == "UNDECIDED":
        missing = change.error if change.error > margin else margin - change.error
        message += f"; {words(what_decides(named, change, missing, candidate.requests))}"
    interval = (change.low, change.high) if isfinite(change.half) else None
    return Check("regression", candidate.alias, metric, statistic, outcome, message, change.error, margin, interval)


@dataclass(frozen=True)
class GateJob:
    """Everything it takes to judge one experiment, so that any process can."""

    experiment: Observed
    candidate: CoefficientRelease
    baseline: CoefficientRelease | None
    policy: Policy
    extrapolate: bool
    repeats: Repeats | None = None


def judge_experiment(job: GateJob) -> Gated:
    """Replay one experiment with the candidate, and with the baseline if there is one, and judge it."""
    try:
        with faults_named(job.experiment.recording.slug):
            simulator = EmbeddedEngine(job.candidate, job.extrapolate)
            run = replay(job.experiment.recording, job.candidate, simulator=simulator)
            comparison = with_draws(compare_replay(run, job.experiment.token_gaps, queues=True), simulator)
            comparison = with_repeats(comparison, job.repeats)
    except ExperimentError as error:
        return _refused(job, str(error))
    judgement = comparison.judged(job.policy.thresholds)
    standing, reason = _standing(job, judgement)
    checks = [] if standing == "not held out" else _judged(judgement, comparison, job.policy)
    if standing == "gated":
        checks += _regressions(job, comparison)
    return Gated(
        slug=comparison.slug,
        alias=comparison.alias,
        model=job.experiment.recording.model or "",
        ground_truth=comparison.recording.ground_truth,
        judgement=judgement,
        standing=standing,
        reason=reason,
        ordered={metric: _ordered(comparison, metric) for metric in job.policy.ranking.metrics},
        checks=tuple(checks),
    )


def _refused(job: GateJob, why: str) -> Gated:
    """An experiment that could not be replayed."""
    recording = job.experiment.recording
    check = Check("release", recording.alias, "", "", "NOT JUDGED", why)
    known = (recording.slug, recording.alias, recording.model or "", recording.ground_truth)
    return Gated(*known, reason=why, checks=(check,))


def _standing(job: GateJob, judgement: Judgement) -> tuple[Standing, str]:
    use = judgement.subject.use
    if job.policy.held_out_only and use not in HELD_OUT:
        return "not held out", use if use in FITTED else "the release does not say what it was fitted on"
    if judgement.lost:
        return "refused", words(judgement.lost[0])
    if judgement.overloaded:
        return "overloaded", "overloaded, so judged by what was served, and neither ranked nor counted as covered"
    return "gated", ""


def _judged(judgement: Judgement, comparison: Comparison, policy: Policy) -> list[Check]:
    """The judgement as checks: why it is missing, what must not be used, each number.

    A number that a policy states must be there; of the usual ones those that the recording states are judged.
    """
    alias, rule = judgement.subject.alias, "capacity" if judgement.overloaded else "threshold"
    checks = [Check("recording", alias, "", "", "NOT JUDGED", words(why)) for why in judgement.lost]
    checks += [
        Check(rule, alias, metric, "mean", "NOT JUDGED", f"{METRIC_NAMES[metric]} unusable: {why}")
        for metric, why in judgement.refused.items()
    ]
    for quantity in judgement.judged if not judgement.lost else ():
        missing = quantity.state == "absent"
        if quantity.metric in judgement.refused or (missing and policy.thresholds is None):
            continue
        cell = (quantity.key, quantity.statistic)
        message = held_text(quantity)
        if missing:
            why = comparison.metrics[quantity.metric][quantity.statistic].reason
            message = f"{quantity.name}: {why or 'nothing observed'}"
        elif quantity.state == "undecided":
            message += f"; {words(quantity_decides(quantity, judgement.subject.requests))}"
        outcome = OUTCOMES[quantity.state]
        checks.append(Check(rule, alias, *cell, outcome, message, quantity.error, quantity.limit, quantity.interval))
    if judgement.subject.use == "unknown":
        why = f"{judgement.subject.release} does not say what it was fitted on"
        checks.append(Check("held out", alias, "", "", "UNDECIDED", why))
    return checks


def _regressions(job: GateJob, candidate: Comparison) -> list[Check]:
    if job.baseline is None:
        return []
    try:
        baseline = _replayed(job, job.baseline)
    except ExperimentError as error:
        why = f"the baseline cannot be replayed: {error}"
        return [Check("regression", candidate.alias, "", "", "NOT JUDGED", why)]
    recording = candidate.run.recording
    if use_of(job.baseline, recording) in FITTED and candidate.use in HELD_OUT:
        why = (
            f"{job.baseline.name} was fitted on this run and {job.candidate.name} was not, so their "
            "errors here cannot be compared; use a run that neither saw, or fit both on it"
        )
        return [Check("regression", candidate.alias, "", "", "NOT JUDGED", why)]
    return regressions(candidate, baseline, job.policy)


def _replayed(job: GateJob, release: CoefficientRelease) -> ReplayRun:
    return replay(job.experiment.recording, release, simulator=EmbeddedEngine(release, job.extrapolate))


def _ordered(comparison: Comparison, metric: str) -> Ordered:
    cell, recording = comparison.metrics[metric]["p99"], comparison.run.recording
    if cell.unusable:
        return Ordered(None, cell.b_us, unusable=cell.reason)
    chosen = observed_requests(recording)
    if cell.a_us is None or not chosen.any() or not of_requests((metric, "p99")):
        return Ordered(cell.a_us, cell.b_us)
    samples = samples_of(recording, chosen)
    half, _ = half_width((metric, "p99"), [(1.0, samples)], request_order(recording, chosen, samples.e2e_us))
    return Ordered(cell.a_us, cell.b_us, (cell.a_us - half, cell.a_us + half))
