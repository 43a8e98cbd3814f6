"""What stands behind the differences of two sides: their intervals, inputs, requests and segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blis_replay.compiled.arrays import Bools, Floats, Int64s
from blis_replay.validate.comparison.compare import Comparison, compare, requests_of_both
from blis_replay.validate.comparison.segments import Segments, segments_between
from blis_replay.validate.comparison.sides import Side, changed_inputs, only_on_one_side
from blis_replay.validate.metrics.latency import METRICS, STATISTICS, LatencySamples
from blis_replay.validate.metrics.observed import Selection
from blis_replay.validate.metrics.resampling import (
    Blocks,
    Cell,
    interval,
    request_blocks,
    resamplable,
    resampled_values,
)

CELLS: tuple[Cell, ...] = tuple((metric, statistic) for metric in METRICS for statistic in STATISTICS)
PAIRS_SHOWN = 10


@dataclass(frozen=True)
class RequestPairs:
    """The requests that both sides have: int64[k] each, by size of the E2E difference, the largest first."""

    request_index: Int64s
    arrival_us: Int64s
    ttft_us: tuple[Int64s, Int64s]
    e2e_us: tuple[Int64s, Int64s]


@dataclass(frozen=True)
class Differences:
    """Two sides compared, and what explains how they differ.

    ``intervals_us``: 95 % of B less A, by number, where requests could be resampled; ``resampled``: in words, what
    they rest on.  ``changed``: inputs that differ, as ``(what, A, B)``; ``one_sided``: those that one side does not
    say.  ``both_replays``: no side is a recording.  ``pairs``, ``segments``: None where the sides do not have the
    same requests.
    """

    a: Side
    b: Side
    comparison: Comparison
    intervals_us: dict[Cell, tuple[float, float]]
    resampled: str
    changed: list[tuple[str, str, str]]
    one_sided: list[str]
    pairs: RequestPairs | None
    segments: Segments | None
    both_replays: bool


def differences(a: Side, b: Side) -> Differences:
    """Compare two sides, with intervals.

    If both are of the same recorded requests, intervals come from drawing blocks of requests with both latencies.
    Else each side is drawn by itself; of a side that has only published numbers, these stand fixed.
    """
    comparison = compare(a, b)
    both = requests_of_both(a, b, Selection())
    chosen = (a.requests, b.requests) if both is None else (both, both)
    samples = [None if part is None else side.latencies(part) for side, part in zip((a, b), chosen, strict=True)]
    blocks = _blocks((a, b), chosen, samples, paired=both is not None)
    inputs = a.inputs(), b.inputs()
    return Differences(
        a=a,
        b=b,
        comparison=comparison,
        intervals_us=_intervals(comparison, samples, blocks),
        resampled=_words(samples, blocks, both is not None),
        changed=changed_inputs(*inputs),
        one_sided=only_on_one_side(*inputs),
        pairs=None if both is None else _pairs(a, both, samples),
        segments=None
        if both is None or a.timeline is None or b.timeline is None
        else segments_between(a.recording, a.timeline(), b.timeline(), both),
        both_replays=all("simulator" in side for side in inputs),
    )


def _blocks(
    sides: Sequence[Side], chosen: Sequence[Bools | None], samples: Sequence[LatencySamples | None], *, paired: bool
) -> list[Blocks]:
    """Of paired sides one for both, else one for each that has requests."""
    known = [(side.recording, part, s) for side, part, s in zip(sides, chosen, samples, strict=True) if s is not None]
    if paired:
        recording, part, _ = known[0]
        return [request_blocks(recording, np.asarray(part), [s for _, _, s in known])]
    return [request_blocks(recording, np.asarray(part), [s]) for recording, part, s in known]


def _intervals(
    comparison: Comparison, samples: Sequence[LatencySamples | None], blocks: Sequence[Blocks]
) -> dict[Cell, tuple[float, float]]:
    cells = [cell for cell in CELLS if resamplable(cell) and _known(comparison, cell)]
    known = [side for side in samples if side is not None]
    if not cells or not known:
        return {}
    drawn = iter(resampled_values(known, blocks, cells))
    published = [[comparison.metrics[m][s].a_us for m, s in cells], [comparison.metrics[m][s].b_us for m, s in cells]]
    a, b = (_fixed(published[i]) if side is None else next(drawn) for i, side in enumerate(samples))
    intervals = {cell: interval((b - a)[:, i]) for i, cell in enumerate(cells)}
    return {cell: bounds for cell, bounds in intervals.items() if not np.isnan(bounds[0])}


def _known(comparison: Comparison, cell: Cell) -> bool:
    metric, statistic = cell
    return comparison.metrics[metric][statistic].difference_us is not None


def _fixed(values_us: Sequence[float | None]) -> Floats:
    return np.array([values_us], np.float64)


def _words(samples: Sequence[LatencySamples | None], blocks: Sequence[Blocks], paired: bool) -> str:
    drawn = " and ".join(own.words for own in blocks)
    if paired:
        return f"requests drawn with both their latencies, in {drawn}"
    known = sum(side is not None for side in samples)
    return {
        0: "none: both sides are published numbers",
        1: f"requests drawn on the side that has them, the published numbers held fixed, in {drawn}",
        2: f"requests of each side drawn by themselves, in {drawn}",
    }[known]


def _pairs(a: Side, both: Bools, samples: Sequence[LatencySamples | None]) -> RequestPairs | None:
    one, other = samples
    if one is None or other is None:
        return None
    index = np.flatnonzero(both)
    order = np.lexsort((index, -np.abs(other.e2e_us - one.e2e_us)))
    return RequestPairs(
        request_index=index[order],
        arrival_us=a.recording.requests["arrival_us"].to_numpy()[index[order]],
        ttft_us=(one.ttft_us.astype(np.int64)[order], other.ttft_us.astype(np.int64)[order]),
        e2e_us=(one.e2e_us.astype(np.int64)[order], other.e2e_us.astype(np.int64)[order]),
    )
