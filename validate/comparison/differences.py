"""Two sides beside each other: the difference of every number, and of every request that both have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.trace import Int64s
from blis_replay.validate.attribution.segments import Segments, segments_between
from blis_replay.validate.bootstrap import interval
from blis_replay.validate.comparison.inputs import changed_inputs, only_on_one_side
from blis_replay.validate.comparison.resampling import Cell, Floats, numbers_of, resamplable, resampled_values
from blis_replay.validate.comparison.sides import Numbers, Side
from blis_replay.validate.metrics import METRICS, STATISTICS, LatencySamples, correlation, paired_mape

CELLS: tuple[Cell, ...] = tuple((metric, statistic) for metric in METRICS for statistic in STATISTICS)
PAIRS_SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """One number on both sides, us: ``b_us`` less ``a_us`` with its interval.

    None where a side lacks it (``reason``); no interval where nothing could be resampled.
    """

    a_us: float | None
    b_us: float | None
    value_us: float | None
    interval_us: tuple[float, float] | None
    reason: str | None = None


@dataclass(frozen=True)
class RequestPairs:
    """The requests that both sides have: int64[k] each, by size of the E2E difference, the largest first."""

    request_index: Int64s
    arrival_us: Int64s
    ttft_us: tuple[Int64s, Int64s]
    e2e_us: tuple[Int64s, Int64s]
    mape: Mapping[str, float | None]
    correlation: Mapping[str, float | None]


@dataclass(frozen=True)
class Differences:
    """Two sides compared.

    ``resampled``: in words, what the intervals rest on.  ``requests``: compared on each side.
    ``pairs``, ``segments``: None where the sides do not have the same requests.
    """

    a: Side
    b: Side
    table: dict[str, dict[str, Difference]]
    resampled: str
    requests: tuple[int, int]
    changed: list[tuple[str, str, str]]
    one_sided: list[str]
    pairs: RequestPairs | None
    segments: Segments | None


def differences(a: Side, b: Side) -> Differences:
    """Compare two sides.

    If both are of the same recorded requests, the numbers are over those that both have, and
    intervals come from drawing requests with both their latencies.  Else each side is drawn by
    itself; of a side that has only published numbers, these stand fixed.
    """
    paired = _same_requests(a, b)
    if paired is not None:
        a_numbers, b_numbers = _over(a, paired), _over(b, paired)
        samples = [_samples(a, paired), _samples(b, paired)]
    else:
        a_numbers, b_numbers = a.numbers, b.numbers
        samples = [side.samples for side in (a, b)]
    intervals = _intervals(samples, (a_numbers, b_numbers), paired=paired is not None)
    table = {
        metric: {s: _difference(a, b, a_numbers, b_numbers, intervals, (metric, s)) for s in STATISTICS}
        for metric in METRICS
    }
    return Differences(
        a=a,
        b=b,
        table=table,
        resampled=_words(samples, paired is not None),
        requests=(_count(a, paired), _count(b, paired)),
        changed=changed_inputs(a.inputs, b.inputs),
        one_sided=only_on_one_side(a.inputs, b.inputs),
        pairs=None if paired is None else _pairs(a, b, paired),
        segments=None if paired is None else _segments(a, b, paired),
    )


def _same_requests(a: Side, b: Side) -> NDArray[np.bool_] | None:
    """bool[n]: requests that both sides have, if they are of the same recording."""
    if a.requests is None or b.requests is None or a.recording.content_hash != b.recording.content_hash:
        return None
    both = a.requests & b.requests
    return both if both.any() else None


def _over(side: Side, chosen: NDArray[np.bool_]) -> Numbers:
    if side.requests is not None and np.array_equal(side.requests, chosen):
        return side.numbers
    if side.recount is not None:
        return side.recount(chosen)
    samples = _samples(side, chosen)
    return side.numbers if samples is None else numbers_of(samples)


def _samples(side: Side, chosen: NDArray[np.bool_]) -> LatencySamples | None:
    if side.samples is None or side.requests is None:
        return None
    kept = chosen[side.requests]
    return LatencySamples(side.samples.ttft_us[kept], side.samples.e2e_us[kept], side.samples.output_tokens[kept])


def _intervals(
    samples: list[LatencySamples | None], numbers: tuple[Numbers, Numbers], *, paired: bool
) -> dict[Cell, tuple[float, float]]:
    cells = [cell for cell in CELLS if resamplable(cell) and all(cell[1] in side.get(cell[0], {}) for side in numbers)]
    known = [side for side in samples if side is not None]
    if not cells or not known:
        return {}
    drawn = iter(resampled_values(known, cells, paired=paired))
    sides = [_fixed(numbers[i], cells) if side is None else next(drawn) for i, side in enumerate(samples)]
    spread = sides[1] - sides[0]
    return {cell: interval(spread[:, i]) for i, cell in enumerate(cells)}


def _fixed(numbers: Numbers, cells: list[Cell]) -> Floats:
    return np.array([[numbers[metric][statistic] for metric, statistic in cells]])


def _difference(
    a: Side, b: Side, a_numbers: Numbers, b_numbers: Numbers, intervals: Mapping[Cell, tuple[float, float]], cell: Cell
) -> Difference:
    metric, statistic = cell
    a_us, b_us = a_numbers.get(metric, {}).get(statistic), b_numbers.get(metric, {}).get(statistic)
    reasons = {side.missing[cell] for side, value in ((a, a_us), (b, b_us)) if value is None and cell in side.missing}
    value_us = None if a_us is None or b_us is None else b_us - a_us
    return Difference(a_us, b_us, value_us, intervals.get(cell), "; ".join(sorted(reasons)) or None)


def _words(samples: list[LatencySamples | None], paired: bool) -> str:
    if paired:
        return "requests drawn with both their latencies"
    known = sum(side is not None for side in samples)
    return {
        0: "none: both sides are published numbers",
        1: "requests drawn on the side that has them, the published numbers held fixed",
        2: "requests of each side drawn by themselves",
    }[known]


def _count(side: Side, paired: NDArray[np.bool_] | None) -> int:
    if paired is not None:
        return int(paired.sum())
    return side.recording.requests.height if side.requests is None else int(side.requests.sum())


def _segments(a: Side, b: Side, both: NDArray[np.bool_]) -> Segments | None:
    return None if a.way is None or b.way is None else segments_between(a.recording, a.way, b.way, both)


def _pairs(a: Side, b: Side, both: NDArray[np.bool_]) -> RequestPairs | None:
    one, other = _samples(a, both), _samples(b, both)
    if one is None or other is None:
        return None
    index = np.flatnonzero(both)
    order = np.lexsort((index, -np.abs(other.e2e_us - one.e2e_us)))
    metrics = {
        "e2e": (one.e2e_us, other.e2e_us),
        "ttft": (one.ttft_us, other.ttft_us),
        "tpot": (one.tpot_us, other.tpot_us),
    }
    return RequestPairs(
        request_index=index[order],
        arrival_us=a.recording.requests["arrival_us"].to_numpy()[index[order]],
        ttft_us=(one.ttft_us.astype(np.int64)[order], other.ttft_us.astype(np.int64)[order]),
        e2e_us=(one.e2e_us.astype(np.int64)[order], other.e2e_us.astype(np.int64)[order]),
        mape={metric: paired_mape(*pair) for metric, pair in metrics.items()},
        correlation={metric: correlation(*pair) for metric, pair in metrics.items()},
    )
