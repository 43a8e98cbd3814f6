"""Two sides beside each other for a terminal, as a frame and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from blis_replay.validate.attribution.segments import Segments
from blis_replay.validate.comparison.differences import PAIRS_SHOWN, Difference, Differences, RequestPairs
from blis_replay.validate.comparison.resampling import Floats
from blis_replay.validate.comparison.sides import Side
from blis_replay.validate.metrics import relative_error
from blis_replay.validate.terminal import Toned, milliseconds, percent, percent_plain, table, toned, wrap

_RUN_COLUMNS = ("id", "slug", "simulator", "coefficients", "replay")


def differences_text(compared: Differences) -> str:
    """Head, metric table, what changed in the inputs, the segments, the requests that differ most."""
    parts = [_head(compared), _metric_table(compared), _remarks(compared), _inputs(compared)]
    if compared.segments is not None:
        parts.append(_segment_table(compared.segments))
    if compared.pairs is not None:
        parts += [_agreement(compared.pairs), _pair_table(compared.pairs)]
    return "\n\n".join(part for part in parts if part)


def runs_text(runs: Sequence[dict[str, object]]) -> str:
    """The stored runs, one a line."""
    if not runs:
        return "no run is stored yet; `blis-replay validate` stores one"
    rows = [[str(run[name]) for name in _RUN_COLUMNS] for run in runs]
    return "\n".join(wrap("  ".join(row), " " * 14) for row in rows)


def _head(compared: Differences) -> str:
    sides = (("A", compared.a, compared.requests[0]), ("B", compared.b, compared.requests[1]))
    return "\n".join(
        wrap(f"{letter}: {side.what} ({count:,} requests)", "   ", Toned(f"{letter}:", "heading"))
        for letter, side, count in sides
    )


def _metric_table(compared: Differences) -> str:
    rows = [
        [f"{metric.upper()} {statistic}", *_numbers(difference)]
        for metric, cells in compared.table.items()
        for statistic, difference in cells.items()
    ]
    return table(["", "A ms", "B ms", "B - A ms", "95 % interval", "B / A - 1"], rows)


def _numbers(d: Difference) -> list[str]:
    interval = "-" if d.interval_us is None else " .. ".join(_signed(bound) for bound in d.interval_us)
    change = percent(relative_error(d.a_us, d.b_us))
    return [milliseconds(d.a_us), milliseconds(d.b_us), _signed(d.value_us), interval, change]


def _signed(value_us: float | None) -> str:
    if value_us is None:
        return "-"
    digits = 2 if abs(value_us) < 10_000_000 else 0
    return f"{value_us / 1000:+,.{digits}f}"


def _remarks(compared: Differences) -> str:
    lines = [f"intervals: {compared.resampled}; quantiles of ITL are pooled over tokens and have none"]
    reasons: dict[str, list[str]] = {}
    for metric, cells in compared.table.items():
        for statistic, difference in cells.items():
            if difference.reason:
                reasons.setdefault(difference.reason, []).append(f"{metric.upper()} {statistic}")
    lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(wrap(line) for line in lines)


def _inputs(compared: Differences) -> str:
    if not compared.changed:
        lines = ["inputs: nothing that both sides say differs"]
    else:
        lines = [toned("inputs that differ:", "heading")]
        for name, one, other in compared.changed:
            lines += [f"  {name}", wrap(f"    A: {one}", "       "), wrap(f"    B: {other}", "       ")]
    if compared.one_sided and all("simulator" in side.inputs for side in (compared.a, compared.b)):
        lines.append(wrap(f"said of one side only: {', '.join(compared.one_sided)}"))
    return "\n".join(lines)


def _segment_table(segments: Segments) -> str:
    rows = [
        [part.name, *(milliseconds(float(us.mean())) for us in (part.a_us, part.b_us)), *_spread(part.difference_us)]
        for part in (*segments.segments, segments.whole)
    ]
    header = ["where the time goes", "A ms", "B ms", "B - A ms", "p50", "p99"]
    lacking = "\n".join(wrap(f"merged: {line}") for line in segments.merged)
    return f"{table(header, rows)}\n{lacking}"


def _spread(difference_us: Floats) -> list[str]:
    return [_signed(float(value)) for value in (difference_us.mean(), *np.quantile(difference_us, (0.5, 0.99)))]


def _agreement(pairs: RequestPairs) -> str:
    parts = []
    for metric, mape in pairs.mape.items():
        r = pairs.correlation[metric]
        parts.append(f"{metric.upper()} MAPE {percent_plain(mape)}" + ("" if r is None else f", r {r:.3f}"))
    return wrap("request by request: " + "; ".join(parts))


def _pair_table(pairs: RequestPairs) -> str:
    rows = []
    for i in range(min(PAIRS_SHOWN, len(pairs.request_index))):
        (e2e_a, e2e_b), (ttft_a, ttft_b) = ((int(side[i]) for side in pair) for pair in (pairs.e2e_us, pairs.ttft_us))
        numbers = [milliseconds(e2e_a), milliseconds(e2e_b), _signed(e2e_b - e2e_a), _signed(ttft_b - ttft_a)]
        rows.append([f"{pairs.request_index[i]}", f"{pairs.arrival_us[i] / 1e6:,.2f}", *numbers])
    header = ["request", "sent s", "E2E A ms", "E2E B ms", "B - A ms", "TTFT B - A ms"]
    return toned("the requests that differ most in E2E:", "heading") + "\n" + table(header, rows)


def differences_json(compared: Differences) -> dict[str, object]:
    """The same for programs; times in ms."""
    return {
        "a": _side(compared.a, compared.requests[0]),
        "b": _side(compared.b, compared.requests[1]),
        "metrics": {
            metric: {statistic: _difference(d) for statistic, d in cells.items()}
            for metric, cells in compared.table.items()
        },
        "resampled": compared.resampled,
        "inputs_changed": [{"input": name, "a": one, "b": other} for name, one, other in compared.changed],
        "inputs_one_sided": compared.one_sided,
        "segments": compared.segments and _segments_json(compared.segments),
        "pairs": None if compared.pairs is None else _pairs(compared.pairs),
    }


_FRAME_COLUMNS = {
    **dict.fromkeys(("metric", "statistic"), pl.String),
    **dict.fromkeys(("a_ms", "b_ms", "difference_ms", "low_ms", "high_ms", "change"), pl.Float64),
    "reason": pl.String,
}


def differences_frame(compared: Differences) -> pl.DataFrame:
    """The metrics: ``a_ms, b_ms, difference_ms``, bounds of its 95 % interval, and ``change``, B over A less one."""
    rows = [
        (
            *(metric, name, _ms(d.a_us), _ms(d.b_us), _ms(d.value_us)),
            *map(_ms, d.interval_us or (None, None)),
            *(relative_error(d.a_us, d.b_us), d.reason),
        )
        for metric, cells in compared.table.items()
        for name, d in cells.items()
    ]
    return pl.DataFrame(rows, orient="row", schema=_FRAME_COLUMNS)


def runs_frame(runs: Sequence[dict[str, object]]) -> pl.DataFrame:
    """The stored runs, a row each."""
    return pl.DataFrame(runs, schema=dict.fromkeys(_RUN_COLUMNS, pl.String))


def _side(side: Side, requests: int) -> dict[str, object]:
    return {"name": side.name, "what": side.what, "slug": side.recording.slug, "requests": requests}


def _segments_json(segments: Segments) -> list[dict[str, object]]:
    return [
        {
            "segment": part.name,
            "a_ms": _ms(float(part.a_us.mean())),
            "b_ms": _ms(float(part.b_us.mean())),
            "difference_ms": _ms(float(part.difference_us.mean())),
        }
        for part in (*segments.segments, segments.whole)
    ]


def _difference(d: Difference) -> dict[str, object]:
    entry: dict[str, object] = {
        "a_ms": _ms(d.a_us),
        "b_ms": _ms(d.b_us),
        "difference_ms": _ms(d.value_us),
        "interval_ms": d.interval_us and [_ms(bound) for bound in d.interval_us],
    }
    return entry if d.reason is None else {**entry, "reason": d.reason}


def _pairs(pairs: RequestPairs) -> dict[str, object]:
    most = [
        {
            "request_index": int(pairs.request_index[i]),
            "sent_ms": _ms(int(pairs.arrival_us[i])),
            "e2e_ms": [_ms(int(side[i])) for side in pairs.e2e_us],
            "ttft_ms": [_ms(int(side[i])) for side in pairs.ttft_us],
        }
        for i in range(min(PAIRS_SHOWN, len(pairs.request_index)))
    ]
    return {"requests": len(pairs.request_index), "mape": pairs.mape, "correlation": pairs.correlation, "most": most}


def _ms(value_us: float | None) -> float | None:
    return None if value_us is None else round(value_us / 1000, 6)
