"""Evidence of recordings about one model: step cycles, client latencies, delays, and the scheduling mode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.errors import ValidateError
from blis_replay.blis.grouping import attended_by
from blis_replay.blis.latency.datasheets import Architecture, architecture_named
from blis_replay.blis.latency.models import Lifecycle
from blis_replay.blis.releases.fit import CoefficientFit, Scheduling, Told
from blis_replay.ingest.recording import ENDED, UNKNOWN, Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.served import published
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import ReplayPlan, drawn_arrivals, plan_replay
from blis_replay.replay.simulator import model_of
from blis_replay.replay.warm_up import Stalls, cold_start
from blis_replay.validate.fit.cycle_rows import CycleRows, rows_from_steps
from blis_replay.validate.fit.minimise import Minimum, losses
from blis_replay.validate.fit.step_form import PRE_QUEUE, StepForm
from blis_replay.validate.metrics.observed import Selection, numbers_from_aggregates, observed_requests
from blis_replay.validate.metrics.resampling import SEED, drawn, interval, row_blocks


def measured_delays(recordings: Sequence[Recording], seed: int = SEED) -> dict[str, CoefficientFit]:
    """``pre_queue`` and ``post_request`` where stamps show them: medians over requests.

    Pre-queue: arrival to queued in journeys less the wait for the engine's turn, else TTFT less queue and
    prefill time of the server.  Post-request: last token in the engine to answer sent, in journeys.
    """
    journeys = pl.concat([recording.lifecycles.frame() for recording in recordings])
    requests = pl.concat([recording.requests.frame(["ttft_us", "queue_us", "prefill_us"]) for recording in recordings])
    after = journeys.filter(pl.col("status") == "ok").select(us=pl.col("departed_us") - pl.col("finished_us"))
    before = requests.select(us=pl.col("ttft_us") - pl.col("queue_us") - pl.col("prefill_us"))
    of_spans, of_ends = (frame["us"].drop_nulls().to_numpy() for frame in (before, after))
    queued_us = np.concatenate([_pre_queue_us(r) for r in recordings])
    queued = "arrival to queued of {:,} journeys, less half a step cycle where others were in the engine"
    stamps = [
        ("post_request", of_ends, "finished to departed of {:,} journeys"),
        ("pre_queue", of_spans, "TTFT - queue - prefill over {:,} server-side requests"),
        ("pre_queue", queued_us, queued),  # better, if there are both
    ]
    return {name: _median(name, delays_us, words, seed) for name, delays_us, words in stamps if len(delays_us)}


def lifecycle_of(measured: Iterable[CoefficientFit]) -> Lifecycle:
    """The delays that were measured."""
    values: dict[str, Any] = {f"{delay.name}_us": delay.value_us for delay in measured}
    return Lifecycle(**values)


def _pre_queue_us(recording: Recording) -> Floats:
    """float64[journeys with two tokens or more]: us from arrival until the engine could have taken it in.

    A busy engine takes requests in, and stamps them as queued, between two steps: half a cycle after they reached
    it on average, which the simulator's own loop adds again.  The cycle is the mean gap of the request's own tokens.
    """
    stamps = ("arrived_us", "queued_us", "first_token_us", "finished_us")
    journeys = recording.lifecycles.frame().filter((pl.col("status") == "ok") & (pl.col("output_tokens") > 1))
    stamped = journeys.drop_nulls(stamps)
    arrived, queued, first, finished = (stamped[name].to_numpy() for name in stamps)
    cycle_us = (finished - first) / (stamped["output_tokens"].to_numpy() - 1)
    begun_us, e2e_us = recording.requests.select("arrival_us", "e2e_us").drop_nulls().to_numpy().T
    served = [np.searchsorted(np.sort(at_us), queued, side="right") for at_us in (begun_us, begun_us + e2e_us)]
    others = served[0] - served[1] > 1
    return np.asarray(queued - arrived - np.where(others, cycle_us / 2, 0.0), np.float64)


def _median(name: str, delays_us: Floats, words: str, seed: int) -> CoefficientFit:
    median_us = float(np.median(delays_us))
    # A median moves by the share of delays above it: that is what has to be alike in neighbours.
    blocks = row_blocks(np.zeros(len(delays_us), np.int64), [np.sign(delays_us - median_us)])
    bounds = interval(drawn(lambda rows: float(np.median(delays_us[rows])), blocks, seed))
    value_us, low_us, high_us = (max(value, 0.0) for value in (median_us, *bounds))
    return CoefficientFit(name, value_us, low_us, high_us, "measured", f"median of {words.format(len(delays_us))}")


# The unit of residuals of each metric, as a fraction: the largest error wanted of a window.
SCALE = {"cycle": 0.01, "e2e": 0.01, "ttft": 0.03}

# Requests of a window, whose mean latencies are one row.
_WINDOW = 50
# A short run has about this many windows, each with fewer requests.
_WINDOWS = 50
# First requests of a run whose prompts are found in a prefix cache: only they find it cold and show what prefill costs.
# They are in shorter windows.  Elsewhere all windows are alike, or the start of a run would count five times as much.
_COLD_REQUESTS = 200
_COLD_WINDOW = 10  # requests


@dataclass(frozen=True)
class CycleEvidence:
    """Step cycles; ``stratum``: int64[rows], the load stage."""

    metrics: ClassVar = ("cycle",)
    rows: CycleRows
    stratum: Int64s

    @property
    def decodes(self) -> Floats:
        """float64[rows]: mean number of decodes."""
        return self.rows.batch[:, 2]

    def residuals(self, form: StepForm, measured: Lifecycle, vector: Floats) -> Floats:
        """float64[rows]: fitted over observed less one, in units of ``SCALE``."""
        rows = self.rows
        return (form.cycle_us(rows.batch, rows.mixed_share, vector) / rows.cycle_us - 1) / SCALE["cycle"]


@dataclass(frozen=True)
class LatencyEvidence:
    """Client latencies of a recording, by windows of its requests; or load levels, each a window.

    ``plans``: the requests up to the last that can matter; one for each load level.  ``window``: int64[requests], the
    window of each request of all plans, -1 for one that is not judged.  ``observed_us``: float64[2, windows], mean E2E
    and TTFT.  ``decodes``: float64[windows], mean number of requests in flight.  ``stratum``: int64[windows], equal
    where windows differ by chance only: of one load stage, of a cold prefix cache or a warm one.  ``edges_us``:
    int64[windows + 1], where a server counted latencies: E2E in the window in which a request ended, TTFT in that of
    its first token, whatever ``window`` says.
    """

    metrics: ClassVar = ("e2e", "ttft")
    plans: tuple[ReplayPlan, ...]
    window: Int64s
    observed_us: Floats
    decodes: Floats
    stratum: Int64s
    of_levels: bool = False
    edges_us: Int64s | None = None

    def residuals(self, form: StepForm, measured: Lifecycle, vector: Floats) -> Floats:
        """float64[2 * windows]: simulated over observed mean less one, E2E then TTFT, in units of ``SCALE``."""
        latency, lifecycle = form.latency(vector), form.lifecycle(vector, measured)
        results = [p.served(p.stalls.on(latency) if p.stalls else latency, lifecycle) for p in self.plans]
        e2e_us, ttft_us = (np.concatenate([getattr(r, name) for r in results]) for name in ("e2e_us", "ttft_us"))
        if self.edges_us is None:
            means = window_means(self.window, e2e_us, ttft_us)
        else:
            arrival_us = np.concatenate([plan.trace.arrival_us for plan in self.plans])
            means = counted_means(self.edges_us, arrival_us, e2e_us, ttft_us)
        scale = np.array([[SCALE["e2e"]], [SCALE["ttft"]]])
        # A run that overflows its server gives unlimited latencies; all such runs are equally wrong.
        return np.asarray(np.clip((means / self.observed_us - 1) / scale, -1e4, 1e4), np.float64).reshape(-1)


@dataclass(frozen=True)
class Gathered:
    """The evidence in a share of the runs: cycles and latencies, some of either or none.

    Rows are residuals: those of a part follow one another by metric, and of a metric by window.
    """

    cycles: tuple[CycleEvidence, ...]
    latencies: tuple[LatencyEvidence, ...]

    @property
    def parts(self) -> tuple[CycleEvidence | LatencyEvidence, ...]:
        return (*self.cycles, *self.latencies)

    @property
    def windows(self) -> int:
        return sum(len(part.decodes) for part in self.parts)

    def residuals(self, form: StepForm, delays: Lifecycle, vector: Floats) -> Floats:
        """float64[rows] of all parts, one after the other."""
        return np.concatenate([part.residuals(form, delays, vector) for part in self.parts])

    def with_scheduling(self, asynchronous: bool) -> Gathered:
        """The same for engines of this scheduling mode."""

        def served(plan: ReplayPlan) -> ReplayPlan:
            return replace(plan, engine=replace(plan.engine, async_scheduling=asynchronous))

        parts = (replace(part, plans=tuple(map(served, part.plans))) for part in self.latencies)
        return replace(self, latencies=tuple(parts))

    def kinds(self) -> Int64s:
        """int64[rows]: the metric of each, by its place in ``SCALE``."""
        place = {metric: i for i, metric in enumerate(SCALE)}
        return np.concatenate([np.repeat([place[m] for m in part.metrics], len(part.decodes)) for part in self.parts])

    def strata(self) -> Int64s:
        """int64[groups]: a number for each part and stratum of it."""
        own = [np.stack([np.full(len(part.stratum), i), part.stratum]) for i, part in enumerate(self.parts)]
        return np.unique(np.hstack(own), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def groups(self) -> Int64s:
        """int64[rows]: rows of one window of one part have one number."""
        numbers = np.split(np.arange(self.windows), np.cumsum([len(part.decodes) for part in self.parts])[:-1])
        return np.concatenate([np.tile(of, len(part.metrics)) for of, part in zip(numbers, self.parts, strict=True)])


def gather(
    recordings: Sequence[Recording], window: tuple[float, float], *, steps: bool, latencies: bool, levels: bool
) -> Gathered:
    """The evidence in a share of the runs, by time: step records, latencies of requests, and load levels."""
    single = [recording for recording in recordings if not is_load_level(recording)]
    cycles = [cycle_evidence(recording, window) for recording in single] if steps else []
    parts = [latency_evidence(recording, window) for recording in single] if latencies else []
    summed_up = [r for r in recordings if is_load_level(r)] if latencies and levels else []
    whole = [recording for recording in summed_up if not counted_windows(recording)]
    parts += [window_evidence(recording) for recording in summed_up if counted_windows(recording)]
    parts += [level_evidence(whole)] if whole else []
    return Gathered(tuple(c for c in cycles if c is not None), tuple(p for p in parts if p is not None))


def window_means(window: Int64s, e2e_us: Int64s, ttft_us: Int64s) -> Floats:
    """float64[2, windows]: mean E2E and TTFT of the requests of each window."""
    judged = window >= 0
    if not judged.all():
        window, e2e_us, ttft_us = window[judged], e2e_us[judged], ttft_us[judged]
    count = np.bincount(window)
    return np.stack([np.bincount(window, values) / count for values in (e2e_us, ttft_us)])


def counted_means(edges_us: Int64s, arrival_us: Int64s, e2e_us: Int64s, ttft_us: Int64s) -> Floats:
    """float64[2, windows]: mean E2E of what ended in each window, mean TTFT of what began; infinite of nothing."""
    means = np.full((2, len(edges_us) - 1), np.inf)
    for row, values in zip(means, (e2e_us, ttft_us), strict=True):
        at = np.searchsorted(edges_us, arrival_us + values, side="right") - 1
        some = (at >= 0) & (at < len(row))
        count, total = (np.bincount(at[some], weights, len(row)) for weights in (None, values[some]))
        np.divide(total, count, out=row, where=count > 0)
    return means


def cycle_evidence(recording: Recording, window: tuple[float, float]) -> CycleEvidence | None:
    """Step cycles of a share of the run, or None."""
    rows = rows_from_steps(recording, window) if recording.steps.height > 1 else None
    if rows is None or not len(rows.cycle_us):
        return None
    requests = recording.requests
    latest = np.maximum(np.searchsorted(requests["arrival_us"].to_numpy(), rows.start_us, side="right") - 1, 0)
    stage = requests["stage"].fill_null(-1).to_numpy()[latest]
    return CycleEvidence(rows, stage.astype(np.int64))


def latency_evidence(recording: Recording, window: tuple[float, float]) -> LatencyEvidence | None:
    """Latencies of the requests that arrived in a share of the run, or None.

    Raises ``ReplayError`` as ``plan_replay`` does.
    """
    requests = recording.requests
    timed = pl.all_horizontal(pl.col("status") == "ok", pl.col("ttft_us", "e2e_us", "output_tokens") > 0)
    judged = requests.select(timed.fill_null(False)).to_series().to_numpy() & Selection(window=window).of(requests)
    if not judged.any():
        return None
    e2e_us, ttft_us = (requests[name].fill_null(0).to_numpy() for name in ("e2e_us", "ttft_us"))
    arrival_us = requests["arrival_us"].to_numpy()
    ended_us = arrival_us + e2e_us
    # Requests that arrive while the last ones are served slow them down.
    last = int(np.flatnonzero(judged)[-1])
    count = max(int(np.searchsorted(arrival_us, int(ended_us[judged].max()))), last + 1)
    plan = plan_replay(with_lengths(recording), ReplayMode())
    finds_prompts = plan.trace.block_keys is not None or (plan.trace.prefill_tokens < plan.trace.prompt_tokens).any()
    cold = _COLD_REQUESTS if finds_prompts else 0
    size = _WINDOW if cold else min(max(len(judged) // _WINDOWS, _COLD_WINDOW), _WINDOW)
    places = np.flatnonzero(judged)
    raw = np.where(places < cold, places // _COLD_WINDOW, cold // _COLD_WINDOW + (places - cold) // size)
    _windows, begins, of_judged = np.unique(raw, return_index=True, return_inverse=True)
    numbers = np.full(count, -1, np.int64)
    numbers[places] = of_judged
    in_flight = np.arange(count) - np.searchsorted(np.sort(ended_us[:count]), arrival_us[:count])
    first = places[begins]
    stage = requests["stage"].fill_null(-1).to_numpy()[first].astype(np.int64)
    some = slice(count)
    answered = None if plan.answered is None else plan.answered.part(some)
    plan = replace(plan, trace=plan.trace.part(some), answered=answered, stalls=cold_start_of(recording))
    return LatencyEvidence(
        (plan,),
        numbers,
        observed_us=window_means(numbers, e2e_us[:count], ttft_us[:count]),
        decodes=window_means(numbers, in_flight, in_flight)[0],
        stratum=2 * stage + (first < cold),
    )


def known_architecture(recording: Recording) -> Architecture | None:
    """The published architecture of a recording's model, if it is one of those that ship."""
    return architecture_named(model_of(recording))


