"""Metric definitions, one function each, for the observed and the simulated side alike.

============ ==================================================================
TTFT         send to first output token, one value a request
E2E          send to last output token, one value a request
TPOT         (E2E - TTFT) / (output tokens - 1), one value a request that has two
ITL          gap between two consecutive output tokens, pooled over all requests;
             its mean is sum(E2E - TTFT) / sum(output tokens - 1), so it needs no
             token times
============ ==================================================================

Quantiles interpolate linearly between order statistics (numpy's default).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Metric = Literal["e2e", "ttft", "itl", "tpot"]
Statistic = Literal["mean", "p50", "p90", "p99"]
METRICS: tuple[str, ...] = get_args(Metric)
STATISTICS: tuple[str, ...] = get_args(Statistic)
# Largest absolute error of the mean that passes (design, section 7).
THRESHOLDS = {"e2e": 0.10, "ttft": 0.15, "itl": 0.15}
# From this error of p99 on, a tail is marked; it is reported and never gated.  Chosen: twice that of the mean.
TAIL_LIMITS = {metric: 2 * limit for metric, limit in THRESHOLDS.items()}
METRIC_NAMES = {"e2e": "E2E", "ttft": "TTFT", "itl": "ITL", "tpot": "TPOT"}
LEVELS = {name: int(name[1:]) / 100 for name in STATISTICS if name != "mean"}
MetricStatistic = tuple[str, str]  # metric, statistic

Values = NDArray[np.float64] | NDArray[np.int64]


@dataclass(frozen=True)
class LatencySamples:
    """Client latencies of finished requests, us: arrays of one length, one place a request.

    ``output_tokens``: 0 where the number is not known; such a request has no TPOT and counts nothing in the ITL.
    """

    ttft_us: Values
    e2e_us: Values
    output_tokens: NDArray[np.int64]

    def of(self, chosen: NDArray[np.bool_]) -> LatencySamples:
        """The chosen requests (bool[n])."""
        return LatencySamples(self.ttft_us[chosen], self.e2e_us[chosen], self.output_tokens[chosen])

    @property
    def tpot_us(self) -> NDArray[np.float64]:
        """float64[n]: nan where a request has one output token only."""
        return np.where(self.gaps > 0, self.decode_us / np.maximum(self.gaps, 1), np.nan)

    @property
    def gaps(self) -> NDArray[np.int64]:
        """int64[n]: gaps between output tokens, 0 where there is only one or their number is not known."""
        return np.maximum(self.output_tokens - 1, 0)

    @property
    def decode_us(self) -> Values:
        """[n]: first to last output token, 0 without a gap."""
        return np.where(self.gaps > 0, self.e2e_us - self.ttft_us, 0)

    @property
    def itl_mean_us(self) -> float | None:
        """Mean inter-token latency, token weighted; None without a second token."""
        gaps = int(self.gaps.sum())
        return float(self.decode_us.sum() / gaps) if gaps else None


def cell_name(cell: MetricStatistic) -> str:
    """``TTFT p99``; of a mean the name of its metric alone."""
    metric, statistic = cell
    return METRIC_NAMES[metric] if statistic == "mean" else f"{METRIC_NAMES[metric]} {statistic}"


def of_requests(cell: MetricStatistic) -> bool:
    """Whether a number follows from latencies of single requests: quantiles of ITL are pooled over all tokens."""
    metric, statistic = cell
    return metric != "itl" or statistic == "mean"


def level_of(statistic: str) -> float:
    """0.95 of ``p95``, and 0.999 of ``p999``."""
    digits = statistic[1:]
    return int(digits) / (1000 if len(digits) > 2 else 100)


def values_of(samples: LatencySamples, metric: str) -> Values:
    """One value per request, nan where it has none; the ITL has none."""
    return {"e2e": samples.e2e_us, "ttft": samples.ttft_us}.get(metric, samples.tpot_us)


def terms(samples: LatencySamples, metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64[n] each: values and counts of each request, whose sums have the mean of the metric as their ratio."""
    if metric == "itl":
        return np.asarray(samples.decode_us, np.float64), np.asarray(samples.gaps, np.float64)
    values = np.asarray(values_of(samples, metric), np.float64)
    return np.nan_to_num(values), (~np.isnan(values)).astype(np.float64)


