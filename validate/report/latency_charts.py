"""Pictures of client latencies: distributions, errors over time, TTFT against what it may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from blis_replay.ingest.tables import Cell, Column, Table
from blis_replay.validate.attribution.attribute import Attribution, Estimate
from blis_replay.validate.metrics.latency import THRESHOLDS
from blis_replay.validate.metrics.resampling import QUANTITIES
from blis_replay.validate.report.series import Band, ErrorsOverTime, QuantileCurve
from blis_replay.validate.report.svg import (
    E2E,
    INK,
    ITL,
    MUTED,
    OBSERVED,
    OVER,
    PANEL,
    SIMULATED,
    TTFT,
    UNDER,
    Chart,
    drawn,
)
from blis_replay.validate.text.cells import cell_text, percent, time_text, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_NAMES = {"e2e": "E2E", "ttft": "TTFT", "itl": "ITL"}
_QUANTILE_COLUMNS = (
    Column("quantile", "text"),
    Column("observed", "time"),
    Column("simulated", "time"),
    Column("error", "error"),
)
_TIMES = tuple(Column(name, "time") for name in ("p10", "p50", "p90"))
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
# Dashes tell the lines apart without colour.
_LOOKS: dict[str, dict[str, Any]] = {
    "observed": {"color": OBSERVED, "label": "observed"},
    "simulated": {"color": SIMULATED, "linestyle": (0, (4, 2)), "label": "simulated"},
}
# Where the legend of a wide picture stands: above its left end, which a phone shows, and the names of the load stages.
ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": 4, "borderaxespad": 1.6}
# A stage's name: its size, the width of a letter of that size, and what share of a picture lies between its axes.
_STAGE_FONT_PT, _LETTER_PT, _PLOTTED_SHARE = 8, 4.4, 0.9
_METRIC_LOOKS = {"e2e": (E2E, "-"), "ttft": (TTFT, (0, (4, 2))), "itl": (ITL, (0, (1, 1.5)))}


def distribution_chart(metric: str, observed: QuantileCurve | None, simulated: QuantileCurve | None) -> Chart:
    """Observed and simulated distribution of ``e2e``, ``ttft`` or ``itl``, on an axis that spreads the tail."""
    name = _NAMES[metric]
    unit = time_unit(max((float(c.value_us.max()) for c in (observed, simulated) if c is not None), default=0.0))

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for side, curve in (("observed", observed), ("simulated", simulated)):
            if curve is not None:
                _draw_curve(axes, curve, side, unit[0])
        axes.set_yscale("log")
        axes.set_ylim(1.0, 0.0008)
        axes.set_yticks([1 - share for share in _PERCENTILES.values()], list(_PERCENTILES))
        axes.minorticks_off()
        axes.set_xlabel(f"{name}, {unit[1]}")
        axes.set_ylabel("percentile")
        axes.legend(loc="best")

    numbers = _quantile_table(f"{name}: quantiles", observed, simulated)
    what = "gap between two output tokens" if metric == "itl" else "request"
    values = " ".join(
        f"{level}: observed {cell_text(seen, 'time')}, simulated {cell_text(value, 'time')}."
        for level, seen, value, _ in numbers.rows
    )
    return Chart(
        f"Distribution of {name}",
        f"Share of {what}s that are faster, on a logarithmic axis of those that are slower. {values}",
        drawn(draw, 3.7, 2.7, [1 - share for share in _PERCENTILES.values()], "y"),
        numbers,
    )


def _draw_curve(axes: Axes, curve: QuantileCurve, side: str, unit_us: float) -> None:
    look = dict(_LOOKS[side])
    if curve.published:
        look |= {"linestyle": "none", "marker": "o", "markersize": 4, "label": f"{side} (published)"}
    inside = curve.level < 1
    axes.plot(curve.value_us[inside] / unit_us, 1 - curve.level[inside], **look)


def _quantile_table(title: str, observed: QuantileCurve | None, simulated: QuantileCurve | None) -> Table:
    rows = []
    for name, level in _PERCENTILES.items():
        seen, value = (None if curve is None else _at(curve, level) for curve in (observed, simulated))
        error = None if seen is None or value is None or seen == 0 else value / seen - 1
        rows.append((name, seen, value, error))
    return Table(title, _QUANTILE_COLUMNS, tuple(rows))


def known_number(value: float) -> float | None:
    """The number of an array for a table: None where it is not known (nan)."""
    return None if np.isnan(value) else float(value)


def _at(curve: QuantileCurve, level: float) -> float | None:
    """The curve at a level; None beyond its end, and between the points of a published one."""
    if level > curve.level[-1] + 1e-9:
        return None
    if curve.published:
        found = np.flatnonzero(np.isclose(curve.level, level))
        return float(curve.value_us[found[0]]) if len(found) else None
    return float(np.interp(level, curve.level, curve.value_us))


def errors_chart(errors: ErrorsOverTime, stages: Sequence[tuple[float, str]], metrics: Sequence[str]) -> Chart:
    """Signed errors over the time of the run, with the starts of load stages."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.axhline(0, color=INK, linewidth=0.8)
        for metric in metrics:
            for limit in (THRESHOLDS[metric], -THRESHOLDS[metric]):
                axes.axhline(100 * limit, color=_METRIC_LOOKS[metric][0], linewidth=0.7, alpha=0.6)
        for metric in metrics:
            colour, dashes = _METRIC_LOOKS[metric]
            axes.plot(errors.at_s, 100 * errors.errors[metric], color=colour, linestyle=dashes, label=_NAMES[metric])
        mark_stages(axes, stages)
        axes.set_xlabel("time of the run at which requests were sent, s")
        axes.set_ylabel("error of the mean, %")
        axes.legend(**ABOVE)

    limits = ", ".join(f"{_NAMES[metric]} {cell_text(THRESHOLDS[metric], 'limit')}" for metric in metrics)
    series = [errors.errors[metric] for metric in metrics]
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (float(at), int(count), *map(known_number, values))
        for at, count, *values in zip(errors.at_s, errors.requests, *series, strict=True)
    )
    return Chart(
        "Error over the time of the run",
        f"Signed errors of the mean of requests sent in each of {len(errors.at_s)} parts of the run. "
        + " ".join(_extremes(errors, metric) for metric in metrics)
        + f" The thin lines are the limits of the means: {limits}.",
        drawn(draw, 8.6, 2.8, errors.at_s.tolist()),
        Table(
            "error of the mean by time",
            (Column("middle, s"), Column("requests"), *(Column(_NAMES[m], "error") for m in metrics)),
            rows,
            note=stages_note(stages),
        ),
        wide=True,
    )


