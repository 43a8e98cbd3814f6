"""Pictures of the server: step cycles against batch size, and how many requests run and wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from blis_replay.ingest.checks.pictures import Table
from blis_replay.validate.report.latency_charts import ABOVE, mark_stages, told_stages
from blis_replay.validate.report.over_time import DepthOverTime
from blis_replay.validate.report.step_cycles import StepCycles
from blis_replay.validate.report.svg import INK, OBSERVED, SIMULATED, Chart, drawn
from blis_replay.validate.terminal import milliseconds, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

_DASHED = (0, (4, 2))
# Shares of the fullest cell; each shade is one path, however many cells it has.
_SHADES = ((0.0, 0.12), (0.1, 0.28), (0.3, 0.48), (0.6, 0.75))


def step_chart(cycles: StepCycles) -> Chart:
    """Recorded step cycles by batch size with the model's step times through them, and what is left below."""

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _draw_density(upper, cycles)
        shown = cycles.observed
        upper.plot(shown.x, shown.middle / 1e3, "o", markersize=3, color=INK, label="recorded, median")
        upper.plot(shown.x, cycles.model_us / 1e3, color=SIMULATED, linestyle=_DASHED, label="latency model, median")
        upper.set_ylabel("step cycle, ms")
        upper.set_ylim(0, cycles.cycle_edges_us[-1] / 1e3)
        upper.legend(loc="best")
        lower.axhline(0, color=SIMULATED, linestyle=_DASHED)
        lower.plot(shown.x, cycles.residual_us / 1e3, "o", markersize=3, color=INK)
        lower.set_ylabel("residual, ms")
        lower.set_xlabel("running requests")

    shown = cycles.observed
    rows = tuple(
        (f"{x:.0f}", int(count), milliseconds(low), milliseconds(middle), milliseconds(high), *_model(model, middle))
        for x, count, low, middle, high, model in zip(
            shown.x, shown.count, shown.low, shown.middle, shown.high, cycles.model_us, strict=True
        )
    )
    columns = ("running requests", "cycles", "p10 ms", "p50 ms", "p90 ms", "model ms", "model error")
    known = cycles.residual_us[~np.isnan(cycles.residual_us)] / 1e3
    left = f"Residuals of the medians from {known.min():+.2f} to {known.max():+.2f} ms. " if len(known) else ""
    beyond = f" {cycles.beyond:,} cycles are longer than the axis." if cycles.beyond else ""
    return Chart(
        "Step cycle against batch size",
        f"{int(shown.count.sum()):,} cycles between consecutive recorded steps, as a density and as medians by running "
        f"requests, and the latency model's step time in the replay. {left}{beyond}".strip(),
        drawn(draw, 3.7, 2.9),
        Table("step cycle by running requests", columns, rows),
    )


def _model(model_us: float, observed_us: float) -> tuple[str, str]:
    if np.isnan(model_us):
        return "-", "-"
    return milliseconds(model_us), percent(model_us / observed_us - 1)


def _draw_density(axes: Axes, cycles: StepCycles) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    most = int(cycles.density.max(initial=0))
    bounds = [share * most for share, _ in _SHADES] + [float(most)]
    for (_, opacity), low, high in zip(_SHADES, bounds[:-1], bounds[1:], strict=True):
        cells = np.argwhere((cycles.density > low) & (cycles.density <= high))
        if len(cells):
            boxes = Path.make_compound_path(*(_box(cycles, i, j) for i, j in cells))
            axes.add_patch(PathPatch(boxes, facecolor=OBSERVED, alpha=opacity, linewidth=0))
    axes.plot([], [], "s", color=OBSERVED, alpha=0.5, label="recorded cycles")


def _box(cycles: StepCycles, i: int, j: int):  # type: ignore[no-untyped-def]  # matplotlib is imported where it is used
    from matplotlib.path import Path

    x, y = cycles.batch_edges, cycles.cycle_edges_us / 1e3
    return Path([(x[i], y[j]), (x[i + 1], y[j]), (x[i + 1], y[j + 1]), (x[i], y[j + 1]), (x[i], y[j])], closed=True)


def depth_chart(depth: DepthOverTime, stages: Sequence[tuple[float, str]]) -> Chart:
    """Running and waiting requests over the run; requests in flight where no steps were recorded."""
    panels = {"in flight" if depth.in_flight else "running": depth.running}
    if depth.waiting is not None:
        panels["waiting"] = depth.waiting

    def draw(figure: Figure) -> None:
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, (observed, simulated)) in zip(rows, panels.items(), strict=True):
            axes.plot(depth.at_s, observed, color=OBSERVED, label="observed")
            axes.plot(depth.at_s, simulated, color=SIMULATED, linestyle=_DASHED, label="simulated")
            axes.set_ylabel(name)
            # A queue that is empty throughout is no line along fractions of a request.
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.0))
        mark_stages(rows[0], stages)
        rows[0].legend(**ABOVE)
        rows[-1].set_xlabel("time of the run, s")

    columns = [f"{side} {name}" for name in panels for side in ("observed", "simulated")]
    series = [values for pair in panels.values() for values in pair]
    rows = tuple(
        (f"{at:.0f}", *("-" if np.isnan(values[i]) else f"{values[i]:.1f}" for values in series))
        for i, at in enumerate(depth.at_s)
    )
    over = "as clients see them" if depth.in_flight else "over recorded and over simulated steps"
    return Chart(
        "Requests in flight" if depth.in_flight else "Running and waiting requests",
        f"Means of {len(depth.at_s)} parts of the run, {over}. "
        + " ".join(f"{name}: {_mean(values)}." for name, values in zip(columns, series, strict=True)),
        drawn(draw, 8.6, 1.6 + 1.2 * len(panels)),
        Table("depth by time", ("middle, s", *columns), rows, note=told_stages(stages)),
        wide=True,
    )


def _mean(values: Floats) -> str:
    known = values[~np.isnan(values)]
    return f"{known.mean():.1f} on average, {known.max():.1f} at most" if len(known) else "not known"
