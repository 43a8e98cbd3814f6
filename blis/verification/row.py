"""One line of the table that ``blis-replay verify`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class VerificationRow:
    """What a check measured and what it should have been; ``check`` names the quantity and its unit.

    ``configuration``: what was run.  ``detail``: how much was looked at, the tolerance or
    interval, and the first fault if there is one.
    """

    check: str
    configuration: str
    measured: float
    expected: float
    passed: bool
    detail: str


def row_of_faults(check: str, configuration: str, faults: Sequence[str], looked_at: str) -> VerificationRow:
    """A row that passes if there are no faults; ``looked_at`` says among how many things."""
    detail = f"{looked_at}; first fault: {faults[0]}" if faults else looked_at
    return VerificationRow(f"{check}, faults", configuration, float(len(faults)), 0.0, not faults, detail)
