"""What a study is, and how it is run and judged: every configuration, system and seed is one job.

A verdict says where the effects lie: seed by seed, with their interval, beside what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.validate.metrics.resampling import CONFIDENCE
from blis_replay_labs.verification.theory import LLAMA_8B_TP2, SECOND_SET, CoefficientSet, fit_line

Verdict = Literal["confirmed", "refuted", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("confirmed", "refuted", "inconclusive")

# One run of a configuration on a system with a seed: its measures by name.  A function of a module or a partial of one,
# so that a process can receive it.
Run = Callable[["System", int], Mapping[str, float]]

EffectKind = Literal["value", "ratio", "difference", "largest", "least_step", "slope", "r2"]


@dataclass(frozen=True)
class Effect:
    """A number made of one measure of some configurations, seed by seed; ``at``: their places on an axis, for lines."""

    kind: EffectKind
    measure: str
    configurations: tuple[str, ...]
    at: tuple[float, ...] = ()


@dataclass(frozen=True)
class Check:
    """An effect and where it has to be: ``least`` and ``most`` belong to what is right, None: no bound.

    ``systems``: those that it applies to, empty: all.
    """

    says: str
    effect: Effect
    least: float | None
    most: float | None
    systems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """What was published for a system: the verdict, None if there was none, and the figures in words."""

    verdict: Verdict | None
    figures: str


@dataclass(frozen=True)
class Study:
    """A hypothesis, what is run to test it, and the rule of the verdict.

    ``systems``: names in ``SYSTEMS``.  ``shown``: measures for the table.  ``checks``: the hypothesis is confirmed if
    all are, refuted if one is, else inconclusive.  ``evidence``: checks that have to be confirmed before
    ``explanation``, why the verdict is not the published one, counts.  ``recorded``: the verdict on record by system.
    """

    name: str
    title: str
    family: str
    hypothesis: str
    systems: tuple[str, ...]
    seeds: tuple[int, ...]
    configurations: Mapping[str, Run]
    shown: tuple[str, ...]
    checks: tuple[Check, ...]
    evidence: tuple[Check, ...]
    source: str
    published: Mapping[str, Published]
    recorded: Mapping[str, Verdict]
    explanation: str


@dataclass(frozen=True)
class System:
    """Coefficients, and the token budget and KV blocks (without vLLM's reserved one) of each engine."""

    name: str
    coefficients: CoefficientSet
    max_num_batched_tokens: int
    kv_blocks: int


_A = System("A", LLAMA_8B_TP2, 2048, 132_139)
_B = System("B", SECOND_SET, 4096, 65_833)

# The last two tell the budget from the coefficients.
SYSTEMS = {
    system.name: system
    for system in (
        _A,
        _B,
        replace(_A, name="A 4096", max_num_batched_tokens=4096),
        replace(_B, name="B 2048", max_num_batched_tokens=2048),
    )
}


# measured[configuration][measure]: float64[seeds]
Measured = Mapping[str, Mapping[str, Floats]]


@dataclass(frozen=True)
class JudgedCheck:
    """A check of one system: the mean effect over seeds, its interval, and what that says."""

    check: Check
    effect: float
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True)
class JudgedSystem:
    """A study on one system.

    ``agreement``: with what was published: ``agrees``, ``explained`` (differs, and the evidence for the reason came
    out), ``differs``, or ``-`` where nothing was.  ``as_recorded``: whether the verdict is the one on record.
    """

    system: str
    measured: Measured
    checks: tuple[JudgedCheck, ...]
    evidence: tuple[JudgedCheck, ...]
    verdict: Verdict
    agreement: str
    as_recorded: bool

    @property
    def passed(self) -> bool:
        """Whether all is as expected."""
        return self.as_recorded and self.agreement != "differs"


def judge(study: Study, system: str, measured: Measured) -> JudgedSystem:
    """The verdict of a study on a system."""
    checks = _of_system(study.checks, system, measured)
    evidence = _of_system(study.evidence, system, measured)
    verdict = overall(check.verdict for check in checks)
    return JudgedSystem(
        system,
        measured,
        checks,
        evidence,
        verdict,
        _agreement(study, system, verdict, evidence),
        study.recorded[system] == verdict,
    )


