"""What studies answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blis_replay.ingest.tables import Table, Value, columns_named, table_of
from blis_replay.validate.text.answer import Answer, Block, Part
from blis_replay_labs.studies.study import Check, JudgedCheck, JudgedSystem, Study, StudyResult

_SUITE_COLUMNS = (
    *columns_named("study", "on", "verdict", kind="text"),
    *columns_named("effect", "95 % interval", "published", kind="word"),
)


def studies_answer(results: Sequence[StudyResult], *, summary: bool) -> Answer:
    """One table of all studies (``summary``), or all of each; the rows are one per check, numbers in full."""
    page = _suite(results) if summary else [part for result in results for part in _study(result)]
    passed = all(result.passed for result in results)
    rows = table_of(row for result in results for row in _rows(result))
    return Answer(page, {"passed": passed, "studies": [_study_json(result) for result in results]}, rows)


def _study(result: StudyResult) -> list[Part]:
    """What was measured, the checks, the verdicts beside the published ones."""
    study = result.study
    head: list[Part] = [f"{study.name}: {study.title}", f"  {study.hypothesis}"]
    return [
        *head,
        *(_measured(result, measure) for measure in study.shown),
        _checks("checks", result, study.checks),
        *([_checks("evidence", result, study.evidence)] if study.evidence else []),
        Block([_verdict(study, system) for system in result.systems]),
        *([f"why: {study.explanation}"] if study.explanation else []),
        f"published: {study.source}; 95 % intervals of mean effects over seeds {', '.join(map(str, study.seeds))}",
    ]


def _suite(results: Sequence[StudyResult]) -> list[Part]:
    """A row for each study and system with the effect of its first check."""
    rows = [
        [
            result.study.name if i == 0 else "",
            system.system,
            system.verdict + ("" if system.as_recorded else " !"),
            number(system.checks[0].effect),
            interval_text(system.checks[0]),
            system.agreement,
        ]
        for result in results
        for i, system in enumerate(result.systems)
    ]
    failed = [result.study.name for result in results if not result.passed]
    summary = "every verdict is the one on record, and every difference from a published one is explained"
    if failed:
        summary = f"not as on record, or different from published without a reason: {', '.join(failed)}"
    intervals = "intervals are 95 %, of the mean effect over seeds"
    return [Table("", _SUITE_COLUMNS, rows), intervals, f"{len(results)} studies; {summary}"]


def number(value: float) -> str:
    """Four significant digits, as a plain number."""
    return "-" if np.isnan(value) else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def interval_text(check: JudgedCheck) -> str:
    """The interval over seeds, ``-`` where they do not differ."""
    return "-" if check.low == check.high else f"{number(check.low)} .. {number(check.high)}"


def bounds_text(check: Check) -> str:
    """Where the effect has to be."""
    if check.least is not None and check.most is not None:
        return f"{check.least:g} to {check.most:g}"
    return f"at least {check.least:g}" if check.least is not None else f"at most {check.most:g}"


def _measured(result: StudyResult, measure: str) -> Table:
    systems = result.systems
    rows = [
        [name, *(number(float(np.mean(system.measured[name][measure]))) for system in systems)]
        for name in result.study.configurations
    ]
    return Table("", columns_named(measure, *(system.system for system in systems)), rows)


_CHECK_COLUMNS = columns_named("", "effect", "95 % interval", "")


def _checks(title: str, result: StudyResult, checks: Sequence[Check]) -> Block:
    lines: list[Part] = [f"{title}:"]
    for check in checks:
        judged = [(s.system, j) for s in result.systems for j in (*s.checks, *s.evidence) if j.check is check]
        rows = [[f"    {name}", number(j.effect), interval_text(j), j.verdict] for name, j in judged]
        lines += [f"- {check.says}: {bounds_text(check)}", Table("", _CHECK_COLUMNS, rows, header=False)]
    return Block(lines)


def _verdict(study: Study, system: JudgedSystem) -> str:
    published = study.published.get(system.system)
    text = f"{system.system}: {system.verdict}; published: "
    if published is None:
        text += "nothing"
    else:
        text += f"{published.verdict or 'no verdict'} ({published.figures})"
        text += {"agrees": "", "explained": "; the difference is explained", "differs": "; NOT EXPLAINED"}.get(
            system.agreement, ""
        )
    if not system.as_recorded:
        text += f"; ON RECORD: {study.recorded[system.system]}"
    return text


def _rows(result: StudyResult) -> list[dict[str, Value]]:
    """A row per check: what it is of, the effect and its interval, and the verdicts."""
    return [
        {
            "study": result.study.name,
            "system": system.system,
            "kind": kind,
            "check": judged.check.says,
            **{name: getattr(judged, name) for name in ("effect", "low", "high")},
            "least": judged.check.least,
            "most": judged.check.most,
            "verdict": judged.verdict,
            "study_verdict": system.verdict,
            "agreement": system.agreement,
        }
        for system in result.systems
        for kind, checks in (("check", system.checks), ("evidence", system.evidence))
        for judged in checks
    ]


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
    effect = {name: getattr(judged, name) for name in ("effect", "low", "high")}
    finite = bool(np.isfinite(list(effect.values())).all())
    return {
        "says": judged.check.says,
        **(effect if finite else dict.fromkeys(effect)),
        "least": judged.check.least,
        "most": judged.check.most,
        "verdict": judged.verdict,
    }
