"""Which anchors of a step clock stay: those against which time would run backwards do not.

The anchors are looked at part by part: of the others a part has to know their latest or their earliest time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.ingest.row_parts import RowParts

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
_NEVER, _FOREVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def in_order(anchors: RowParts, believed: pl.Expr) -> list[Bools]:
    """Of each part of the anchors (``start_us``, by step) which of them stay; ``believed``: which are first."""
    columns = believed.meta.root_names()
    firsts = _ascending(anchors, [frame.select(believed).to_series().to_numpy() for frame in anchors.frames(columns)])
    return _ascending(anchors, _fitting(anchors, firsts))


def _ascending(anchors: RowParts, among: Sequence[Bools]) -> list[Bools]:
    """``among`` without those that begin before an earlier one, or after a later one, whichever leaves more."""
    early = _equal(anchors, among, _latest_so_far(anchors, among))
    if _count(early) == _count(among):
        return early
    late = _equal(anchors, among, _earliest_from_here(anchors, among))
    return early if _count(early) >= _count(late) else late


def _fitting(anchors: RowParts, firsts: Sequence[Bools]) -> list[Bools]:
    """``firsts``, which ascend, and the others that begin between the last of them before and the next."""
    bounds = zip(_latest_so_far(anchors, firsts), _earliest_from_here(anchors, firsts), strict=True)
    return [
        of | ((start_us >= low) & (start_us <= high))
        for (start_us, of), (low, high) in zip(_both(anchors, firsts), bounds, strict=True)
    ]


def _latest_so_far(anchors: RowParts, among: Sequence[Bools]) -> Iterator[Int64s]:
    """Of each anchor the latest time among those up to it."""
    latest = _NEVER
    for start_us, of in _both(anchors, among):
        so_far = np.maximum(np.maximum.accumulate(np.where(of, start_us, _NEVER)), latest)
        latest = int(so_far[-1]) if len(so_far) else latest
        yield so_far


def _earliest_from_here(anchors: RowParts, among: Sequence[Bools]) -> Iterator[Int64s]:
    """Of each anchor the earliest time among those from it on."""
    times = [np.where(of, start_us, _FOREVER).min(initial=_FOREVER) for start_us, of in _both(anchors, among)]
    from_part = np.minimum.accumulate(np.array([*times, _FOREVER])[::-1])[::-1]
    for (start_us, of), later in zip(_both(anchors, among), from_part[1:], strict=True):
        yield np.minimum(np.minimum.accumulate(np.where(of, start_us, _FOREVER)[::-1])[::-1], later)


def _equal(anchors: RowParts, among: Sequence[Bools], times_us: Iterator[Int64s]) -> list[Bools]:
    return [of & (start_us == at_us) for (start_us, of), at_us in zip(_both(anchors, among), times_us, strict=True)]


def _both(anchors: RowParts, among: Sequence[Bools]) -> Iterator[tuple[Int64s, Bools]]:
    return zip(_starts(anchors), among, strict=True)


def _starts(anchors: RowParts) -> Iterator[Int64s]:
    return (frame["start_us"].to_numpy() for frame in anchors.frames(["start_us"]))


def _count(flags: Sequence[Bools]) -> int:
    return sum(int(np.count_nonzero(of)) for of in flags)
