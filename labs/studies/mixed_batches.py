"""The modes of mixed steps against recorded load sweeps: the roofline's error by point, and what a mode changes.

Each point of a sweep counts once, whatever its number of requests: the absolute relative error of its mean E2E,
TTFT and ITL.  Modes differ by what they change of these, point by point.  Points of one run share its server, so the
interval of a difference is over runs.

A roofline that is slow throughout is off by less where a mode makes mixed steps short.  So the modes can be compared
levelled, too: with that overhead a layer with which the ITL of the synchronous point, where no batch is mixed, is
right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal, Unpack

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.base.document import Text
from blis_replay.blis.latency.datasheets import Architecture, gpu_named
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.replay.simulator import model_of
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.metrics.latency import LatencySamples, relative_error
from blis_replay.validate.metrics.observed import on_both_sides, samples_of, simulated_samples
from blis_replay_labs.silicon.physical_fit import known_architecture
from blis_replay_labs.silicon.roofline import Efficiency, Mixed, RooflineModel, roofline_release
from blis_replay_labs.studies.study import seed_interval

LoadKind = Literal["synchronous", "constant", "throughput"]
LOAD_KINDS: tuple[LoadKind, ...] = ("synchronous", "constant", "throughput")

# Fewer requests are the rest of a point whose spans were lost.
FEWEST_REQUESTS = 10

# Requests that a client sends at once arrive within this of each other.
_AT_ONCE_US = 500_000
# A lost span doubles a gap; what is longer and leaves the server idle is the pause between two points.
_PAUSE_GAPS = 2.5
# Of the requests of a point that are sent one at a time, some are stamped a little before the end of the last one.
_MOST_SYNCHRONOUS = 0.9
_BURST_SHARE = 0.1


@dataclass(frozen=True)
class SweepPoint:
    """A load of a sweep: ``requests``, their places in the recording, int64[n].

    ``rate_per_s``: as they arrived; of a constant load that of its median gap, which lost spans do not change.
    """

    kind: LoadKind
    rate_per_s: float
    requests: Int64s


def sweep_points(recording: Recording) -> tuple[SweepPoint, ...]:
    """The points of a sweep in order of time, without those of fewer than ``FEWEST_REQUESTS`` requests."""
    requests = recording.requests
    arrival_us = requests["arrival_us"].to_numpy()
    duration_us = requests["e2e_us"].fill_null(0).to_numpy()
    if recording.stages:
        stage = requests["stage"].fill_null(-1).to_numpy()
        parts = [np.flatnonzero(stage == known.stage) for known in recording.stages]
    else:
        edges = [0, *_starts(arrival_us, arrival_us + duration_us), len(arrival_us)]
        parts = [np.arange(low, high) for low, high in pairwise(edges)]
    return tuple(_point(part, arrival_us, duration_us) for part in parts if len(part) >= FEWEST_REQUESTS)


def load_kind(arrival_us: Int64s, end_us: Int64s) -> LoadKind:
    """All within a tenth of the time that serving them takes: ``throughput``; one after the other:
    ``synchronous``; else ``constant``.
    """
    if np.ptp(arrival_us) < _BURST_SHARE * (end_us.max() - arrival_us.min()):
        return "throughput"
    alone = arrival_us[1:] >= np.maximum.accumulate(end_us)[:-1]
    return "synchronous" if alone.mean() >= _MOST_SYNCHRONOUS else "constant"


def _point(part: Int64s, arrival_us: Int64s, duration_us: Int64s) -> SweepPoint:
    arrivals = arrival_us[part]
    kind = load_kind(arrivals, arrivals + duration_us[part])
    gap_us = np.median(np.diff(arrivals)) if kind == "constant" else np.ptp(arrivals) / (len(part) - 1)
    return SweepPoint(kind, 1e6 / max(float(gap_us), 1.0), part.astype(np.int64))


def _starts(arrival_us: Int64s, end_us: Int64s) -> list[int]:
    """Places at which a point begins, the first one left out: before and after a burst, and after each pause."""
    burst = _burst(arrival_us)
    first = [burst[0]] if burst and burst[0] > 0 else []
    begin = burst[1] if burst else 0
    starts = [*first, *([begin] if 0 < begin < len(arrival_us) else [])]
    gap_us, served_us = np.diff(arrival_us), np.maximum.accumulate(end_us)
    for i in range(begin + 1, len(arrival_us)):
        # Two gaps tell a constant rate: the third cannot be longer by chance.
        if i - begin < 3 or arrival_us[i] <= served_us[i - 1]:
            continue
        if gap_us[i - 1] > _PAUSE_GAPS * np.median(gap_us[begin : i - 1]):
            starts.append(i)
            begin = i
    return starts


def _burst(arrival_us: Int64s) -> tuple[int, int] | None:
    """The longest run of requests that were sent at once, if it is one."""
    breaks = [0, *(np.flatnonzero(np.diff(arrival_us) > _AT_ONCE_US) + 1).tolist(), len(arrival_us)]
    longest = max(pairwise(breaks), key=lambda run: run[1] - run[0])
    return longest if longest[1] - longest[0] >= FEWEST_REQUESTS else None


STUDIED: tuple[Mixed, ...] = ("weighted", "token_proportional", "additive")
REFERENCE: Mixed = "weighted"

# How long a client that sends one request at a time waits between two in a replay: longer than any takes.
_PAUSE_US = 600_000_000

Verdict = Literal["better", "worse", "inconclusive"]


@dataclass(frozen=True)
class ModeDifference:
    """What a mode changes of the mean absolute error of E2E beside ``REFERENCE``, in fractions: mean over runs.

    ``kind``: of load, ``all`` for all points.  ``low``, ``high``: Student's 95 % interval over runs, infinite for one.
    """

    mode: Mixed
    kind: str
    runs: int
    points: int
    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Whether the mode is ``better`` or ``worse`` than the reference; ``inconclusive`` if either may be."""
        if self.low > 0:
            return "worse"
        return "better" if self.high < 0 else "inconclusive"


