"""What a gate answers: a page, a document, rows, JUnit XML, and Markdown for a pull request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from blis_replay.base.errors import counted, printable
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.tables import Cell, Column, Number, Table, columns_named
from blis_replay.validate.comparison.overview import WAS_IT, cautions, counts_text, error_cell, toned_error
from blis_replay.validate.comparison.pages import judgement_json
from blis_replay.validate.comparison.verdict_text import command_text, toned
from blis_replay.validate.gating.policy import Check, Gated, GateReport, Ordered, Policy
from blis_replay.validate.judgement import VERDICTS, exit_code
from blis_replay.validate.metrics.latency import METRIC_NAMES, THRESHOLDS, cell_name
from blis_replay.validate.metrics.skill import SCORED, Skill
from blis_replay.validate.text.answer import Answer, Block, Line, Part, markdown, markdown_text
from blis_replay.validate.text.cells import in_ms, percent, percent_plain, time_span

_MOST_COLUMNS = 4


def gate_answer(report: GateReport, store: str = "", releases: tuple[str | None, str | None] = (None, None)) -> Answer:
    """Verdict with the largest reason, errors by experiment, what is in the way, and changes against the baseline.

    ``store``: option of the next command; ``releases``: baseline and candidate, as the user gave them.

    Errors and limits are fractions, times in ms.  The rows are one per check, of an experiment or of the gate as a
    whole (``experiment`` empty).
    """
    verdict = Line(f"{report.verdict}  {report.candidate.name}: {gate_reason(report)}", mark=toned(report.verdict))
    head: list[Part] = [Block([verdict, against(report)]), _errors(report), Block(_apart(report))]
    passed = Block([f"{check.rule}: {check.message}" for check in report.checks if check.outcome == "PASS"])
    found = in_the_way(report)
    every = [Line(f"{one.outcome}  {place(one)}: {one.message}", mark=toned(one.outcome)) for one in found]
    page: list[Part] = [*head, Block(every), _changes(report), _predictions(report), _skills(report), passed]
    brief: list[Part] = [*head, Block(_worst_of_each(report, found)), Block(_unchanged_and_rule(report)), passed]
    of = report.baseline or report.candidate, report.candidate
    baseline, candidate = (quote(given or release.name) for given, release in zip(releases, of, strict=True))
    brief.append(Block([_MORE, *_next(report, found, (baseline, candidate), store)]))
    rows = Table("", _DATA_COLUMNS, [_row(check) for check in report.all_checks])
    return Answer(page, _document(report), rows, exit_code([report.verdict]), brief=brief)


_MORE = "more: -v prints every check, every change and every interval"


def _next(report: GateReport, found: Sequence[Check], releases: tuple[str, str], store: str) -> list[Line]:
    """Where the worst error comes from, as ``validate`` says; of one that grew, both releases beside each other."""
    worst = next((check for check in found if check.value is not None and check.experiment), None)
    if worst is None:
        return []
    baseline, candidate = releases
    if worst.rule == "regression":
        both = f"blis-replay compare {baseline} {candidate} --experiment {quote(worst.experiment)}{store}"
        return [Line("next:", command=both)]
    judged = [one.judgement for one in report.judgements if one.judgement and one.alias == worst.experiment]
    options = f" --coefficients {candidate}{store}"
    return [Line("next:", command=command_text(one.next, options)) for one in judged[:1]]


def _worst_of_each(report: GateReport, found: Sequence[Check]) -> list[Line]:
    """What is in the way most of each experiment, and how much more there is; the first stands on the first line."""
    of = {id(check): judgement.slug for judgement in report.judgements for check in judgement.checks}
    by_place: dict[str, list[Check]] = {}
    for check in found:
        by_place.setdefault(of.get(id(check), check.rule), []).append(check)
    alike: dict[tuple[str, str, str], list[Check]] = {}
    for checks in by_place.values():
        why = f"{checks[0].message}{_and_more(checks)}{_other_changes(report, checks[0])}"
        alike.setdefault((checks[0].outcome, checks[0].rule, why), []).append(checks[0])
    lines = []
    for (outcome, rule, why), checks in alike.items():
        where = ", ".join([*(check.experiment for check in checks if check.experiment), rule])
        lines.append(Line(f"{outcome}  {where}: {why}", mark=toned(outcome)))
    return lines if len(by_place) > 1 else []


def _other_changes(report: GateReport, check: Check) -> str:
    """What else changed of an experiment whose error grew, for better or worse; empty of another check."""
    judged = [c for c in _judged_changes(report) if c.experiment == check.experiment and c is not check]
    if check.rule != "regression" or check.value is None or not judged:
        return ""
    changes = [f"{cell_name((c.metric, c.statistic))} {100 * (c.value or 0):+.2f}" for c in judged]
    return f"; changes of other |error|s: {', '.join(changes)} points"


def _and_more(found: Sequence[Check]) -> str:
    """The checks after the first, by outcome: which, where it is one, else how many."""
    more = []
    for one in VERDICTS:
        others = [check for check in found[1:] if check.outcome == one]
        if len(others) == 1:
            where = "" if place(others[0]) == place(found[0]) else place(others[0])
            more.append(" ".join(filter(None, (one, where, others[0].metric.upper()))))
        elif others:
            more.append(f"{one} {counted(len(others), 'check')}")
    return f"; besides, {', '.join(more)}" if more else ""


def _unchanged_and_rule(report: GateReport) -> list[str]:
    """How many errors did not change, and when a change fails, which is not when an error is beyond its limit."""
    judged = _judged_changes(report)
    if report.baseline is None or not judged:
        return []
    of, same = report.policy.regression, len(judged) - len(changed(report))
    equal = f"{same} of {len(judged)} errors did not change at all"
    return [
        *([f"against {report.baseline.name}: {equal}"] if same else []),
        f"regression: FAIL if an |error| grew by more than {100 * of.margin:g} points, and its whole "
        f"{100 * of.confidence:g} % interval is above 0; PASS if the whole interval is at most {100 * of.margin:g}",
    ]


def _judged_changes(report: GateReport) -> list[Check]:
    return [check for check in report.all_checks if check.rule == "regression" and check.value is not None]


def gate_reason(report: GateReport) -> str:
    """What stands in the way most; of a pass, how many experiments it rests on."""
    if found := in_the_way(report):
        return f"{place(found[0])}: {found[0].message}{_and_more(found)}"
    return counts_text([j.outcome for j in report.judgements if j.outcome is not None])


def in_the_way(report: GateReport) -> list[Check]:
    """Checks that did not pass, the worst first; of each kind the largest value for its limit first."""
    found = [check for check in report.all_checks if check.outcome != "PASS"]

    def rank(check: Check) -> tuple[int, bool, float]:  # an error beyond its limit before one that only grew
        limited = check.rule in ("threshold", "capacity")
        return VERDICTS.index(check.outcome), not limited, -abs(check.value or 0) / (check.limit or 1)

    return sorted(found, key=rank)


def place(check: Check) -> str:
    """Where a check belongs: experiment and rule."""
    return f"{check.experiment}, {check.rule}" if check.experiment else check.rule


def against(report: GateReport) -> str:
    """Candidate, baseline and policy in words, and what became of the experiments."""
    baseline = f"baseline {report.baseline.name}" if report.baseline else "no baseline"
    counts = counts_text([j.outcome for j in report.judgements if j.outcome is not None])
    aside = sum(j.outcome is None for j in report.judgements)
    of = "; ".join(filter(None, [counts, f"{aside} not gated" if aside else ""]))
    return (
        f"candidate {report.candidate.name}; {baseline}; limits of the {report.policy.name} policy; {of}; exit code "
        f"{exit_code([report.verdict])}"
    )


def outcome(judgement: Gated) -> str:
    """What became of an experiment: its verdict, or that it is not gated."""
    return judgement.outcome or "not gated"


def changed(report: GateReport) -> list[Check]:
    """Regression checks with a number, where the baseline answered anything else than the candidate."""
    return [c for c in _judged_changes(report) if max(map(abs, (c.value or 0.0, *(c.interval or ())))) > _NO_CHANGE]


_NO_CHANGE = 1e-12  # a fraction of the observed value: what rounding makes of two equal errors


def _errors(report: GateReport) -> Table:
    """Few columns each in 80 columns, all in one table where there is room."""
    cells = list(report.policy.limits)
    columns = (
        *columns_named("error of", "run", kind="text"),
        *(Column(cell_name(cell), "error", part=1 + i // _MOST_COLUMNS) for i, cell in enumerate(cells)),
        *([Column("change, pts", "word")] if (grown := _grown(report)) else []),
        Column("outcome", "word"),
    )
    limits: list[Cell] = ["at most", "", *(f"{100 * report.policy.limits[cell]:g} %" for cell in cells)]
    limits += [*([f"{100 * report.policy.regression.margin:+.2f}"] if grown else []), ""]
    rows: list[list[Cell]] = [
        [
            j.alias + ("" if j.ground_truth == "recorded" else "*"),
            "-" if j.judgement is None else WAS_IT[j.judgement.subject.use],
            *(_error(j, cell) for cell in cells),
            *([grown.get(j.slug)] if grown else []),
            toned(outcome(j)),
        ]
        for j in report.judgements
    ]
    return Table("", columns, [limits, *rows])


def _grown(report: GateReport) -> dict[str, str]:
    """By slug, which |error| grew and by how many points: of the worst outcome what grew, or may have, most."""
    grown: dict[str, str] = {}
    for judgement in report.judgements:
        known = [(c, c.value) for c in judgement.checks if c.rule == "regression" and c.value is not None]
        if known:
            check, points = max(known, key=lambda one: (-VERDICTS.index(one[0].outcome), _may_have_grown(*one)))
            grown[judgement.slug] = f"{cell_name((check.metric, check.statistic))} {100 * points:+.2f}"
    return grown


def _may_have_grown(check: Check, value: float) -> float:
    return check.interval[1] if check.interval is not None and check.outcome == "UNDECIDED" else value


def _error(judgement: Gated, cell: tuple[str, str]) -> Cell:
    """An error in the colour of its state; of an overloaded run only what is judged says anything."""
    judged = judgement.judgement
    if judged is None or not judged.overloaded:
        return None if judged is None else error_cell(judged, cell, judged.errors.get(cell))
    served = next((q for q in judged.judged if (q.key, q.statistic) == cell), None)
    return None if served is None else toned_error(served.error, served.state)


def _changes(report: GateReport) -> Block:
    """What changed against the baseline, and how much did not."""
    rows = changed(report)
    if not rows:
        return Block(_unchanged_and_rule(report))
    title = f"change of |error|, {100 * report.policy.regression.confidence:g} % interval"
    said: list[Part] = ["intervals: of both errors on the same requests", *_unchanged_and_rule(report)]
    return Block([_change_table(title, rows), *said])


def _predictions(report: GateReport) -> Part:
    """What other coefficients that fit as well simulate, where the candidate keeps how unsure they are."""
    metrics = [metric for metric in THRESHOLDS if any(metric in _between_us(gated) for gated in report.judgements)]
    columns = (Column("simulated mean, 95 %", "text"), *(Column(METRIC_NAMES[m], "word") for m in metrics))
    rows: list[list[Cell]] = [
        [gated.alias, *(time_span(*between[m]) if m in between else "-" for m in metrics)]
        for gated in report.judgements
        if (between := _between_us(gated))
    ]
    return Table("", columns, rows) if rows else Block([])


def _between_us(gated: Gated) -> Mapping[str, tuple[float, float]]:
    """By metric, the 95 % interval of the simulated mean; empty without any."""
    between: Mapping[str, tuple[float, float]] = _remarked(gated, "predicted", "between_us")
    return between


def _remarked(gated: Gated, code: str, value: str) -> Mapping[str, Any]:
    remarks = gated.judgement.remarks if gated.judgement else ()
    found: Mapping[str, Any] = next((one.values[value] for one in remarks if one.code == code), {})
    return found


_SKILLS = (
    Column("single requests", "text"),
    *columns_named("E2E skill", "TTFT skill", "E2E CRPS", "TTFT CRPS", "beside repeats", kind="word"),
)


def _skills(report: GateReport) -> Part:
    """How near single requests are, where they were recorded."""
    found = {gated.alias: _remarked(gated, "skill", "skills") for gated in report.judgements}
    rows: list[list[Cell]] = [[alias, *_skill_cells(skills)] for alias, skills in found.items() if skills]
    note = "skill: 1 is right, 0 as a straight line in the lengths; CRPS: of the observed mean"
    return Table("", _SKILLS, rows, note) if rows else Block([])


def _skill_cells(skills: Mapping[str, Skill]) -> list[Cell]:
    of = [skills.get(metric) for metric in SCORED]
    lines, repeats = ([one and getattr(one, name) for one in of] for name in ("beside_line", "beside_repeats"))
    return [
        *("-" if skill is None else f"{skill:+.2f}" for skill in lines),
        *("-" if one is None else percent_plain(one.share) for one in of),
        " / ".join("-" if ratio is None else f"{ratio:.1f}" for ratio in repeats) if any(repeats) else "-",
    ]


def _change_table(title: str, checks: Sequence[Check]) -> Table:
    columns = (
        *columns_named(title, "", kind="text"),
        Column("points", Number(2, 100, signed=True)),
        *columns_named("interval", "outcome"),
    )
    return Table("", columns, [_change(check) for check in checks])


def _change(check: Check) -> list[Cell]:
    low, high = check.interval or (float("nan"), float("nan"))
    interval = f"{100 * low:+.2f} .. {100 * high:+.2f}"
    named = (check.experiment, cell_name((check.metric, check.statistic)))
    return [*named, check.value or 0.0, interval, toned(check.outcome)]


def _apart(report: GateReport) -> list[str]:
    """Under the table: what its marks mean, and whom the verdict leaves out, by reason."""
    apart: dict[str, list[str]] = {}
    for judgement in report.judgements:
        if judgement.outcome is None:
            judged = judgement.judgement.judged if judgement.judgement else ()
            far = [q for q in judged if q.error is not None and q.state in ("beyond", "undecided")]
            far_text = f" ({', '.join(f'{q.name} {percent(q.error or 0.0)} {q.state}' for q in far)})" if far else ""
            apart.setdefault(f"not gated, {judgement.reason}", []).append(f"{judgement.alias}{far_text}")
        elif judgement.standing == "overloaded":
            apart.setdefault(judgement.reason, []).append(judgement.alias)
    for alias, why in report.left_out.items():
        apart.setdefault(f"left out, {why}", []).append(alias)
    lines = [f"{why}: {', '.join(aliases)}" for why, aliases in apart.items()]
    lines += cautions([one.judgement for one in report.judgements if one.judgement and one.outcome])
    if any(j.ground_truth != "recorded" for j in report.judgements):
        lines.insert(0, "* published aggregates; intervals come from reconstructions of the requests")
    return lines


def _document(report: GateReport) -> dict[str, object]:
    return {
        "verdict": report.verdict,
        "candidate": _release(report.candidate),
        "baseline": report.baseline and _release(report.baseline),
        "policy": _policy(report.policy),
        "experiments": [_judgement(judgement) for judgement in report.judgements],
        "checks": [_check(check) for check in report.checks],
        "left_out": report.left_out,
    }


def _release(release: CoefficientRelease) -> dict[str, object]:
    return {"coefficients": release.name, "coefficients_hash": release.sha256, "hardware": release.hardware}


def _policy(policy: Policy) -> dict[str, object]:
    return {
        "name": policy.name,
        "policy_hash": policy.sha256 or None,
        "thresholds": {f"{metric} {statistic}": limit for (metric, statistic), limit in policy.limits.items()},
        "regression": {
            "cells": [" ".join(number) for number in policy.regression.numbers],
            "margin": policy.regression.margin,
            "confidence": policy.regression.confidence,
        },
        "ranking": {"metrics": list(policy.ranking.metrics), "tolerance": policy.ranking.tolerance},
        "coverage": {"experiments": policy.coverage.experiments, "models": list(policy.coverage.models)},
        "held_out_only": policy.held_out_only,
    }


def _judgement(gated: Gated) -> dict[str, object]:
    judged = gated.judgement
    return {
        "slug": gated.slug,
        "alias": gated.alias,
        "model": gated.model,
        "ground_truth": gated.ground_truth,
        "standing": gated.standing,
        "reason": gated.reason,
        "outcome": gated.outcome,
        "judgement": judged and judgement_json(judged),
        "errors": {} if judged is None else {" ".join(cell): error for cell, error in judged.errors.items()},
        "simulated_between_ms": {m: list(map(in_ms, between)) for m, between in _between_us(gated).items()},
        "skill": {metric: one.document for metric, one in _remarked(gated, "skill", "skills").items()},
        "p99": {metric: _ordered(p99) for metric, p99 in gated.ordered.items()},
        "checks": [_check(check) for check in gated.checks],
    }


def _ordered(p99: Ordered) -> dict[str, object]:
    interval = p99.interval_us and [in_ms(max(bound, 0.0)) for bound in p99.interval_us]
    return {
        "observed_ms": in_ms(p99.observed_us),
        "simulated_ms": in_ms(p99.simulated_us),
        "observed_interval_ms": interval,
    }


def _check(check: Check) -> dict[str, object]:
    return {
        "rule": check.rule,
        "experiment": check.experiment,
        "metric": check.metric,
        "statistic": check.statistic,
        "outcome": check.outcome,
        "value": check.value,
        "limit": check.limit,
        "interval": _interval(check),
        "message": check.message,
    }


def _interval(check: Check) -> list[float] | None:
    finite = check.interval is not None and all(map(math.isfinite, check.interval))
    return list(check.interval or ()) if finite else None


_DATA_COLUMNS = (
    *columns_named("rule", "experiment", "metric", "statistic", "outcome", kind="data"),
    *columns_named("value", "limit", "low", "high", kind="real"),
    Column("message", "data"),
)


def _row(check: Check) -> list[Cell]:
    named = (check.rule, check.experiment, check.metric, check.statistic, check.outcome)
    return [*named, check.value, check.limit, *(_interval(check) or (None, None)), check.message]


def gate_junit(report: GateReport) -> str:
    """A suite per experiment and one of the gate as a whole, a case per check; see ``junit``."""
    suites = [(j.alias, j.checks, j.reason if j.outcome is None else "") for j in report.judgements]
    return junit(f"blis-replay gate: {against(report)}", [*suites, ("the gate as a whole", report.checks, "")])


def junit(title: str, suites: Iterable[tuple[str, Sequence[Check], str]]) -> str:
    """JUnit XML of suites: a name, checks, and why the whole was left out.

    FAIL is a ``failure``, UNDECIDED and NOT JUDGED are an ``error``; an experiment that is not gated is ``skipped``.
    """
    root = Element("testsuites", name=printable(title))
    for name, checks, left_out in suites:
        _suite(root, name, checks, left_out)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(root: Element, name: str, checks: Sequence[Check], left_out: str) -> None:
    suite = SubElement(root, "testsuite", name=printable(name))
    for check in checks:
        _case(suite, name, check)
    if left_out:
        case = SubElement(suite, "testcase", classname=printable(name), name="not gated")
        SubElement(case, "skipped", message=printable(left_out))
    suite.set("tests", str(len(suite)))
    for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(len(suite.findall(f"testcase/{tag}"))))


def _case(suite: Element, name: str, check: Check) -> None:
    title = " ".join(part for part in (check.rule, check.metric, check.statistic) if part)
    case = SubElement(suite, "testcase", classname=printable(name), name=title)
    message = printable(check.message)
    if check.outcome == "PASS":
        SubElement(case, "system-out").text = message
    else:
        SubElement(case, "failure" if check.outcome == "FAIL" else "error", message=f"{check.outcome}: {message}")


def gate_markdown(report: GateReport) -> str:
    """Verdict, what stands in the way of a pass, and the tables of errors and of changes."""
    head = f"{report.candidate.name}: {gate_reason(report)}"
    parts = [f"## {report.verdict}: coefficient gate", markdown_text(head), markdown_text(against(report))]
    parts.append(
        "\n".join(
            f"- **{c.outcome}** {markdown_text(place(c))}: {markdown_text(c.message)}" for c in in_the_way(report)
        )
    )
    parts.append(markdown(_errors(report)))
    moved = [check for check in changed(report) if check.interval is not None]
    parts.append(markdown(_change_table("change of |error|", moved)) if moved else "")
    parts.append("\n".join(f"- {check.rule}: {markdown_text(check.message)}" for check in report.checks))
    return "\n\n".join(part for part in parts if part) + "\n"