def number(samples: LatencySamples, cell: MetricStatistic) -> float:
    """One number of the samples in us; nan without samples or if not ``of_requests``."""
    metric, statistic = cell
    values, counts = terms(samples, metric)
    if not of_requests(cell) or not counts.any():
        return float("nan")
    if statistic == "mean":
        return float(values.sum() / counts.sum())
    return float(np.quantile(values[counts > 0], level_of(statistic)))


def statistics(values: Values) -> dict[str, float]:
    """Mean, p50, p90, p99 of a sample without its nans; empty if nothing is left."""
    finite = np.asarray(values, np.float64)
    finite = finite[~np.isnan(finite)]
    if len(finite) == 0:
        return {}
    quantiles = np.quantile(finite, list(LEVELS.values()))
    return {"mean": float(finite.mean()), **dict(zip(LEVELS, map(float, quantiles), strict=True))}


def latency_statistics(
    samples: LatencySamples, gaps: tuple[Values, NDArray[np.int64]] | None
) -> dict[str, dict[str, float]]:
    """Statistics of all metrics, us; ``gaps``: pooled gaps between tokens as ``(gap_us, count)``, None if not known."""
    itl = {} if gaps is None else pooled_quantiles(*gaps)
    if samples.itl_mean_us is not None:
        itl["mean"] = samples.itl_mean_us
    return {
        "e2e": statistics(samples.e2e_us),
        "ttft": statistics(samples.ttft_us),
        "tpot": statistics(samples.tpot_us),
        "itl": itl,
    }


def pooled_quantiles(values: Values, counts: NDArray[np.int64]) -> dict[str, float]:
    """p50, p90, p99 of a sample in which ``values[i]`` occurs ``counts[i]`` times.

    Equal to the quantiles of ``np.repeat(values, counts)``, without making that array.
    """
    if counts.sum() == 0:
        return {}
    quantiles = weighted_quantiles(values, counts, np.array(list(LEVELS.values())))
    return dict(zip(LEVELS, quantiles.tolist(), strict=True))


def weighted_quantiles(values: Values, counts: NDArray[np.int64], levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[k]: the quantiles at ``levels`` (float64[k], 0..1) of ``np.repeat(values, counts)``."""
    order = np.argsort(values, kind="stable")
    ranked, upto = np.asarray(values)[order], np.cumsum(counts[order])
    rank = levels * (int(upto[-1]) - 1)
    low, high = (np.searchsorted(upto, at, side="right") for at in (np.floor(rank), np.ceil(rank)))
    return np.asarray(ranked[low] + (ranked[high] - ranked[low]) * (rank - np.floor(rank)), np.float64)


def relative_error(observed: float | None, simulated: float | None) -> float | None:
    """Signed error as a fraction of the observed value; None if it has no meaning."""
    if observed is None or simulated is None or observed == 0:
        return None
    return simulated / observed - 1


def paired_mape(observed: Values, simulated: Values) -> float | None:
    """Mean absolute percentage error over pairs, as a fraction; pairs with 0 observed drop out."""
    usable = (observed != 0) & ~np.isnan(np.asarray(observed, np.float64))
    if not usable.any():
        return None
    return float(np.abs(simulated[usable] / observed[usable] - 1).mean())


def correlation(observed: Values, simulated: Values) -> float | None:
    """Pearson's r over pairs; None with fewer than 3 pairs or a constant side."""
    usable = ~np.isnan(np.asarray(observed, np.float64)) & ~np.isnan(np.asarray(simulated, np.float64))
    if usable.sum() < 3 or np.ptp(observed[usable]) == 0 or np.ptp(simulated[usable]) == 0:
        return None
    return float(np.corrcoef(observed[usable], simulated[usable])[0, 1])
