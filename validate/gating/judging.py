"""One experiment under a gate: thresholds, and the change against the baseline with its interval."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from blis_replay.base.errors import ExperimentError, faults_named
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.gpu_names import same_gpu
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.identity import requests_hash
from blis_replay.ingest.readers.formats import request_formats
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.simulator import EmbeddedEngine, entry_of
from blis_replay.validate.comparison.compare import compare_replay, with_draws, with_repeats
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.spread import Repeats
from blis_replay.validate.comparison.verdict_text import beyond_fit
from blis_replay.validate.gating.policy import Check, Gated, Ordered, Outcome, Policy, Standing
from blis_replay.validate.judgement import UNSEEN, Quantity, State
from blis_replay.validate.metrics.latency import THRESHOLDS, MetricStatistic, of_requests
from blis_replay.validate.metrics.observed import Observed, observed_requests, samples_of, simulated_samples
from blis_replay.validate.metrics.uncertainty import Estimate, change_estimates, half_width, request_order


def regressions(candidate: Comparison, baseline: ReplayRun, policy: Policy) -> list[Check]:
    """The change of each absolute error of the policy against the baseline, and whether it is too much."""
    run, recording = candidate.run, candidate.run.recording
    recorded = observed_requests(recording)
    chosen = run.simulated.completed & baseline.simulated.completed & (recording.requests["status"] == "ok").to_numpy()
    chosen = chosen & recorded if recorded.any() else chosen
    cells = policy.regression.cells
    known = {cell: candidate.estimates[cell] for cell in cells if cell in candidate.estimates}
    observed = samples_of(recording, chosen) if recorded.any() else None
    sides = simulated_samples(run, chosen), simulated_samples(baseline, chosen), observed
    changes = change_estimates(recording, chosen, *sides, known)
    return [_regression(policy, candidate, cell, changes.get(cell)) for cell in cells]


def _regression(policy: Policy, candidate: Comparison, cell: MetricStatistic, change: Estimate | None) -> Check:
    metric, statistic = cell
    observed, named = candidate.metrics[metric][statistic], f"{metric.upper()} {statistic}"
    margin = policy.regression.margin
    if observed.unusable or change is None:
        message = f"{named}: {observed.reason or 'nothing observed'}"
        return Check("regression", candidate.alias, metric, statistic, "not judged", message, limit=margin)
    after = abs(candidate.estimates[cell].error)
    message = f"{named}: |error| {100 * (after - change.error):.2f} % with the baseline, {100 * after:.2f} % now, "
    message += f"change {100 * change.error:+.2f} [{100 * change.low:+.2f}, {100 * change.high:+.2f}] points"
    message += f", at most {100 * margin:g}"
    outcome: Outcome = "fail" if change.low > margin else "pass" if change.high <= margin else "not judged"
    interval = (change.low, change.high) if isfinite(change.half) else None
    return Check("regression", candidate.alias, metric, statistic, outcome, message, change.error, margin, interval)


# Without one request in a hundred the queue is another; fewer are a recorder's hiccup.
_MOST_REJECTED = 0.01


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
            if not job.extrapolate:
                _refuse_other_hardware(job.candidate, job.experiment.recording)
            simulator = EmbeddedEngine(job.candidate, job.extrapolate)
            run = replay(job.experiment.recording, job.candidate, simulator=simulator)
            comparison = with_draws(compare_replay(run, job.experiment.token_gaps, queues=True), simulator)
            comparison = with_repeats(comparison, job.repeats)
    except ExperimentError as error:
        return _refused(job, str(error))
    standing, reason = _standing(job, comparison)
    checks: list[Check] = []
    if standing != "fitted" and (checks := _recording(job, comparison)):
        standing, reason = "refused", checks[0].message
    elif standing == "overloaded":
        checks = _capacity(comparison, job.policy)
    elif standing == "gated":
        checks = [*_thresholds(comparison, job.policy), *_regressions(job, comparison)]
    return Gated(
        slug=comparison.slug,
        alias=comparison.alias,
        model=job.experiment.recording.model or "",
        ground_truth=comparison.ground_truth,
        uses=comparison.uses,
        standing=standing,
        reason=reason,
        errors={(m, s): cell.error for m, cells in comparison.metrics.items() for s, cell in cells.items()},
        ordered={metric: _ordered(comparison, metric) for metric in job.policy.ranking.metrics},
        checks=tuple(checks),
        requests=comparison.requests,
    )


def _refuse_other_hardware(release: CoefficientRelease, recording: Recording) -> None:
    if recording.hardware is None or same_gpu(release.hardware, recording.hardware):
        return
    # Of a model that the release does not have, --extrapolate would be refused too: that is said first.
    entry_of(release, recording, extrapolate=True)
    raise ReleaseError(
        f"release {release.name} is for {release.hardware}, and {recording.alias} was recorded on "
        f"{recording.hardware}; gate it with --extrapolate if that is meant"
    )


def _refused(job: GateJob, why: str) -> Gated:
    """An experiment that could not be replayed."""
    recording = job.experiment.recording
    check = Check("release", recording.alias, "", "", "not judged", why)
    known = (recording.slug, recording.alias, recording.model or "", recording.ground_truth)
    return Gated(*known, reason=why, checks=(check,))


def _standing(job: GateJob, comparison: Comparison) -> tuple[Standing, str]:
    if job.policy.held_out_only and comparison.uses == "fitted on this run":
        return "fitted", "the release was fitted on this run"
    if job.policy.held_out_only and comparison.uses == "unknown":
        return "fitted", "the release does not say what it was fitted on"
    if comparison.overloaded:
        return "overloaded", "overloaded, so judged by what was served, and neither ranked nor counted as covered"
    return "gated", ""


def _capacity(comparison: Comparison, policy: Policy) -> list[Check]:
    """What an overloaded run is judged by, against the limit that the policy has for the mean of its metric."""
    checks = []
    for measure in comparison.capacity or ():
        limit = policy.thresholds.get((measure.metric, "mean"), THRESHOLDS[measure.metric])
        checks.append(_held("capacity", comparison, comparison.held_measure(measure, limit)))
    nothing = "overloaded, and nothing that was served can be judged"
    refused = [f"{metric.upper()}: unusable: {why}" for metric, why in comparison.unusable.items()]
    refused = refused or ([] if checks else [nothing])
    return [*checks, *(Check("capacity", comparison.alias, "", "", "not judged", reason) for reason in refused)]


_OUTCOMES: dict[State, Outcome] = {"within": "pass", "beyond": "fail", "open": "not judged", "absent": "not judged"}


def _held(rule: str, comparison: Comparison, quantity: Quantity) -> Check:
    """One error against its limit; of reconstructed requests those of all of them."""
    message = f"{quantity.name}: error {100 * (quantity.error or 0.0):+.2f} %"
    cell = (quantity.key, quantity.statistic)
    if comparison.draws is not None and quantity.interval is not None:
        low, middle, high = (100 * value for value in comparison.draws.range_of(cell))
        message += f" ({comparison.draws.count} reconstructions: {middle:+.2f} %, {low:+.2f} to {high:+.2f})"
    message += f", at most {100 * quantity.limit:g} % either way"
    if quantity.state == "open":
        by_draws = quantity.by_draws == "open"
        message += f": not decided{' by this reconstruction' if by_draws else f': {beyond_fit(comparison.judgement)}'}"
    outcome = _OUTCOMES[quantity.state]
    return Check(rule, comparison.alias, *cell, outcome, message, quantity.error, quantity.limit)


def _recording(job: GateJob, comparison: Comparison) -> list[Check]:
    """What forbids to judge by the recording at all: a check says so of the whole, or too many requests are lost."""
    recording = job.experiment.recording
    reasons = list(comparison.lost)
    requests, rejected = recording.requests.height, _rejected_requests(recording)
    if rejected > _MOST_REJECTED * (requests + rejected):
        reasons.append(
            f"{rejected} of {requests + rejected} request records were rejected when they were read (see `inspect`), "
            "so what can be replayed is not the load that was served"
        )
    return [Check("recording", recording.alias, "", "", "not judged", reason) for reason in reasons]


def _rejected_requests(recording: Recording) -> int:
    """Rejected records of the files that the requests are from."""
    formats = {form.name for form in request_formats()}
    return sum(file.rejected_count for file in recording.files if file.kind.split(" ")[0] in formats)


def _thresholds(comparison: Comparison, policy: Policy) -> list[Check]:
    checks = []
    for (metric, statistic), limit in policy.thresholds.items():
        cell, named = comparison.metrics[metric][statistic], f"{metric.upper()} {statistic}"
        if cell.error is None:
            message = f"{named}: {cell.reason or 'nothing observed'}"
            checks.append(Check("threshold", comparison.alias, metric, statistic, "not judged", message, limit=limit))
        else:
            quantity = replace(comparison.held(metric, statistic, limit), name=named)
            checks.append(_held("threshold", comparison, quantity))
    return checks


def _regressions(job: GateJob, candidate: Comparison) -> list[Check]:
    if job.baseline is None:
        return []
    try:
        baseline = _replayed(job, job.baseline)
    except ExperimentError as error:
        why = f"the baseline cannot be replayed: {error}"
        return [Check("regression", candidate.alias, "", "", "not judged", why)]
    recording = candidate.run.recording
    seen = job.baseline.used(recording.slug, recording.content_hash, requests_hash(recording))
    if seen == "latencies" and candidate.uses in (*UNSEEN, "fitted on its steps"):
        why = (
            f"{job.baseline.name} was fitted on the latencies of this run and {job.candidate.name} was not, so their "
            "errors here cannot be compared; use a run that neither saw, or fit both on it"
        )
        return [Check("regression", candidate.alias, "", "", "not judged", why)]
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
