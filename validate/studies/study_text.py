"""Results of studies as text, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blis_replay.validate.studies.judge import JudgedCheck, JudgedSystem
from blis_replay.validate.studies.study import Check, Study
from blis_replay.validate.studies.suite import StudyResult
from blis_replay.validate.terminal import table, wrap


def study_text(result: StudyResult) -> str:
    """One study: what was measured, the checks, the verdicts beside the published ones."""
    study = result.study
    parts = [wrap(f"{study.name}: {study.title}"), wrap(f"  {study.hypothesis}")]
    if result.absent:
        return "\n\n".join([*parts, wrap(f"not judged: {result.absent}")])
    parts += [_measured(result, measure) for measure in study.shown]
    parts += [_checks("checks", result, study.checks)]
    if study.evidence:
        parts += [_checks("evidence", result, study.evidence)]
    parts += ["\n".join(_verdict(study, system) for system in result.systems)]
    if study.explanation:
        parts += [wrap(f"why: {study.explanation}")]
    over = (
        f"recordings {', '.join(study.recordings)}" if study.recordings else f"seeds {', '.join(map(str, study.seeds))}"
    )
    parts += [wrap(f"published: {study.source}; {over}")]
    return "\n\n".join(parts)


def suite_text(results: Sequence[StudyResult]) -> str:
    """All studies: a row for each and system with the effect of its first check."""
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
    rows += [[result.study.name, "", "not judged", "-", "-", "-"] for result in results if result.absent]
    header = ["study", "on", "verdict", "effect", "95 % interval", "published"]
    failed = [result.study.name for result in results if not result.passed]
    told = "every verdict is the one on record, and every difference from a published one is explained"
    if failed:
        told = f"not as on record, or different from published without a reason: {', '.join(failed)}"
    absent = [wrap(f"{result.study.name} is not judged: {result.absent}") for result in results if result.absent]
    return "\n\n".join([table(header, rows, left=3), *absent, wrap(f"{len(results)} studies; {told}")])


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


def _measured(result: StudyResult, measure: str) -> str:
    systems = result.systems
    rows = [
        [name, *(number(float(np.mean(system.measured[name][measure]))) for system in systems)]
        for name in result.study.configurations
    ]
    return table([measure, *(system.system or "mean" for system in systems)], rows)


def _checks(title: str, result: StudyResult, checks: Sequence[Check]) -> str:
    lines = [f"{title}:"]
    for check in checks:
        lines.append(wrap(f"- {check.says}: {bounds_text(check)}"))
        judged = [(s.system, j) for s in result.systems for j in (*s.checks, *s.evidence) if j.check is check]
        rows = [[f"    {name}", number(j.effect), interval_text(j), j.verdict] for name, j in judged]
        lines += table(["", "effect", "95 % interval", ""], rows).splitlines()[2:]
    return "\n".join(lines)


def _verdict(study: Study, system: JudgedSystem) -> str:
    published = study.published.get(system.system)
    text = f"{system.system}: " if system.system else ""
    text += f"{system.verdict}; published: "
    if published is None:
        text += "nothing"
    else:
        text += f"{published.verdict or 'no verdict'} ({published.figures})"
        text += {"agrees": "", "explained": "; the difference is explained", "differs": "; NOT EXPLAINED"}.get(
            system.agreement, ""
        )
    if not system.as_recorded:
        text += f"; ON RECORD: {study.recorded[system.system]}"
    return wrap(text)
