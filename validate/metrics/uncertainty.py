"""How sure the error of a simulator is: 95 % intervals of errors, and of changes of errors.

The error of a mean is a ratio of means, simulated over observed, less one.  To first order each request adds
``(s - (1 + e) o) / mean(o)`` to it, so what both sides share cancels before anything is widened.  Requests that
are served together share steps, and one slow second delays all that queue behind it: the additions are summed over
blocks of time, and the scatter of the sums gives the standard error, with Student's t of as many blocks as there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, hypot, inf, isfinite, sqrt

import numpy as np

from blis_replay.base.arrays import Bools, Floats
from blis_replay.ingest.recording import Recording
from blis_replay.validate.metrics.latency import LatencySamples
from blis_replay.validate.metrics.resampling import CONFIDENCE, Blocks, MetricStatistic, request_blocks

# Fewer independent blocks than this give no interval.
MIN_BLOCKS = 4
_LEVELS = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


@dataclass(frozen=True)
class Estimate:
    """A signed relative error with its 95 % interval, or the change of its absolute value.

    ``low``, ``high``: fractions, infinite where no interval can be made.  ``blocks``: how many independent blocks of
    time it rests on.  ``parts``: half-widths, as fractions, of what is in it: ``requests``, ``repeats``,
    ``reconstructions``, ``beyond the fit``.
    """

    error: float
    low: float
    high: float
    blocks: float
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def half(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2

    @property
    def sampled(self) -> Estimate:
        """Without the margin of steps beyond the fit."""
        unsure = self.parts.get("beyond the fit", 0.0)
        low, high = (1 + self.low) / (1 - unsure) - 1, (1 + self.high) / (1 + unsure) - 1
        return replace(self, low=low, high=high, parts={k: v for k, v in self.parts.items() if k != "beyond the fit"})

    def beyond(self, unsure: float) -> Estimate:
        """Widened by steps beyond the fit: what is simulated may be off by this share."""
        if not unsure:
            return self
        low, high = (1 + self.low) * (1 - unsure) - 1, (1 + self.high) * (1 + unsure) - 1
        return replace(self, low=low, high=high, parts={**self.parts, "beyond the fit": unsure})


def requests_needed(estimate: Estimate, limit: float, requests: int) -> int | None:
    """About how many requests of the same load decide whether the error is within the limit; None: no number does."""
    margin = abs(limit - abs(estimate.error))
    fixed = sum(half for part, half in estimate.parts.items() if part != "requests")
    sampled = estimate.parts.get("requests", inf)
    if not isfinite(sampled) or margin <= fixed:
        return None
    needed = requests * (sampled / (margin - fixed)) ** 2
    digits = 10 ** max(len(str(ceil(needed))) - 2, 0)
    return ceil(needed / digits) * digits


def error_estimates(
    recording: Recording,
    chosen: Bools,
    observed: LatencySamples,
    simulated: LatencySamples,
    errors: Mapping[MetricStatistic, float],
) -> dict[MetricStatistic, Estimate]:
    """The interval of each error over the chosen requests (bool[n]), of which both sides have the latencies.

    ``errors``: as the table has them, by metric and statistic.
    """
    blocks = request_blocks(recording, chosen, [observed, simulated])
    return {cell: estimate(error, _additions(cell, observed, simulated), blocks) for cell, error in errors.items()}


def change_estimates(
    recording: Recording,
    chosen: Bools,
    candidate: LatencySamples,
    baseline: LatencySamples,
    errors: Mapping[MetricStatistic, Estimate],
) -> dict[MetricStatistic, Estimate]:
    """The change of each absolute error from the baseline to the candidate, fractions of the observed value.

    ``candidate``, ``baseline``: simulated latencies of the chosen requests (bool[n]).  ``errors``: of the candidate.
    """
    blocks = request_blocks(recording, chosen, [candidate, baseline])
    changes = {}
    for cell, after in errors.items():
        ratio = _number(cell, baseline) / _number(cell, candidate)
        changes[cell] = _change(after.sampled, ratio, half_width(_additions(cell, candidate, baseline), blocks)[0])
    return changes


def _change(after: Estimate, ratio: float, ratio_half: float) -> Estimate:
    """The change where the baseline simulates ``ratio`` times as much as the candidate, give or take half an interval.

    The recording is in both errors.  Where they have one sign it cancels, and the change is as sure as the ratio;
    where they may differ in sign, it is as sure as the errors.
    """

    def change(error: float, of: float) -> float:
        return abs(error) - abs((1 + error) * of - 1)

    if ratio == 1 and ratio_half == 0:
        return Estimate(0.0, 0.0, 0.0, after.blocks, after.parts)
    value = change(after.error, ratio)
    kinks = (at for at in (0.0, 1 / ratio - 1) if after.low < at < after.high)
    by_error = [change(error, ratio) - value for error in (after.error, after.low, after.high, *kinks)]
    by_ratio = max(abs(change(after.error, ratio + off) - value) for off in (-ratio_half, ratio_half))
    if not isfinite(after.half + ratio_half):
        return Estimate(value, -inf, inf, after.blocks, after.parts)
    low, high = value - hypot(min(by_error), by_ratio), value + hypot(max(by_error), by_ratio)
    return Estimate(value, low, high, after.blocks, after.parts)


def estimate(error: float, additions: Floats, blocks: Blocks) -> Estimate:
    """An error with the half-width of the sum of what each request, or each row of the blocks, adds to it."""
    half, independent = half_width(additions, blocks)
    return Estimate(error, error - half, error + half, independent, {"requests": half})


def half_width(additions: Floats, blocks: Blocks) -> tuple[float, float]:
    """Half of the 95 % interval of the sum of additions (float64[requests]), and how many blocks it rests on."""
    if not additions.any():
        return 0.0, float(len(blocks.stratum))
    from scipy.special import stdtrit  # heavy, and only intervals need it

    sums = np.bincount(blocks.number, additions, minlength=len(blocks.stratum))
    stages, of_stage = np.unique(blocks.stratum, return_inverse=True)
    sums = sums - (np.bincount(of_stage, sums) / np.bincount(of_stage))[of_stage]
    degrees = len(sums) - len(stages)
    if degrees + 1 < MIN_BLOCKS:
        return inf, 1.0
    error = sqrt(float(sums @ sums) * len(sums) / degrees)
    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * error, degrees + 1.0


def _number(cell: MetricStatistic, samples: LatencySamples) -> float:
    values, counts = _terms(cell[0], samples)
    if cell[1] == "mean":
        return float(values.sum() / counts.sum())
    return float(np.quantile(values[counts > 0], _LEVELS[cell[1]]))


def _terms(metric: str, samples: LatencySamples) -> tuple[Floats, Floats]:
    """float64[requests] each, whose sums have the mean as their ratio."""
    if metric == "itl":
        return np.asarray(samples.decode_us, np.float64), np.asarray(samples.gaps, np.float64)
    if metric == "tpot":
        several = samples.gaps > 0
        return np.where(several, samples.tpot_us, 0.0), several.astype(np.float64)
    values = np.asarray(samples.e2e_us if metric == "e2e" else samples.ttft_us, np.float64)
    return values, np.ones(len(values))


def _additions(cell: MetricStatistic, observed: LatencySamples, simulated: LatencySamples) -> Floats:
    """float64[requests]: what each request adds to the relative error of a number, to first order; their sum is 0."""
    metric, statistic = cell
    (o, o_count), (s, s_count) = _terms(metric, observed), _terms(metric, simulated)
    of_o, of_s = _number(cell, observed), _number(cell, simulated)
    ratio = of_s / of_o
    if statistic == "mean":
        return np.asarray(ratio * ((s - of_s * s_count) / s.sum() - (o - of_o * o_count) / o.sum()), np.float64)
    level = _LEVELS[statistic]
    step = (1 - level) / 2
    # How far the quantile moves, as a share of itself, per share of the requests: of both sides, so that they cancel.
    slopes = [
        float(np.subtract(*np.quantile(side[count > 0], [level + step, level - step]))) / number / (2 * step)
        for side, count, number in ((o, o_count, of_o), (s, s_count, of_s))
    ]
    above = ((s > of_s) & (s_count > 0)) / s_count.sum() - ((o > of_o) & (o_count > 0)) / o_count.sum()
    return np.asarray(ratio * max(slopes) * above, np.float64)
