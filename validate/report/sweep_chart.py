"""The curves of a sweep: latencies and throughput against the load, on both sides."""

from __future__ import annotations

from math import log2

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.validate.comparison.sweep import Sweep, knee_text, sweep_table
from blis_replay.validate.report.latency_charts import SIDE_DASHES
from blis_replay.validate.report.svg import Chart, Mark, Panel, drawn


def sweep_chart(sweep: Sweep) -> Chart:
    """TTFT, gap between tokens and requests per second by load; dots are levels, vertical lines the knees."""
    at = [log2(load) for load in sweep.loads]
    knees = {}
    for side, load in sweep.knees.items():
        if load is not None:
            knees[load] = "knee of both" if load in knees else f"knee {side}"
    panels = []
    for metric in ("ttft", sweep.gap):
        means = [level.metrics[metric]["mean"] for level in sweep.levels]
        sides = [[cell.a_us for cell in means], [cell.b_us for cell in means]]
        if all(us is None for side in sides for us in side):
            continue
        curves = [np.array([np.nan if us is None else us / 1_000 for us in side]) for side in sides]
        panels.append((f"{metric.upper()}, ms", curves, _band(sweep, metric, at, curves[0])))
    rates = [sweep.throughput(i) for i in range(len(sweep.levels))]
    if any(rate is not None for pair in rates for rate in pair):
        sides = [list(side) for side in zip(*rates, strict=True)]
        curves = [np.array([np.nan if rate is None else rate for rate in side]) for side in sides]
        panels.append(("requests/s", curves, []))
    shown = [
        Panel(
            [
                *band,
                *(
                    Mark(at, curve, side, side if i == 0 else "", dashes, dot=4.0)
                    for (side, dashes), curve in zip(SIDE_DASHES.items(), curves, strict=True)
                ),
            ],
            f"{sweep.by}, logarithmic" if i == len(panels) - 1 else "",
            label,
            x_ticks={f"{load:g}": place for load, place in zip(sweep.loads, at, strict=True)},
            y_limits=(0.0, None),
            stages=[(log2(load), name) for load, name in knees.items()] if i == 0 else (),
        )
        for i, (label, curves, band) in enumerate(panels)
    ]
    return Chart(
        "Latencies and throughput by load",
        "Band: 95 % interval of the simulated mean beside the observed one, for another recording of the load. "
        f"{knee_text(sweep)}.",
        drawn(shown, 8.6, 0.9 + 1.4 * len(panels), at, share_x=True),
        sweep_table(sweep),
        wide=True,
    )


def _band(sweep: Sweep, metric: str, at: list[float], observed_ms: Floats) -> list[Mark]:
    """Where the simulated mean may lie: the observed one and the interval of the error, over levels that have it."""
    spans = [level.interval((metric, "mean")) for level in sweep.levels]
    known = [i for i, span in enumerate(spans) if span is not None and np.isfinite(observed_ms[i])]
    ends = [[observed_ms[i] * (1 + span[side]) for i in known if (span := spans[i])] for side in (0, 1)]
    places = [at[i] for i in known]
    return [Mark([*places, *places[::-1]], [*ends[0], *ends[1][::-1]], "simulated", filled=True, opacity=0.18)]
