"""From what was measured to a verdict: effects by seed, their interval, and where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.verification.phases import fit_line
from blis_replay.validate.bootstrap import CONFIDENCE
from blis_replay.validate.studies.study import Check, Effect, EffectKind, Study, Verdict

Floats = NDArray[np.float64]


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


def seed_interval(values: Floats, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Mean and Student's interval over seeds; the mean itself where they do not differ or there is one."""
    from scipy.stats import t

    mean = float(values.mean())
    if len(values) < 2 or np.ptp(values) == 0:
        return mean, mean, mean
    half = float(t.ppf((1 + confidence) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
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
    "smallest": lambda rows, at: rows.min(axis=0),
    "least_step": lambda rows, at: np.diff(rows, axis=0).min(axis=0),
    "slope": lambda rows, at: _lines(rows, at, lambda y: fit_line(at, y).slope),
    "r2": lambda rows, at: _lines(rows, at, lambda y: fit_line(at, y).r2),
}