@dataclass(frozen=True)
class MixedBatches:
    """``points``: one row per point and mode.

    ``experiment``, ``alias``, ``workload``, ``mode``, ``per_layer_us``, ``point``, ``kind``, ``rate_per_s``,
    ``requests``, ``mixed_share`` (of the steps that ran while it lasted), and ``e2e``, ``ttft``, ``itl``, signed
    errors of the mean in fractions, null where nothing was observed.
    """

    points: pl.DataFrame
    differences: tuple[ModeDifference, ...]


def mixed_batches(
    recordings: Sequence[Recording],
    architectures: Mapping[str, Architecture],
    efficiencies: Mapping[str, Efficiency] | None = None,
    gpu: str | None = None,
    *,
    levelled: bool = False,
    **pool: Unpack[Pool],
) -> MixedBatches:
    """Replay sweeps with the roofline in each of the ``STUDIED`` modes.

    ``efficiencies``: measured tables by slug, smooth curves where there are none; ``gpu``: of recordings that do not
    name theirs; ``levelled``: with the overhead a layer of ``level``.  Raises ``NothingToJudgeError`` if no recording
    has a point, ``ValidateError`` for a model of unknown architecture, ``ReleaseError`` for a GPU without a datasheet.
    """
    by_slug = {recording.slug: recording for recording in recordings}
    models = {
        slug: roofline_of(recording, architectures, gpu, (efficiencies or {}).get(slug))
        for slug, recording in by_slug.items()
    }
    if levelled:
        models = {slug: level(by_slug[slug], model) for slug, model in models.items()}
    jobs = [(slug, mode) for slug in by_slug for mode in STUDIED]
    answers = map_jobs(partial(mode_errors, by_slug, models), jobs, **pool)
    rows = [row for answer in answers for row in answer]
    if not rows:
        raise NothingToJudgeError("none of the recordings has a point of a load sweep; ingest the results of one")
    points = pl.DataFrame(rows, infer_schema_length=None)
    return MixedBatches(points, mode_differences(points))


