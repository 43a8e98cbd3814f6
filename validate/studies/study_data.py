"""Results of studies as plain values, and as a frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blis_replay.validate.studies.judge import JudgedCheck, JudgedSystem
from blis_replay.validate.studies.study import Study
from blis_replay.validate.studies.suite import StudyResult

if TYPE_CHECKING:
    import polars as pl


def suite_json(results: Sequence[StudyResult]) -> dict[str, Any]:
    """Everything, numbers in full; a measure that a run does not give is absent."""
    return {"passed": all(result.passed for result in results), "studies": [_study_json(result) for result in results]}


def suite_frame(results: Sequence[StudyResult]) -> pl.DataFrame:
    """A row a check: what it is of, the effect and its interval, and the verdicts."""
    import polars as pl

    rows = [
        {
            "study": result.study.name,
            "system": system.system,
            "kind": kind,
            "check": judged.check.says,
            "effect": judged.effect,
            "low": judged.low,
            "high": judged.high,
            "least": judged.check.least,
            "most": judged.check.most,
            "verdict": judged.verdict,
            "study_verdict": system.verdict,
            "agreement": system.agreement,
        }
        for result in results
        for system in result.systems
        for kind, checks in (("check", system.checks), ("evidence", system.evidence))
        for judged in checks
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def _study_json(result: StudyResult) -> dict[str, Any]:
    study = result.study
    return {
        "name": study.name,
        "title": study.title,
        "family": study.family,
        "hypothesis": study.hypothesis,
        "seeds": list(study.seeds),
        "source": study.source,
        "explanation": study.explanation or None,
        "recordings": list(study.recordings),
        "not_judged": result.absent or None,
        "systems": [_system_json(study, system) for system in result.systems],
    }


def _system_json(study: Study, system: JudgedSystem) -> dict[str, Any]:
    published = study.published.get(system.system)
    return {
        "system": system.system,
        "verdict": system.verdict,
        "recorded": study.recorded[system.system],
        "published": None if published is None else {"verdict": published.verdict, "figures": published.figures},
        "agreement": system.agreement,
        "checks": [_check_json(judged) for judged in system.checks],
        "evidence": [_check_json(judged) for judged in system.evidence],
        "measured": {
            name: {measure: values.tolist() for measure, values in by_measure.items() if not np.isnan(values).any()}
            for name, by_measure in system.measured.items()
        },
    }


def _check_json(judged: JudgedCheck) -> dict[str, Any]:
    finite = bool(np.isfinite([judged.effect, judged.low, judged.high]).all())
    return {
        "says": judged.check.says,
        "effect": judged.effect if finite else None,
        "low": judged.low if finite else None,
        "high": judged.high if finite else None,
        "least": judged.check.least,
        "most": judged.check.most,
        "verdict": judged.verdict,
    }
