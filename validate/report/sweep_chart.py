"""The curves of a sweep: latencies and throughput against the load, on both sides."""

from __future__ import annotations

from math import log2

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.validate.comparison.sweep import Sweep, knee_text, sweep_table
from blis_replay.validate.report.latency_charts import two_sides
from blis_replay.validate.report.svg import Chart, Mark, Panel, band, drawn


def sweep_chart(sweep: Sweep) -> Chart:
    """TTFT, gap between tokens and requests per second by load; dots are levels, vertical lines the knees."""
    at = np.log2(sweep.loads)
    knees = {}
    for side, load in sweep.knees.items():
        if load is not None:
            knees[load] = "knee of both" if load in knees else f"knee {side}"
    panels: list[tuple[str, Floats, list[Mark]]] = []
    for metric in ("ttft", sweep.gap):
        means = [level.metrics[metric]["mean"] for level in sweep.levels]
        sides_ms = np.array([(cell.a_us, cell.b_us) for cell in means], np.float64).T / 1_000
        panels.append((f"{metric.upper()}, ms", sides_ms, _interval(sweep, metric, at, sides_ms[0])))
    rates = np.array([sweep.throughput(i) for i in range(len(sweep.levels))], np.float64).T
    panels.append(("requests/s", rates, []))
    known = [panel for panel in panels if not np.isnan(panel[1]).all()]
    shown = [
        Panel(
            [*interval, *two_sides(at, curves, named=i == 0, dot=4.0)],
            f"{sweep.by}, logarithmic",
            label,
            x_ticks={f"{load:g}": place for load, place in zip(sweep.loads, at.tolist(), strict=True)},
            y_limits=(0.0, None),
            stages=[(log2(load), name) for load, name in knees.items()] if i == 0 else (),
        )
        for i, (label, curves, interval) in enumerate(known)
    ]
    return Chart(
        "Latencies and throughput by load",
        "Band: 95 % interval of the simulated mean beside the observed one, for another recording of the load. "
        f"{knee_text(sweep)}.",
        drawn(shown, 8.6, 0.9 + 1.4 * len(shown), at.tolist(), share_x=True),
        sweep_table(sweep),
        wide=True,
    )


def _interval(sweep: Sweep, metric: str, at: Floats, observed_ms: Floats) -> list[Mark]:
    """Where the simulated mean may lie: the observed one and the interval of the error, over levels that have it."""
    spans = [level.interval((metric, "mean")) or (np.nan, np.nan) for level in sweep.levels]
    low_ms, high_ms = observed_ms * (1 + np.array(spans).T)
    known = np.isfinite(low_ms)
    return [band(at[known], low_ms[known], high_ms[known], "simulated")]