def roofline_of(
    recording: Recording,
    architectures: Mapping[str, Architecture],
    gpu: str | None = None,
    efficiency: Efficiency | None = None,
) -> RooflineModel:
    """The roofline of what a recording ran on; arguments and errors as of ``mixed_batches``."""
    return RooflineModel(
        known_architecture(architectures, model_of(recording)),
        gpu_named(recording.hardware or gpu),
        recording.tensor_parallelism or 1,
        efficiency=efficiency,
    )


def mode_errors(
    recordings: Mapping[str, Recording], models: Mapping[str, RooflineModel], job: tuple[str, Mixed]
) -> list[dict[str, object]]:
    """The rows of ``MixedBatches.points`` of one recording (by slug) in one mode."""
    slug, mode = job
    recording, latency = recordings[slug], replace(models[slug], mixed=mode)
    points = sweep_points(recording)
    run = _replay(recording, points, latency)
    about: dict[str, object] = {"experiment": slug, "alias": recording.alias, "workload": recording.workload}
    about |= {"mode": mode, "per_layer_us": latency.per_layer_us}
    return [
        about | {"point": i, "kind": point.kind, "rate_per_s": point.rate_per_s} | errors
        for i, point in enumerate(points)
        if (errors := _point_errors(run, point)) is not None
    ]


def level(recording: Recording, model: RooflineModel) -> RooflineModel:
    """The model with the overhead a layer that makes the mean ITL of the synchronous point right, 0 at least.

    As it is if there is no such point, or no second token.
    """
    points = [point for point in sweep_points(recording) if point.kind == "synchronous"]
    if not points:
        return model
    run = _replay(recording, points, model)
    chosen = _observed_of(run, points[0])
    observed_us = samples_of(run.recording, chosen).itl_mean_us
    simulated_us = simulated_samples(run, chosen).itl_mean_us
    if observed_us is None or simulated_us is None:
        return model
    excess_us = (simulated_us - observed_us) * model.tensor_parallelism / model.architecture.layers
    return replace(model, per_layer_us=max(model.per_layer_us - excess_us, 0.0))


def _replay(recording: Recording, points: Sequence[SweepPoint], latency: RooflineModel) -> ReplayRun:
    release = roofline_release(f"roofline-{latency.mixed}", model_of(recording), latency.gpu.name, latency)
    return replay(one_at_a_time(recording, points), release)


def one_at_a_time(recording: Recording, points: Sequence[SweepPoint]) -> Recording:
    """The recording with a long pause before each request of a synchronous point, and before every point.

    A client that waits for an answer sends the next request when it is in.  At recorded arrivals a simulator that
    is slower than the server would serve two at once, which this load never has.
    """
    requests = recording.requests
    pause_us = np.zeros(requests.height, np.int64)
    for point in points:
        pause_us[point.requests if point.kind == "synchronous" else point.requests[:1]] = _PAUSE_US
    later_us = pl.Series(requests["arrival_us"].to_numpy() + np.cumsum(pause_us) - pause_us[0])
    return replace(recording, requests=rows_of(requests.frame().with_columns(later_us.alias("arrival_us"))))


def _observed_of(run: ReplayRun, point: SweepPoint) -> Bools:
    chosen = np.zeros(run.recording.requests.height, np.bool_)
    chosen[point.requests] = True
    return chosen & on_both_sides(run)


def _point_errors(run: ReplayRun, point: SweepPoint) -> dict[str, object] | None:
    chosen = _observed_of(run, point)
    if not chosen.any():
        return None
    observed, simulated = _means(samples_of(run.recording, chosen)), _means(simulated_samples(run, chosen))
    errors = {name: relative_error(value, simulated[name]) for name, value in observed.items()}
    return {"requests": int(chosen.sum()), "mixed_share": _mixed_share(run, chosen), **errors}


