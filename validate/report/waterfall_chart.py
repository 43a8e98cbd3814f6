"""The waterfall of an attribution: from the error of a replay, component by component, to what none explains."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING

from blis_replay.ingest.checks.pictures import Table
from blis_replay.validate.attribution.attribute import Attribution
from blis_replay.validate.attribution.resampled import QUANTITIES
from blis_replay.validate.report.svg import INK, MUTED, OVER, PANEL, UNDER, Chart, drawn
from blis_replay.validate.terminal import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NO_COMPONENT = "no component"


@dataclass(frozen=True)
class Fall:
    """One bar, in fractions of the observed value: from ``start`` to ``end``."""

    name: str
    start: float
    end: float


def falls(attribution: Attribution, quantity: int) -> list[Fall]:
    """The bars of one number of QUANTITIES: the error, each replaced component, what is left; empty if not observed.

    The ends of the first bar and the sum of all others agree: error = changes + residual.
    """
    observed_us = attribution.observed_us[quantity]
    if isnan(observed_us) or observed_us == 0:
        return []
    error = attribution.error[quantity].value_us / observed_us
    bars, at = [Fall("error", 0.0, error)], error
    for cause in attribution.causes:
        change = cause.changes[quantity].value_us / observed_us
        bars.append(Fall(cause.component.name, at, at - change))
        at -= change
    return [*bars, Fall(_NO_COMPONENT, at, 0.0)]


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

    rows = tuple((name, *(_cell(bars[i]) for bars in shown.values())) for i, name in enumerate(names))
    told = "; ".join(
        f"{metric}: " + ", ".join(f"{bar.name} {_cell(bar)}" for bar in bars) for metric, bars in shown.items()
    )
    return Chart(
        "Where the error comes from",
        f"From the error of the replay to the recording, replacing one component after the other. {told}.",
        drawn(draw, 8.6, 1.1 + 0.3 * len(names)),
        Table("parts of the error of the mean, in % of observed", ("", *shown), rows),
        wide=True,
    )


def _cell(bar: Fall) -> str:
    """What a bar adds to the error: the error itself, or what replacing the component takes away."""
    return percent((bar.end if bar.name == "error" else bar.start - bar.end) + 0.0)


def _draw_bars(axes: Axes, bars: list[Fall]) -> None:
    for row, bar in enumerate(bars):
        part = bar.end if bar.name == "error" else bar.start - bar.end
        axes.barh(row, 100 * (bar.end - bar.start), left=100 * bar.start, color=OVER if part > 0 else UNDER, height=0.6)
        axes.annotate(
            _cell(bar),
            (100 * max(bar.start, bar.end), row),
            xytext=(3, 0),
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
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
