"""A comparison as JSON (times in ms, errors and MAPE as fractions), and as the table that the store keeps."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from blis_replay.replay.store import provenance_of
from blis_replay.validate.comparison.capacity import Measure
from blis_replay.validate.comparison.compare import Comparison, MetricCell
from blis_replay.validate.comparison.saturation_text import saturation_json
from blis_replay.validate.comparison.spread import Draws, unsure_of
from blis_replay.validate.metrics.objectives import attainment_json
from blis_replay.validate.metrics.resampling import MetricStatistic
from blis_replay.validate.text.cells import in_ms


def comparison_json(comparison: Comparison) -> dict[str, object]:
    """One experiment; times in ms, errors and MAPE as fractions."""
    noise = comparison.noise
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
        "capacity": None if comparison.capacity is None else [_measure_json(m) for m in comparison.capacity],
        "unusable": comparison.unusable,
        "repeats": noise and {"recordings": list(noise.recordings), "apart": _by_metric(noise.apart)},
        "slo": comparison.promised and {side: attainment_json(one) for side, one in vars(comparison.promised).items()},
        "reconstructions": comparison.draws and _draws_json(comparison.draws),
        "unsure": unsure_of(comparison.run),
        "warm_up": comparison.warming and vars(comparison.warming),
        "findings": [vars(finding) for finding in comparison.findings],
        "saturation": comparison.saturation and saturation_json(comparison.saturation),
        "open_arguments": [vars(argument) for argument in comparison.open_arguments],
        "schedule": comparison.schedule and comparison.schedule.document,
        "known_differences": list(comparison.run.simulated.differences),
        "not_simulated": list(comparison.run.simulated.not_simulated),
        "provenance": provenance_of(comparison.run),
    }


def _draws_json(draws: Draws) -> dict[str, object]:
    ranges = {cell: dict(zip(("low", "median", "high"), draws.range_of(cell), strict=True)) for cell in draws.errors}
    return {"count": draws.count, "errors": _by_metric(ranges)}


def _by_metric(values: Mapping[MetricStatistic, object]) -> dict[str, dict[str, object]]:
    named: dict[str, dict[str, object]] = {}
    for (metric, statistic), value in values.items():
        named.setdefault(metric, {})[statistic] = value
    return named


def _measure_json(measure: Measure) -> dict[str, object]:
    return {
        "measure": measure.slug,
        "unit": measure.unit,
        "observed_value": measure.observed,
        "simulated_value": measure.simulated,
        "error": measure.error,
        "limit": measure.limit,
    }


def _cell(cell: MetricCell) -> dict[str, object]:
    entry: dict[str, object] = {
        "observed_ms": in_ms(cell.a_us),
        "simulated_ms": in_ms(cell.b_us),
        "error": cell.error,
    }
    if cell.reason:
        entry["reason"] = cell.reason
    if cell.between_us:
        entry["observed_between_ms"] = [in_ms(bound) for bound in cell.between_us]
    return entry


def errors_frame(comparison: Comparison) -> pl.DataFrame:
    """The table of a comparison in the store's form."""
    return pl.DataFrame(
        [
            {
                "metric": metric,
                "statistic": statistic,
                "observed_us": cell.a_us,
                "simulated_us": cell.b_us,
                "error": cell.error,
                "reason": cell.reason,
            }
            for metric, cells in comparison.metrics.items()
            for statistic, cell in cells.items()
        ],
        infer_schema_length=None,
    )
