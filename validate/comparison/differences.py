"""The differences of two sides: their intervals, inputs, requests and segments, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, isfinite

import numpy as np

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.ingest.tables import Cell, Column, Table, Toned, Value, columns_named, table_of
from blis_replay.validate.comparison.compare import compare, requests_of_both
from blis_replay.validate.comparison.comparison import Comparison, MetricCell, Pairing
from blis_replay.validate.comparison.named_sides import changed_inputs, inputs_of, only_on_one_side, timeline_of
from blis_replay.validate.comparison.pages import pairs_sentence
from blis_replay.validate.comparison.saturation import overload_sentence
from blis_replay.validate.comparison.segments import Segments, segments_between
from blis_replay.validate.comparison.sides import Side
from blis_replay.validate.metrics.latency import METRICS, STATISTICS, LatencySamples, MetricStatistic, of_requests
from blis_replay.validate.metrics.observed import Selection
from blis_replay.validate.metrics.uncertainty import half_width, request_order
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import in_ms, number_text

CELLS: tuple[MetricStatistic, ...] = tuple((metric, statistic) for metric in METRICS for statistic in STATISTICS)
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

    ``intervals_us``: 95 % of B less A, by number, where there are requests; ``resampled``: in words, what
    they rest on.  ``changed``: inputs that differ, as ``(what, A, B)``; ``one_sided``: those that one side does not
    say.  ``both_replays``: no side is a recording.  ``pairs``, ``segments``: None where the sides do not have the
    same requests.
    """

    a: Side
    b: Side
    comparison: Comparison
    intervals_us: dict[MetricStatistic, tuple[float, float]]
    resampled: str
    changed: list[tuple[str, str, str]]
    one_sided: list[str]
    pairs: RequestPairs | None
    segments: Segments | None
    both_replays: bool


def differences(a: Side, b: Side) -> Differences:
    """Compare two sides, with intervals.

    If both are of the same recorded requests, intervals are of the differences of each request.  Else each side has its
    own; published numbers stand fixed.
    """
    comparison = compare(a, b)
    both = requests_of_both(a, b, Selection())
    chosen = (a.requests, b.requests) if both is None else (both, both)
    samples = [None if part is None else side.latencies(part) for side, part in zip((a, b), chosen, strict=True)]
    inputs = inputs_of(a), inputs_of(b)
    return Differences(
        a=a,
        b=b,
        comparison=comparison,
        intervals_us=_intervals(comparison, (a, b), chosen, samples, both is not None),
        resampled=_words(samples, both is not None),
        changed=changed_inputs(*inputs),
        one_sided=only_on_one_side(*inputs),
        pairs=None if both is None else _pairs(a, both, samples),
        segments=_segments_of_both(a, b, both),
        both_replays=all("simulator" in side for side in inputs),
    )


def _segments_of_both(a: Side, b: Side, both: Bools | None) -> Segments | None:
    if both is None:
        return None
    one, other = timeline_of(a), timeline_of(b)
    return None if one is None or other is None else segments_between(a.recording, one, other, both)


def _intervals(
    comparison: Comparison,
    sides: Sequence[Side],
    chosen: Sequence[Bools | None],
    samples: Sequence[LatencySamples | None],
    paired: bool,
) -> dict[MetricStatistic, tuple[float, float]]:
    known = [
        ((weight, side), request_order(of.recording, part, side.e2e_us))
        for weight, of, part, side in zip((-1.0, 1.0), sides, chosen, samples, strict=True)
        if side is not None and part is not None
    ]
    together = [([side for side, _ in known], known[0][1])] if paired else [([side], order) for side, order in known]
    intervals = {}
    for metric, statistic in filter(of_requests, CELLS):
        middle = comparison.metrics[metric][statistic].difference_us
        if known and middle is not None:
            half = hypot(*(half_width((metric, statistic), of, order)[0] for of, order in together))
            if isfinite(half):
                intervals[metric, statistic] = middle - half, middle + half
    return intervals