def mark_stages(axes: Axes, stages: Sequence[tuple[float, str]]) -> None:
    """Draw a line at the start of each load stage, with its name where there is room.

    Call it after plotting: the limits of the axis decide how much room there is.
    """
    low_s, high_s = axes.get_xlim()
    width_pt = 72 * _PLOTTED_SHARE * axes.figure.get_figwidth()  # type: ignore[union-attr]
    taken_pt = float("-inf")
    for start_s, name in stages:
        if not low_s <= start_s <= high_s:
            continue  # requests without a latency are in no curve, and a label beyond it leaves no room for one
        axes.axvline(start_s, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        at_pt = width_pt * (start_s - low_s) / (high_s - low_s)
        name_pt = _LETTER_PT * len(name)
        if at_pt < taken_pt or at_pt + name_pt > width_pt:
            continue
        taken_pt = at_pt + name_pt + 2 * _LETTER_PT
        axes.annotate(
            name,
            (start_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 2),
            textcoords="offset points",
            color=MUTED,
            fontsize=_STAGE_FONT_PT,
        )
    axes.set_xlim(low_s, high_s)


def stages_note(stages: Sequence[tuple[float, str]]) -> str:
    """When every load stage began, in words; a picture may not have room for all of their names."""
    return "load stages: " + "; ".join(f"{name} from {start_s:.0f} s" for start_s, name in stages) if stages else ""


def _extremes(errors: ErrorsOverTime, metric: str) -> str:
    known = errors.errors[metric][~np.isnan(errors.errors[metric])]
    if not len(known):
        return f"{_NAMES[metric]}: nothing known."
    return f"{_NAMES[metric]} between {percent(float(known.min()))} and {percent(float(known.max()))}."


def ttft_chart(title: str, x_label: str, observed: Band, simulated: Band) -> Chart:
    """TTFT against something that requests differ in: medians, and the middle 80 % as an area."""

    unit_us, unit = time_unit(max(float(shown.high.max()) for shown in (observed, simulated)))

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for side, shown in (("observed", observed), ("simulated", simulated)):
            look = _LOOKS[side]
            area = (shown.x, shown.low / unit_us, shown.high / unit_us)
            axes.fill_between(*area, color=look["color"], alpha=0.18, linewidth=0)
            axes.plot(shown.x, shown.middle / unit_us, marker="o", markersize=2.5, **look)
        axes.locator_params(axis="x", integer=True)  # tokens and requests are whole
        axes.set_xlabel(x_label)
        axes.set_ylabel(f"TTFT, {unit}")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")

    rows = (*_band_rows("observed", observed), *_band_rows("simulated", simulated))
    return Chart(
        title,
        f"Medians of TTFT in bins of {x_label}, with the middle 80 % of the requests. Observed {_range(observed)}; "
        f"simulated {_range(simulated)}.",
        drawn(draw, 3.7, 2.7, [*observed.x.tolist(), *simulated.x.tolist()]),
        Table(title, (Column("side", "text"), Column(x_label, "count"), Column("requests"), *_TIMES), rows),
    )


def _band_rows(side: str, shown: Band) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        (side, float(x), int(count), *map(float, (low, middle, high)))
        for x, low, middle, high, count in zip(shown.x, shown.low, shown.middle, shown.high, shown.count, strict=True)
    )


