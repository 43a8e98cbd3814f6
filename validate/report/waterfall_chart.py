"""The waterfall of an attribution: from the error of a replay, component by component, to the unexplained rest."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING

from blis_replay.ingest.tables import Column, Table
from blis_replay.validate.attribution.attribute import Attribution, Estimate
from blis_replay.validate.metrics.resampling import QUANTITIES
from blis_replay.validate.report.svg import INK, MUTED, OVER, PANEL, UNDER, Chart, drawn
from blis_replay.validate.text.cells import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Bars below it, in %, would be drawn against an axis of rounding errors.
_NOTHING = 0.05
_INTERVALS = "low and high: 95 % interval"
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
        for axes, (metric, bars) in zip(
            figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown.items(), strict=True
        ):
            _draw_bars(axes, bars)
            axes.set_title(f"{metric} mean", color=INK)
            axes.set_xlabel("% of observed")

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
        drawn(draw, 8.6, 1.1 + 0.3 * len(names), range(len(names)), "y"),
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
