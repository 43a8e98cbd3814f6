"""What a gate answers: a page, a document, rows, JUnit XML, and Markdown for a pull request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.errors import printable
from blis_replay.ingest.tables import Cell, Column, Number, Table, Toned, columns_named
from blis_replay.validate.comparison.verdict_text import verdict_tone
from blis_replay.validate.gating.policy import Check, Gated, GateReport, Ordered, Policy
from blis_replay.validate.text.answer import Answer, Block, Line, Part, Verbatim, markdown, markdown_text
from blis_replay.validate.text.cells import in_ms

EXIT_CODES = {"pass": 0, "fail": 1, "not judged": 3}
VERDICTS = {"pass": "pass", "fail": "fail", "not judged": "could not be judged"}
_MOST_COLUMNS = 4


def gate_answer(report: GateReport) -> Answer:
    """Errors by experiment, changes against the baseline, order and coverage, verdict with what led to it.

    Errors and limits are fractions, times in ms.  The rows are one per check, of an experiment or of the gate as a
    whole (``experiment`` empty).
    """
    verdict = f"verdict: {VERDICTS[report.verdict]}"
    page: list[Part] = [
        f"gate: {against(report)}",
        _errors(report),
        _changes(report),
        Block([f"{check.rule}: {check.message}" for check in report.checks if check.outcome == "pass"]),
        Block(_apart(report)),
        Block(
            [
                Line(verdict, mark=Toned(verdict, verdict_tone(report.verdict))),
                *(f"- {place(check)}: {check.message}" for check in in_the_way(report)),
            ]
        ),
    ]
    return Answer(
        page,
        _document(report),
        Table("", _DATA_COLUMNS, [_row(check) for check in report.all_checks]),
        EXIT_CODES[report.verdict],
    )


def in_the_way(report: GateReport) -> list[Check]:
    """Checks that failed, then those that could not be judged."""
    return [check for outcome in ("fail", "not judged") for check in report.all_checks if check.outcome == outcome]


def place(check: Check) -> str:
    """Where a check belongs: experiment and rule."""
    return f"{check.experiment}, {check.rule}" if check.experiment else check.rule


def against(report: GateReport) -> str:
    """Candidate, baseline and policy in words."""
    baseline = report.baseline.name if report.baseline else "none"
    return f"candidate {report.candidate.name}; baseline {baseline}; policy {report.policy.name}"


def outcome(judgement: Gated) -> str:
    """What became of an experiment: the worst of its checks, or why it is not gated."""
    return judgement.outcome or "not held out"


def cell_name(metric: str, statistic: str) -> str:
    """The heading of a column: the mean goes without saying."""
    return metric.upper() if statistic == "mean" else f"{metric.upper()} {statistic}"


def changed(report: GateReport) -> list[Check]:
    """Regression checks with a number, where the baseline answered anything else than the candidate."""
    judged = [c for c in report.all_checks if c.rule == "regression" and c.value is not None]
    return [c for c in judged if c.value or any(c.interval or ())]


def _errors(report: GateReport) -> Table:
    """Few columns each in 80 columns, all in one table where there is room."""
    cells = list(report.policy.thresholds)
    columns = (
        *columns_named("error of", "fit on", kind="text"),
        *(Column(cell_name(*cell), "error", part=1 + i // _MOST_COLUMNS) for i, cell in enumerate(cells)),
        Column("outcome", "word"),
    )
    limits = ["at most", "", *(f"{100 * report.policy.thresholds[cell]:g} %" for cell in cells), ""]
    rows: list[list[Cell]] = [
        [
            j.alias + ("" if j.ground_truth == "recorded" else "*"),
            j.uses.removeprefix("fitted on "),
            *(_error(j, cell) for cell in cells),
            _toned_outcome(outcome(j)),
        ]
        for j in report.judgements
    ]
    return Table("", columns, [limits, *rows])


def _error(judgement: Gated, cell: tuple[str, str]) -> Cell:
    """An error; one that the policy does not let pass stands out, and an overloaded run has none that says anything."""
    if judgement.standing == "overloaded":
        return None
    failed = [check for check in judgement.checks if check.rule == "threshold" and check.outcome == "fail"]
    error = judgement.errors.get(cell)
    return Toned(error, "bad") if cell in {(check.metric, check.statistic) for check in failed} else error


def _toned_outcome(named: str) -> Toned:
    return Toned(named, verdict_tone(named))


def _changes(report: GateReport) -> Block:
    """What changed against the baseline, and how much did not."""
    if report.baseline is None:
        return Block([])
    rows, judged = changed(report), [c for c in report.all_checks if c.rule == "regression" and c.value is not None]
    same = f"{len(judged) - len(rows)} of {len(judged)} errors are those of the baseline to the last digit"
    if not rows:
        return Block([f"against {report.baseline.name}: {same}"])
    title = f"change of |error|, {100 * report.policy.regression.confidence:g} % interval"
    return Block([_change_table(title, rows), "intervals: over draws of blocks of requests", Verbatim(same)])


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
    named = (check.experiment, cell_name(check.metric, check.statistic))
    return [*named, check.value or 0.0, interval, _toned_outcome(check.outcome)]


def _apart(report: GateReport) -> list[str]:
    lines = [f"not gated: {j.alias}: {j.reason}" for j in report.judgements if j.outcome is None]
    lines += [f"{j.alias}: {j.reason}" for j in report.judgements if j.standing == "overloaded"]
    lines += [f"left out: {alias}: {why}" for alias, why in report.left_out.items()]
    if any(j.ground_truth != "recorded" for j in report.judgements):
        lines.append(
            "* published aggregates: there are no recorded requests, so intervals come from reconstructions of them"
        )
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
        "thresholds": {f"{metric} {statistic}": limit for (metric, statistic), limit in policy.thresholds.items()},
        "regression": {
            "cells": [" ".join(cell) for cell in policy.regression.cells],
            "margin": policy.regression.margin,
            "confidence": policy.regression.confidence,
        },
        "ranking": {"metrics": list(policy.ranking.metrics), "tolerance": policy.ranking.tolerance},
        "coverage": {"experiments": policy.coverage.experiments, "models": list(policy.coverage.models)},
        "held_out_only": policy.held_out_only,
    }


def _judgement(judgement: Gated) -> dict[str, object]:
    return {
        "slug": judgement.slug,
        "alias": judgement.alias,
        "model": judgement.model,
        "ground_truth": judgement.ground_truth,
        "requests": judgement.requests,
        "coefficients_use": judgement.uses,
        "standing": judgement.standing,
        "reason": judgement.reason,
        "outcome": judgement.outcome,
        "errors": {" ".join(cell): error for cell, error in judgement.errors.items()},
        "p99": {metric: _ordered(p99) for metric, p99 in judgement.ordered.items()},
        "checks": [_check(check) for check in judgement.checks],
    }


def _ordered(p99: Ordered) -> dict[str, object]:
    interval = p99.interval_us and [in_ms(bound) for bound in p99.interval_us]
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
    """A suite an experiment and one of the gate as a whole, a case a check.

    What failed is a ``failure``, what could not be judged an ``error``, an experiment that is
    not gated a ``skipped`` case.
    """
    root = Element("testsuites", name=printable(f"blis-replay gate: {against(report)}"))
    for judgement in report.judgements:
        _suite(root, judgement.alias, judgement.checks, judgement)
    _suite(root, "the gate as a whole", report.checks)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(root: Element, name: str, checks: tuple[Check, ...], judgement: Gated | None = None) -> None:
    suite = SubElement(root, "testsuite", name=printable(name))
    for check in checks:
        _case(suite, name, check)
    if judgement is not None and judgement.outcome is None:
        case = SubElement(suite, "testcase", classname=printable(name), name="not gated")
        SubElement(case, "skipped", message=printable(judgement.reason))
    suite.set("tests", str(len(suite)))
    for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(len(suite.findall(f"testcase/{tag}"))))


def _case(suite: Element, name: str, check: Check) -> None:
    title = " ".join(part for part in (check.rule, check.metric, check.statistic) if part)
    case = SubElement(suite, "testcase", classname=printable(name), name=title)
    message = printable(check.message)
    if check.outcome == "pass":
        SubElement(case, "system-out").text = message
    else:
        SubElement(case, "failure" if check.outcome == "fail" else "error", message=message)


def gate_markdown(report: GateReport) -> str:
    """Verdict, what stands in the way of a pass, and the tables of errors and of changes."""
    parts = [f"## Coefficient gate: {VERDICTS[report.verdict]}", markdown_text(against(report))]
    parts.append(
        "\n".join(
            f"- **{markdown_text(place(c))}** ({c.outcome}): {markdown_text(c.message)}" for c in in_the_way(report)
        )
    )
    parts.append(markdown(_markdown_errors(report)))
    moved = [check for check in changed(report) if check.interval is not None]
    parts.append(markdown(_change_table("change of |error|", moved)) if moved else "")
    parts.append("\n".join(f"- {check.rule}: {markdown_text(check.message)}" for check in report.checks))
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_errors(report: GateReport) -> Table:
    cells = list(report.policy.thresholds)
    limits = [f"{cell_name(*cell)} (≤ {100 * report.policy.thresholds[cell]:g} %)" for cell in cells]
    columns = (*columns_named("experiment", "fit on"), *columns_named(*limits, kind="error"), Column("outcome"))
    rows = [
        [j.alias, j.uses.removeprefix("fitted on "), *(_error(j, cell) for cell in cells), outcome(j)]
        for j in report.judgements
    ]
    return Table("", columns, rows)