def _words(samples: Sequence[LatencySamples | None], paired: bool) -> str:
    if paired:
        return "of the differences of the same requests, over the run"
    known = sum(side is not None for side in samples)
    return {
        0: "none: both sides are published numbers",
        1: "of the requests of the side that has them, the published numbers held fixed",
        2: "of the requests of each side by themselves",
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


_RUN_COLUMNS = columns_named("id", "slug", "simulator", "coefficients", "replay", kind="data")
_METRIC_COLUMNS = (
    *(Column(""), Column("A ms", "ms"), Column("B ms", "ms"), Column("B - A ms", "ms_difference")),
    *(Column("95 % interval", "word"), Column("B / A - 1", "error")),
)
_SEGMENT_COLUMNS = (
    *(Column("where the time goes"), Column("A ms", "ms"), Column("B ms", "ms")),
    *columns_named("B - A ms", "p50", "p99", kind="ms_difference"),
)
_PAIR_COLUMNS = (
    *(Column("request"), Column("sent s", "decimal"), Column("E2E A ms", "ms"), Column("E2E B ms", "ms")),
    *columns_named("B - A ms", "TTFT B - A ms", kind="ms_difference"),
)
_DATA_COLUMNS = (
    *columns_named("metric", "statistic", kind="data"),
    *columns_named("a_ms", "b_ms", "difference_ms", "low_ms", "high_ms", "change", kind="real"),
    Column("reason", "data"),
)


def differences_answer(compared: Differences) -> Answer:
    """Head, metric table, what changed in the inputs, the segments, the requests that differ most; times in ms.

    The rows are the metrics: bounds are those of the difference's 95 % interval, ``change`` is B over A less one.
    """
    page: list[Part] = [
        _head(compared),
        Table(
            "",
            _METRIC_COLUMNS,
            [[f"{m.upper()} {s}", *_numbers(cell, within)] for m, s, cell, within in _cells(compared)],
        ),
        _remarks(compared),
        *_inputs(compared),
        *([] if compared.segments is None else [_segments(compared.segments)]),
    ]
    if compared.pairs is not None:
        page += [pairs_sentence(compared.comparison), _pair_table(compared.pairs)]
    rows = [
        [
            m,
            s,
            *map(in_ms, (cell.a_us, cell.b_us, cell.difference_us, *(within or (None, None)))),
            cell.error,
            cell.reason,
        ]
        for m, s, cell, within in _cells(compared)
    ]
    return Answer(page, _document(compared), Table("", _DATA_COLUMNS, rows))


def runs_answer(runs: Sequence[Mapping[str, Value]]) -> Answer:
    """The stored runs, one per line."""
    none = "no run is stored yet; `blis-replay validate` stores one"
    rows = [[str(run[column.name]) for column in _RUN_COLUMNS] for run in runs]
    shown = Table("", columns_named(*(column.name for column in _RUN_COLUMNS), kind="text"), rows, cut=True)
    return Answer([shown if rows else none], {"runs": runs}, table_of(runs, _RUN_COLUMNS))


def _cells(compared: Differences) -> list[tuple[str, str, MetricCell, tuple[float, float] | None]]:
    """Metric, statistic, both numbers, and the interval of their difference."""
    return [
        (metric, name, cell, compared.intervals_us.get((metric, name)))
        for metric, cells in compared.comparison.metrics.items()
        for name, cell in cells.items()
    ]


def _head(compared: Differences) -> Block:
    sides = zip(("A", "B"), (compared.a, compared.b), compared.comparison.compared, strict=True)
    return Block(
        [
            Line(f"{letter}: {side.what} ({count:,} requests)", "   ", Toned(f"{letter}:", "heading"))
            for letter, side, count in sides
        ]
    )


def _numbers(cell: MetricCell, interval_us: tuple[float, float] | None) -> list[Cell]:
    interval = interval_us and " .. ".join(number_text(bound, "ms_difference") for bound in interval_us)
    return [cell.a_us, cell.b_us, cell.difference_us, interval, cell.error]


def _remarks(compared: Differences) -> Block:
    lines = [f"intervals: {compared.resampled}; quantiles of ITL are pooled over tokens and have none"]
    reasons: dict[str, list[str]] = {}
    for metric, statistic, cell, _ in _cells(compared):
        if cell.reason:
            reasons.setdefault(cell.reason, []).append(f"{metric.upper()} {statistic}")
    lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    overloads = dict.fromkeys(overload_sentence(side.recording) for side in (compared.a, compared.b))
    return Block([*lines, *filter(None, overloads)])


def _inputs(compared: Differences) -> list[Part]:
    changed = [
        line
        for name, one, other in compared.changed
        for line in (f"  {name}", Line(f"    A: {one}", "       "), Line(f"    B: {other}", "       "))
    ]
    parts: list[Part] = [
        Block(changed, "inputs that differ") if changed else "inputs: nothing that both sides say differs"
    ]
    if compared.one_sided and compared.both_replays:
        parts.append(f"said of one side only: {', '.join(compared.one_sided)}")
    return [Block(parts)]


def _segments(segments: Segments) -> Block:
    rows: list[list[Cell]] = [
        [part.name, *(float(us.mean()) for us in (part.a_us, part.b_us)), *_spread(part.difference_us)]
        for part in (*segments.segments, segments.whole)
    ]
    return Block([Table("", _SEGMENT_COLUMNS, rows), *(f"merged: {line}" for line in segments.merged)])


def _spread(difference_us: Floats) -> list[float]:
    return [float(value) for value in (difference_us.mean(), *np.quantile(difference_us, (0.5, 0.99)))]


def _pair_table(pairs: RequestPairs) -> Table:
    rows: list[list[Cell]] = []
    for i in range(min(PAIRS_SHOWN, len(pairs.request_index))):
        (e2e_a, e2e_b), (ttft_a, ttft_b) = ((int(side[i]) for side in pair) for pair in (pairs.e2e_us, pairs.ttft_us))
        named = (str(pairs.request_index[i]), float(pairs.arrival_us[i]) / 1e6)
        rows.append([*named, e2e_a, e2e_b, e2e_b - e2e_a, ttft_b - ttft_a])
    return Table("the requests that differ most in E2E", _PAIR_COLUMNS, rows)


def _document(compared: Differences) -> dict[str, object]:
    metrics: dict[str, dict[str, object]] = {}
    for metric, statistic, cell, within in _cells(compared):
        metrics.setdefault(metric, {})[statistic] = _difference(cell, within)
    return {
        "a": _side(compared.a, compared.comparison.compared[0]),
        "b": _side(compared.b, compared.comparison.compared[1]),
        "metrics": metrics,
        "resampled": compared.resampled,
        "inputs_changed": [{"input": name, "a": one, "b": other} for name, one, other in compared.changed],
        "inputs_one_sided": compared.one_sided,
        "segments": compared.segments and _segments_json(compared.segments),
        "pairs": None if compared.pairs is None else _pairs_json(compared.pairs, compared.comparison.paired),
    }


def _side(side: Side, requests: int) -> dict[str, object]:
    return {
        "name": side.name,
        "what": side.what,
        "slug": side.recording.slug,
        "requests": requests,
        "overloaded": bool(overload_sentence(side.recording)),
    }


def _segments_json(segments: Segments) -> list[dict[str, object]]:
    return [
        {
            "segment": part.name,
            "a_ms": in_ms(float(part.a_us.mean())),
            "b_ms": in_ms(float(part.b_us.mean())),
            "difference_ms": in_ms(float(part.difference_us.mean())),
        }
        for part in (*segments.segments, segments.whole)
    ]


def _difference(cell: MetricCell, interval_us: tuple[float, float] | None) -> dict[str, object]:
    entry: dict[str, object] = {
        "a_ms": in_ms(cell.a_us),
        "b_ms": in_ms(cell.b_us),
        "difference_ms": in_ms(cell.difference_us),
        "interval_ms": interval_us and [in_ms(bound) for bound in interval_us],
    }
    return entry if cell.reason is None else {**entry, "reason": cell.reason}


def _pairs_json(pairs: RequestPairs, paired: Mapping[str, Pairing]) -> dict[str, object]:
    most = [
        {
            "request_index": int(pairs.request_index[i]),
            "sent_ms": in_ms(int(pairs.arrival_us[i])),
            "e2e_ms": [in_ms(int(side[i])) for side in pairs.e2e_us],
            "ttft_ms": [in_ms(int(side[i])) for side in pairs.ttft_us],
        }
        for i in range(min(PAIRS_SHOWN, len(pairs.request_index)))
    ]
    return {
        "requests": len(pairs.request_index),
        "mape": {metric: pairing.mape for metric, pairing in paired.items()},
        "correlation": {metric: pairing.correlation for metric, pairing in paired.items()},
        "most": most,
    }