def cold_start_of(recording: Recording) -> Stalls | None:
    """The cold start that the latencies of a recording show, which no coefficient of a step stands for.

    None for a mixture of experts: its kernels are compiled one by one, and a coefficient says how long that takes.
    """
    architecture = known_architecture(recording)
    if architecture is not None and architecture.experts:
        return None
    return cold_start(recording.requests.frame(["arrival_us", "ttft_us", "status"]).filter(pl.col("status") == "ok"))


def is_load_level(recording: Recording) -> bool:
    """Whether all that is recorded of its latencies is a summary."""
    return recording.is_summed_up and not observed_requests(recording).any()


@dataclass(frozen=True)
class LoadLevel:
    """A load level: requests of its mean lengths (``plan``), its statistics in us, and mean lengths of the requests.

    ``stage``: the load stage that it is, of a recording with several; None for a whole recording.
    """

    plan: ReplayPlan
    numbers: Mapping[str, Mapping[str, float]]
    prompt_tokens: float
    output_tokens: float
    stage: int | None = None

    @property
    def cycle_us(self) -> float:
        """Mean step cycle: the mean gap between tokens."""
        return self.numbers["itl"]["mean"]

    @property
    def begun(self) -> float:
        """Requests that begin in a mean step cycle: by Little's law, or at the rate."""
        loop, arrival_us = self.plan.mode.loop, self.plan.trace.arrival_us
        if loop is not None:
            return self.cycle_us * loop.concurrency / self.numbers["e2e"]["mean"]
        if self.stage is not None:
            return self.cycle_us * self.plan.recording.stages[self.stage].rate_per_s / 1e6
        return self.cycle_us * len(arrival_us) / max(int(arrival_us[-1]), 1)

    @property
    def batch(self) -> Floats:
        """float64[4]: 1, prefill, decode and context tokens of its mean step."""
        decodes = self.begun * (self.output_tokens - 1)
        each = attended_by(self.plan.engine.kv_cache_groups, self.prompt_tokens + self.output_tokens / 2 - 1, 1)
        return np.array([1.0, self.begun * self.prompt_tokens, decodes, decodes * float(each)])