def _range(shown: Band) -> str:
    return f"medians between {time_text(float(shown.middle.min()))} and {time_text(float(shown.middle.max()))}"


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Bars below it, in %, would be drawn against an axis of rounding errors.
_NOTHING = 0.05
_INTERVALS = "low and high: 95 % interval over resampled blocks of requests"
_ERROR, _NO_COMPONENT = "error", "no component"


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
    named = [(cause.component.name, cause.changes[quantity]) for cause in attribution.causes]
    bars = [_fall(_ERROR, 0.0, attribution.error[quantity], observed_us)]
    for name, estimate in [*named, (_NO_COMPONENT, attribution.residual[quantity])]:
        bars.append(_fall(name, bars[-1].end, estimate, observed_us))
    return bars


def _fall(name: str, start: float, estimate: Estimate, observed_us: float) -> Fall:
    return Fall(name, start, *(value / observed_us for value in (estimate.value_us, estimate.low_us, estimate.high_us)))


def waterfall_chart(attribution: Attribution) -> Chart | None:
    """Waterfalls of the means of E2E, TTFT and ITL; None where no mean was observed."""
    means = [i for i, (_, statistic) in enumerate(QUANTITIES) if statistic == "mean"]
    shown = {QUANTITIES[i][0].upper(): bars for i in means if (bars := falls(attribution, i))}
    if not shown:
        return None
    names = [bar.name for bar in next(iter(shown.values()))]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for axes, (metric, bars) in zip(panels, shown.items(), strict=True):
            _draw_bars(axes, bars)
            axes.set_title(f"{metric} mean, % of observed", color=INK, loc="left")

    columns = [Column(name, "error") for metric in shown for name in (metric, f"{metric} low", f"{metric} high")]
    rows = tuple(
        (name, *(number for bars in shown.values() for number in _numbers(bars[i]))) for i, name in enumerate(names)
    )
    parts = "; ".join(
        f"{metric}: " + ", ".join(f"{bar.name} {percent(bar.part + 0.0)}" for bar in bars)
        for metric, bars in shown.items()
    )
    return Chart(
        "Where the error comes from",
        "From the error of the replay to the recording, replacing one component after the other; the whiskers are 95 % "
        f"intervals over resampled blocks of requests. {parts}.",
        # Below each other, and no wider than a telephone can show: so they are as high as the latencies beside them.
        drawn(draw, 4.4, len(shown) * (0.55 + 0.2 * len(names)), range(len(names)), "y"),
        Table(
            "parts of the error of the mean, in % of observed",
            (Column("part", "text"), *columns),
            rows,
            note=_INTERVALS,
        ),
        beside=True,
    )


def _numbers(bar: Fall) -> tuple[float | None, ...]:
    """A bar and its interval as fractions; a zero has no sign, and what is not known is None."""
    return tuple(None if isnan(value) else value + 0.0 for value in (bar.part, bar.low, bar.high))


def _draw_bars(axes: Axes, bars: list[Fall]) -> None:
    for row, bar in enumerate(bars):
        colour = OVER if bar.part > 0 else UNDER
        axes.barh(row, 100 * (bar.end - bar.start), left=100 * bar.start, color=colour, height=0.6)
        ends = [bar.start, bar.end]
        if not isnan(bar.low):
            ends += [bar.at(bar.low), bar.at(bar.high)]
            axes.errorbar(100 * bar.end, row, xerr=_whiskers(bar), color=INK, elinewidth=1, capsize=2.5)
        axes.annotate(
            percent(bar.part + 0.0),
            (100 * max(ends), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
            bbox={"facecolor": PANEL, "edgecolor": "none", "pad": 0.5},
        )
    for row, bar in enumerate(bars[:-1]):
        axes.plot([100 * bar.end] * 2, [row + 0.3, row + 0.7], color=MUTED, linewidth=0.8)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.use_sticky_edges = False
    axes.margins(x=0.25)
    if max(abs(100 * bar.part) for bar in bars) < _NOTHING:
        axes.set_xlim(-1, 1)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def _whiskers(bar: Fall) -> list[list[float]]:
    """How far the interval reaches to the left and to the right of the bar's end, in %; never less than nothing."""
    left, right = sorted((bar.at(bar.low), bar.at(bar.high)))
    return [[100 * max(bar.end - left, 0.0)], [100 * max(right - bar.end, 0.0)]]
