"""The table over all experiments: errors as a heat table, the worst first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blis_replay.validate.comparison.compare import THRESHOLDS, Cell, Comparison
from blis_replay.validate.terminal import percent

# What is shown of each experiment, with the error at which a cell is as hot as can be.
COLUMNS = (
    *((("e2e", "mean"), THRESHOLDS["e2e"]), (("e2e", "p99"), 2 * THRESHOLDS["e2e"])),
    *((("ttft", "mean"), THRESHOLDS["ttft"]), (("ttft", "p99"), 2 * THRESHOLDS["ttft"])),
    (("itl", "mean"), THRESHOLDS["itl"]),
)
# Least share of that error for each degree of heat.
_DEGREES = (0.1, 0.25, 0.5, 1.0)
_VERDICTS = ("fail", "pass", "unusable", "not judged", "overloaded")


@dataclass(frozen=True)
class HeatCell:
    """A signed error as text, and its heat: 0 (none) to 4 (beyond the threshold; beyond twice that for a p99)."""

    text: str
    heat: int


@dataclass(frozen=True)
class OverviewRow:
    """One experiment, as ``Comparison`` has it, without the requests of its recording and replay.

    ``cells``: by COLUMNS.  ``worst``: the largest absolute error of a mean over its threshold.
    """

    slug: str
    alias: str
    verdict: str
    uses: str
    ground_truth: str
    metrics: Mapping[str, Mapping[str, Cell]]
    cells: tuple[HeatCell, ...]
    worst: float


def overview_row(comparison: Comparison) -> OverviewRow:
    """The row of an experiment."""
    return OverviewRow(
        slug=comparison.slug,
        alias=comparison.alias,
        verdict=comparison.verdict,
        uses=comparison.uses,
        ground_truth=comparison.ground_truth,
        metrics=comparison.metrics,
        cells=tuple(_cells(comparison)),
        worst=_worst(comparison),
    )


def by_worst(row: OverviewRow) -> tuple[int, float, str]:
    """The order of the table: failed, passed, unusable, not judged, overloaded; within each the worst first."""
    return _VERDICTS.index(row.verdict), -row.worst, row.slug


def header() -> list[str]:
    """The columns in words."""
    return [f"{metric.upper()} {statistic}" for (metric, statistic), _ in COLUMNS]


def _cells(comparison: Comparison) -> list[HeatCell]:
    errors = [(comparison.metrics[metric][statistic].error, most) for (metric, statistic), most in COLUMNS]
    return [HeatCell(percent(error), _heat(error, most)) for error, most in errors]


def _heat(error: float | None, most: float) -> int:
    return 0 if error is None else sum(abs(error) / most >= degree for degree in _DEGREES)


def _worst(comparison: Comparison) -> float:
    return max(abs(comparison.metrics[metric]["mean"].error or 0.0) / limit for metric, limit in THRESHOLDS.items())
