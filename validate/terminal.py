"""Plain text for terminals: tables, numbers, wrapped lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from blis_replay.ingest.printable import printable

LINE_COLUMNS = 80


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns padded to their content, the first ``left`` of them left-aligned; cells made printable."""
    header, *rows = [[printable(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; cells are only text in it."""
    lines = [[markdown_text(cell) for cell in header], ["---"] * len(header)]
    lines += [[markdown_text(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_text(text: str) -> str:
    """Text that is only text in Markdown: names come from files that others wrote."""
    shown = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|#@" else c for c in shown)


def percent(fraction: float | None, digits: int = 1) -> str:
    """A signed percentage, ``-`` where there is none."""
    return "-" if fraction is None else f"{100 * fraction:+.{digits}f} %"


def percent_plain(fraction: float | None) -> str:
    """An unsigned percentage."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def milliseconds(value_us: float | None) -> str:
    """A time in ms with two decimals, ``-`` where there is none."""
    return "-" if value_us is None else f"{value_us / 1000:,.2f}"


def wrap(text: str, indent: str = "  ") -> str:
    """Text made printable and broken at 80 columns, later lines indented."""
    return textwrap.fill(
        printable(text), LINE_COLUMNS, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
