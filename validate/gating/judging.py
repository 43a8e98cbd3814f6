"""One experiment under a gate: thresholds, and the change against the baseline with its interval."""

from __future__ import annotations

import re
from dataclasses import dataclass

from blis_replay.blis.errors import ReleaseError, SimulatorError
from blis_replay.blis.release import CoefficientRelease
from blis_replay.ingest.readers.formats import REQUEST_FORMATS
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.simulator import EmbeddedEngine
from blis_replay.validate.bootstrap import interval
from blis_replay.validate.comparison.compare import Comparison
from blis_replay.validate.comparison.resampling import resamplable, resampled_values
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.experiment import StoredExperiment, compare_whole
from blis_replay.validate.gating.policy import Policy
from blis_replay.validate.gating.regression import regressions
from blis_replay.validate.gating.verdicts import Check, Judgement, Ordered, Outcome, Standing
from blis_replay.validate.observed import observed_requests, samples_of

# Without one request in a hundred the queue is another; fewer are a recorder's hiccup.
_MOST_REJECTED = 0.01


@dataclass(frozen=True)
class GateJob:
    """Everything it takes to judge one experiment, so that any process can."""

    experiment: StoredExperiment
    candidate: CoefficientRelease
    baseline: CoefficientRelease | None
    policy: Policy
    extrapolate: bool


def judge_experiment(job: GateJob) -> Judgement:
    """Replay one experiment with the candidate, and with the baseline if there is one, and judge it."""
    try:
        if not job.extrapolate:
            _refuse_other_hardware(job.candidate, job.experiment.recording)
        run = _replayed(job, job.candidate)
        comparison = compare_whole(job.experiment, run)
    except (SimulatorError, ReplayError, NothingToJudgeError) as error:
        return _refused(job, str(error))
    standing, reason = _standing(job, comparison)
    checks: list[Check] = []
    if standing == "gated" and (checks := _recording(job)):
        standing, reason = "refused", checks[0].message
    elif standing == "gated":
        checks = [*_thresholds(comparison, job.policy), *_regressions(job, comparison)]
    return Judgement(
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
    if recording.hardware is None or _same_gpu(release.hardware, recording.hardware):
        return
    raise ReleaseError(
        f"release {release.name} is for {release.hardware}, and {recording.alias} was recorded on "
        f"{recording.hardware}; gate it with --extrapolate if that is meant"
    )


def _same_gpu(one: str, other: str) -> bool:
    """Whether all words of the shorter name are in the longer: H100 is H100-SXM-80GB, H100-PCIe is not."""
    first, second = (set(re.findall(r"[a-z0-9]+", name.lower())) - {"nvidia", "amd"} for name in (one, other))
    return first <= second or second <= first


def _refused(job: GateJob, why: str) -> Judgement:
    """An experiment that could not be replayed; an overloaded one would not be gated either way."""
    recording, overloaded = job.experiment.recording, job.experiment.overloaded
    check = Check("release", recording.alias, "", "", "not judged", why)
    return Judgement(
        slug=recording.slug,
        alias=recording.alias,
        model=recording.model or "",
        ground_truth=recording.ground_truth,
        uses="not stated",
        standing="overloaded" if overloaded else "refused",
        reason=f"the recording is overloaded; {why}" if overloaded else why,
        errors={},
        ordered={},
        checks=() if overloaded else (check,),
    )


def _standing(job: GateJob, comparison: Comparison) -> tuple[Standing, str]:
    if job.experiment.overloaded:
        return "overloaded", "the recording is overloaded (see `inspect`)"
    if job.policy.held_out_only and comparison.uses == "own latencies":
        return "fitted", "the release was fitted on its own latencies"
    if job.policy.held_out_only and comparison.uses == "not stated":
        return "fitted", "the release does not say what it was fitted on"
    return "gated", ""


def _recording(job: GateJob) -> list[Check]:
    """What forbids to judge by the recording at all: a check says so of the whole, or too many requests are lost."""
    reasons = [f"{f.check}: {f.message}" for f in job.experiment.findings if f.severity == "unusable" and not f.metric]
    requests, rejected = job.experiment.recording.requests.height, _rejected_requests(job.experiment.recording)
    if rejected > _MOST_REJECTED * (requests + rejected):
        reasons.append(
            f"{rejected} of {requests + rejected} request records were rejected when they were read (see `inspect`), "
            "so what can be replayed is not the load that was served"
        )
    return [Check("recording", job.experiment.recording.alias, "", "", "not judged", reason) for reason in reasons]


def _rejected_requests(recording: Recording) -> int:
    """Rejected records of the files that the requests are from."""
    formats = {form.name for form in REQUEST_FORMATS}
    return sum(file.rejected_count for file in recording.files if file.kind.split(" ")[0] in formats)


def _thresholds(comparison: Comparison, policy: Policy) -> list[Check]:
    checks = []
    for (metric, statistic), limit in policy.thresholds.items():
        cell, named = comparison.metrics[metric][statistic], f"{metric.upper()} {statistic}"
        if cell.error is None:
            outcome: Outcome = "not judged"
            message = f"{named}: {cell.reason or 'nothing observed'}"
        else:
            outcome = "fail" if abs(cell.error) > limit else "pass"
            message = f"{named}: error {100 * cell.error:+.2f} %, at most {100 * limit:g} % either way"
        checks.append(Check("threshold", comparison.alias, metric, statistic, outcome, message, cell.error, limit))
    return checks


def _regressions(job: GateJob, candidate: Comparison) -> list[Check]:
    if job.baseline is None:
        return []
    try:
        baseline = _replayed(job, job.baseline)
    except (SimulatorError, ReplayError) as error:
        why = f"the baseline cannot be replayed: {error}"
        return [Check("regression", candidate.alias, "", "", "not judged", why)]
    return regressions(candidate, baseline, job.policy)


def _replayed(job: GateJob, release: CoefficientRelease) -> ReplayRun:
    return replay(job.experiment.recording, release, simulator=EmbeddedEngine(release, job.extrapolate))


def _ordered(comparison: Comparison, metric: str) -> Ordered:
    cell, recording = comparison.metrics[metric]["p99"], comparison.run.recording
    if cell.unusable:
        return Ordered(None, cell.simulated_us, unusable=cell.reason)
    chosen = observed_requests(recording)
    if cell.observed_us is None or not chosen.any() or not resamplable((metric, "p99")):
        return Ordered(cell.observed_us, cell.simulated_us)
    samples = samples_of(recording, chosen)
    (draws,) = resampled_values([samples], [(metric, "p99")], paired=True)
    return Ordered(cell.observed_us, cell.simulated_us, interval(draws[:, 0]))
