"""The answer of a gate as Markdown, for the summary of a pull request."""

from __future__ import annotations

from blis_replay.validate.gating.report_text import (
    VERDICTS,
    against,
    cell_name,
    changed,
    in_the_way,
    outcome,
    place,
)
from blis_replay.validate.gating.verdicts import GateReport
from blis_replay.validate.terminal import markdown_table, markdown_text, percent


def gate_markdown(report: GateReport) -> str:
    """Verdict, what stands in the way of a pass, and the tables of errors and of changes."""
    parts = [f"## Coefficient gate: {VERDICTS[report.verdict]}", markdown_text(against(report))]
    parts.append(
        "\n".join(
            f"- **{markdown_text(place(c))}** ({c.outcome}): {markdown_text(c.message)}" for c in in_the_way(report)
        )
    )
    parts.append(_errors(report))
    parts.append(_changes(report))
    parts.append("\n".join(f"- {check.rule}: {markdown_text(check.message)}" for check in report.checks))
    return "\n\n".join(part for part in parts if part) + "\n"


def _errors(report: GateReport) -> str:
    cells = list(report.policy.thresholds)
    header = ["experiment", "fit on", *(f"{cell_name(*c)} (≤ {100 * report.policy.thresholds[c]:g} %)" for c in cells)]
    rows = [
        [j.alias, j.uses.removeprefix("own "), *(percent(j.errors.get(cell)) for cell in cells), outcome(j)]
        for j in report.judgements
    ]
    return markdown_table([*header, "outcome"], rows)


def _changes(report: GateReport) -> str:
    rows = [
        [
            check.experiment,
            cell_name(check.metric, check.statistic),
            f"{100 * (check.value or 0.0):+.2f}",
            f"{100 * check.interval[0]:+.2f} .. {100 * check.interval[1]:+.2f}",
            check.outcome,
        ]
        for check in changed(report)
        if check.interval is not None
    ]
    if not rows:
        return ""
    return markdown_table(["change of |error|", "", "points", "interval", "outcome"], rows)
