"""Instrument checks: their list, their findings, and the evidence of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blis_replay.ingest.checks.registry import CheckEvidence
from blis_replay.ingest.recording import Finding
from blis_replay.ingest.tables import Table, Toned, Value, columns_named, table_of
from blis_replay.validate.text.answer import Answer, Block, Line, Part

# ``table``: the title of a table, or ``finding``; ``row`` counts from 0; ``column`` names the cell.
_EVIDENCE_COLUMNS = columns_named("table", "row", "column", "value", kind="data")


def checks_answer(names: Mapping[str, str]) -> Answer:
    """The instrument checks with what they measure."""
    lines = [f"{name}: {measures}" for name, measures in names.items()]
    return Answer(
        [Block(lines)], names, table_of({"check": name, "measures": measures} for name, measures in names.items())
    )


def finding_line(finding: Finding) -> Line:
    """A finding in a list of them; its severity stands out unless it is only a note."""
    severity = f"({finding.severity})"
    return Line(f"- {finding.check} {severity}: {finding.message}", mark=_severity(severity, finding))


def evidence_answer(evidence: CheckEvidence) -> Answer:
    """The check, its rule, findings and tables; the rows are one per number or word of a finding or a table."""
    check = evidence.check
    page: list[Part] = [
        Line(f"{check.name}: {evidence.alias}  ({evidence.slug})", mark=Toned(check.name, "heading")),
        f"measures: {check.measures}",
        f"thresholds: {check.rule}",
        *(_finding(finding) for finding in evidence.findings),
        *([] if evidence.findings else ["no finding"]),
        *evidence.tables,
    ]
    document = {
        "slug": evidence.slug,
        "alias": evidence.alias,
        "check": check.name,
        "measures": check.measures,
        "rule": check.rule,
        "findings": [vars(finding) for finding in evidence.findings],
        "tables": [{"title": shown.title, "note": shown.note, "rows": shown.records()} for shown in evidence.tables],
    }
    return Answer(page, document, _evidence_rows(evidence))


def _evidence_rows(evidence: CheckEvidence) -> Table:
    findings: list[Mapping[str, Value]] = [
        {"severity": finding.severity, "message": finding.message, **finding.measured} for finding in evidence.findings
    ]
    tables: list[tuple[str, Sequence[Mapping[str, Value]]]] = [("finding", findings)]
    tables += [(shown.title, shown.records()) for shown in evidence.tables]
    rows = [
        [title, i, name, None if value is None else str(value)]
        for title, records in tables
        for i, record in enumerate(records)
        for name, value in record.items()
    ]
    return Table("", _EVIDENCE_COLUMNS, rows)


def _severity(text: str, finding: Finding) -> Toned | None:
    if finding.severity == "note":
        return None
    return Toned(text, "bad" if finding.severity == "unusable" else "caution")


def _finding(finding: Finding) -> Block:
    of = f" of {finding.metric}" if finding.metric else ""
    line = Line(f"{finding.severity}{of}: {finding.message}", mark=_severity(finding.severity, finding))
    measured = Table("", columns_named("measured", ""), list(finding.measured.items()))
    return Block([line, measured] if finding.measured else [line])
