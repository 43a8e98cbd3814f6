"""What a comparison can have on either side: a recording, a replay of one, or a stored run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.blis.release import bundled_releases
from blis_replay.ingest.errors import UnknownExperimentError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import RunRecord, Store, list_runs, read_run
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.errors import UnknownNameError
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import Simulator
from blis_replay.validate.attribution.segments import Way, way_of_recording, way_of_run
from blis_replay.validate.comparison.compare import simulated_samples, simulated_statistics
from blis_replay.validate.comparison.inputs import Inputs, inputs_of_recording, inputs_of_run, inputs_of_stored_run
from blis_replay.validate.comparison.resampling import numbers_of
from blis_replay.validate.comparison.unusable import unusable_cells
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.experiment import StoredExperiment, find_experiment, read_experiment
from blis_replay.validate.metrics import METRICS, STATISTICS, LatencySamples
from blis_replay.validate.observed import (
    Selection,
    cells_from_aggregates,
    cells_from_requests,
    has_gaps,
    observed_requests,
    samples_of,
)

Numbers = dict[str, dict[str, float]]
SIMULATORS = ("embedded", "blis")
RUN_ID_LENGTH = 12
_SHORTEST_ID = 6


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    ``what``: in words.  ``requests``: bool[n], which requests of ``recording`` have latencies
    here, and ``samples`` theirs; both None where only aggregates are known.  ``numbers``: us by
    metric and statistic; ``missing``: why one is absent.  ``recount``: the numbers over fewer
    requests (bool[n]), where both sides must have them.  ``run``: the replay, if it is one.
    ``way``: when each request reached what, where single requests are known.
    """

    name: str
    what: str
    recording: Recording
    requests: NDArray[np.bool_] | None
    samples: LatencySamples | None
    numbers: Numbers
    missing: dict[tuple[str, str], str]
    inputs: Inputs
    recount: Callable[[NDArray[np.bool_]], Numbers] | None = None
    run: ReplayRun | None = None
    way: Way | None = None


@dataclass(frozen=True)
class Choice:
    """What a name alone does not say: the experiment of a release or a simulator, and the simulator itself."""

    experiment: str | None
    simulator: Callable[[str], Simulator]


def side_of(store: Store, name: str, choice: Choice) -> Side:
    """The side that a name stands for.

    A simulator (``embedded``, ``blis``), ``EXPERIMENT@RELEASE``, a release (by name or
    ``.yaml`` file), an experiment, or the beginning of a stored run's id.  Raises
    ``UnknownNameError`` for what is none of these or lacks its experiment, and as
    ``replay`` and ``load_release`` do.
    """
    if name in SIMULATORS:
        return _replayed(store, name, _experiment(choice, f"the simulator {name}"), choice.simulator(name))
    if "@" in name:
        experiment, _, release = name.partition("@")
        return _replayed(store, name, experiment, None, release)
    if name in bundled_releases() or name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return _replayed(store, name, _experiment(choice, f"the release {name}"), None, name)
    if run := _stored_run(store, name):
        return _of_stored_run(store, name, run)
    try:
        return _of_recording(name, read_experiment(store, find_experiment(store, name)))
    except UnknownExperimentError as error:
        raise UnknownNameError(
            f"{name} is no simulator ({', '.join(SIMULATORS)}), no EXPERIMENT@RELEASE, no release and no stored run "
            f"(list them with --runs); {error}"
        ) from None


def _experiment(choice: Choice, what: str) -> str:
    if choice.experiment is None:
        raise UnknownNameError(f"{what} alone is nothing to compare; name an experiment with --experiment")
    return choice.experiment


def _of_recording(name: str, experiment: StoredExperiment) -> Side:
    recording = experiment.recording
    chosen = observed_requests(recording)
    if not chosen.any() and not recording.aggregates.height:
        raise NothingToJudgeError(f"{recording.alias}: the recording has no latencies to compare")
    numbers, missing = _observed(experiment, chosen)
    return Side(
        name=name,
        what=f"recording {recording.alias}",
        recording=recording,
        requests=chosen if chosen.any() else None,
        samples=samples_of(recording, chosen) if chosen.any() else None,
        numbers=numbers,
        missing=missing,
        inputs=inputs_of_recording(recording),
        recount=None if not chosen.any() else lambda fewer: _observed(experiment, fewer)[0],
        way=way_of_recording(recording) if chosen.any() else None,
    )


