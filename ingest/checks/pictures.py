"""What a check shows besides its findings: tables of numbers, one column of which may be drawn as bars."""

from __future__ import annotations

from dataclasses import dataclass

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """``columns`` names the cells of each row; ``bars``: the column to draw, if any; ``note``: how to read it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    bars: str = ""
    note: str = ""