def load_level(
    recording: Recording, scheduling: Literal["recorded", "asynchronous", "synchronous"] = "recorded"
) -> LoadLevel:
    """The level of a recording that ``is_load_level``.

    Without a mean E2E it is the mean TTFT and the mean TPOT of as many gaps as a mean output has.  Raises
    ``ValidateError`` without either, or without a mean TTFT, ``ReplayError`` where no requests can be made of it.
    """
    plan = plan_replay(recording, ReplayMode(scheduling=scheduling))
    numbers = _known(plan.recording, None)
    prompt, output = float(plan.trace.prompt_tokens.mean()), float(plan.trace.output_tokens.mean())
    tpot_us = published(recording.aggregates, -1, "tpot_reported", "mean")
    if "mean" in numbers["ttft"] and published(recording.aggregates, -1, "e2e", "mean") is None and tpot_us is not None:
        numbers["e2e"]["mean"] = numbers["ttft"]["mean"] + tpot_us * (output - 1)
        numbers["itl"]["mean"] = tpot_us
    lacks = [metric.upper() for metric in ("ttft", "e2e") if "mean" not in numbers[metric]]
    if lacks or not numbers["itl"].get("mean", 0.0) > 0:
        raise ValidateError(
            f"{recording.alias}: its summary has no mean {' and '.join(lacks) or 'gap between tokens'}, so delays "
            "cannot be told from steps; ingest mean TTFT and TPOT or E2E, or leave this level out"
        )
    return LoadLevel(plan, numbers, prompt, output)


