"""The offset of the step clock, found by laying running depth over requests in flight.

Stamps can be made up, and two hosts that both count Unix time need not agree, so equal epochs prove nothing.  What a
step counted does: a request is in the engine only after its client sent it, and the client has its last token only
after the engine is done with it.  So depth rises after sends and falls before ends, and the offset lies between the
shift at which the rises match best and the one at which the falls do.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.ingest.rows import Rows, query

FEWEST_STEPS = 50
FEWEST_REQUESTS = 20
# No run takes this long; Unix time less time since boot is decades.
MIXED_US = 30 * 86_400 * 1_000_000
_DEPTH_COLUMNS = ("start_us", "running_depth", "waiting_depth")
_EVERY_KTH = """
SELECT * EXCLUDE place FROM (SELECT *, row_number() OVER () AS place FROM steps) WHERE (place - 1) % $every = 0
"""
# What stamps may be off by before they are not believed.
SLACK_US = 100_000
# Below this share the two curves are not of the same requests.
EXPLAINED = 0.8
_MOST_STEPS = 20_000
_CELLS = 4096
_FINEST_CELL_US = 250_000
_BLOCKS = 16
_REPLICATES = 200
_RESOLUTION_US = 1_000
# Share of bootstrap replicates that must find the same coarse offset.
_AGREEING = 0.95


@dataclass(frozen=True)
class DepthOffset:
    """What has to be added to the steps' times so that they fit the requests'.

    ``low_us``: the shift at which the engine's admissions match the clients' sends best.  ``high_us``: the one at which
    its releases match the clients' ends.  Both are widened to the 95 % interval of a bootstrap over blocks of time.
    The offset is between them, as no request is admitted before it is sent nor ends at the client before it ends in the
    engine.  ``early_us`` and ``late_us``: the same pair for either half of the steps.  ``explained``: share of the
    depth's variance that the requests in flight explain.
    """

    low_us: int
    high_us: int
    early_us: tuple[int, int]
    late_us: tuple[int, int]
    explained: float
    steps: int

    @property
    def offset_us(self) -> int:
        """The middle of the interval."""
        return (self.low_us + self.high_us) // 2

    @property
    def fits_at_zero(self) -> bool:
        """Whether the steps fit where they are, within ``SLACK_US``."""
        return self.low_us - SLACK_US <= 0 <= self.high_us + SLACK_US

    @property
    def uncertainty_us(self) -> int:
        """Half of the interval, rounded up."""
        return (self.high_us - self.low_us + 1) // 2


@dataclass(frozen=True)
class _Depths:
    """Steps in order of time with the requests in the engine, and the clients' sends and ends, each sorted."""

    time_us: Int64s
    depth: Floats
    sent_us: Int64s
    ended_us: Int64s

    def part(self, first: int, last: int) -> _Depths:
        """The steps ``first..last`` beside the same requests."""
        return _Depths(self.time_us[first:last], self.depth[first:last], self.sent_us, self.ended_us)


def estimate_offset(steps: Rows, requests: Rows) -> tuple[DepthOffset | None, str]:
    """The offset of the steps' clock against the requests', or None and why it is not identified.

    ``steps``: ``start_us``, ``running_depth``, ``waiting_depth``; ``requests``: ``arrival_us``, ``e2e_us``, failed ones
    included: the engine counted them too.
    """
    depths = _depths(steps, requests)
    if why_not := _why_not(depths, requests.height):
        return None, why_not
    around_us, cell_us, agreeing = _coarse(depths)
    if agreeing < _AGREEING:
        return None, "several offsets fit the running depth equally well"
    low_us, high_us, residual = _interval(depths, around_us, cell_us)
    explained = 1 - residual / float(depths.depth.var())
    if explained < EXPLAINED:
        return None, f"requests in flight explain only {100 * max(0.0, explained):.0f} % of the running depth"
    half, all_ = len(depths.depth) // 2, len(depths.depth)
    early, late = (_interval(depths.part(*ends), around_us, cell_us)[:2] for ends in ((0, half), (half, all_)))
    return DepthOffset(low_us, high_us, early, late, explained, all_), ""