def _means(samples: LatencySamples) -> dict[str, float | None]:
    return {
        "e2e": float(samples.e2e_us.mean()),
        "ttft": float(samples.ttft_us.mean()),
        "itl": samples.itl_mean_us,
    }


def _mixed_share(run: ReplayRun, chosen: Bools) -> float:
    """Of the steps from the first arrival to the last token of these requests, those with prefill and decode."""
    arrival_us = run.result.arrival_us[chosen]
    last_us = int((arrival_us + run.e2e_us[chosen]).max())
    steps = run.result.steps
    there = (steps["start_us"] >= int(arrival_us.min())) & (steps["start_us"] < last_us)
    mixed = there & (steps["prefill_tokens"] > 0) & (steps["decode_tokens"] > 0)
    return float(mixed.sum() / max(int(there.sum()), 1))


def mode_differences(points: pl.DataFrame) -> tuple[ModeDifference, ...]:
    """Each mode beside ``REFERENCE``, over all points and by kind of load."""
    found = []
    for mode in STUDIED:
        for kind in ("all", *LOAD_KINDS):
            of_kind = points if kind == "all" else points.filter(pl.col("kind") == kind)
            if mode != REFERENCE and not of_kind.is_empty():
                found.append(_difference(of_kind, mode, kind))
    return tuple(found)


def _difference(points: pl.DataFrame, mode: Mixed, kind: str) -> ModeDifference:
    key = ["experiment", "point"]
    one, other = (points.filter(pl.col("mode") == name).select(*key, pl.col("e2e").abs()) for name in (mode, REFERENCE))
    both = one.join(other, on=key, suffix="_reference").with_columns(pl.col("e2e") - pl.col("e2e_reference"))
    by_run = both.group_by("experiment").agg(pl.col("e2e").mean()).sort("experiment")["e2e"].to_numpy()
    return ModeDifference(mode, kind, len(by_run), both.height, float(by_run.mean()), *_over_runs(by_run))


def _over_runs(values: Floats) -> tuple[float, float]:
    if len(values) < 2 and values.any():
        return -np.inf, np.inf  # one run says nothing of others, unless nothing at all has changed
    return seed_interval(values)[1:]


MEASURES = (
    "e2e_error_percent",
    *(f"{kind}_error_percent" for kind in LOAD_KINDS),
    *(f"{kind}_signed_percent" for kind in LOAD_KINDS),
    "mixed_steps_percent",
    "per_layer_us",
)


@dataclass(frozen=True)
class SweepRun:
    """``gpu``: of recordings that do not name theirs; ``levelled``: see ``level``."""

    mixed: Mixed
    gpu: Text
    levelled: bool = False


def run(described: SweepRun, recordings: Sequence[Recording], place: int) -> Mapping[str, float]:
    """All of ``MEASURES`` by name, of the recording at a place: means over the points of its sweep.

    ``error``: of E2E, absolute; ``signed``: with its sign; nan where the sweep has no such load.
    """
    from blis_replay.blis.latency.datasheets import bundled_architectures

    recording = recordings[place]
    model = roofline_of(recording, bundled_architectures(), described.gpu)
    if described.levelled:
        model = level(recording, model)
    rows = mode_errors({recording.slug: recording}, {recording.slug: model}, (recording.slug, described.mixed))
    errors = np.array([row["e2e"] for row in rows], np.float64)
    kinds = np.array([row["kind"] for row in rows])
    return {
        "e2e_error_percent": _mean(np.abs(errors)),
        **{f"{kind}_error_percent": _mean(np.abs(errors[kinds == kind])) for kind in LOAD_KINDS},
        **{f"{kind}_signed_percent": _mean(errors[kinds == kind]) for kind in LOAD_KINDS},
        "mixed_steps_percent": _mean(np.array([row["mixed_share"] for row in rows], np.float64)),
        "per_layer_us": model.per_layer_us,
    }


def _mean(fractions: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return 100 * float(fractions.mean()) if len(fractions) else float("nan")
