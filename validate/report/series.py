"""The numbers behind the pictures: the run over its time, step cycles by batch size, distributions."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.ingest.recording import NOT_KNOWN, Recording
from blis_replay.ingest.served import published_itl
from blis_replay.ingest.steps.records import one_a_step
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.metrics.latency import LatencySamples, Values, weighted_quantiles

_MOST_BINS = 80
_FEWEST_REQUESTS = 20
_DEPTH_BINS = 120


@dataclass(frozen=True)
class ErrorsOverTime:
    """Signed errors of the mean of the requests sent in each bin; nan in a bin without any.

    ``at_s``: float64[k], middles of the bins.  ``requests``: int64[k].  ``errors``: by metric, float64[k], fractions.
    ``ttft_us``: float64[k], mean TTFT observed and simulated.
    """

    at_s: Floats
    requests: Int64s
    errors: dict[str, Floats]
    ttft_us: tuple[Floats, Floats]


def errors_over_time(arrival_us: Int64s, observed: LatencySamples, simulated: LatencySamples) -> ErrorsOverTime:
    """Errors of the mean E2E, TTFT and ITL over bins of equal length, about 20 requests or more each.

    ``arrival_us``: int64[n] of the requests of both samples.
    """
    bins = int(np.clip(len(arrival_us) // _FEWEST_REQUESTS, 1, _MOST_BINS))
    edges = np.linspace(float(arrival_us.min()), float(arrival_us.max()) + 1, bins + 1)
    place = np.searchsorted(edges, arrival_us, side="right") - 1

    def total(values: Values) -> Floats:
        return np.bincount(place, np.asarray(values, np.float64), bins).astype(np.float64)

    def itl(samples: LatencySamples) -> Floats:
        # Token-weighted, as metrics.LatencySamples.itl_mean_us.
        return _ratio(total(samples.decode_us), total(samples.gaps))

    requests = np.bincount(place, minlength=bins).astype(np.int64)
    ttft_us = [total(side.ttft_us) for side in (observed, simulated)]
    return ErrorsOverTime(
        at_s=(edges[1:] + edges[:-1]) / 2e6,
        requests=requests,
        errors={
            "e2e": _ratio(total(simulated.e2e_us), total(observed.e2e_us)) - 1,
            "ttft": _ratio(ttft_us[1], ttft_us[0]) - 1,
            "itl": _ratio(itl(simulated), itl(observed)) - 1,
        },
        ttft_us=(_ratio(ttft_us[0], requests), _ratio(ttft_us[1], requests)),
    )


def stage_starts(recording: Recording) -> list[tuple[float, str]]:
    """When the first request of each load stage was sent, s, and the stage's name."""
    rates = {stage.stage: stage.rate_per_s for stage in recording.stages}
    begins = (
        recording.requests.frame(["stage", "arrival_us"])
        .drop_nulls("stage")
        .group_by("stage")
        .agg(pl.col("arrival_us").min())
        .sort("stage")
    )
    return [
        (begin_us / 1e6, f"stage {stage}" + (f", {rates[stage]:g}/s" if stage in rates else ""))
        for stage, begin_us in begins.iter_rows()
    ]


@dataclass(frozen=True)
class DepthOverTime:
    """Mean running and waiting depth in bins of equal length, nan where nothing is known of a bin.

    Over steps where steps or iterations were recorded; ``waiting`` is None of iterations.  Else ``in_flight``: requests
    sent and not done, on both sides, as ``running``, and no ``waiting``.
    """

    at_s: Floats
    running: tuple[Floats, Floats]
    waiting: tuple[Floats, Floats] | None
    in_flight: bool


def depth_over_time(run: ReplayRun, compared: Bools) -> DepthOverTime | None:
    """Depths observed and simulated; ``compared``: bool[n], requests with both latencies.

    None where the recording has neither step records on the requests' clock nor latencies.
    """
    steps = run.recording.steps.frame(["start_us", "running_depth", "waiting_depth"]).drop_nulls()
    loose = any(clock.name == "step" and clock.placed == NOT_KNOWN for clock in run.recording.clocks)
    if steps.is_empty():
        steps = _logged(run.recording)
    if steps.height and not loose:
        return _of_steps(run, steps)
    if not compared.any():
        return None
    return _of_requests(run, compared)


def _logged(recording: Recording) -> pl.DataFrame:
    """``step_id``, ``start_us`` and ``running_depth`` of the iterations of a server's log whose start is known."""
    running = (pl.col("prefill_requests") + pl.col("decode_requests")).alias("running_depth")
    logged = recording.iterations.frame(["iteration", "start_us", "prefill_requests", "decode_requests"]).drop_nulls()
    return logged.select(pl.col("iteration").alias("step_id"), "start_us", running)


def _of_steps(run: ReplayRun, steps: pl.DataFrame) -> DepthOverTime:
    simulated = run.result.steps
    observed_us = steps["start_us"].to_numpy()
    edges = _edges(max(int(observed_us.max()), int(simulated["scheduled_us"].max(initial=0))))

    def both(column: str) -> tuple[Floats, Floats]:
        seen = _mean_in(edges, observed_us, steps[column].to_numpy())
        return seen, _mean_in(edges, simulated["scheduled_us"], simulated[column])

    waiting = both("waiting_depth") if "waiting_depth" in steps.columns else None  # a server log does not say it
    return DepthOverTime((edges[1:] + edges[:-1]) / 2e6, both("running_depth"), waiting, in_flight=False)


