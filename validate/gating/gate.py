"""The gate: a candidate release over many experiments, against a policy and a baseline."""

from __future__ import annotations

from collections.abc import Sequence

from blis_replay.blis.release import CoefficientRelease
from blis_replay.ingest.recording import ARRIVALS
from blis_replay.ingest.store import (
    Store,
    list_experiments,
)
from blis_replay.replay.executor_ledger import Progress
from blis_replay.replay.executors import ExecutorName, map_jobs
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.experiment import all_experiments, read_experiment, select_experiments
from blis_replay.validate.gating.judging import GateJob, judge_experiment
from blis_replay.validate.gating.policy import Coverage, Policy
from blis_replay.validate.gating.ranking import ranking_checks
from blis_replay.validate.gating.verdicts import Check, GateReport, Judgement


def gate(
    store: Store,
    candidate: CoefficientRelease,
    baseline: CoefficientRelease | None = None,
    policy: Policy | None = None,
    selectors: Sequence[str] = (),
    *,
    extrapolate: bool = False,
    executor: ExecutorName = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> GateReport:
    """Judge a candidate release on experiments.

    ``selectors``: as ``select_experiments``; without any, all stored and bundled experiments
    of the models that the candidate has.  ``extrapolate``: judge also where GPU, data type or
    tensor parallelism are not those of the release.
    ``executor``, ``workers``, ``progress``: of ``map_jobs``.  Raises ``ReleaseError`` for an invalid
    release, ``UnknownExperimentError`` for a selector that selects nothing,
    ``NothingToJudgeError`` if no experiment is left.
    """
    policy = policy or Policy()
    for release in (candidate, baseline):
        if release is not None:
            release.refuse_if_invalid()
    slugs, left_out = _chosen(store, candidate, selectors)
    jobs = [GateJob(read_experiment(store, slug), candidate, baseline, policy, extrapolate) for slug in slugs]
    judgements = map_jobs(judge_experiment, jobs, executor=executor, workers=workers, progress=progress)
    ordered = tuple(sorted(judgements, key=lambda judgement: (judgement.alias, judgement.slug)))
    checks = (*ranking_checks(ordered, policy.ranking), _covered(ordered, policy.coverage))
    return GateReport(candidate, baseline, policy, ordered, checks, left_out)


def _chosen(store: Store, candidate: CoefficientRelease, selectors: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Slugs to judge; and, without selectors, what is left out by alias."""
    if selectors:
        return select_experiments(store, selectors), {}
    known = {entry.model.lower() for entry in candidate.models}
    slugs, left_out = set(all_experiments(store)), {}
    for row in list_experiments(store):
        if row.ground_truth == ARRIVALS:
            why = "an arrival trace, without latencies"
        elif (row.model or "").lower() not in known:
            why = f"{candidate.name} has no coefficients for {row.model}"
        else:
            continue
        left_out[row.slug if row.alias in left_out else row.alias] = why
        slugs.discard(row.slug)
    if not slugs:
        raise NothingToJudgeError(
            f"{candidate.name}: no stored or bundled experiment is of a model that it has coefficients for; "
            "ingest a recording of one"
        )
    return sorted(slugs), left_out


def _covered(judgements: Sequence[Judgement], coverage: Coverage) -> Check:
    judged = [j for j in judgements if j.standing == "gated" and j.outcome != "not judged"]
    missing = [m for m in coverage.models if m.lower() not in {j.model.lower() for j in judged}]
    enough = len(judged) >= coverage.experiments and not missing
    message = f"{len(judged)} experiments judged, at least {coverage.experiments} asked for"
    message += f"; no experiment judged of {', '.join(missing)}" if missing else ""
    return Check(
        "coverage",
        "",
        "",
        "",
        "pass" if enough else "not judged",
        message,
        float(len(judged)),
        float(coverage.experiments),
    )