def _known(recording: Recording, stage: int | None) -> dict[str, dict[str, float]]:
    """What a summary says of a stage or of all, us, by metric and statistic."""
    return {
        metric: {name: number.value_us for name, number in of.items() if number.value_us is not None}
        for metric, of in numbers_from_aggregates(recording, stage).items()
    }


def level_evidence(recordings: Sequence[Recording]) -> LatencyEvidence:
    """Load levels as evidence, a window each; raises as ``load_level``.

    Any is as good as another for drawing them again: no time says which were neighbours.
    """
    levels = [load_level(recording) for recording in recordings]
    window = np.repeat(np.arange(len(levels)), [len(level.plan.trace) for level in levels])
    observed_us = np.array([[level.numbers[name]["mean"] for level in levels] for name in ("e2e", "ttft")])
    decodes = np.array([level.batch[2] for level in levels])
    plans, alike = tuple(level.plan for level in levels), np.zeros(len(levels), np.int64)
    return LatencyEvidence(plans, window, observed_us, decodes, alike, of_levels=True)


# Requests of a window of counters, at the least: a mean of fewer says more of their lengths than of the server.
_COUNTED = 20
# Where counters tell arrivals to a second or so, the mean of some draws of them is what is fitted; of many requests,
# that come as near to it by themselves, fewer.
_DRAWS, _DRAWN_REQUESTS = 8, 2_400


