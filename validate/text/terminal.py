"""Text for terminals: tables and wrapped lines in the width there is, tones where colour is shown, numbers."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.globals import resolve_color_default

from blis_replay.base.errors import printable
from blis_replay.ingest.tables import Cell, Column, Table, Tone, Toned, plain
from blis_replay.validate.text.cells import cell_text

# What a page is made for; a pipe has as many.
LINE_COLUMNS = 80
# Longer lines of prose are hard to follow; shorter ones hold two or three words.
_PROSE_COLUMNS, _FEWEST_COLUMNS = 100, 40
_GAP = "  "
_BELOW = " " * 6
_LONGEST_BAR = 40

# Between a number and its unit, where no line ends.
_UNIT = re.compile(r"(?<=\d) (?=(?:%|us|ms|s)(?!\w))")

# Of the eight colours of every terminal, those that are read on black as on white.
_STYLES: Mapping[Tone, Mapping[str, Any]] = {
    "good": {"fg": "green"},
    "bad": {"fg": "red", "bold": True},
    "caution": {"fg": "magenta"},
    "heading": {"bold": True},
}


def line_columns() -> int:
    """Columns of the terminal that output goes to (COLUMNS, where the environment has it), 80 in a pipe."""
    if not _is_terminal():
        return LINE_COLUMNS
    return shutil.get_terminal_size((LINE_COLUMNS, 24)).columns


def has_room() -> bool:
    """Whether there is more room than the 80 columns that every page fits."""
    return line_columns() > LINE_COLUMNS


def coloured() -> bool:
    """Whether output is shown in colour: as ``--color`` says, else on a terminal."""
    told = resolve_color_default()
    return _is_terminal() if told is None else told


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def toned(text: str, tone: Tone) -> str:
    """Text, made printable, in the colour of its tone where there is colour."""
    shown = printable(text)
    return click.style(shown, **_STYLES[tone]) if coloured() else shown


@dataclass(frozen=True)
class _Shown:
    """What is printed of a cell: printable text, and its tone."""

    text: str
    tone: Tone | None = None


_Lines = Sequence[Sequence[_Shown]]


def table_text(table: Table) -> str:
    """A table in the width there is: title, note, and columns padded to their content.

    Columns for wide terminals are shown as far as they fit; the parts of a table are next to each other if they fit.
    """
    header = [_Shown(printable(column.name), "heading") for column in table.columns]
    lines = [header, *([_shown(*pair) for pair in zip(row, table.columns, strict=True)] for row in table.rows)]
    title = [wrap(f"{table.title}:", mark=Toned(table.title, "heading"))] if table.title else []
    note = [wrap(f"({table.note})")] if table.note else []
    parts = [_laid_out(table, lines, columns) for columns in _parts(table, _widths(lines))]
    return "\n".join([*title, *note, "\n\n".join(parts)])


def _shown(cell: Cell, column: Column) -> _Shown:
    return _Shown(printable(cell_text(cell, column.kind)), cell.tone if isinstance(cell, Toned) else None)


def _parts(table: Table, widths: Sequence[int]) -> list[list[int]]:
    """Which columns are shown, in one table or in several below each other."""
    columns, room = table.columns, line_columns()
    kept = [i for i, column in enumerate(columns) if not column.wide and (has_room() or not column.below)]
    if _total(widths[i] for i in kept) > room:  # a cell below its row is whole; beside it, it would be cut
        kept = [i for i in kept if not columns[i].below]
    for i in sorted((i for i in kept if columns[i].spare), key=lambda i: columns[i].spare):
        if _total(widths[k] for k in kept if widths[k]) > room:
            kept.remove(i)
    numbers = sorted({column.part for column in columns if column.part})
    if numbers and not (has_room() and _total(widths[i] for i in kept) <= room):
        return [[i for i in kept if columns[i].part in (0, number)] for number in numbers]
    for i in sorted(range(len(columns)), key=lambda i: columns[i].wide) if has_room() else ():
        if columns[i].wide:
            if _total(widths[k] for k in [*kept, i]) > room:
                break
            kept.append(i)
    return [sorted(kept)]


def _laid_out(table: Table, lines: _Lines, columns: Sequence[int]) -> str:
    """These columns: their names, a rule, and the rows, each with what stands below it."""
    chosen: _Lines = [[line[i] for i in columns] for line in lines]
    chosen = _cut(chosen) if table.cut else chosen
    if table.bars:
        chosen = [[*line, bar] for line, bar in zip(chosen, _bars(table, _total(_widths(chosen))), strict=True)]
    widths = _widths(chosen)
    left = {at for at, i in enumerate(columns) if at == 0 or table.columns[i].kind == "text"}
    below = [i for i, column in enumerate(table.columns) if column.below and i not in columns]
    head, *rows = [_line(line, widths, left) for line in chosen]
    if below:
        more = [wrap(_BELOW + "; ".join(line[i].text for i in below), _BELOW) for line in lines[1:]]
        rows = [f"{row}\n{text}" for row, text in zip(rows, more, strict=True)]
    return "\n".join([head, _GAP.join("-" * width for width in widths).rstrip(), *rows])


def _bars(table: Table, used: int) -> list[_Shown]:
    """A bar for each row in what is left of the line; padded, because the column is aligned to the right."""
    longest = max(1, min(_LONGEST_BAR, line_columns() - used - len(_GAP)))
    drawn = [max(1, round(longest * length)) if length else 0 for length in bar_lengths(table)]  # what is there is seen
    return [_Shown(""), *(_Shown(("#" * length).ljust(longest)) for length in drawn)]


def bar_lengths(table: Table) -> list[float]:
    """The length of each row's bar as a share of the longest (0..1); 0 for text and negative numbers."""
    values = [plain(row[table.names.index(table.bars)]) for row in table.rows]
    numbers = [max(float(value), 0.0) if isinstance(value, int | float) else 0.0 for value in values]
    most = max([*numbers, 0.0])
    return [number / most if most else 0.0 for number in numbers]


