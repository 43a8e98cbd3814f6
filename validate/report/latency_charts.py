"""Pictures of client latencies: distributions, errors over time, TTFT against what it may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan

import numpy as np

from blis_replay.compiled.arrays import Floats
from blis_replay.ingest.tables import Cell, Column, Table
from blis_replay.validate.attribution.attribute import Attribution, Estimate
from blis_replay.validate.metrics.latency import THRESHOLDS
from blis_replay.validate.metrics.resampling import QUANTITIES
from blis_replay.validate.report.series import Band, ErrorsOverTime, QuantileCurve
from blis_replay.validate.report.svg import (
    Bar,
    Chart,
    Drawing,
    draw_bands,
    draw_distribution,
    draw_errors,
    draw_falls,
)
from blis_replay.validate.text.cells import cell_text, percent, time_text, time_unit

_NAMES = {"e2e": "E2E", "ttft": "TTFT", "itl": "ITL"}
_QUANTILE_COLUMNS = (
    Column("quantile", "text"),
    Column("observed", "time"),
    Column("simulated", "time"),
    Column("error", "error"),
)
_TIMES = tuple(Column(name, "time") for name in ("p10", "p50", "p90"))
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def distribution_chart(metric: str, observed: QuantileCurve | None, simulated: QuantileCurve | None) -> Chart:
    """Observed and simulated distribution of ``e2e``, ``ttft`` or ``itl``, on an axis that spreads the tail."""
    name = _NAMES[metric]
    unit = time_unit(max((float(c.value_us.max()) for c in (observed, simulated) if c is not None), default=0.0))

    curves = {side: curve for side, curve in (("observed", observed), ("simulated", simulated)) if curve is not None}
    lines = {side: (*_below_all(curve), curve.published) for side, curve in curves.items()}
    marks = {level: 1 - share for level, share in _PERCENTILES.items()}
    draw = partial(draw_distribution, f"{name}, {unit[1]}", unit[0], lines, marks)
    numbers = _quantile_table(f"{name}: quantiles", observed, simulated)
    what = "gap between two output tokens" if metric == "itl" else "request"
    values = " ".join(
        f"{level}: observed {cell_text(seen, 'time')}, simulated {cell_text(value, 'time')}."
        for level, seen, value, _ in numbers.rows
    )
    return Chart(
        f"Distribution of {name}",
        f"Share of {what}s that are faster, on a logarithmic axis of those that are slower. {values}",
        Drawing(draw, 3.7, 2.7, [1 - share for share in _PERCENTILES.values()], "y"),
        numbers,
    )


def _below_all(curve: QuantileCurve) -> tuple[Floats, Floats]:
    """Levels and values of a curve that an axis of those that are slower can show."""
    inside = curve.level < 1
    return curve.level[inside], curve.value_us[inside]


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

    shown = {m: (_NAMES[m], THRESHOLDS[m], errors.errors[m]) for m in metrics}
    draw = partial(draw_errors, errors.at_s, shown, stages)
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
        Drawing(draw, 8.6, 2.8, errors.at_s.tolist()),
        Table(
            "error of the mean by time",
            (Column("middle, s"), Column("requests"), *(Column(_NAMES[m], "error") for m in metrics)),
            rows,
            note=stages_note(stages),
        ),
        wide=True,
    )


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

    areas = {
        side: (shown.x, shown.low / unit_us, shown.middle / unit_us, shown.high / unit_us)
        for side, shown in (("observed", observed), ("simulated", simulated))
    }
    draw = partial(draw_bands, x_label, f"TTFT, {unit}", areas)
    rows = (*_band_rows("observed", observed), *_band_rows("simulated", simulated))
    return Chart(
        title,
        f"Medians of TTFT in bins of {x_label}, with the middle 80 % of the requests. Observed {_range(observed)}; "
        f"simulated {_range(simulated)}.",
        Drawing(draw, 3.7, 2.7, [*observed.x.tolist(), *simulated.x.tolist()]),
        Table(title, (Column("side", "text"), Column(x_label, "count"), Column("requests"), *_TIMES), rows),
    )


def _band_rows(side: str, shown: Band) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        (side, float(x), int(count), *map(float, (low, middle, high)))
        for x, low, middle, high, count in zip(shown.x, shown.low, shown.middle, shown.high, shown.count, strict=True)
    )


def _range(shown: Band) -> str:
    return f"medians between {time_text(float(shown.middle.min()))} and {time_text(float(shown.middle.max()))}"


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

    drawn = {f"{metric} mean, % of observed": [_bar(fall) for fall in bars] for metric, bars in shown.items()}
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
        Drawing(partial(draw_falls, drawn), 4.4, len(shown) * (0.55 + 0.2 * len(names)), range(len(names)), "y"),
        Table(
            "parts of the error of the mean, in % of observed",
            (Column("part", "text"), *columns),
            rows,
            note=_INTERVALS,
        ),
        beside=True,
    )


def _bar(fall: Fall) -> Bar:
    ends = sorted((fall.at(fall.low), fall.at(fall.high)))
    return Bar(fall.name, percent(fall.part + 0.0), fall.part, fall.start, fall.end, *ends)


def _numbers(bar: Fall) -> tuple[float | None, ...]:
    """A bar and its interval as fractions; a zero has no sign, and what is not known is None."""
    return tuple(None if isnan(value) else value + 0.0 for value in (bar.part, bar.low, bar.high))
