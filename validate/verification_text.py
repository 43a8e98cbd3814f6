"""The checks of the simulator itself: as a table, as a frame and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import polars as pl

from blis_replay.blis.verification.row import VerificationRow
from blis_replay.validate.terminal import Cell, Toned, cut_table, has_room, table, wrap

_INDENT = " " * 6


def verification_text(rows: Sequence[VerificationRow], seed: int) -> str:
    """The checks with what was measured and expected, and how many passed."""
    counted = f"{sum(row.passed for row in rows)} of {len(rows)} checks passed (seed {seed})"
    note = "+- is half of a 99.9 % interval over independent replications."
    return f"{_table(rows) if has_room() else _two_lines_each(rows)}\n\n{note}\n{counted}"


def _table(rows: Sequence[VerificationRow]) -> str:
    cells = [[*_check(row), *_numbers(row), row.configuration, row.detail] for row in rows]
    return cut_table(["", "check", "measured", "expected", "configuration", "detail"], cells, left=(0, 1, 4, 5))


def _two_lines_each(rows: Sequence[VerificationRow]) -> str:
    """What 80 columns have no room for stands below its row."""
    head, rule, *lines = table(
        ["", "check", "measured", "expected"], [[*_check(row), *_numbers(row)] for row in rows], left=2
    ).splitlines()
    below = [wrap(f"{_INDENT}{row.configuration}; {row.detail}", _INDENT) for row in rows]
    return "\n".join([head, rule, *(f"{line}\n{more}" for line, more in zip(lines, below, strict=True))])


def _check(row: VerificationRow) -> list[Cell]:
    return [Toned("pass", "good") if row.passed else Toned("FAIL", "bad"), row.check]


def _numbers(row: VerificationRow) -> list[str]:
    return [f"{row.measured:,.7g}", f"{row.expected:,.7g}"]


def verification_json(rows: Sequence[VerificationRow], seed: int, quick: bool) -> dict[str, object]:
    """The same for programs."""
    passed = all(row.passed for row in rows)
    return {"passed": passed, "seed": seed, "quick": quick, "checks": [asdict(row) for row in rows]}


def rows_frame(rows: Sequence[VerificationRow]) -> pl.DataFrame:
    """The same, a row a check."""
    return pl.DataFrame([asdict(row) for row in rows])
