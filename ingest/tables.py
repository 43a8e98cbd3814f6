"""The shape of every table that is shown: titled, with typed columns.

What a table holds stands here.  How it is written in a terminal, as CSV, Markdown, JSON or HTML stands in
``validate/text``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import polars as pl

Value = str | int | float | bool | None
Tone = Literal["good", "bad", "caution", "heading"]


@dataclass(frozen=True)
class Number:
    """How a number is written: times ``factor``, with ``decimals`` and a ``unit``.

    ``signed``: with + above 0.  ``whole_from``: no decimals from here on, after ``factor``.
    """

    decimals: int = 0
    factor: float = 1.0
    unit: str = ""
    signed: bool = False
    whole_from: float = inf


# The usual numbers, by name.
NUMBERS = {
    "count": Number(),
    "decimal": Number(2),
    "magnitude": Number(2, whole_from=1e3),
    "ms": Number(2, 1e-3, whole_from=1e4),  # of us
    "ms_difference": Number(2, 1e-3, signed=True, whole_from=1e4),  # of us
    "share": Number(1, 100, " %", whole_from=1e3),
    "error": Number(1, 100, " %", signed=True, whole_from=1e3),
    "error_brief": Number(1, 100, " %", signed=True, whole_from=1e2),
    "error_short": Number(1, 100, " %", signed=True, whole_from=10),
}
# How the values of a column are written: a number, or
#   value: by their own type;  text: flush left;  word: flush right, beside numbers
#   time: us, written in ms, or in s from ten seconds on, with three or four digits and the unit
#   data: for programs, numbers in full;  real: the same, always with a decimal point
Kind = (
    Number
    | Literal["value", "text", "word", "time", "data", "real"]
    | Literal["count", "decimal", "magnitude", "ms", "ms_difference", "share", "error", "error_brief", "error_short"]
)


@dataclass(frozen=True)
class Toned:
    """A value with a meaning that colour shows; a sign or a word says it as well."""

    value: Value
    tone: Tone


# A text stands for itself in a column of any kind.
Cell = Value | Toned


@dataclass(frozen=True)
class Column:
    """One column: its heading, and how its values are written.

    ``wide``: shown only where a terminal has more than 80 columns; 1 is wanted most.  ``part``: where the whole table
    is too wide, it is shown in parts; 0 stands in every part.  ``below``: where the terminal has 80 columns, the value
    stands in a line below its row.  ``spare``: left out where the terminal is too narrow for all; 1 goes first.
    """

    name: str
    kind: Kind = "value"
    wide: int = 0
    part: int = 0
    below: bool = False
    spare: int = 0


@dataclass(frozen=True)
class Table:
    """A row has one cell per column.

    ``note``: how to read it.  ``bars``: the name of the column that is drawn as bars, if any.  ``cut``: the longest
    texts are cut to the width there is.
    """

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    bars: str = ""
    cut: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [column.name for column in self.columns]

    def records(self) -> list[dict[str, Value]]:
        """The rows by column name, without tones."""
        return [dict(zip(self.names, map(plain, row), strict=True)) for row in self.rows]


def plain(cell: Cell) -> Value:
    """A cell without its tone."""
    return cell.value if isinstance(cell, Toned) else cell


def columns_named(*names: str, kind: Kind = "value") -> tuple[Column, ...]:
    """Columns of one kind, by their names."""
    return tuple(Column(name, kind) for name in names)


def table_of(records: Iterable[Mapping[str, Value]], columns: Sequence[Column] = ()) -> Table:
    """A table for programs: a row per record, its columns those of the first record unless they are given."""
    rows = list(records)
    shown = tuple(columns) or columns_named(*(rows[0] if rows else ()), kind="data")
    return Table("", shown, [[row[column.name] for column in shown] for row in rows])


def without_formulas(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with ' before a text that a spreadsheet would take as a formula: names come from files of others."""
    import polars as pl

    for name in [name for name, kind in frame.schema.items() if kind == pl.String]:
        text = pl.col(name)
        formula = text.str.contains(r"^[=+\-@\t\r].") & text.cast(pl.Float64, strict=False).is_null()
        frame = frame.with_columns(pl.when(formula).then("'" + text).otherwise(text).alias(name))
    return frame
