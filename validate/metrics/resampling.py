"""Numbers of a metric table under resampled requests: what intervals of differences are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from blis_replay.compiled.arrays import Floats, Int64s
from blis_replay.validate.metrics.latency import METRICS, STATISTICS, LatencySamples, Values, statistics

RESAMPLES = 200
CONFIDENCE = 0.95
SEED = 42


def resampled(requests: int, resamples: int = RESAMPLES, seed: int = SEED) -> Iterator[Int64s]:
    """Draws with replacement, int64[requests] each; what is paired uses the same draw on both sides."""
    rng = np.random.default_rng(seed)
    for _ in range(resamples):
        yield rng.integers(0, requests, requests)


def interval(values: Floats, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The percentile interval of resampled values (float64[resamples]), nans left out; (nan, nan) of none."""
    finite = values[~np.isnan(values)]
    if len(finite) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(finite, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


Cell = tuple[str, str]  # metric, statistic


def resamplable(cell: Cell) -> bool:
    """Whether requests can be resampled for a number: not for quantiles of gaps, pooled over all tokens."""
    metric, statistic = cell
    return metric != "itl" or statistic == "mean"


def cell_values(samples: LatencySamples, cells: Sequence[Cell]) -> Floats:
    """float64[cells]: each number of the samples in us, nan where there is none or it is not ``resamplable``."""
    tables: dict[str, dict[str, float]] = {}
    for metric in {metric for metric, _ in cells}:
        tables[metric] = _table(samples, metric, means_only=all(s == "mean" for m, s in cells if m == metric))
    return np.array([tables[metric].get(statistic, np.nan) for metric, statistic in cells])


def numbers_of(samples: LatencySamples) -> dict[str, dict[str, float]]:
    """All that ``cell_values`` can say of the samples, us by metric and statistic; absent where there is none."""
    cells = [(m, s) for m in METRICS for s in STATISTICS if resamplable((m, s))]
    numbers: dict[str, dict[str, float]] = {metric: {} for metric in METRICS}
    for (metric, statistic), value_us in zip(cells, cell_values(samples, cells), strict=True):
        if not np.isnan(value_us):
            numbers[metric][statistic] = float(value_us)
    return numbers


def resampled_values(sides: Sequence[LatencySamples], cells: Sequence[Cell], *, paired: bool) -> list[Floats]:
    """float64[resamples, cells] for each side: its numbers with requests drawn with replacement.

    ``paired``: request i of all sides is the same request, so every draw is of all of them;
    else each side has draws of its own.
    """
    answers = []
    for number, side in enumerate(sides):
        seed = SEED if paired else SEED + number
        draws = resampled(len(side.e2e_us), RESAMPLES, seed)
        answers.append(np.array([cell_values(_drawn(side, draw), cells) for draw in draws]))
    return answers


def _drawn(samples: LatencySamples, draw: Int64s) -> LatencySamples:
    return LatencySamples(samples.ttft_us[draw], samples.e2e_us[draw], samples.output_tokens[draw])


def _table(samples: LatencySamples, metric: str, *, means_only: bool) -> dict[str, float]:
    if metric == "itl":
        mean_us = samples.itl_mean_us
        return {} if mean_us is None else {"mean": mean_us}
    values: Values = {"e2e": samples.e2e_us, "ttft": samples.ttft_us, "tpot": samples.tpot_us}[metric]
    if means_only and metric != "tpot":
        return {"mean": float(values.mean())} if len(values) else {}
    return statistics(values)
