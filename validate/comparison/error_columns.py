"""The columns of tables of errors: means and p99s in 80 columns, more percentiles where there is room."""

from __future__ import annotations

from blis_replay.validate.comparison.compare import THRESHOLDS, Comparison
from blis_replay.validate.metrics import STATISTICS
from blis_replay.validate.terminal import Tone, Toned, percent

ERROR_COLUMNS = (*((metric, name) for metric in ("e2e", "ttft", "itl") for name in STATISTICS), ("tpot", "mean"))
# What 80 columns leave room for, and the others in the order in which they are wanted.
_ALWAYS = {("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"), ("ttft", "p99"), ("itl", "mean")}
_WANTED = sorted(
    (cell for cell in ERROR_COLUMNS if cell not in _ALWAYS),
    key=lambda cell: ("p99", "p50", "p90", "mean").index(cell[1]),
)


def error_header() -> list[str]:
    """The heading of each column: the metric's name stands over its mean."""
    return [metric.upper() if name == "mean" else name for metric, name in ERROR_COLUMNS]


def wide_columns(before: int) -> list[int]:
    """Which of the columns, after so many others, need more than 80 columns, the most wanted first."""
    return [before + ERROR_COLUMNS.index(cell) for cell in _WANTED]


def error_cells(comparison: Comparison) -> list[str | Toned]:
    """The errors of a comparison; those of means that are beyond their threshold stand out."""
    return [error_cell(comparison, metric, name) for metric, name in ERROR_COLUMNS]


def error_cell(comparison: Comparison, metric: str, name: str) -> str | Toned:
    """One error, ``-`` where there is none."""
    error = comparison.metrics[metric][name].error
    beyond = (
        name == "mean"
        and comparison.verdict != "overloaded"
        and error is not None
        and abs(error) > THRESHOLDS.get(metric, float("inf"))
    )
    return Toned(percent(error), "bad") if beyond else percent(error)


def verdict_tone(verdict: str) -> Tone:
    """The tone of a verdict or an outcome."""
    if verdict in ("pass", "fail"):
        return "good" if verdict == "pass" else "bad"
    return "caution"