def _observed(experiment: StoredExperiment, chosen: NDArray[np.bool_]) -> tuple[Numbers, dict[tuple[str, str], str]]:
    recording, gaps = experiment.recording, experiment.token_gaps
    if chosen.any():
        cells = cells_from_requests(recording, samples_of(recording, chosen), Selection(), gaps)
    else:
        cells = cells_from_aggregates(recording, None)
    forbidden = unusable_cells(experiment.findings, token_times=bool(chosen.any()) and has_gaps(gaps))
    numbers: Numbers = {metric: {} for metric in METRICS}
    missing = {}
    for metric, statistic in ((m, s) for m in METRICS for s in STATISTICS):
        cell = cells[metric][statistic]
        if (finding := forbidden.get((metric, statistic))) is not None:
            missing[metric, statistic] = f"unusable: {finding.check}: {finding.message}"
        elif cell.value_us is None:
            missing[metric, statistic] = cell.reason or "not recorded"
        else:
            numbers[metric][statistic] = cell.value_us
    return numbers, missing


def _replayed(store: Store, name: str, experiment: str, simulator: Simulator | None, release: str = "") -> Side:
    slug = find_experiment(store, experiment)
    recording = read_experiment(store, slug).recording
    run = replay(recording, simulator.release if simulator else load_release(release), simulator=simulator)
    chosen = run.simulated.completed
    samples = simulated_samples(run, chosen)
    numbers = simulated_statistics(run, samples, chosen)
    return Side(
        name=name,
        what=f"{recording.alias} replayed by {run.simulator} with {run.release.name}",
        recording=recording,
        requests=chosen,
        samples=samples,
        numbers=numbers,
        missing=_absent(numbers, "the simulator reports requests only"),
        inputs=inputs_of_run(run),
        recount=lambda fewer: simulated_statistics(run, simulated_samples(run, fewer), fewer),
        run=run,
        way=way_of_run(run),
    )


def _stored_run(store: Store, name: str) -> RunRecord | None:
    if len(name) < _SHORTEST_ID or set(name) - set("0123456789abcdef"):
        return None
    found = [run for run in list_runs(store) if run.run_key.startswith(name)]
    if len(found) > 1:
        raise UnknownNameError(f"{name} begins the ids of {len(found)} stored runs; give more of it")
    return found[0] if found else None


def _of_stored_run(store: Store, name: str, run: RunRecord) -> Side:
    experiment = read_experiment(store, run.slug)
    requests, _steps, errors = read_run(store, run)
    if run.content_hash != experiment.recording.content_hash:
        raise NothingToJudgeError(f"{name}: the recording was replaced after this run was stored; validate it again")
    chosen = (requests["state"] == "completed").to_numpy()
    samples = _stored_samples(experiment.recording, run, requests, chosen)
    numbers = numbers_of(samples)
    pooled = errors.filter(pl.col("simulated_us").is_not_null() & (pl.col("metric") == "itl"))
    for statistic, value_us in pooled.select("statistic", "simulated_us").iter_rows():
        numbers["itl"].setdefault(statistic, value_us)  # single tokens are not stored with a run
    return Side(
        name=name,
        what=f"{experiment.recording.alias} replayed ({run.replay_mode}) by {run.simulator} with {run.release}, stored",
        recording=experiment.recording,
        requests=chosen,
        samples=samples,
        numbers=numbers,
        missing=_absent(numbers, "not stored with the run"),
        inputs=inputs_of_stored_run(experiment.recording, run),
        way=_stored_way(requests, chosen),
    )


def _stored_way(requests: pl.DataFrame, chosen: NDArray[np.bool_]) -> Way:
    """The client's two latencies: of the loop that takes requests in, a stored run knows nothing."""
    sent_us = np.where(chosen, 0.0, np.nan)
    ttft_us, e2e_us = (requests[name].cast(pl.Float64).fill_null(np.nan).to_numpy() for name in ("ttft_us", "e2e_us"))
    lacks = "queued, scheduled, first token and finished: not told of a stored run; only the two latencies are left"
    return Way(sent_us, None, ttft_us, e2e_us, "a stored run", lacks)


def _stored_samples(
    recording: Recording, run: RunRecord, requests: pl.DataFrame, chosen: NDArray[np.bool_]
) -> LatencySamples:
    column = "output_tokens_reported" if "lengths=re-tokenised" in run.replay_mode else "output_tokens"
    lengths = recording.requests[column].fill_null(0).to_numpy().astype(np.int64)
    kept = requests.filter(pl.Series(chosen))
    return LatencySamples(
        kept["ttft_us"].to_numpy().astype(np.int64), kept["e2e_us"].to_numpy().astype(np.int64), lengths[chosen]
    )


def _absent(numbers: Numbers, why: str) -> dict[tuple[str, str], str]:
    return {(m, s): why for m in METRICS for s in STATISTICS if s not in numbers.get(m, {})}


def runs_json(store: Store, slug: str | None) -> list[dict[str, object]]:
    """The stored runs, each with the id by which it can be compared."""
    return [
        {
            "id": run.run_key[:RUN_ID_LENGTH],
            "slug": run.slug,
            "simulator": run.simulator,
            "coefficients": run.release,
            "replay": run.replay_mode,
        }
        for run in list_runs(store, slug)
    ]