def counted_windows(recording: Recording) -> list[int]:
    """Windows in which a server counted what ended: the stages of a range of ``/metrics``."""
    ended = (pl.col("metric") == "requests") & (pl.col("statistic") == ENDED) & (pl.col("stage") >= 0)
    return recording.aggregates.filter(ended)["stage"].to_list()


def window_evidence(recording: Recording) -> LatencyEvidence:
    """A range of counters as evidence: draws of its arrivals, in windows of ``_COUNTED`` requests or more.

    What was in flight when the range began is unknown, so the first of them is left out.  Raises as ``load_level``.
    """
    plan = load_level(recording).plan
    numbers = recording.aggregates.pivot("statistic", index=("stage", "metric"), values="value")
    by = {(stage, metric): row for stage, metric, *row in numbers.select("stage", "metric", ENDED, "mean").iter_rows()}
    edges_us, means, decodes, held = [0], [], [], np.zeros((2, 2))
    end_us = 0
    for stage in recording.stages:
        end_us += stage.duration_us
        count = by[stage.stage, "requests"][0]
        for row, metric in zip(held, ("e2e", "ttft"), strict=True):
            of = by.get((stage.stage, metric))
            if of is not None and of[1] is not None:
                row += (count * of[1], count)
        if held[:, 1].min() >= _COUNTED:
            means.append(held[:, 0] / held[:, 1])
            # Little's law.
            decodes.append(held[0, 0] / (end_us - edges_us[-1]))
            edges_us.append(end_us)
            held = np.zeros((2, 2))
    edges, observed_us = np.array(edges_us[1:], np.int64), np.array(means[1:]).reshape(-1, 2).T
    alike, unused = np.zeros(len(means[1:]), np.int64), np.full(len(plan.trace), -1)
    draws = range(max(min(_DRAWS, _DRAWN_REQUESTS // len(plan.trace)), 1))
    traces = (replace(plan.trace, arrival_us=drawn_arrivals(plan.recording, draw)) for draw in draws)
    plans = tuple(replace(plan, trace=trace) for trace in traces)
    return LatencyEvidence(plans, unused, observed_us, np.array(decodes[1:]), alike, of_levels=True, edges_us=edges)


def _levels(recordings: Sequence[Recording]) -> list[LoadLevel]:
    """The levels of recordings: those whose windows were counted have one for each."""
    levels = []
    for recording in recordings:
        whole, windows = load_level(recording), counted_windows(recording)
        if not windows:
            levels.append(whole)
        for stage in windows:
            requests = whole.plan.recording.requests.where("stage = $stage", stage=stage)
            prompt, output = (requests.select(name).to_numpy().mean() for name in ("prompt_tokens", "output_tokens"))
            numbers = _known(whole.plan.recording, stage)
            if "mean" in numbers["e2e"] and "mean" in numbers["ttft"] and numbers["itl"].get("mean", 0.0) > 0:
                levels.append(LoadLevel(whole.plan, numbers, float(prompt), float(output), stage))
    return levels


def rows_from_levels(recordings: Sequence[Recording]) -> CycleRows:
    """A row of mean batch and cycle for each load level; raises as ``load_level``."""
    levels = _levels(recordings)
    batch, cycle_us = np.array([level.batch for level in levels]), np.array([level.cycle_us for level in levels])
    chunks = np.array([math.ceil(v.prompt_tokens / v.plan.engine.max_num_batched_tokens) for v in levels])
    mixed_share = np.minimum(chunks * [level.begun for level in levels], 1.0)
    return CycleRows(batch, cycle_us, context_known=True, mixed_share=mixed_share)


def row_of_first_token(recordings: Sequence[Recording]) -> CycleRows:
    """The step of a prefill, by the mean TTFT of the level with the fewest requests, where it waits for few others.

    In the mean steps of levels of one shape prefills, decodes and context are in proportion: this tells them apart.
    """
    level = min(_levels(recordings), key=lambda level: level.batch[2])
    chunks = math.ceil(level.prompt_tokens / level.plan.engine.max_num_batched_tokens)
    batch = level.batch[None].copy()
    batch[0, 1] = level.prompt_tokens / chunks
    return CycleRows(batch, np.array([level.numbers["ttft"]["mean"] / chunks]), True, mixed_share=np.ones(1))


def with_lengths(recording: Recording) -> Recording:
    """The recording, with the median output length for the few succeeded requests whose length is unknown.

    They load the server, but are not judged.
    """
    requests = recording.requests
    unknown = (pl.col("status") == "ok") & pl.col("output_tokens").is_null()
    if not requests.select(unknown.any()).item():
        return recording
    median = pl.col("output_tokens").median().round().cast(pl.Int64)
    filled = pl.when(unknown).then(median).otherwise(pl.col("output_tokens")).alias("output_tokens")
    return replace(recording, requests=rows_of(requests.frame().with_columns(filled)))


# Share of resamples that a scheduling mode has to win to be the one: an interval of 95 %, on one side.
_SURE_FROM = 0.975


@dataclass(frozen=True)
class SchedulingEvidence:
    """Fits under asynchronous and under synchronous scheduling, compared.

    ``configured``: the mode in the recording, and its source.  ``cost``: mean robust cost of a window, asynchronous and
    synchronous; ``pre_queue_us``: the delays that come out.  ``asynchronous_share``: of resamples of the windows, those
    in which asynchronous scheduling fits better.
    """

    configured: Scheduling
    configured_source: str
    cost: tuple[float, float]
    pre_queue_us: tuple[float, float]
    asynchronous_share: float

    @property
    def told(self) -> Told:
        """The mode that the latencies identify, if they do."""
        if 1 - _SURE_FROM < self.asynchronous_share < _SURE_FROM:
            return "not told apart"
        return "asynchronous" if self.asynchronous_share >= _SURE_FROM else "synchronous"

    @property
    def used(self) -> Scheduling:
        """The mode to fit with: what the recording says; where it says nothing, the one that fits better."""
        if self.configured_source != UNKNOWN or self.cost[0] == self.cost[1]:
            return self.configured
        return "asynchronous" if self.cost[0] < self.cost[1] else "synchronous"

    @property
    def contradicts(self) -> bool:
        """Whether the latencies say otherwise than the recording."""
        return self.told not in ("not told apart", self.configured)

    @property
    def text(self) -> str:
        """The evidence in a sentence."""
        modes = ", ".join(
            f"{mode} {cost:.2f} with a pre-queue delay of {delay_us / 1000:.1f} ms"
            for mode, cost, delay_us in zip(("asynchronous", "synchronous"), self.cost, self.pre_queue_us, strict=True)
        )
        return f"cost of a window: {modes}; asynchronous fits better in {self.asynchronous_share:.0%} of resamples"


def configured_scheduling(recording: Recording) -> tuple[Scheduling, str]:
    """``asynchronous`` or ``synchronous`` as the engine arguments have it, and the source of that argument."""
    setting = recording.engine["async_scheduling"]
    return ("asynchronous" if setting.value else "synchronous"), setting.source


def scheduling_evidence(
    gathered: Gathered, fits: Sequence[Minimum], configured: tuple[Scheduling, str], seed: int
) -> SchedulingEvidence:
    """Compare two fits to what was gathered, the first one under asynchronous scheduling."""
    cost = [np.bincount(gathered.groups(), losses(fit.residuals)) for fit in fits]
    gain = np.asarray(cost[1] - cost[0], np.float64)
    draws = drawn(lambda rows: float(gain[rows].sum()), row_blocks(gathered.strata(), [gain]), seed)
    delays_us = (float(fits[0].vector[PRE_QUEUE]), float(fits[1].vector[PRE_QUEUE]))
    means = (float(cost[0].mean()), float(cost[1].mean()))
    return SchedulingEvidence(*configured, means, delays_us, float(np.mean(draws > 0)))
