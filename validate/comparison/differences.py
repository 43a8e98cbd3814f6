"""The differences of two sides: their intervals and inputs, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, isfinite

from blis_replay.base.arrays import Bools
from blis_replay.ingest.tables import Cell, Column, Table, Toned, columns_named
from blis_replay.validate.comparison.compare import compare, requests_of_both
from blis_replay.validate.comparison.comparison import Comparison, MetricCell
from blis_replay.validate.comparison.named_sides import changed_inputs, inputs_of, only_on_one_side
from blis_replay.validate.comparison.pages import pairs_sentence
from blis_replay.validate.comparison.saturation import overload_sentence
from blis_replay.validate.comparison.sides import Side
from blis_replay.validate.metrics.latency import METRICS, STATISTICS, LatencySamples, MetricStatistic, of_requests
from blis_replay.validate.metrics.observed import Selection
from blis_replay.validate.metrics.uncertainty import half_width, request_order
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import in_ms, number_text

CELLS: tuple[MetricStatistic, ...] = tuple((metric, statistic) for metric in METRICS for statistic in STATISTICS)


@dataclass(frozen=True)
class Differences:
    """Two sides compared, and what explains how they differ.

    ``intervals_us``: 95 % of B less A, by number, where there are requests; ``resampled``: in words, what
    they rest on.  ``changed``: inputs that differ, as ``(what, A, B)``; ``one_sided``: those that one side does not
    say.  ``both_replays``: no side is a recording.
    """

    a: Side
    b: Side
    comparison: Comparison
    intervals_us: dict[MetricStatistic, tuple[float, float]]
    resampled: str
    changed: list[tuple[str, str, str]]
    one_sided: list[str]
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
        both_replays=all("simulator" in side for side in inputs),
    )


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


_METRIC_COLUMNS = (
    *(Column(""), Column("A ms", "ms"), Column("B ms", "ms"), Column("B - A ms", "ms_difference")),
    *(Column("95 % interval", "word"), Column("B / A - 1", "error")),
)
_DATA_COLUMNS = (
    *columns_named("metric", "statistic", kind="data"),
    *columns_named("a_ms", "b_ms", "difference_ms", "low_ms", "high_ms", "change", kind="real"),
    Column("reason", "data"),
)


def differences_answer(compared: Differences) -> Answer:
    """Head, metric table, what changed in the inputs, how single requests agree; times in ms.

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
        pairs_sentence(compared.comparison),
    ]
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
        "paired": {metric: vars(pairing) for metric, pairing in compared.comparison.paired.items()},
    }


def _side(side: Side, requests: int) -> dict[str, object]:
    return {
        "name": side.name,
        "what": side.what,
        "slug": side.recording.slug,
        "requests": requests,
        "overloaded": bool(overload_sentence(side.recording)),
    }


def _difference(cell: MetricCell, interval_us: tuple[float, float] | None) -> dict[str, object]:
    entry: dict[str, object] = {
        "a_ms": in_ms(cell.a_us),
        "b_ms": in_ms(cell.b_us),
        "difference_ms": in_ms(cell.difference_us),
        "interval_ms": interval_us and [in_ms(bound) for bound in interval_us],
    }
    return entry if cell.reason is None else {**entry, "reason": cell.reason}