def judge_check(check: Check, measured: Measured) -> JudgedCheck:
    """Confirmed if all of the interval lies within the bounds, refuted if all of it lies beyond one of them."""
    effects = effect_by_seed(check.effect, measured)
    mean, low, high = seed_interval(effects)
    least = -np.inf if check.least is None else check.least
    most = np.inf if check.most is None else check.most
    verdict: Verdict = "inconclusive"
    if least <= low and high <= most:
        verdict = "confirmed"
    elif high < least or most < low or np.isnan(mean):
        verdict = "refuted"
    return JudgedCheck(check, mean, low, high, verdict)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Refuted if one is, confirmed if all are."""
    found = set(verdicts)
    if "refuted" in found:
        return "refuted"
    return "confirmed" if found == {"confirmed"} else "inconclusive"


def effect_by_seed(effect: Effect, measured: Measured) -> Floats:
    """float64[seeds]: the effect, seed by seed, so that what a seed does to all configurations cancels out."""
    rows = np.array([measured[name][effect.measure] for name in effect.configurations])
    return _EFFECTS[effect.kind](rows, np.array(effect.at))


def seed_interval(values: Floats) -> tuple[float, float, float]:
    """Mean and Student's interval over seeds; the mean itself where they do not differ or there is one."""
    from scipy.special import stdtrit  # lighter than scipy.stats

    mean = float(values.mean())
    if len(values) < 2 or np.ptp(values) == 0:
        return mean, mean, mean
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2) * values.std(ddof=1) / np.sqrt(len(values)))
    return mean, mean - half, mean + half


def _of_system(checks: Iterable[Check], system: str, measured: Measured) -> tuple[JudgedCheck, ...]:
    return tuple(judge_check(check, measured) for check in checks if not check.systems or system in check.systems)


def _agreement(study: Study, system: str, verdict: Verdict, evidence: tuple[JudgedCheck, ...]) -> str:
    published = study.published.get(system)
    if published is None or published.verdict is None:
        return "-"
    if published.verdict == verdict:
        return "agrees"
    explained = study.explanation and evidence and all(check.verdict == "confirmed" for check in evidence)
    return "explained" if explained else "differs"


def _ratio(rows: Floats, _at: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(rows[0] / rows[1])


def _lines(rows: Floats, at: Floats, part: Callable[[Floats], float]) -> Floats:
    return np.array([part(column) for column in rows.T])


_EFFECTS: dict[EffectKind, Callable[[Floats, Floats], Floats]] = {
    "value": lambda rows, at: rows[0],
    "ratio": _ratio,
    "difference": lambda rows, at: rows[0] - rows[1],
    "largest": lambda rows, at: rows.max(axis=0),
    "least_step": lambda rows, at: np.diff(rows, axis=0).min(axis=0),
    "slope": lambda rows, at: _lines(rows, at, lambda y: fit_line(at, y).slope),
    "r2": lambda rows, at: _lines(rows, at, lambda y: fit_line(at, y).r2),
}


@dataclass(frozen=True)
class Job:
    """One run of a configuration on a system with a seed."""

    run: Run
    system: str
    seed: int


@dataclass(frozen=True)
class StudyResult:
    """A study and its verdict on each of its systems."""

    study: Study
    systems: tuple[JudgedSystem, ...]

    @property
    def passed(self) -> bool:
        """Whether every verdict is the one on record, and every difference from a published one is explained."""
        return all(system.passed for system in self.systems)


def run_studies(studies: Sequence[Study], **pool: Unpack[Pool]) -> list[StudyResult]:
    """Run studies, all their jobs in one pool; the same whatever the executor.

    Raises ``SimulatorError`` if a configuration cannot be run.
    """
    jobs = [
        Job(run, system, seed)
        for study in studies
        for system in study.systems
        for run in study.configurations.values()
        for seed in study.seeds
    ]
    answers = iter(map_jobs(run_job, jobs, **pool))
    results = []
    for study in studies:
        systems = []
        for system in study.systems:
            measured = {name: [next(answers) for _ in study.seeds] for name in study.configurations}
            systems.append(judge(study, system, _by_measure(measured)))
        results.append(StudyResult(study, tuple(systems)))
    return results


def run_job(job: Job) -> Mapping[str, float]:
    """The measures of one run."""
    return job.run(SYSTEMS[job.system], job.seed)


def _by_measure(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> Measured:
    return {
        name: {measure: np.array([run[measure] for run in runs], np.float64) for measure in runs[0]}
        for name, runs in measured.items()
    }
