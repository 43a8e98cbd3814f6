"""The evidence of an instrument check, for a terminal, as a frame and as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from blis_replay.ingest.check_evidence import CheckEvidence
from blis_replay.ingest.checks.pictures import Cell, Table
from blis_replay.ingest.recording import Finding
from blis_replay.validate.terminal import Toned, line_columns, table, wrap

_LONGEST_BAR = 40


def names_text(names: Mapping[str, str]) -> str:
    """The instrument checks, a line or two each."""
    return "\n".join(wrap(f"{name}: {measures}") for name, measures in names.items())


def names_frame(names: Mapping[str, str]) -> pl.DataFrame:
    """The same as a frame."""
    return pl.DataFrame({"check": list(names), "measures": list(names.values())})


def evidence_json(evidence: CheckEvidence) -> dict[str, object]:
    """The check, its rule, findings and tables; a table has its rows by column name."""
    return {
        "slug": evidence.slug,
        "alias": evidence.alias,
        "check": evidence.check.name,
        "measures": evidence.check.measures,
        "rule": evidence.check.rule,
        "findings": [vars(finding) for finding in evidence.findings],
        "tables": [
            {
                "title": shown.title,
                "note": shown.note,
                "rows": [dict(zip(shown.columns, row, strict=True)) for row in shown.rows],
            }
            for shown in evidence.tables
        ],
    }


def evidence_frame(evidence: CheckEvidence) -> pl.DataFrame:
    """A row a number or word: of ``finding`` i its measured values, of each table its cells.

    ``table`` is the table's title or ``finding``, ``row`` counts from 0, ``column`` names the cell, ``value`` is text.
    """
    found = [
        ("finding", i, name, value) for i, finding in enumerate(evidence.findings) for name, value in _told(finding)
    ]
    cells = [
        (shown.title, i, name, value)
        for shown in evidence.tables
        for i, row in enumerate(shown.rows)
        for name, value in zip(shown.columns, row, strict=True)
    ]
    rows = [(title, i, name, None if value is None else str(value)) for title, i, name, value in [*found, *cells]]
    schema = {"table": pl.String, "row": pl.Int64, "column": pl.String, "value": pl.String}
    return pl.DataFrame(rows, orient="row", schema=schema)


def _told(finding: Finding) -> list[tuple[str, Cell]]:
    return [("severity", finding.severity), ("message", finding.message), *finding.measured.items()]


def evidence_text(evidence: CheckEvidence) -> str:
    """The same in 80 columns, with bars."""
    parts = [
        wrap(f"{evidence.check.name}: {evidence.alias}  ({evidence.slug})", mark=Toned(evidence.check.name, "heading")),
        wrap(f"measures: {evidence.check.measures}"),
        wrap(f"thresholds: {evidence.check.rule}"),
        *(_finding(finding) for finding in evidence.findings),
        *([] if evidence.findings else ["no finding"]),
        *(_table(shown) for shown in evidence.tables),
    ]
    return "\n\n".join(parts)


def finding_line(finding: Finding) -> str:
    """A finding in a list of them; its severity stands out unless it is only a note."""
    severity = f"({finding.severity})"
    return wrap(f"- {finding.check} {severity}: {finding.message}", mark=_severity(severity, finding))


def _severity(text: str, finding: Finding) -> Toned | None:
    if finding.severity == "note":
        return None
    return Toned(text, "bad" if finding.severity == "unusable" else "caution")


def _finding(finding: Finding) -> str:
    of = f" of {finding.metric}" if finding.metric else ""
    lines = [wrap(f"{finding.severity}{of}: {finding.message}", mark=_severity(finding.severity, finding))]
    if finding.measured:
        lines.append(table(["measured", ""], [[name, cell_text(value)] for name, value in finding.measured.items()]))
    return "\n".join(lines)


def _table(shown: Table) -> str:
    rows = [[cell_text(cell) for cell in row] for row in shown.rows]
    header = list(shown.columns)
    if shown.bars:
        bars = _bars(bar_lengths(shown), _room(header, rows))
        header, rows = [*header, ""], [[*row, bar] for row, bar in zip(rows, bars, strict=True)]
    note = [wrap(f"({shown.note})")] if shown.note else []
    return "\n".join([wrap(f"{shown.title}:", mark=Toned(shown.title, "heading")), *note, table(header, rows)])


def _room(header: list[str], rows: list[list[str]]) -> int:
    used = sum(max(len(row[i]) for row in [header, *rows]) + 2 for i in range(len(header)))
    return max(1, min(_LONGEST_BAR, line_columns() - used))


def bar_lengths(shown: Table) -> list[float]:
    """The length of each row's bar as a share of the longest (0..1); 0 for what is no positive number."""
    values = [row[shown.columns.index(shown.bars)] for row in shown.rows]
    numbers = [max(float(value), 0.0) if isinstance(value, int | float) else 0.0 for value in values]
    most = max([*numbers, 0.0])
    return [number / most if most else 0.0 for number in numbers]


def _bars(lengths: list[float], longest: int) -> list[str]:
    # Whatever is there at all is seen; padded, because the column is aligned to the right.
    drawn = [max(1, round(longest * length)) if length else 0 for length in lengths]
    return [("#" * length).ljust(longest) for length in drawn]


def cell_text(value: Cell) -> str:
    """One cell of a check's table, or one measured value, as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value
