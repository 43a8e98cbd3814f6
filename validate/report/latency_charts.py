"""Pictures of client latencies: distributions, errors over time, TTFT against what it may depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.ingest.tables import Cell, Column, Table, columns_named
from blis_replay.validate.explain.attribute import MEANS, QUANTITIES, Attribution, Estimate
from blis_replay.validate.metrics.latency import METRIC_NAMES, THRESHOLDS, relative_error
from blis_replay.validate.report.series import Band, ErrorsOverTime, QuantileCurve
from blis_replay.validate.report.svg import DASHED, DOTTED, Chart, Mark, Panel, band, drawn
from blis_replay.validate.text.cells import cell_text, limit_text, percent, time_unit

_QUANTILE_COLUMNS = (
    *(Column("quantile", "text"), Column("observed", "time"), Column("simulated", "time"), Column("error", "error")),
)
_RUNNING = "running requests"
_TIMES = tuple(Column(name, "time") for name in ("p10", "p50", "p90"))
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
SIDE_DASHES = {"observed": "", "simulated": DASHED}
# Limits from the middle of an axis of errors to its end; what lies farther is drawn there.
REACH = 3.0
_METRIC_DASHES = {"e2e": "", "ttft": DASHED, "itl": DOTTED}


def distribution_chart(metric: str, observed: QuantileCurve | None, simulated: QuantileCurve | None) -> Chart:
    """Observed and simulated distribution of ``e2e``, ``ttft`` or ``itl``, on an axis that spreads the tail."""
    name = METRIC_NAMES[metric]
    curves = {side: curve for side, curve in (("observed", observed), ("simulated", simulated)) if curve is not None}
    unit_us, unit = time_unit(max((float(curve.value_us.max()) for curve in curves.values()), default=0.0))
    marks = {level: 1 - share for level, share in _PERCENTILES.items()}
    panel = Panel(
        [_curve(side, curve, unit_us) for side, curve in curves.items()],
        f"{name}, {unit}",
        "percentile",
        y_limits=(1.0, 0.0008),
        y_ticks=marks,
        log_y=True,
    )
    rows = []
    for quantile, level in _PERCENTILES.items():
        seen, value = (None if curve is None else _at(curve, level) for curve in (observed, simulated))
        rows.append((quantile, seen, value, relative_error(seen, value)))
    numbers = Table(f"{name}: quantiles", _QUANTILE_COLUMNS, tuple(rows))
    what = "gaps between two output tokens" if metric == "itl" else "requests"
    values = " ".join(
        f"{level}: observed {cell_text(seen, 'time')}, simulated {cell_text(value, 'time')}."
        for level, seen, value, _ in numbers.rows
    )
    return Chart(
        f"Distribution of {name}",
        f"Share of {what} that are faster, on a logarithmic axis of those that are slower. {values}",
        drawn([panel], 3.4, 2.7, list(marks.values()), "y"),
        numbers,
    )


def _curve(side: str, curve: QuantileCurve, unit_us: float) -> Mark:
    """A curve against the share that is slower; single points where only some quantiles were published."""
    inside = curve.level < 1
    x, y = curve.value_us[inside] / unit_us, 1 - curve.level[inside]
    if curve.published:
        return Mark(x, y, side, f"{side} (published)", width=0, dot=4)
    return Mark(x, y, side, side, SIDE_DASHES[side])


def two_sides(x: Floats, sides: Iterable[Floats], *, named: bool = True, dot: float = 0.0) -> list[Mark]:
    """Observed and simulated values over x; ``named``: in the legend."""
    dashed = zip(SIDE_DASHES.items(), sides, strict=True)
    return [Mark(x, values, side, side if named else "", dashes, dot=dot) for (side, dashes), values in dashed]


def table_rows(*columns: Floats | Int64s) -> list[tuple[Cell, ...]]:
    """The rows of a table from its columns; None where a number is not known (nan)."""
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [tuple(None if isnan(value) else value for value in row) for row in rows]


def _at(curve: QuantileCurve, level: float) -> float | None:
    """The curve at a level; None beyond its end, and between the points of a published one."""
    if level > curve.level[-1] + 1e-9:
        return None
    if curve.published:
        found = np.flatnonzero(np.isclose(curve.level, level))
        return float(curve.value_us[found[0]]) if len(found) else None
    return float(np.interp(level, curve.level, curve.value_us))


def errors_chart(
    errors: ErrorsOverTime, stages: Sequence[tuple[float, str]], metrics: Sequence[str], end_s: float | None = None
) -> Chart:
    """Signed errors over the time of the run, and mean TTFT below; ``end_s``: of the axis, None: of the data."""
    rules = [
        *(Mark((-inf, inf), (at, at), m, width=0.7, opacity=0.6) for m in metrics for at in _limits(m)),
        Mark((-inf, inf), (0, 0), "ink", width=0.8),
    ]
    lines = [Mark(errors.at_s, 100 * errors.errors[m], m, METRIC_NAMES[m], dashes=_METRIC_DASHES[m]) for m in metrics]
    unit_us, unit = time_unit(np.nanmax(errors.ttft_us, initial=0))
    ttft_us = errors.ttft_us if "ttft" in metrics else ()
    x_limits, at = (None if end_s is None else 0.0, end_s), "time of the run at which requests were sent, s"
    panels = [Panel([*rules, *lines], at, "error of the mean, %", x_limits=x_limits, stages=stages, zooms=True)]
    if ttft_us:
        ttft = two_sides(errors.at_s, [us / unit_us for us in ttft_us])
        panels.append(Panel(ttft, at, f"mean TTFT, {unit}", x_limits=x_limits, y_limits=(0.0, None), zooms=True))
    limits = ", ".join(f"{METRIC_NAMES[metric]} {limit_text(THRESHOLDS[metric])}" for metric in metrics)
    rows = table_rows(errors.at_s, errors.requests, *(errors.errors[metric] for metric in metrics), *ttft_us)
    columns = (
        *columns_named("middle, s", "requests"),
        *(Column(METRIC_NAMES[m], "error") for m in metrics),
        *(Column(f"{side} TTFT", "time") for side, _ in zip(SIDE_DASHES, ttft_us, strict=False)),
    )
    return Chart(
        "Error and TTFT over the time of the run" if ttft_us else "Error over the time of the run",
        f"Signed errors of the mean of requests sent in each of {len(errors.at_s)} parts of the run. "
        f"The thin lines are the limits of the means: {limits}.",
        drawn(panels, 8.6, 0.6 + 1.9 * len(panels), errors.at_s.tolist(), share_x=True),
        Table("error of the mean by time", columns, rows, note=stages_note(stages)),
        wide=True,
    )


def _limits(metric: str) -> tuple[float, float]:
    return -100 * THRESHOLDS[metric], 100 * THRESHOLDS[metric]


def stages_note(stages: Sequence[tuple[float, str]]) -> str:
    """When every load stage or overload began; a picture may not have room for all of their names."""
    return "; ".join(f"{name} from {start_s:.0f} s" for start_s, name in stages)


def cycles_chart(observed: Band, simulated: Band) -> Chart:
    """Step cycle against batch size: medians, and the middle 80 % as an area."""
    unit_us, unit = time_unit(max(float(shown.high.max(initial=0)) for shown in (observed, simulated)))
    marks, rows = [], list[tuple[Cell, ...]]()
    for side, shown in (("observed", observed), ("simulated", simulated)):
        marks.append(band(shown.x, shown.low / unit_us, shown.high / unit_us, side))
        marks.append(Mark(shown.x, shown.middle / unit_us, side, side, SIDE_DASHES[side], dot=3))
        rows += [(side, *row) for row in table_rows(shown.x, shown.count, shown.low, shown.middle, shown.high)]
    panel = Panel(marks, _RUNNING, f"step cycle, {unit}", y_limits=(0.0, None), whole_x=True)
    return Chart(
        "Step cycle against batch size",
        f"Medians of the step cycle by {_RUNNING}, with the middle 80 %.",
        drawn([panel], 3.4, 2.7, [*observed.x.tolist(), *simulated.x.tolist()]),
        Table("step cycle", (Column("side", "text"), Column(_RUNNING, "count"), Column("number"), *_TIMES), rows),
    )


_INTERVALS = "low and high: 95 % interval for another recording of the same load"
_ERROR = "error"


@dataclass(frozen=True)
class Fall:
    """One bar, in fractions of the observed value: ``part`` of the error, with its 95 % interval (nan if unknown).

    It begins at ``start``, and all parts but the error itself lead from there towards the recording.
    """

    name: str
    start: float
    part: float
    low: float
    high: float

    @property
    def end(self) -> float:
        """Where the bar ends: at the error, or closer to the recording by its part."""
        return self.at(self.part)

    def at(self, part: float) -> float:
        """Where it would end if its part were ``part``."""
        return self.start + part if self.name == _ERROR else self.start - part


def falls(attribution: Attribution, quantity: int) -> list[Fall]:
    """The bars of one number of QUANTITIES: the error, each replaced component, what is left; empty if not observed.

    The error is the sum of all other parts.
    """
    observed_us = attribution.observed_us[quantity]
    if isnan(observed_us) or observed_us == 0:
        return []
    bars = [_fall(_ERROR, 0.0, attribution.error[quantity], observed_us)]
    for name, estimates in attribution.parts:
        bars.append(_fall(name, bars[-1].end, estimates[quantity], observed_us))
    return bars


def _fall(name: str, start: float, estimate: Estimate, observed_us: float) -> Fall:
    return Fall(name, start, *(value / observed_us for value in (estimate.value_us, estimate.low_us, estimate.high_us)))


def waterfall_chart(attribution: Attribution) -> Chart | None:
    """Waterfalls of the means of E2E, TTFT and ITL; None where no mean was observed."""
    shown = {QUANTITIES[i][0].upper(): bars for i in MEANS if (bars := falls(attribution, i))}
    if not shown:
        return None
    names = [bar.name for bar in next(iter(shown.values()))]
    panels = [_waterfall(metric, bars) for metric, bars in shown.items()]
    of_metrics = [name for metric in shown for name in (metric, f"{metric} low", f"{metric} high")]
    columns = (Column("part", "text"), *columns_named(*of_metrics, kind="error"))
    rows = tuple(
        (name, *(number for bars in shown.values() for number in _numbers(bars[i]))) for i, name in enumerate(names)
    )
    return Chart(
        "Where the error comes from",
        "From the error of the replay to the recording, replacing one component after the other. Each part is divided "
        "by the limit of its metric, on the axis of all recordings. The whisker of the error is its 95 % "
        "interval for another recording of the same load, and goes on where it has no cap; ± is half of a part's.",
        # Below each other, and no wider than a telephone can show: so they are as high as the latencies beside them.
        drawn(panels, 4.4, len(shown) * (0.5 + 0.2 * len(names)), range(len(names)), "y", share_x=True),
        Table("parts of the error of the mean, in % of observed", columns, rows, note=_INTERVALS),
        beside=True,
    )


def _waterfall(metric: str, bars: Sequence[Fall]) -> Panel:
    """A bar for each part with its size and interval in words, and thin lines from one bar to the next.

    What lies beyond the axis is drawn to its end.
    """
    limit = THRESHOLDS[metric.lower()]
    marks = [Mark((-1, 1, 1, -1), (-inf, -inf, inf, inf), "pass", filled=True, opacity=0.14)]
    texts = []
    for row, bar in enumerate(bars):
        ends = (bar.start, bar.end, *sorted((bar.at(bar.low), bar.at(bar.high))))
        start, end, low, high = (min(max(value / limit, -REACH), REACH) for value in ends)
        across, down = (start, end, end, start), (row - 0.3, row - 0.3, row + 0.3, row + 0.3)
        marks.append(Mark(across, down, "simulated" if bar.name == _ERROR else "part", filled=True))
        if row + 1 < len(bars):
            marks.append(Mark((end, end), (row + 0.3, row + 0.7), "muted", width=0.8))
        if bar.name == _ERROR and not isnan(bar.low):  # a bar that hangs in the air has its interval beside it
            low, high = min(low, end), max(high, end)
            wide, along = [low, high], [float(row), float(row)]
            for tip in (low, high):
                if abs(tip) < REACH:  # one that goes on has no cap
                    wide, along = [*wide, nan, tip, tip], [*along, nan, row - 0.15, row + 0.15]
            marks.append(Mark(wide, along, "ink", width=1))
        half = "" if bar.name == _ERROR or isnan(bar.low) else f" ±{100 * (bar.high - bar.low) / 2:.1f}"
        texts.append((row, f"{percent(bar.part + 0.0).removesuffix(' %')}{half} %"))
    marks.append(Mark((0, 0), (-inf, inf), "ink", width=0.8))
    return Panel(
        marks,
        "error over limit",
        title=f"{metric} mean, limit {limit_text(limit)}",
        x_limits=(-REACH, REACH),
        y_limits=(len(bars) - 0.5, -0.5),
        y_ticks={bar.name: row for row, bar in enumerate(bars)},
        texts=texts,
    )


def _numbers(bar: Fall) -> tuple[float | None, ...]:
    """A bar and its interval as fractions; a zero has no sign, and what is not known is None."""
    return tuple(None if isnan(value) else value + 0.0 for value in (bar.part, bar.low, bar.high))
