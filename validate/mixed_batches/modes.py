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
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.blis.architecture import Architecture
from blis_replay.blis.efficiency import Efficiency
from blis_replay.blis.gpu import gpu_named
from blis_replay.blis.roofline import Mixed, RooflineModel
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.executor_ledger import Progress
from blis_replay.replay.executors import ExecutorName, map_jobs
from blis_replay.replay.release_file import roofline_release
from blis_replay.replay.simulator import model_of
from blis_replay.validate.calibration.physical_fit import known_architecture
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.metrics import LatencySamples
from blis_replay.validate.mixed_batches.sweep_points import LOAD_KINDS, SweepPoint, sweep_points
from blis_replay.validate.observed import observed_requests, samples_of

STUDIED: tuple[Mixed, ...] = ("weighted", "token_proportional", "additive")
REFERENCE: Mixed = "weighted"

# How long a client that sends one request at a time waits between two in a replay: longer than any takes.
_PAUSE_US = 600_000_000
_CONFIDENCE = 0.95

Floats = NDArray[np.float64]
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
    """``points``: a row a point and mode.

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
    executor: ExecutorName = "local",
    workers: int | None = None,
    progress: Progress | None = None,
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
    answers = map_jobs(
        partial(mode_errors, by_slug, models), jobs, executor=executor, workers=workers, progress=progress
    )
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
    simulated_us = _simulated(run, chosen).itl_mean_us
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
    return replace(recording, requests=requests.with_columns(later_us.alias("arrival_us")))


def _observed_of(run: ReplayRun, point: SweepPoint) -> NDArray[np.bool_]:
    chosen = np.zeros(run.recording.requests.height, np.bool_)
    chosen[point.requests] = True
    return chosen & observed_requests(run.recording) & run.simulated.completed


def _simulated(run: ReplayRun, chosen: NDArray[np.bool_]) -> LatencySamples:
    return LatencySamples(run.ttft_us[chosen], run.e2e_us[chosen], run.simulated.output_tokens[chosen])


def _point_errors(run: ReplayRun, point: SweepPoint) -> dict[str, object] | None:
    chosen = _observed_of(run, point)
    if not chosen.any():
        return None
    observed, simulated = _means(samples_of(run.recording, chosen)), _means(_simulated(run, chosen))
    errors = {name: _error(simulated[name], value) for name, value in observed.items()}
    return {"requests": int(chosen.sum()), "mixed_share": _mixed_share(run, chosen), **errors}


def _error(simulated: float | None, observed: float | None) -> float | None:
    return simulated / observed - 1 if simulated is not None and observed else None


def _means(samples: LatencySamples) -> dict[str, float | None]:
    return {
        "e2e": float(samples.e2e_us.mean()),
        "ttft": float(samples.ttft_us.mean()),
        "itl": samples.itl_mean_us,
    }


def _mixed_share(run: ReplayRun, chosen: NDArray[np.bool_]) -> float:
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
    from scipy.stats import t  # heavy, and only studies need it

    if np.ptp(values) == 0 and not values.any():
        return 0.0, 0.0  # no change at all, which is no matter of chance
    if len(values) < 2:
        return -np.inf, np.inf
    half = float(t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return float(values.mean()) - half, float(values.mean()) + half
