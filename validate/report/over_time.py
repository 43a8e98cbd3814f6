"""A run over its time: errors of the requests sent in each part of it, and how many ran and waited."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.blis.trace import Int64s
from blis_replay.ingest.recording import NOT_KNOWN, Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.metrics import LatencySamples, Values

Floats = NDArray[np.float64]

_MOST_BINS = 80
_FEWEST_REQUESTS = 20
_DEPTH_BINS = 120


@dataclass(frozen=True)
class ErrorsOverTime:
    """Signed errors of the mean of the requests sent in each bin; nan in a bin without any.

    ``at_s``: float64[k], middles of the bins.  ``requests``: int64[k].  ``errors``: by metric, float64[k], fractions.
    """

    at_s: Floats
    requests: Int64s
    errors: dict[str, Floats]


def errors_over_time(arrival_us: Int64s, observed: LatencySamples, simulated: LatencySamples) -> ErrorsOverTime:
    """Errors of the mean E2E, TTFT and ITL over bins of equal length, about 20 requests or more each.

    ``arrival_us``: int64[n] of the requests of both samples.
    """
    bins = int(np.clip(len(arrival_us) // _FEWEST_REQUESTS, 1, _MOST_BINS))
    edges = np.linspace(float(arrival_us.min()), float(arrival_us.max()) + 1, bins + 1)
    place = np.searchsorted(edges, arrival_us, side="right") - 1

    def total(values: Values) -> Floats:
        return np.bincount(place, np.asarray(values, np.float64), bins).astype(np.float64)

    def decode_us(samples: LatencySamples) -> Values:
        return np.where(samples.output_tokens > 1, samples.e2e_us - samples.ttft_us, 0)

    def itl(samples: LatencySamples) -> Floats:
        # Token-weighted, as metrics.LatencySamples.itl_mean_us.
        return _ratio(total(decode_us(samples)), total(samples.output_tokens - 1))

    return ErrorsOverTime(
        at_s=(edges[1:] + edges[:-1]) / 2e6,
        requests=np.bincount(place, minlength=bins).astype(np.int64),
        errors={
            "e2e": _ratio(total(simulated.e2e_us), total(observed.e2e_us)) - 1,
            "ttft": _ratio(total(simulated.ttft_us), total(observed.ttft_us)) - 1,
            "itl": _ratio(itl(simulated), itl(observed)) - 1,
        },
    )


def stage_starts(recording: Recording) -> list[tuple[float, str]]:
    """When the first request of each load stage was sent, s, and the stage's name."""
    rates = {stage.stage: stage.rate_per_s for stage in recording.stages}
    begins = recording.requests.drop_nulls("stage").group_by("stage").agg(pl.col("arrival_us").min()).sort("stage")
    return [
        (begin_us / 1e6, f"stage {stage}" + (f", {rates[stage]:g}/s" if stage in rates else ""))
        for stage, begin_us in begins.iter_rows()
    ]


@dataclass(frozen=True)
class DepthOverTime:
    """Mean running and waiting depth in bins of equal length, nan where nothing is known of a bin.

    Over steps where steps were recorded.  Else ``in_flight``: requests sent and not done, on both sides,
    as ``running``, and no ``waiting``.
    """

    at_s: Floats
    running: tuple[Floats, Floats]
    waiting: tuple[Floats, Floats] | None
    in_flight: bool


def depth_over_time(run: ReplayRun, compared: NDArray[np.bool_]) -> DepthOverTime | None:
    """Depths observed and simulated; ``compared``: bool[n], requests with both latencies.

    None where the recording has neither step records on the requests' clock nor latencies.
    """
    steps = run.recording.steps.whole(["start_us", "running_depth", "waiting_depth"]).drop_nulls()
    loose = any(clock.name == "step" and clock.placed == NOT_KNOWN for clock in run.recording.clocks)
    if steps.height and not loose:
        return _of_steps(run, steps)
    if not compared.any():
        return None
    return _of_requests(run, compared)


def _of_steps(run: ReplayRun, steps: pl.DataFrame) -> DepthOverTime:
    simulated = run.result.steps
    observed_us = steps["start_us"].to_numpy()
    edges = _edges(max(int(observed_us.max()), int(simulated["scheduled_us"].max(initial=0))))

    def both(column: str) -> tuple[Floats, Floats]:
        seen = _mean_in(edges, observed_us, steps[column].to_numpy())
        return seen, _mean_in(edges, simulated["scheduled_us"], simulated[column])

    return DepthOverTime(_middles_s(edges), both("running_depth"), both("waiting_depth"), in_flight=False)


def _of_requests(run: ReplayRun, compared: NDArray[np.bool_]) -> DepthOverTime:
    requests = run.recording.requests.filter(compared)
    arrival_us = run.plan.trace.arrival_us[compared]
    sent_us, seen_us = requests["arrival_us"].to_numpy(), requests["e2e_us"].to_numpy()
    simulated_us = run.e2e_us[compared]
    edges = _edges(int(max((sent_us + seen_us).max(), (arrival_us + simulated_us).max())))
    running = (_in_flight(edges, sent_us, sent_us + seen_us), _in_flight(edges, arrival_us, arrival_us + simulated_us))
    return DepthOverTime(_middles_s(edges), running, None, in_flight=True)


def _edges(end_us: int) -> Floats:
    return np.linspace(0, max(end_us, 1) + 1, _DEPTH_BINS + 1)


def _middles_s(edges: Floats) -> Floats:
    return (edges[1:] + edges[:-1]) / 2e6


def _mean_in(edges: Floats, at_us: Int64s, values: Int64s) -> Floats:
    place = np.searchsorted(edges, at_us, side="right") - 1
    inside = (place >= 0) & (place < _DEPTH_BINS)
    sums = np.bincount(place[inside], values[inside].astype(np.float64), _DEPTH_BINS)
    return _ratio(sums, np.bincount(place[inside], minlength=_DEPTH_BINS))


def _in_flight(edges: Floats, begin_us: Int64s, end_us: Int64s) -> Floats:
    """Mean over each bin of the number of spans that are open: their time in the bin over its length."""

    def until(at_us: Int64s) -> Floats:
        # Sum over spans of the time before each edge that lies after ``at_us``.
        ranked = np.sort(at_us).astype(np.float64)
        passed = np.searchsorted(ranked, edges, side="right")
        return np.asarray(passed * edges - np.concatenate([[0.0], np.cumsum(ranked)])[passed], np.float64)

    return np.diff(until(begin_us) - until(end_us)) / np.diff(edges)


def _ratio(above: Values, below: Values) -> Floats:
    return np.asarray(np.divide(above, below, out=np.full(len(above), np.nan), where=np.asarray(below) > 0), np.float64)