def _why_not(depths: _Depths, requests: int) -> str:
    """Why the steps do not tell, or ``""``; ``requests``: their number."""
    if len(depths.depth) < FEWEST_STEPS:
        return f"fewer than {FEWEST_STEPS} steps with a running depth"
    if len(depths.ended_us) < FEWEST_REQUESTS:
        return f"fewer than {FEWEST_REQUESTS} requests with a recorded end"
    if len(depths.ended_us) < 0.99 * requests:
        return "more than 1 % of the requests have no recorded end"
    return "the running depth never changes" if depths.depth.min() == depths.depth.max() else _impossible(depths)


def _depths(steps: Rows, requests: Rows) -> _Depths:
    # Waiting requests are in the engine too: with them, a full batch hides no arrival.
    known = _thinned(steps)
    depth = known["running_depth"] + known["waiting_depth"].fill_null(0)
    timed = requests.select("arrival_us", "e2e_us").drop_nulls()
    sent_us = timed["arrival_us"].to_numpy()
    return _Depths(
        known["start_us"].to_numpy(),
        depth.to_numpy().astype(np.float64),
        np.sort(sent_us),
        np.sort(sent_us + timed["e2e_us"].to_numpy()),
    )


def _thinned(steps: Rows) -> pl.DataFrame:
    """Every k-th of the steps with a depth in order of time, ``_MOST_STEPS`` at most."""
    known = steps.only(_DEPTH_COLUMNS).where("start_us IS NOT NULL AND running_depth IS NOT NULL")
    every = {"every": max(1, -(-known.height // _MOST_STEPS))}
    return query(_EVERY_KTH, known.schema, every, steps=known.ordered("start_us")).frame()


def _impossible(depths: _Depths) -> str:
    """Why these times cannot be those of one run, or ``""``."""
    spans = [int(depths.time_us[-1]) - int(depths.time_us[0])]
    spans += [int(times[-1]) - int(depths.sent_us[0]) for times in (depths.sent_us, depths.ended_us)]
    if max(spans) > MIXED_US:
        return "the stamps are more than 30 days apart"
    if depths.ended_us[0] < depths.sent_us[0]:
        return "requests end before the first is sent"
    return "the steps cover too short a time" if spans[0] < _BLOCKS * _cell_us(depths) else ""


def _counts(times_us: Int64s, at_us: Int64s, shifts_us: Int64s) -> Floats:
    """float64[shifts, at]: how many of the sorted times lie at or before ``at + shift``."""
    return np.stack([np.searchsorted(times_us, at_us + shift, side="right") for shift in shifts_us]).astype(np.float64)


def _cell_us(depths: _Depths) -> int:
    """The coarse grid's cell, us: the longer of the two curves has at most ``_CELLS``."""
    of_requests = int(depths.ended_us[-1]) - int(depths.sent_us[0])
    of_steps = int(depths.time_us[-1]) - int(depths.time_us[0])
    return max(_FINEST_CELL_US, -(-max(of_requests, of_steps) // _CELLS))


def _coarse(depths: _Depths) -> tuple[int, int, float]:
    """The best offset on a grid over all overlaps, the grid's cell in us, and the share of replicates that agree."""
    begin_us, first_us, cell_us = int(depths.sent_us[0]), int(depths.time_us[0]), _cell_us(depths)
    cell = (depths.time_us - first_us) // cell_us
    weight = np.bincount(cell).astype(np.float64)
    depth = np.bincount(cell, depths.depth) / np.maximum(weight, 1)
    flight = _in_flight(depths, begin_us, cell_us, (int(depths.ended_us[-1]) - begin_us) // cell_us + 1)
    around = np.pad(flight, len(weight) - 1)
    edges = np.linspace(0, len(weight), _BLOCKS + 1).astype(int)
    cost = np.stack([_lagged(around, depth, weight, a, b) for a, b in pairwise(edges)])
    best = int(cost.sum(axis=0).argmin())
    replicated = (_resampling(_BLOCKS) @ cost).argmin(axis=1)
    offset_us = begin_us - first_us + (best - (len(weight) - 1)) * cell_us
    return offset_us, cell_us, float((abs(replicated - best) <= 1).mean())


def _in_flight(depths: _Depths, begin_us: int, cell_us: int, cells: int) -> Floats:
    """Mean number of requests in flight in each cell from ``begin_us`` on."""
    edges_us = np.arange(cells + 1, dtype=np.float64) * cell_us

    def area(times_us: Int64s) -> Floats:
        since_us = (times_us - begin_us).astype(np.float64)
        upto = np.searchsorted(since_us, edges_us)
        return np.asarray(upto * edges_us - np.concatenate([[0.0], np.cumsum(since_us)])[upto])

    return np.asarray(np.diff(area(depths.sent_us) - area(depths.ended_us)) / cell_us, np.float64)


def _lagged(around: Floats, depth: Floats, weight: Floats, first: int, last: int) -> Floats:
    """Weighted squared difference of the cells ``first..last`` at every lag of the padded curve ``around``."""
    w, wd = weight[first:last], (weight * depth)[first:last]
    reach = around[first : len(around) - (len(weight) - last)]
    squares = np.correlate(reach**2, w, "valid") - 2 * np.correlate(reach, wd, "valid")
    return np.asarray(squares + float((wd * depth[first:last]).sum()), np.float64)


def _interval(depths: _Depths, around_us: int, cell_us: int) -> tuple[int, int, float]:
    """``low_us``, ``high_us`` and the mean squared rest at the best pair of shifts."""
    centres, spacing_us, reach = (around_us, around_us), max(_RESOLUTION_US, cell_us // 12), 18
    while True:
        steps_us = np.arange(-reach, reach + 1) * spacing_us
        rises_us, falls_us = (steps_us + centre for centre in centres)
        cost = _cost_by_block(depths, rises_us, falls_us)
        rise, fall = _best(cost.sum(axis=0)[None])
        centres = int(rises_us[rise[0]]), int(falls_us[fall[0]])
        if spacing_us <= _RESOLUTION_US:
            break
        spacing_us, reach = max(_RESOLUTION_US, spacing_us // 20), 40
    rest = float(cost.sum(axis=0).min()) / len(depths.depth)
    rises, falls = _best(np.tensordot(_resampling(len(cost)), cost, axes=1))
    margin_us = _RESOLUTION_US
    low_us = min(centres[0], int(np.quantile(rises_us[rises], 0.025))) - margin_us
    high_us = max(centres[1], int(np.quantile(falls_us[falls], 0.975))) + margin_us
    return min(low_us, high_us), max(low_us, high_us), rest


def _cost_by_block(depths: _Depths, rises_us: Int64s, falls_us: Int64s) -> Floats:
    """float64[blocks, rises, falls]: squared difference summed over each block of steps."""
    risen = depths.depth - _counts(depths.sent_us, depths.time_us, rises_us)
    fallen = _counts(depths.ended_us, depths.time_us, falls_us)
    # Both run into the thousands while their sum is small: taken from one of them, the squares keep their digits.
    level = fallen[len(falls_us) // 2]
    risen, fallen = risen + level, fallen - level
    edges = np.linspace(0, len(depths.depth), _BLOCKS + 1).astype(int)
    blocks = [slice(a, b) for a, b in pairwise(edges)]
    return np.stack(
        [
            (risen[:, s] ** 2).sum(axis=1)[:, None]
            + 2 * risen[:, s] @ fallen[:, s].T
            + (fallen[:, s] ** 2).sum(axis=1)[None]
            for s in blocks
        ]
    )


def _best(cost: Floats) -> tuple[Int64s, Int64s]:
    """For each of the leading entries, the earliest rise and the latest fall among the pairs of least cost."""
    least = cost.min(axis=(1, 2), keepdims=True)
    near = cost <= least + 1e-9 * (1 + abs(least))
    rise = near.any(axis=2).argmax(axis=1)
    fall = near.shape[2] - 1 - near.any(axis=1)[:, ::-1].argmax(axis=1)
    return np.asarray(rise, np.int64), np.asarray(fall, np.int64)


def _resampling(blocks: int) -> Floats:
    """float64[replicates, blocks]: how often each block is drawn; the same draws each time."""
    draws = np.random.default_rng(0).integers(0, blocks, (_REPLICATES, blocks))
    return np.stack([np.bincount(row, minlength=blocks) for row in draws]).astype(np.float64)
