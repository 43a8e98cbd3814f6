"""The charts of an experiment, and for each absent chart the reason in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blis_replay.ingest.tables import Column, Table, columns_named
from blis_replay.validate.metrics.latency import values_of
from blis_replay.validate.metrics.observed import samples_of, simulated_samples
from blis_replay.validate.report.evidence import Evidence
from blis_replay.validate.report.latency_charts import (
    SIDE_DASHES,
    cycles_chart,
    distribution_chart,
    errors_chart,
    stages_note,
    table_rows,
    two_sides,
    waterfall_chart,
)
from blis_replay.validate.report.series import (
    DepthOverTime,
    QuantileCurve,
    depth_over_time,
    errors_over_time,
    published_curve,
    quantile_curve,
    stage_starts,
    step_cycles,
)
from blis_replay.validate.report.svg import Chart, Panel, drawn
from blis_replay.validate.report.worst import Worst, worst_requests


def depth_chart(depth: DepthOverTime, stages: Sequence[tuple[float, str]], end_s: float | None = None) -> Chart:
    """Running and waiting requests over the run; requests in flight where no steps were recorded.

    ``end_s``: of the axis, None: of the data.
    """
    panels = {"in flight" if depth.in_flight else "running": depth.running}
    empty = "" if depth.waiting is None else " No request waits on either side."
    if depth.waiting is not None and any(np.nanmax(side, initial=0) > 0 for side in depth.waiting):
        panels["waiting"], empty = depth.waiting, ""
    shown = [
        Panel(
            two_sides(depth.at_s, sides, named=i == 0),
            "time of the run, s",
            counted,
            x_limits=(0.0, end_s),
            zooms=True,
            # An empty queue would otherwise be drawn against fractions of a request.
            y_limits=(0.0, None if np.nanmax(sides, initial=0) >= 1 else 1.0),
            stages=stages if i == 0 else (),
        )
        for i, (counted, sides) in enumerate(panels.items())
    ]
    names = [f"{side} {name}" for name in panels for side in SIDE_DASHES]
    columns = (Column("middle, s"), *columns_named(*names, kind="decimal"))
    rows = table_rows(depth.at_s, *(values for pair in panels.values() for values in pair))
    over = "as clients see them" if depth.in_flight else "over recorded and over simulated steps"
    return Chart(
        "Requests in flight" if depth.in_flight else "Running and waiting requests",
        f"Means of {len(depth.at_s)} parts of the run, {over}.{empty}",
        drawn(shown, 8.6, 1.6 + 1.2 * len(panels), depth.at_s.tolist(), share_x=True),
        Table("depth by time", columns, rows, note=stages_note(stages)),
        wide=True,
    )


_NO_REQUESTS = "no latencies of single requests were recorded"
_OF_QUEUE = "the latencies of an overloaded run measure its queue"


@dataclass(frozen=True)
class Charts:
    """``shown`` in the order of the page; ``worst``: requests; ``absent``: what is not drawn, to the reason."""

    shown: tuple[Chart, ...]
    worst: Worst | None
    absent: dict[str, str]


# A chart or the worst requests; or the title of what is absent, to the reason.
_Found = Iterator[Chart | Worst | dict[str, str]]


def charts_of(evidence: Evidence) -> Charts:
    """All pictures that the recording and the replay have numbers for."""
    parts = (_distributions, _steps, _over_time, _depth, _waterfall, _worst)
    found = [one for part in parts for one in part(evidence)]
    absent = {title: why for one in found if isinstance(one, dict) for title, why in one.items()}
    worst = next((one for one in found if isinstance(one, Worst)), None)
    return Charts(tuple(one for one in found if isinstance(one, Chart)), worst, absent)


def _distributions(evidence: Evidence) -> _Found:
    for metric in ("e2e", "ttft", "itl"):
        if evidence.comparison.overloaded and metric != "itl":
            yield {f"distribution of {metric.upper()}": _OF_QUEUE}
            continue
        observed = None if metric in _forbidden(evidence) else _observed_curve(evidence, metric)
        simulated = _simulated_curve(evidence, metric)
        if observed is None and simulated is None:
            yield {f"distribution of {metric.upper()}": "neither side has any"}
            continue
        yield distribution_chart(metric, observed, simulated)
        if observed is None:
            cell = evidence.comparison.metrics[metric]["p50"]
            yield {f"observed distribution of {metric.upper()}": cell.reason or "nothing was recorded of it"}


def _observed_curve(evidence: Evidence, metric: str) -> QuantileCurve | None:
    recording = evidence.run.recording
    if metric == "itl" and evidence.token_gaps is not None:
        return quantile_curve(*evidence.token_gaps)
    if metric == "itl" or not evidence.compared.any():
        return published_curve(recording, metric)
    return quantile_curve(values_of(samples_of(recording, evidence.compared), metric))


def _simulated_curve(evidence: Evidence, metric: str) -> QuantileCurve | None:
    run, chosen = evidence.run, evidence.compared
    if not chosen.any():
        chosen = run.simulated.completed & (run.recording.requests["status"] == "ok").to_numpy()
    if metric == "itl":
        return quantile_curve(*run.pooled_gaps(chosen))
    return quantile_curve(values_of(simulated_samples(run, chosen), metric))


def _over_time(evidence: Evidence) -> _Found:
    run, title = evidence.run, "error over the time of the run"
    metrics = [metric for metric in ("e2e", "ttft", "itl") if metric not in _forbidden(evidence)]
    if not evidence.compared.any():
        yield {title: _NO_REQUESTS}
    elif not metrics:
        yield {title: "instrument checks call all of E2E, TTFT and ITL unusable"}
    else:
        arrival_us = run.recording.requests["arrival_us"].to_numpy()[evidence.compared]
        sides = samples_of(run.recording, evidence.compared), simulated_samples(run, evidence.compared)
        yield errors_chart(errors_over_time(arrival_us, *sides), _marked(evidence), metrics, _end_s(evidence))


def _end_s(evidence: Evidence) -> float | None:
    """When the last compared request was done on either side; None without any."""
    run, compared = evidence.run, evidence.compared
    sent_us = run.arrival_us[compared]
    both_us = (sent_us + run.e2e_us[compared], sent_us + run.recording.requests["e2e_us"].to_numpy()[compared])
    return float(np.max(both_us)) / 1e6 if len(sent_us) else None


def _worst(evidence: Evidence) -> _Found:
    title = "requests with the largest errors"
    if not evidence.compared.any():
        yield {title: _NO_REQUESTS}
    elif evidence.comparison.overloaded or _forbidden(evidence) & {"e2e", "ttft"}:
        yield {title: "single latencies cannot be compared"}
    else:
        yield worst_requests(evidence.run)


def _steps(evidence: Evidence) -> _Found:
    cycles = step_cycles(evidence.run)
    if cycles is None:
        yield {"step cycle against batch size": "fewer than 20 pairs of consecutive steps were recorded"}
    else:
        yield cycles_chart(*cycles)


def _depth(evidence: Evidence) -> _Found:
    depth = depth_over_time(evidence.run, evidence.compared)
    absent = {"running and waiting depth": f"no steps on the requests' clock, and {_NO_REQUESTS}"}
    yield absent if depth is None else depth_chart(depth, _marked(evidence), _end_s(evidence))


def _marked(evidence: Evidence) -> list[tuple[float, str]]:
    """What a picture over time marks, with its second: load stages, and where the server is overloaded."""
    saturation = evidence.comparison.saturation
    between = () if saturation is None else ((saturation.from_us, "overloaded"), (saturation.until_us, "served again"))
    overload = [(at_us / 1e6, name) for at_us, name in between if at_us is not None]
    return sorted([*stage_starts(evidence.run.recording), *overload])


def _waterfall(evidence: Evidence) -> _Found:
    attribution, title = evidence.attribution, "where the error comes from"
    if isinstance(attribution, str):
        yield {title: attribution}
    elif evidence.comparison.overloaded and not attribution.causes:
        yield {title: _OF_QUEUE}
    else:
        yield waterfall_chart(attribution) or {title: "no mean was observed"}


def _forbidden(evidence: Evidence) -> set[str]:
    """Metrics that an instrument check calls unusable."""
    return {metric for metric, cells in evidence.comparison.metrics.items() if cells["mean"].unusable}
