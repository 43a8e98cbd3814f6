"""Means and p99s of latencies, over all requests and over resampled ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.result import TokenGaps
from blis_replay.compiled.arrays import Floats, Int64s
from blis_replay.validate.metrics.latency import LatencySamples
from blis_replay.validate.metrics.resampling import Blocks, resampled

# What is attributed, in the order of the columns of every array here.
QUANTITIES = (
    *(("e2e", "mean"), ("e2e", "p99"), ("ttft", "mean"), ("ttft", "p99")),
    *(("itl", "mean"), ("itl", "p99")),
)
_P99 = 0.99

Counts = Int64s


@dataclass(frozen=True)
class PooledGaps:
    """Gaps between output tokens that can be drawn again by request: ``gaps`` of the requests ``rows`` (int64[m])."""

    gaps: TokenGaps
    rows: Counts


def draws(blocks: Blocks, resamples: int, seed: int) -> Counts:
    """int64[1 + resamples, requests]: how often each request counts, first every one once."""
    once = np.ones((1, blocks.requests), np.int64)
    drawn = [np.bincount(indices, minlength=blocks.requests) for indices in resampled(blocks, resamples, seed)]
    return np.vstack([once, *drawn])


def quantities(samples: LatencySamples, times: Counts, gaps: PooledGaps | None) -> Floats:
    """float64[draws, QUANTITIES] us: one row a row of ``times`` (int64[draws, m]); nan where gaps are not known.

    ``samples``: m requests.  Requests with one output token have no gap and count nothing in the ITL.
    """
    table = np.full((len(times), len(QUANTITIES)), np.nan)
    for column, values_us in ((0, samples.e2e_us), (2, samples.ttft_us)):
        table[:, column] = times @ values_us.astype(np.float64) / times.sum(axis=1)
        table[:, column + 1] = _p99s(values_us.astype(np.float64), times)
    pairs = times @ samples.gaps
    table[:, 4] = np.divide(
        times @ samples.decode_us.astype(np.float64), pairs, out=np.full(len(times), np.nan), where=pairs > 0
    )
    if gaps is not None:
        table[:, 5] = _gap_p99s(gaps, times)
    return table


def _p99s(values_us: Floats, times: Counts) -> Floats:
    order = np.argsort(values_us, kind="stable")
    return np.array([_ranked(values_us[order], np.cumsum(row[order])) for row in times])


def _gap_p99s(pooled: PooledGaps, times: Counts) -> Floats:
    gap_us = pooled.gaps.gap_us.astype(np.float64)
    order = np.argsort(gap_us, kind="stable")
    ranked_us = gap_us[order]
    requests = int(max(pooled.rows.max(initial=0), pooled.gaps.request.max(initial=0))) + 1
    p99s = np.empty(len(times))
    for i, row in enumerate(times):
        every = np.zeros(requests, np.int64)
        every[pooled.rows] = row
        p99s[i] = _ranked(ranked_us, np.cumsum(pooled.gaps.counts(every)[order]))
    return p99s


def _ranked(ranked_us: Floats, upto: Counts) -> float:
    """The p99 of values in order that occur ``diff(upto)`` times each; nan of none."""
    if len(upto) == 0 or upto[-1] == 0:
        return float("nan")
    rank = _P99 * (int(upto[-1]) - 1)
    low, high = np.searchsorted(upto, [np.floor(rank), np.ceil(rank)], side="right")
    return float(ranked_us[low] + (ranked_us[high] - ranked_us[low]) * (rank - np.floor(rank)))