def _of_requests(run: ReplayRun, compared: Bools) -> DepthOverTime:
    requests = run.recording.requests.frame(["arrival_us", "e2e_us"]).filter(compared)
    arrival_us = run.arrival_us[compared]
    sent_us, seen_us = requests["arrival_us"].to_numpy(), requests["e2e_us"].to_numpy()
    simulated_us = run.e2e_us[compared]
    edges = _edges(int(max((sent_us + seen_us).max(), (arrival_us + simulated_us).max())))
    running = (_in_flight(edges, sent_us, sent_us + seen_us), _in_flight(edges, arrival_us, arrival_us + simulated_us))
    return DepthOverTime((edges[1:] + edges[:-1]) / 2e6, running, None, in_flight=True)


def _edges(end_us: int) -> Floats:
    return np.linspace(0, max(end_us, 1) + 1, _DEPTH_BINS + 1)


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


_SHARES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Band:
    """float64[k] each: median x of a bin, and p10, p50 and p90 of y in it; ``count`` int64[k] points."""

    x: Floats
    low: Floats
    middle: Floats
    high: Floats
    count: Int64s


def band_by(edges: Floats, x: Int64s, y: Int64s | Floats) -> Band:
    """Points (x[i], y[i]) in bins between edges (float64[k + 1]); empty bins are left out, and so are points beyond."""
    place = np.searchsorted(edges, x, side="right") - 1
    parts = [part for i in range(len(edges) - 1) if len(part := np.flatnonzero(place == i))]
    low, middle, high = np.array([np.quantile(y[part], _SHARES) for part in parts]).reshape(-1, 3).T
    count = np.array([len(part) for part in parts], np.int64)
    return Band(np.array([np.median(x[part]) for part in parts]), low, middle, high, count)


# With fewer requests running, the engine may have been idle between two steps.
_BUSY_DEPTH = 4
_MOST_BATCH_BINS = 32
_FEWEST_CYCLES = 20


def step_cycles(run: ReplayRun) -> tuple[Band, Band] | None:
    """us from one recorded step to the next, and the model's step times, by running requests.

    None with fewer than 20 consecutive recorded steps.
    """
    batch, cycle_us = recorded_cycles(run.recording)
    if len(batch) < _FEWEST_CYCLES:
        return None
    low, high, steps = int(batch.min()), int(batch.max()) + 1, run.result.steps
    width = -(-(high - low) // _MOST_BATCH_BINS)
    edges = np.arange(low, high + width, width, dtype=np.float64)
    model = band_by(edges, steps["running_depth"].astype(np.int64), steps["end_us"] - steps["start_us"])
    return band_by(edges, batch, cycle_us), model


def recorded_cycles(recording: Recording) -> tuple[Int64s, Int64s]:
    """Running requests in the later of two consecutive recorded steps, and us from start to start; while busy.

    Iterations of a server's log stand in for step records.
    """
    names = ["step_id", "start_us", "running_depth"]
    steps = one_a_step(recording.steps.frame(names).drop_nulls())
    if steps.is_empty():
        steps = _logged(recording).sort("step_id")
    step_id, start_us, depth = (steps[name].to_numpy() for name in names)
    later = np.flatnonzero(np.diff(step_id) == 1) + 1
    cycle_us = start_us[later] - start_us[later - 1]
    usable = (depth[later - 1] >= _BUSY_DEPTH) & (cycle_us > 0)
    return depth[later][usable].astype(np.int64), cycle_us[usable].astype(np.int64)


# Even steps up to p90, then even steps of the logarithm of the share that is slower, to p99.9.
LEVELS: Floats = np.concatenate([np.linspace(0, 0.9, 46)[:-1], 1 - np.logspace(-1, -3, 41)])
_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class QuantileCurve:
    """``level`` float64[k], shares of the sample (0..1, ascending), and ``value_us`` float64[k] at each.

    ``published``: single published quantiles; nothing is known between them.
    """

    level: Floats
    value_us: Floats
    published: bool = False


def quantile_curve(values_us: Values, counts: Int64s | None = None) -> QuantileCurve | None:
    """The curve of a sample without its nans, in which ``values_us[i]`` occurs ``counts[i]`` times (once if None).

    Levels end at 1 - 1/n, the most that n values can show.  None for an empty sample.
    """
    finite = ~np.isnan(np.asarray(values_us, np.float64))
    times = finite.astype(np.int64) if counts is None else np.where(finite, counts, 0)
    size = int(times.sum())
    if size == 0:
        return None
    highest = max(1 - 1 / size, 0.0) + 1e-12
    level = LEVELS[highest >= LEVELS]
    return QuantileCurve(level, weighted_quantiles(values_us[times > 0], times[times > 0], level))


def published_curve(recording: Recording, metric: str) -> QuantileCurve | None:
    """The quantiles that were published of ``e2e``, ``ttft`` or ``itl`` (its true gaps); None without any."""
    if metric == "itl":
        named = published_itl(recording.aggregates)
    else:
        of_run = recording.aggregates.filter((pl.col("stage") == -1) & (pl.col("metric") == metric))
        named = {name: value for name, value in of_run.select("statistic", "value").iter_rows() if value is not None}
    found = [(float(m[1]) / 100, value) for name, value in named.items() if (m := _PERCENTILE.fullmatch(name))]
    points = np.array(sorted(found), np.float64).reshape(-1, 2)
    return QuantileCurve(points[:, 0], points[:, 1], published=True) if len(points) else None
