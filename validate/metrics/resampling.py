"""Numbers of a metric table under resampled requests: what intervals of differences are made of.

Requests that are served together share steps, so one slow second is in all of them, and in those that queue behind
them.  Drawn one by one they look like many independent measurements, and an interval comes out several times too
narrow.  So whole blocks of time are drawn, longer than what they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.blis.result import TokenGaps
from blis_replay.ingest.recording import Recording
from blis_replay.validate.metrics.latency import LatencySamples

RESAMPLES = 200
CONFIDENCE = 0.95
SEED = 42

# A block holds at least this many residences.
_RESIDENCES = 4.0
# Blocks are made twice as long as long as that widens the mean by this factor, and this many are left.
_STILL_WIDER, _ENOUGH = 1.05, 8
# The largest correlation of neighbouring blocks that is believed.
_MOST_ALIKE = 0.9
# Of fewer blocks than this no interval is made: nothing shows how runs differ.
FEWEST_BLOCKS = 4


@dataclass(frozen=True)
class Blocks:
    """Requests by blocks of time: ``number``, int64[requests], counts from 0, those of one stratum in a row.

    ``stratum``: int64[blocks], the load stage of each; blocks are drawn from their own stage, because which stages
    there are is no chance.  ``span_us``: how long a block is, 0 where there is none.  ``memory``: by what factor the
    variance of a mean is larger because neighbouring blocks are alike: a slow second makes a queue that outlasts it.
    """

    number: Int64s
    stratum: Int64s
    span_us: int
    memory: float = 1.0

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.number)

    @property
    def widening(self) -> float:
        """What intervals have to be widened by: Student's t of as many blocks as are independent; nan of too few."""
        degrees = len(self.stratum) - len(np.unique(self.stratum))
        if degrees < FEWEST_BLOCKS - 1:
            return float("nan")
        # Heavy, and only intervals need it; what else scipy.stats imports takes twice as long again.
        from scipy.special import ndtri, stdtrit

        level, independent = (1 + CONFIDENCE) / 2, max((degrees + 1) / self.memory - 1, 2.0)
        # A draw of b blocks scatters by (b - 1) / b of the variance.
        fewer = (degrees + 1) / degrees * self.memory
        return float(stdtrit(independent, level) / ndtri(level) * np.sqrt(fewer))

    @property
    def words(self) -> str:
        """What is drawn, in words."""
        if np.isnan(self.widening):
            return f"too few blocks of time to draw ({len(self.stratum)}): the run is hardly longer than a request"
        return f"{len(self.stratum)} blocks of {self.span_us / 1e6:.3g} s"


def request_blocks(recording: Recording, chosen: Bools, sides: Sequence[LatencySamples]) -> Blocks:
    """Blocks for drawing the chosen requests (bool[n]), of which each side has the latencies.

    They begin at four mean residences and grow until the means' scatter grows no more: that of the differences of the
    sides from the first one, of a single side that of its own latencies.
    """
    rows = recording.requests
    arrival_us, stage = rows["arrival_us"].to_numpy()[chosen], rows["stage"].fill_null(-1).to_numpy()[chosen]
    residence_us = max((float(side.e2e_us.mean()) for side in sides if len(side.e2e_us)), default=0.0)
    first, others = sides[0], sides[1:]
    series = [first.e2e_us, first.ttft_us]
    if others:
        series = [other.e2e_us - first.e2e_us for other in others] + [o.ttft_us - first.ttft_us for o in others]
    return time_blocks(arrival_us, residence_us, stage, [np.asarray(values, np.float64) for values in series])


