"""The checks of the simulator itself: as a table, as a frame and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import polars as pl

from blis_replay.blis.verification.row import VerificationRow
from blis_replay.validate.terminal import Toned, table

_HEADER = ["", "check", "configuration", "measured", "expected", "detail"]


def verification_text(rows: Sequence[VerificationRow], seed: int) -> str:
    """A row a check, and how many passed."""
    counted = f"{sum(row.passed for row in rows)} of {len(rows)} checks passed (seed {seed})"
    note = "+- is half of a 99.9 % interval over independent replications."
    return f"{table(_HEADER, [_cells(row) for row in rows], left=(0, 1, 2, 5))}\n\n{note}\n{counted}"


def _cells(row: VerificationRow) -> list[str | Toned]:
    outcome = Toned("pass", "good") if row.passed else Toned("FAIL", "bad")
    return [outcome, row.check, row.configuration, f"{row.measured:,.7g}", f"{row.expected:,.7g}", row.detail]


def verification_json(rows: Sequence[VerificationRow], seed: int, quick: bool) -> dict[str, object]:
    """The same for programs."""
    passed = all(row.passed for row in rows)
    return {"passed": passed, "seed": seed, "quick": quick, "checks": [asdict(row) for row in rows]}


def rows_frame(rows: Sequence[VerificationRow]) -> pl.DataFrame:
    """The same, a row a check."""
    return pl.DataFrame([asdict(row) for row in rows])
