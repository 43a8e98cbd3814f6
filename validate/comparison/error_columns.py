"""Errors of a comparison as columns of a table: every statistic, those that 80 columns show first."""

from __future__ import annotations

from blis_replay.ingest.tables import Cell, Column, Toned
from blis_replay.validate.comparison.compare import Comparison
from blis_replay.validate.metrics.latency import STATISTICS, THRESHOLDS

ERROR_COLUMNS = (*((metric, name) for metric in ("e2e", "ttft", "itl") for name in STATISTICS), ("tpot", "mean"))
# What 80 columns leave room for, and the others in the order in which they are wanted.
_ALWAYS = {("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"), ("ttft", "p99"), ("itl", "mean")}
WANTED = sorted(
    (cell for cell in ERROR_COLUMNS if cell not in _ALWAYS),
    key=lambda cell: ("p99", "p50", "p90", "mean").index(cell[1]),
)
# The metric's name stands over its mean.
ERRORS = tuple(
    Column(
        cell[0].upper() if cell[1] == "mean" else cell[1],
        "error",
        wide=WANTED.index(cell) + 1 if cell in WANTED else 0,
    )
    for cell in ERROR_COLUMNS
)


def error_cells(comparison: Comparison) -> list[Cell]:
    """The errors of a comparison; those of means that are beyond their threshold stand out."""
    return [error_cell(comparison, metric, name) for metric, name in ERROR_COLUMNS]


def error_cell(comparison: Comparison, metric: str, name: str) -> Cell:
    """One error; that of a mean that is beyond its threshold stands out."""
    error = comparison.metrics[metric][name].error
    beyond = (
        name == "mean"
        and not comparison.overloaded
        and error is not None
        and metric in THRESHOLDS
        and abs(error) > comparison.limit(metric)
    )
    return Toned(error, "bad") if beyond else error
