"""The gate: a candidate release over many experiments, against a policy and a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Unpack

from blis_replay.base.errors import NothingToJudgeError, counted
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.identity import requests_hash
from blis_replay.ingest.recording import ARRIVALS, RECORDED, Recording
from blis_replay.ingest.store import Store, list_experiments
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.validate.comparison.held_out import use_of
from blis_replay.validate.comparison.repeats import copy_of, repeats_of
from blis_replay.validate.comparison.spread import load_is_known
from blis_replay.validate.experiment import WILDCARDS, all_experiments, select_experiments
from blis_replay.validate.gating.judging import GateJob, judge_experiment
from blis_replay.validate.gating.policy import Check, Coverage, Gated, GateReport, Ordered, Policy, Ranking
from blis_replay.validate.judgement import HELD_OUT, Verdict
from blis_replay.validate.metrics.observed import Observed, read_observed
from blis_replay.validate.text.cells import milliseconds

_NAMED = 3  # pairs in a sentence, the furthest apart first; all p99s stand in the JSON


def ranking_checks(judgements: Sequence[Gated], ranking: Ranking) -> list[Check]:
    """One check for each metric of the ranking over the p99s of the gated experiments.

    Two experiments have an order if their observed p99s differ by more than the tolerance
    and, where requests were recorded, the intervals of the p99s under resampling are apart.
    """
    gated = [judgement for judgement in judgements if judgement.standing == "gated"]
    return [_check(metric, gated, ranking.tolerance) for metric in ranking.metrics if gated]


def _check(metric: str, gated: Sequence[Gated], tolerance: float) -> Check:
    p99s = {judgement.slug: judgement.ordered[metric] for judgement in gated}
    aliases = {judgement.slug: judgement.alias for judgement in gated}
    named = f"{metric.upper()} p99"
    unusable = [f"{aliases[slug]} ({p99.unusable})" for slug, p99 in p99s.items() if p99.unusable]
    pairs = [pair for pair in combinations(p99s, 2) if _have_order(p99s[pair[0]], p99s[pair[1]], tolerance)]
    inverted = [pair for pair in pairs if _inverted(p99s[pair[0]], p99s[pair[1]])]
    absent = sum(p99.observed_us is None and not p99.unusable for p99 in p99s.values())
    compared = f"{len(inverted)} of {len(pairs)} pairs of experiments with an observed order are inverted"
    message = f"{named}: {compared if pairs else 'no two experiments are far enough apart'}"
    message += f"; no p99 was observed of {counted(absent, 'experiment')}" if absent else ""
    inverted.sort(key=lambda pair: -_apart(p99s[pair[0]], p99s[pair[1]]))
    message += "".join(
        f"; {' / '.join(aliases[slug] for slug in pair)}: {_p99s_text(p99s[pair[0]], p99s[pair[1]])}"
        for pair in inverted[:_NAMED]
    )
    message += f"; and {len(inverted) - _NAMED} more" if len(inverted) > _NAMED else ""
    message += f"; not to be used: {', '.join(unusable)}" if unusable else ""
    outcome: Verdict = "FAIL" if inverted else "NOT JUDGED" if unusable else "PASS"
    return Check("ranking", "", metric, "p99", outcome, message, float(len(inverted)), 0.0)


def _have_order(one: Ordered, other: Ordered, tolerance: float) -> bool:
    if one.observed_us is None or other.observed_us is None or None in (one.simulated_us, other.simulated_us):
        return False
    low_us, high_us = sorted((one.observed_us, other.observed_us))
    if high_us <= low_us * (1 + tolerance):
        return False
    if one.interval_us is None or other.interval_us is None:
        return True
    return one.interval_us[1] < other.interval_us[0] or other.interval_us[1] < one.interval_us[0]


def _inverted(one: Ordered, other: Ordered) -> bool:
    if one.observed_us is None or other.observed_us is None or one.simulated_us is None or other.simulated_us is None:
        return False
    return (one.observed_us - other.observed_us) * (one.simulated_us - other.simulated_us) < 0


def _apart(one: Ordered, other: Ordered) -> float:
    """How many times the smaller observed p99 the larger is."""
    low_us, high_us = sorted((one.observed_us or 0.0, other.observed_us or 0.0))
    return high_us / low_us if low_us else float("inf")


def _p99s_text(one: Ordered, other: Ordered) -> str:
    seen = " / ".join(milliseconds(p99.observed_us) for p99 in (one, other))
    simulated = " / ".join(milliseconds(p99.simulated_us) for p99 in (one, other))
    return f"observed {seen} ms, simulated {simulated} ms"


def gate(
    store: Store,
    candidate: CoefficientRelease,
    baseline: CoefficientRelease | None = None,
    policy: Policy | None = None,
    selectors: Sequence[str] = (),
    *,
    extrapolate: bool = False,
    repeats: Sequence[str] = (),
    **pool: Unpack[Pool],
) -> GateReport:
    """Judge a candidate release on experiments.

    ``selectors``: as ``select_experiments``; without any, all stored and bundled experiments
    of the models that the candidate has.  ``extrapolate``: judge also where GPU, data type or
    tensor parallelism are not those of the release.
    ``repeats``: recordings of the same loads, as ``repeats_of``.  ``pool``: of ``map_jobs``.  Raises ``ReleaseError``
    for an invalid release, ``UnknownExperimentError`` for a selector that selects nothing,
    ``NothingToJudgeError`` if no experiment is left.
    """
    policy = policy or Policy()
    for release in (candidate, baseline):
        if release is not None:
            release.refuse_if_invalid()
    slugs, left_out = _chosen(store, candidate, selectors)
    kept, by_requests = list[Observed](), dict[str, Recording]()
    for slug in slugs:
        observed = read_observed(store, slug)
        recording = observed.recording
        first = by_requests.setdefault(requests_hash(recording) or slug, recording)
        first = next((one.recording for one in kept if _same_run(recording, one.recording)), first)
        if first is recording:
            kept.append(observed)
        else:
            left_out[slug if recording.alias in (first.alias, *left_out) else recording.alias] = (
                f"the same run as {first.alias}"
            )
    # A release fits the runs that it was fitted on, so only the others say how far the server differs from itself.
    alike = [one.recording for one in kept if use_of(candidate, one.recording) in HELD_OUT]
    repeated = repeats_of(store, [one.recording.slug for one in kept], repeats, alike)
    jobs = [GateJob(one, candidate, baseline, policy, extrapolate, repeated.get(one.recording.slug)) for one in kept]
    judgements = map_jobs(judge_experiment, jobs, **pool)
    ordered = tuple(sorted(judgements, key=lambda judgement: (judgement.alias, judgement.slug)))
    checks = (*ranking_checks(ordered, policy.ranking), _covered(ordered, policy.coverage))
    return GateReport(candidate, baseline, policy, ordered, checks, left_out)


def _same_run(one: Recording, other: Recording) -> bool:
    recorded = one.ground_truth == other.ground_truth == RECORDED and one.model == other.model
    return recorded and copy_of(one, other) != ""


def _chosen(store: Store, candidate: CoefficientRelease, selectors: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Slugs to judge; and, where none or a pattern was given, what is left out by alias."""
    slugs = set(select_experiments(store, selectors) if selectors else all_experiments(store))
    named = {slug for name in selectors if not set(name) & WILDCARDS for slug in select_experiments(store, [name])}
    known, left_out = {entry.model.lower() for entry in candidate.models}, {}
    for row in list_experiments(store):
        if row.slug in named or row.slug not in slugs:
            continue
        if row.ground_truth == ARRIVALS:
            why = "an arrival trace, without latencies"
        elif (row.model or "").lower() not in known:
            why = f"{candidate.name} has no coefficients for {row.model}"
        elif row.overloaded and not load_is_known(row.slug, row.ground_truth):
            why = "overloaded, and which requests failed was not published, so a replay serves another load"
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


def _covered(judgements: Sequence[Gated], coverage: Coverage) -> Check:
    judged = [j for j in judgements if j.standing == "gated" and j.outcome != "NOT JUDGED"]
    missing = [m for m in coverage.models if m.lower() not in {j.model.lower() for j in judged}]
    enough = len(judged) >= coverage.experiments and not missing
    message = f"{counted(len(judged), 'experiment')} judged, at least {coverage.experiments} asked for"
    message += f"; no experiment judged of {', '.join(missing)}" if missing else ""
    outcome: Verdict = "PASS" if enough else "NOT JUDGED"
    return Check("coverage", "", "", "", outcome, message, float(len(judged)), float(coverage.experiments))
