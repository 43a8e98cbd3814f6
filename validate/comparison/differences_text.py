"""What a comparison of any two sides answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from blis_replay.compiled.arrays import Floats
from blis_replay.ingest.tables import Cell, Column, Table, Toned, Value, columns_named, table_of
from blis_replay.validate.comparison.compare import MetricCell, Pairing
from blis_replay.validate.comparison.differences import PAIRS_SHOWN, Differences, RequestPairs
from blis_replay.validate.comparison.segments import Segments
from blis_replay.validate.comparison.sides import Side
from blis_replay.validate.text.answer import Answer, Block, Line, Part
from blis_replay.validate.text.cells import in_ms, milliseconds_signed, percent_plain

_RUN_COLUMNS = columns_named("id", "slug", "simulator", "coefficients", "replay", kind="data")
_METRIC_COLUMNS = (
    *(Column(""), Column("A ms", "ms"), Column("B ms", "ms"), Column("B - A ms", "ms_difference_brief")),
    *(Column("95 % interval", "word"), Column("B / A - 1", "error")),
)
_SEGMENT_COLUMNS = (
    *(Column("where the time goes"), Column("A ms", "ms"), Column("B ms", "ms")),
    *columns_named("B - A ms", "p50", "p99", kind="ms_difference_brief"),
)
_PAIR_COLUMNS = (
    *(Column("request"), Column("sent s", "decimal"), Column("E2E A ms", "ms"), Column("E2E B ms", "ms")),
    *columns_named("B - A ms", "TTFT B - A ms", kind="ms_difference_brief"),
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
        page += [_agreement(compared.comparison.paired), _pair_table(compared.pairs)]
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
    interval = interval_us and " .. ".join(milliseconds_signed(bound) for bound in interval_us)
    return [cell.a_us, cell.b_us, cell.difference_us, interval, cell.error]


def _remarks(compared: Differences) -> Block:
    lines = [f"intervals: {compared.resampled}; quantiles of ITL are pooled over tokens and have none"]
    reasons: dict[str, list[str]] = {}
    for metric, statistic, cell, _ in _cells(compared):
        if cell.reason:
            reasons.setdefault(cell.reason, []).append(f"{metric.upper()} {statistic}")
    return Block(lines + [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()])


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


def _agreement(paired: Mapping[str, Pairing]) -> str:
    parts = []
    for metric, pairing in paired.items():
        r = "" if pairing.correlation is None else f", r {pairing.correlation:.3f}"
        parts.append(f"{metric.upper()} MAPE {percent_plain(pairing.mape)}{r}")
    return "request by request: " + "; ".join(parts)


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
        "pairs": None if compared.pairs is None else _pairs(compared.pairs, compared.comparison.paired),
    }


def _side(side: Side, requests: int) -> dict[str, object]:
    return {"name": side.name, "what": side.what, "slug": side.recording.slug, "requests": requests}


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


def _pairs(pairs: RequestPairs, paired: Mapping[str, Pairing]) -> dict[str, object]:
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