def time_blocks(arrival_us: Int64s, residence_us: float, stage: Int64s, series: Sequence[Floats]) -> Blocks:
    """The same from arrays: arrivals, load stage and values of each request, and how long one is served on average."""
    if len(arrival_us) == 0:
        return Blocks(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
    span_us = max(int(_RESIDENCES * residence_us), 1)
    blocks = _cut(arrival_us, stage, span_us)
    while len(blocks.stratum) >= 2 * _ENOUGH:
        longer = _cut(arrival_us, stage, 2 * blocks.span_us)
        if len(longer.stratum) < _ENOUGH or all(
            _scatter(values, longer) <= _STILL_WIDER * _scatter(values, blocks) for values in series
        ):
            break
        blocks = longer
    return replace(blocks, memory=max((_memory(values, blocks) for values in series), default=1.0))


def row_blocks(stratum: Int64s, series: Sequence[Floats]) -> Blocks:
    """Blocks of rows in order of time, from single ones on: ``stratum``, int64[rows], and the series as above."""
    return time_blocks(np.arange(len(stratum)), 1 / _RESIDENCES, stratum, series)


def _cut(arrival_us: Int64s, stage: Int64s, span_us: int) -> Blocks:
    """Blocks of about equal length in each stage; a last piece is shared among the others."""
    number = np.zeros(len(arrival_us), np.int64)
    strata: list[int] = []
    for one in np.unique(stage):
        rows = np.flatnonzero(stage == one)
        since_us = arrival_us[rows] - arrival_us[rows[0]]
        length_us = int(since_us[-1]) + 1
        pieces = max(length_us // span_us, 1)
        of_stage = np.unique(since_us * pieces // length_us, return_inverse=True)[1]
        number[rows] = len(strata) + of_stage
        strata += [int(one)] * (int(of_stage.max()) + 1)
    return Blocks(number, np.array(strata, np.int64), span_us)


def _sums(values: Floats, blocks: Blocks) -> Floats:
    """float64[blocks]: sums of the values' deviations, around the mean of their stage."""
    sums = np.bincount(blocks.number, values - values.mean())
    stage = np.unique(blocks.stratum, return_inverse=True)[1]
    return np.asarray(sums - (np.bincount(stage, sums) / np.bincount(stage))[stage], np.float64)


def _scatter(values: Floats, blocks: Blocks) -> float:
    """Standard error of the mean of the values, by how the sums of their blocks scatter."""
    sums, stages = _sums(values, blocks), len(np.unique(blocks.stratum))
    return float(np.sqrt((sums**2).sum() * len(sums) / max(len(sums) - stages, 1))) / len(values)


def _memory(values: Floats, blocks: Blocks) -> float:
    """(1 + r) / (1 - r), at least 1: r is the correlation of neighbouring blocks, without its bias (Kendall 1954)."""
    sums = _sums(values, blocks)
    square = float((sums**2).sum())
    if square == 0 or len(sums) < FEWEST_BLOCKS:
        return 1.0
    seen = float(sums[1:] @ sums[:-1]) / square
    alike = min(max(seen + (1 + 3 * seen) / len(sums), 0.0), _MOST_ALIKE)
    return (1 + alike) / (1 - alike)


def resampled(blocks: Blocks, resamples: int = RESAMPLES, seed: int = SEED) -> Iterator[Int64s]:
    """Requests of blocks drawn with replacement, each stage as many as it has; about int64[requests] each.

    What is paired uses the same draw on both sides.
    """
    rng = np.random.default_rng(seed)
    order = np.argsort(blocks.number, kind="stable")
    size = np.bincount(blocks.number, minlength=len(blocks.stratum))
    first = np.cumsum(size) - size
    of_stage = [np.flatnonzero(blocks.stratum == stage) for stage in np.unique(blocks.stratum)]
    for _ in range(resamples):
        drawn = np.concatenate([rows[rng.integers(0, len(rows), len(rows))] for rows in of_stage])
        lengths = size[drawn]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        yield order[np.repeat(first[drawn], lengths) + within]


def widened(values: Floats, blocks: Blocks) -> Floats:
    """float64[resamples, ...]: resampled values spread around their mean as far as few blocks ask for."""
    middle = values.mean(axis=0)
    return np.asarray(middle + blocks.widening * (values - middle), np.float64)


def spread(values: Floats, blocks: Blocks) -> Floats:
    """The same, of too few blocks as far as two of them would ask for: for what has to have bounds."""
    middle, widening = values.mean(axis=0), blocks.widening
    return np.asarray(middle + (_OF_TWO if np.isnan(widening) else widening) * (values - middle), np.float64)


# Student's t of one degree of freedom over the normal, at 97.5 %.
_OF_TWO = 12.71 / 1.96


def interval(values: Floats, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The percentile interval of resampled values (float64[resamples]), nans left out; (nan, nan) of none."""
    finite = values[~np.isnan(values)]
    if len(finite) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(finite, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


# What is attributed, in the order of the columns of the arrays below.
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
    shared, place = pooled.gaps.by_stretch()
    place = place[order]
    p99s = np.empty(len(times))
    for i, row in enumerate(times):
        every = np.zeros(requests, np.int64)
        every[pooled.rows] = row
        p99s[i] = _ranked(ranked_us, np.cumsum(shared.counts(every)[place]))
    return p99s


def _ranked(ranked_us: Floats, upto: Counts) -> float:
    """The p99 of values in order that occur ``diff(upto)`` times each; nan of none."""
    if len(upto) == 0 or upto[-1] == 0:
        return float("nan")
    rank = _P99 * (int(upto[-1]) - 1)
    low, high = np.searchsorted(upto, [np.floor(rank), np.ceil(rank)], side="right")
    return float(ranked_us[low] + (ranked_us[high] - ranked_us[low]) * (rank - np.floor(rank)))
