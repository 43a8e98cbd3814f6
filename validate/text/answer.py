"""The one shape of an answer, and its renderers: text, JSON, CSV and Markdown.

A verb's function returns data, one function lays it out as an ``Answer``, and the renderers here print it in any form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blis_replay.base.errors import printable
from blis_replay.ingest.tables import Column, Table, Toned, Value, table_of, without_formulas
from blis_replay.validate.text.cells import cell_text
from blis_replay.validate.text.terminal import table_text, toned, wrap

if TYPE_CHECKING:
    import polars as pl

    from blis_replay.ingest.recording import Finding


# What stands below a table that marks experiments with a star.
RECONSTRUCTED = "* ground truth: published aggregates, requests reconstructed from them"


@dataclass(frozen=True)
class Line:
    """A sentence that is broken at the width there is, later lines indented.

    ``mark``: words in it that stand out.  ``command``: to be copied, at its end; on a line of its own if it would be
    broken.
    """

    text: str
    indent: str = "  "
    mark: Toned | None = None
    command: str = ""


@dataclass(frozen=True)
class Verbatim:
    """Text that is printed as it is, such as YAML."""

    text: str


@dataclass(frozen=True)
class Block:
    """Parts directly below each other, with a heading if there is one; nothing without parts."""

    parts: Sequence[Part]
    heading: str = ""


Part = str | Line | Verbatim | Table | Block


@dataclass(frozen=True, repr=False)
class Answer:
    """What a verb answers, for people and for programs.

    ``page``: the parts of the text, with a blank line between them.  ``document``: JSON values.  ``data``: the rows of
    CSV, Markdown and frames; without it the document is the only row.  ``exit_code``: what the command ends with.
    ``beside_data``: what the page says and the rows cannot, for standard error.  ``brief``: what the command line
    prints instead of the page unless all of it is asked for (``-v``); nothing: the page.  ``card``: HTML, for a
    notebook.  ``whole``: lays out all of it, where this is only what is printed at first.
    """

    page: Sequence[Part]
    document: Mapping[str, Any]
    data: Table | None = None
    exit_code: int = 0
    beside_data: tuple[str, ...] = ()
    brief: Sequence[Part] = ()
    card: str = ""
    whole: Callable[[], Answer] | None = None

    @property
    def table(self) -> Table:
        """The rows for programs."""
        if self.data is not None:
            return self.data
        return table_of([{name: _joined(value) for name, value in self.document.items()}])

    @property
    def frame(self) -> pl.DataFrame:
        """The same as a polars frame."""
        return frame(self.table)

    def __repr__(self) -> str:
        return page_text(self.page)

    def _repr_html_(self) -> str | None:
        return self.card or None


def finding_line(finding: Finding) -> Line:
    """A finding in a list of them; its severity stands out unless it is only a note."""
    severity = f"({finding.severity})"
    return Line(f"- {finding.check} {severity}: {finding.message}", mark=severity_mark(severity, finding))


def severity_mark(text: str, finding: Finding) -> Toned | None:
    """How a text about a finding stands out: by its severity, a note not at all."""
    if finding.severity == "note":
        return None
    return Toned(text, "bad" if finding.severity == "unusable" else "heading")


def one_line(text: str, document: Mapping[str, Any]) -> Answer:
    """The answer of a verb that writes files: a line that is not broken, and the same for programs."""
    return Answer([Verbatim(text)], document)


def _joined(value: Any) -> Value:
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else value


def page_text(parts: Iterable[Part]) -> str:
    """A page for a terminal: its parts with a blank line between them; what is empty is left out."""
    return "\n\n".join(filter(None, map(part_text, parts)))


def part_text(part: Part) -> str:
    """One part for a terminal, in the width there is."""
    match part:
        case str():
            return wrap(part)
        case Line():
            return wrap(part.text, part.indent, part.mark, part.command)
        case Verbatim():
            return part.text
        case Table():
            return table_text(part)
        case Block():
            heading = [toned(f"{part.heading}:", "heading")] if part.heading and part.parts else []
            return "\n".join([*heading, *filter(None, map(part_text, part.parts))])


def page_json(document: Mapping[str, Any]) -> str:
    """The document as JSON; a number that is not finite becomes null."""
    return json.dumps(_with_nulls(document), indent=2, allow_nan=False)


def _with_nulls(value: Any) -> Any:
    """A document with null for every number that JSON cannot write, such as the mean of no requests."""
    if isinstance(value, dict):
        return {key: _with_nulls(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def frame(table: Table) -> pl.DataFrame:
    """A table as a frame: texts, integers where all numbers are such, else floats."""
    import polars as pl

    records = table.records()
    return pl.DataFrame(
        {c.name: pl.Series([record[c.name] for record in records], dtype=_dtype(c, records)) for c in table.columns}
    )


def _dtype(column: Column, records: Sequence[Mapping[str, Value]]) -> Any:
    import polars as pl

    kinds = {type(record[column.name]) for record in records} - {type(None)}
    if column.kind == "real":
        return pl.Float64
    if column.kind in ("text", "word") or not kinds or str in kinds:
        return pl.String
    return pl.Boolean if kinds == {bool} else pl.Int64 if kinds == {int} else pl.Float64


def csv(table: Table) -> str:
    """A header and a line per row, numbers in full, ``without_formulas``."""
    return without_formulas(frame(table)).write_csv()


def markdown(table: Table) -> str:
    """A table in Markdown; cells are only text in it."""
    rows = [
        [cell_text(cell, column.kind) for cell, column in zip(row, table.columns, strict=True)] for row in table.rows
    ]
    lines = [[markdown_text(cell) for cell in row] for row in [table.names, *rows]]
    lines.insert(1, ["---"] * len(table.columns))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_text(text: str) -> str:
    """Text that is only text in Markdown: names come from files that others wrote."""
    shown = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|#@" else c for c in shown)