def _cut(lines: _Lines) -> _Lines:
    """Lines whose longest cells are cut, so that they keep to the width there is; --json has them whole."""
    widths = _widths(lines)
    while _total(widths) > max(line_columns(), LINE_COLUMNS):
        widths[widths.index(max(widths))] -= 1
    return [
        [
            cell if len(cell.text) <= width else _Shown(f"{cell.text[: width - 3]}...", cell.tone)
            for cell, width in zip(line, widths, strict=True)
        ]
        for line in lines
    ]


def _total(widths: Iterable[int]) -> int:
    """Columns of a line of cells of these widths."""
    return sum(width + len(_GAP) for width in widths) - len(_GAP)


def _widths(lines: _Lines) -> list[int]:
    return [max(map(len, texts)) for texts in zip(*([cell.text for cell in line] for line in lines), strict=True)]


def _line(cells: Sequence[_Shown], widths: Sequence[int], left: Collection[int]) -> str:
    """Cells beside each other, with nothing after the last one that says something."""
    last = max((i for i, cell in enumerate(cells) if cell.text.strip()), default=-1)
    shown = []
    for i, cell in enumerate(cells[: last + 1]):
        room = widths[i] - len(cell.text)
        before, after = (0, room if i < last else 0) if i in left else (room, 0)
        text = toned(cell.text, cell.tone) if cell.tone and cell.text else cell.text
        shown.append(" " * before + text + " " * after)
    return _GAP.join(shown).rstrip()


def wrap(text: str, indent: str = "  ", mark: Toned | None = None, command: str = "") -> str:
    """Text made printable and broken at the width there is (100 columns at most), later lines indented.

    ``mark``: words in it to be shown in their tone.  ``command``: what it ends with, to be copied: it has a line of its
    own where it would be broken.
    """
    said, copied = printable(text), printable(command)
    filled = _filled(f"{said} {copied}".rstrip(), indent)
    if copied not in filled:
        filled = f"{_filled(said, indent)}\n{indent}{copied}"
    return filled if mark is None else filled.replace(printable(str(mark.value)), toned(str(mark.value), mark.tone), 1)


def _filled(text: str, indent: str) -> str:
    columns = max(min(line_columns(), _PROSE_COLUMNS), _FEWEST_COLUMNS)
    whole = _UNIT.sub("\N{NO-BREAK SPACE}", text)
    filled = textwrap.fill(whole, columns, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return filled.replace("\N{NO-BREAK SPACE}", " ")
