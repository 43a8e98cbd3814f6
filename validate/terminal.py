"""Text for terminals: tables and wrapped lines in the width there is, tones where colour is shown, numbers."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import click
from click.globals import resolve_color_default

from blis_replay.ingest.printable import printable

# What a page is made for; a pipe has as many.
LINE_COLUMNS = 80
# Longer lines of prose are hard to follow, and shorter ones are no lines.
_PROSE_COLUMNS, _FEWEST_COLUMNS = 100, 40
_GAP = "  "

# What a sentence ends with to say what to do.
_COMMAND = re.compile(r": (blis-replay [^:]*)$")

Tone = Literal["good", "bad", "caution", "heading"]

# Of the eight colours of every terminal, those that are read on black as on white.
_STYLES: Mapping[Tone, Mapping[str, Any]] = {
    "good": {"fg": "green"},
    "bad": {"fg": "red", "bold": True},
    "caution": {"fg": "magenta"},
    "heading": {"bold": True},
}


@dataclass(frozen=True)
class Toned:
    """Text with a meaning that colour shows; what it means is said by the text (a sign, a word) as well."""

    text: str
    tone: Tone


Cell = str | Toned


def line_columns() -> int:
    """Columns of the terminal that output goes to (COLUMNS, where the environment has it), 80 in a pipe."""
    if not _is_terminal():
        return LINE_COLUMNS
    return shutil.get_terminal_size((LINE_COLUMNS, 24)).columns


def has_room() -> bool:
    """Whether there is more room than the 80 columns that every page fits."""
    return line_columns() > LINE_COLUMNS


def coloured() -> bool:
    """Whether output is shown in colour: as the command line was told, else on a terminal."""
    told = resolve_color_default()
    return _is_terminal() if told is None else told


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def toned(text: str, tone: Tone) -> str:
    """Text, made printable, in the colour of its tone where there is colour."""
    shown = printable(text)
    return click.style(shown, **_STYLES[tone]) if coloured() else shown


def table(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], left: int | Collection[int] = 1, wide: Sequence[int] = ()
) -> str:
    """Columns padded to their content; cells made printable.

    ``left``: how many columns at the begin are left-aligned, or which.  ``wide``: columns shown only where there is
    more room than 80 columns, in the order in which they are wanted.
    """
    kept = _kept(_widths(header, rows), wide)
    flush = range(left) if isinstance(left, int) else left
    return _laid_out(*_chosen(header, rows, kept), {at for at, i in enumerate(kept) if i in flush})


def tables(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], parts: Sequence[Sequence[int]], left: Collection[int] = (0,)
) -> list[str]:
    """One table of all columns where there is more room than 80 columns and it fits, else one of each part's.

    ``parts``: the columns of each; ``left``: which are left-aligned.
    """
    together, widths = sorted(set(chain(*parts))), _widths(header, rows)
    if has_room() and _total(widths[i] for i in together) <= line_columns():
        parts = [together]
    return [_laid_out(*_chosen(header, rows, part), {at for at, i in enumerate(part) if i in left}) for part in parts]


def cut_table(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], left: int | Collection[int] = 1, wide: Sequence[int] = ()
) -> str:
    """A ``table`` whose longest cells are cut, so that it keeps to the width there is; --json has them whole."""
    widths = _widths(header, rows)
    kept = _kept(widths, wide)
    while _total(widths[i] for i in kept) > max(line_columns(), LINE_COLUMNS):
        widths[max(kept, key=widths.__getitem__)] -= 1
    return table(
        header, [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows], left, wide
    )


def _chosen(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], columns: Sequence[int]
) -> tuple[list[str], list[list[Cell]]]:
    return [header[i] for i in columns], [[row[i] for i in columns] for row in rows]


def _cut(cell: Cell, width: int) -> Cell:
    text = printable(_text(cell))
    shown = text if len(text) <= width else text[: width - 3] + "..."
    return shown if isinstance(cell, str) else Toned(shown, cell.tone)


def _kept(widths: Sequence[int], wide: Sequence[int]) -> list[int]:
    """Columns that are shown: all that are not for wide terminals only, and of those as many as fit."""
    kept = [i for i in range(len(widths)) if i not in set(wide)]
    if has_room():
        for i in wide:
            if _total(widths[k] for k in [*kept, i]) > line_columns():
                break
            kept.append(i)
    return sorted(kept)


def _total(widths: Iterable[int]) -> int:
    """Columns of a line of cells of these widths."""
    return sum(width + len(_GAP) for width in widths) - len(_GAP)


def _widths(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[int]:
    return [max(len(printable(_text(row[i]))) for row in [header, *rows]) for i in range(len(header))]


def _laid_out(header: Sequence[str], rows: Sequence[Sequence[Cell]], left: Collection[int]) -> str:
    widths = _widths(header, rows)
    titles: list[Cell] = [Toned(title, "heading") for title in header]
    lines: list[Sequence[Cell]] = [titles, ["-" * width for width in widths], *rows]
    return "\n".join(_line(line, widths, left) for line in lines)


def _line(row: Sequence[Cell], widths: Sequence[int], left: Collection[int]) -> str:
    """Cells beside each other, with nothing after the last one that says something."""
    texts = [printable(_text(cell)) for cell in row]
    last = max((i for i, text in enumerate(texts) if text.strip()), default=-1)
    shown = []
    for i in range(last + 1):
        room = widths[i] - len(texts[i])
        before, after = (0, room if i < last else 0) if i in left else (room, 0)
        shown.append(" " * before + _painted(row[i], texts[i]) + " " * after)
    return _GAP.join(shown).rstrip()


def _painted(cell: Cell, text: str) -> str:
    return text if isinstance(cell, str) or not text else toned(text, cell.tone)


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


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
    """A signed percentage, ``-`` where there is none; what rounds to nothing is positive."""
    return "-" if fraction is None else f"{round(100 * fraction, digits) + 0.0:+.{digits}f} %"


def percent_plain(fraction: float | None) -> str:
    """An unsigned percentage."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def milliseconds(value_us: float | None) -> str:
    """A time in ms with two decimals, ``-`` where there is none."""
    return "-" if value_us is None else f"{value_us / 1000:,.2f}"


def wrap(text: str, indent: str = "  ", mark: Toned | None = None) -> str:
    """Text made printable and broken at the width there is (100 columns at most), later lines indented.

    A command at its end that would be broken has a line of its own, to be copied.  ``mark``: words in it to be
    shown in their tone.
    """
    filled, command = _filled(printable(text), indent), _COMMAND.search(printable(text))
    if command and command[1] not in filled:
        filled = _filled(printable(text)[: command.start(1)].rstrip(), indent) + f"\n{indent}{command[1]}"
    return filled if mark is None else filled.replace(printable(mark.text), toned(mark.text, mark.tone), 1)


def _filled(text: str, indent: str) -> str:
    columns = max(min(line_columns(), _PROSE_COLUMNS), _FEWEST_COLUMNS)
    return textwrap.fill(text, columns, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
