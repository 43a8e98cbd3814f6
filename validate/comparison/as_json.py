"""The JSON of ``validate --json``: documented in docs/json.md, stable."""

from __future__ import annotations

from collections.abc import Sequence

from blis_replay.replay.store import provenance_of
from blis_replay.validate.comparison.compare import THRESHOLDS, Cell, Comparison, mean_abs_errors
from blis_replay.validate.comparison.saturation_text import saturation_json


def comparison_json(comparison: Comparison) -> dict[str, object]:
    """One experiment; times in ms, errors and MAPE as fractions."""
    return {
        "slug": comparison.slug,
        "alias": comparison.alias,
        "ground_truth": comparison.ground_truth,
        "requests": comparison.requests,
        "excluded": comparison.excluded,
        "stage": comparison.selection.stage,
        "metrics": {
            metric: {name: _cell(cell) for name, cell in cells.items()} for metric, cells in comparison.metrics.items()
        },
        "paired": {metric: vars(pairing) for metric, pairing in comparison.paired.items()},
        "coefficients_use": comparison.uses,
        "verdict": comparison.verdict,
        "failed_thresholds": list(comparison.failed_thresholds),
        "unusable": comparison.unusable,
        "findings": [vars(finding) for finding in comparison.findings],
        "saturation": comparison.saturation and saturation_json(comparison.saturation),
        "known_differences": list(comparison.run.simulated.differences),
        "provenance": provenance_of(comparison.run),
    }


def report_json(
    comparisons: Sequence[Comparison], stages: dict[str, list[Comparison]], not_judged: dict[str, str]
) -> dict[str, object]:
    """The whole answer: experiments, means over the gated ones, and what could not be judged."""
    experiments = []
    for comparison in comparisons:
        entry = comparison_json(comparison)
        if comparison.slug in stages:
            entry["stages"] = [comparison_json(stage) for stage in stages[comparison.slug]]
        experiments.append(entry)
    first = comparisons[0].run if comparisons else None
    return {
        "experiments": experiments,
        "mean_abs_error": mean_abs_errors(comparisons),
        "not_judged": not_judged,
        "thresholds": THRESHOLDS,
        "provenance": {
            "coefficients": first.release.name if first else None,
            "coefficients_hash": first.release.sha256 if first else None,
            "replay": first.mode.name if first else None,
        },
    }


def _cell(cell: Cell) -> dict[str, object]:
    entry: dict[str, object] = {
        "observed_ms": _ms(cell.observed_us),
        "simulated_ms": _ms(cell.simulated_us),
        "error": cell.error,
    }
    if cell.reason:
        entry["reason"] = cell.reason
    if cell.between_us:
        entry["observed_between_ms"] = [_ms(bound) for bound in cell.between_us]
    return entry


def _ms(value_us: float | None) -> float | None:
    return None if value_us is None else round(value_us / 1000, 6)
