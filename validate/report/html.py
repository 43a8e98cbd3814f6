"""Text and tables in HTML, escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from blis_replay.base.errors import printable
from blis_replay.ingest.tables import Cell, Table, plain
from blis_replay.validate.text.cells import cell_text
from blis_replay.validate.text.terminal import bar_lengths

# A text of a recording can have any length; nobody reads more of it than this.
_LONGEST_TEXT = 2_000
# The space between a number and its unit.
UNIT = re.compile(r"(?<=\d) (?=%|(?:points?|[num]?s|[kMGT]?i?B|tokens?|requests?|steps?)\b)")
# Longer words than a number are broken where a page needs it.
_LONG_CELL = 24


def readable(text: str) -> str:
    """Text on one line, without control characters and of bounded length."""
    left = len(text) - _LONGEST_TEXT
    return printable(text) if left <= 0 else f"{printable(text[:_LONGEST_TEXT])}… ({left:,} characters more)"


def html_text(text: str) -> str:
    """Text that is only text in HTML; no line ends between a number and its unit."""
    return UNIT.sub("\u00a0", html_verbatim(text))


def html_verbatim(text: str) -> str:
    """The same for what is copied, such as a command: its spaces stay."""
    return escape(readable(text))


def html(table: Table, more: str = "", cells: Sequence[str] = ()) -> str:
    """A table in HTML without the columns of wide terminals; a bar is a span whose width is a share of its cell.

    ``more``: name of a last column, with ``cells`` in HTML.
    """
    note = f' <span class="note">({html_text(table.note)})</span>' if table.note else ""
    # A header without a text would be announced as one.
    heads = [
        (name, ' class="text"' if column.kind == "text" else "")
        for name, column in zip(table.names, table.columns, strict=True)
        if not column.wide
    ]
    names = "".join(f'<th scope="col"{text}>{html_text(name)}</th>' if name else "<td></td>" for name, text in heads)
    last = cells or ([_bar(length) for length in bar_lengths(table)] if table.bars else [""] * len(table.rows))
    head = f'<th scope="col" class="text">{html_text(more)}</th>' if more else "<td></td>" if table.bars else ""
    return "\n".join(
        [
            f'<div class="scroll" role="group" tabindex="0" aria-label="{html_text(table.title or "table")}">',
            f"<table>\n<caption>{html_text(table.title)}{note}</caption>" if table.title or note else "<table>",
            f"<thead><tr>{names}{head}</tr></thead>\n<tbody>",
            *(f"<tr>{_cells(table, row)}{cell}</tr>" for row, cell in zip(table.rows, last, strict=True)),
            "</tbody>\n</table>\n</div>\n",
        ]
    )


def _cells(table: Table, row: Sequence[Cell]) -> str:
    """The cells of a row; the first one names it."""
    shown: list[str] = []
    for cell, column in zip(row, table.columns, strict=True):
        if column.wide:
            continue
        value = plain(cell)
        tag, of = ("td", "") if shown or value == "" else ("th", ' scope="row"')
        text = "text" if column.kind == "text" else ""
        long = "long" if isinstance(value, str) and len(value) > _LONG_CELL else ""
        kinds = f' class="{" ".join(filter(None, (text, long)))}"' if text or long else ""
        shown.append(f"<{tag}{of}{kinds}>{html_text(cell_text(cell, column.kind))}</{tag}>")
    return "".join(shown)


def _bar(length: float) -> str:
    drawn = f'<span style="width: {100 * length:.1f}%"></span>' if length else ""
    return f'<td class="bar" aria-hidden="true">{drawn}</td>'
