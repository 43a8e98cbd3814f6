"""Does a model of the step time transfer?  Leave one model or one workload out, fit to the rest, try it on that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, Unpack

import numpy as np

from blis_replay.base.errors import ExperimentError, NothingToJudgeError, ReleaseError, ValidateError, faults_named
from blis_replay.blis.latency.datasheets import Architecture, Gpus, gpu_named
from blis_replay.blis.latency.models import Lifecycle
from blis_replay.blis.latency.physical import PhysicalModel
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.recording import ARRIVALS, PUBLISHED, GroundTruth, Recording
from blis_replay.ingest.store import Store, list_experiments, read_stored
from blis_replay.replay.driver import replay
from blis_replay.replay.executors import Pool, map_jobs
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.experiment import experiment_row, find_experiment
from blis_replay.validate.fit.calibrate import DEFAULT_SPLIT, Options, calibrate, fitted_release
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR
from blis_replay.validate.fit.step_errors import step_cycles, step_errors
from blis_replay.validate.metrics.observed import Observed, pooled_gaps
from blis_replay_labs.silicon.physical_fit import (
    PhysicalFit,
    fit_physical,
    known_architecture,
    lacking_ttft_us,
    physical_rows,
)


def calibrate_physical(
    training: Sequence[Recording],
    targets: Sequence[Recording],
    architectures: Mapping[str, Architecture],
    name: str,
    gpus: Gpus | None = None,
) -> tuple[CoefficientRelease, PhysicalFit]:
    """Fit to ``training`` and make a release that serves the models of ``training`` and ``targets``.

    Of a target nothing enters but its model, hardware and tensor parallelism.  The delay before
    the queue is one for all: what the replayed training recordings lack in TTFT.  Raises
    ``ValidateError`` for a model of unknown architecture or nothing to fit to, ``ReleaseError``
    for hardware without a datasheet among ``gpus`` (``gpu_named``).
    """
    rows = [physical_rows(r, known_architecture(architectures, model_of(r)), gpus) for r in training]
    fit = fit_physical([part for part in rows if part is not None])
    release = _release(name, fit, [*training, *targets], architectures, Lifecycle(), gpus)
    measured = [recording for recording, part in zip(training, rows, strict=True) if part is not None]
    delays_us = {recording.slug: lacking_ttft_us(recording, release) for recording in measured}
    delay_us = float(max(round(_mean_over_models(measured, delays_us)), 0))
    source = (
        f"what {len(measured)} replayed training recordings lack in TTFT, median of a recording, mean over models "
        f"({min(delays_us.values()) / 1000:.1f} to {max(delays_us.values()) / 1000:.1f} ms)"
    )
    lifecycle = Lifecycle(pre_queue_us=delay_us, pre_queue_source=source)
    return _release(name, fit, [*training, *targets], architectures, lifecycle, gpus), fit


def _mean_over_models(recordings: Sequence[Recording], values: Mapping[str, float]) -> float:
    by_model: dict[str, list[float]] = {}
    for recording in recordings:
        by_model.setdefault(model_of(recording), []).append(values[recording.slug])
    return float(np.mean([np.mean(of_model) for of_model in by_model.values()]))


def _release(
    name: str,
    fit: PhysicalFit,
    recordings: Sequence[Recording],
    architectures: Mapping[str, Architecture],
    lifecycle: Lifecycle,
    gpus: Gpus | None,
) -> CoefficientRelease:
    entries: dict[tuple[str, int, str], ModelEntry] = {}
    for recording in recordings:
        model, tensor_parallelism = model_of(recording), recording.tensor_parallelism or 1
        gpu = gpu_named(recording.hardware, gpus)
        latency = PhysicalModel(known_architecture(architectures, model), gpu, fit.coefficients, tensor_parallelism)
        entry = ModelEntry(model, tensor_parallelism, latency, lifecycle)
        entries[model, tensor_parallelism, gpu.name] = entry
    summary = f"Shared physical coefficients, fitted over {', '.join(sorted({part.model for part in fit.rows}))}."
    models = [entries[key] for key in sorted(entries)]
    source = "fitted by blis-replay generalize"
    return fitted_release(name, summary, source, recordings, models, [part.fitted_on for part in fit.rows])


LeaveOut = Literal["model", "workload"]
ModelForm = Literal["physical", "per-model"]

EVERYTHING = "all"


def trains(case: Observed) -> bool:
    """Whether coefficients may be fitted to it: overloaded runs and published aggregates are only predicted."""
    return not case.overloaded and case.recording.ground_truth != PUBLISHED


@dataclass(frozen=True)
class Fold:
    """What is left out, the cases to fit to, and those to predict.

    ``left_out`` None: nothing, every case is predicted by a fit that may have seen it.  A fold
    that would train on what it tests cannot be made: ``ValueError``.
    """

    left_out: str | None
    by: LeaveOut
    train: tuple[Observed, ...]
    test: tuple[Observed, ...]

    def __post_init__(self) -> None:
        if self.left_out is None:
            return
        seen = {key_of(case, self.by) for case in self.train}
        if self.left_out in seen or {key_of(case, self.by) for case in self.test} != {self.left_out}:
            raise ValueError(f"a fold without {self.left_out} trains on {sorted(seen)}")

    @property
    def name(self) -> str:
        """The last part of what is left out, or ``all``."""
        return EVERYTHING if self.left_out is None else self.left_out.split("/")[-1]


@dataclass(frozen=True)
class Score:
    """Signed errors of one experiment as fractions, ``errors[metric][statistic]``; None where nothing was observed.

    ``step_mape``: of single step cycles, None without consecutive step records.  ``problem``: why it could
    not be predicted, with no errors then.
    """

    slug: str
    alias: str
    ground_truth: GroundTruth
    overloaded: bool
    errors: Mapping[str, Mapping[str, float | None]]
    step_mape: float | None
    problem: str | None = None


@dataclass(frozen=True)
class FoldResult:
    """A fold's release (None if nothing could be fitted), the shared coefficients where it has some, and its scores."""

    name: str
    trained_on: tuple[str, ...]
    release: CoefficientRelease | None
    fit: PhysicalFit | None
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Generalisation:
    """All folds; ``in_distribution`` is fitted to every case.  ``not_used``: experiments left aside, and why."""

    by: LeaveOut
    form: ModelForm
    folds: tuple[FoldResult, ...]
    in_distribution: FoldResult
    not_used: Mapping[str, str]


@dataclass(frozen=True)
class _Job:
    fold: Fold
    form: ModelForm
    architectures: Mapping[str, Architecture]
    gpus: Gpus | None


def generalize(
    cases: Sequence[Observed],
    by: LeaveOut,
    form: ModelForm,
    architectures: Mapping[str, Architecture],
    *,
    gpus: Gpus | None = None,
    **pool: Unpack[Pool],
) -> Generalisation:
    """Fit and predict every fold, and once with nothing left out.

    ``form`` ``physical``: coefficients that all models share, on each architecture of
    ``architectures`` (by model name); ``per-model``: a line for each model, which can leave out
    workloads only.  ``gpus``: see ``gpu_named``.
    ``pool``: of ``map_jobs``.
    Raises ``ValidateError`` if the form cannot do it, ``NothingToJudgeError`` if
    there is nothing to leave out.
    """
    if by == "model" and form == "per-model":
        raise ValidateError("coefficients of one model do not transfer to another; use --model-form physical")
    usable, not_used = _usable(cases, form, architectures, gpus)
    left_out = folds(usable, by)
    if not left_out:
        others = "".join(f"; {alias} left aside: {why}" for alias, why in list(not_used.items())[:1])
        raise NothingToJudgeError(
            f"recordings of at least two {by}s are needed, one to leave out and one to fit to; overloaded runs and "
            f"published aggregates are never fitted to{others}"
        )
    nothing_left_out = Fold(None, by, tuple(case for case in usable if trains(case)), tuple(usable))
    jobs = [_Job(fold, form, architectures, gpus) for fold in [*left_out, nothing_left_out]]
    *results, everything = map_jobs(_run, jobs, **pool)
    return Generalisation(by, form, tuple(results), everything, not_used)


def read_cases(store: Store, patterns: Sequence[str] = (), gpu: str | None = None) -> list[Observed]:
    """Stored and bundled experiments whose alias or slug matches one of the patterns (``7b-*``); all without any.

    ``gpu``: that of recordings which do not say.  Arrival traces have nothing to compare and are
    left aside.  Raises ``NothingToJudgeError`` if none is left.
    """
    names = {row.slug: row.alias for row in list_experiments(store)}
    names |= {slug: alias for alias, slug in bundled_aliases().items() if slug not in names}
    cases = []
    for slug, alias in names.items():
        if patterns and not any(fnmatchcase(name, pattern) for name in (slug, alias) for pattern in patterns):
            continue
        row = experiment_row(store, find_experiment(store, slug))
        if row.ground_truth == ARRIVALS:
            continue
        recording = read_stored(store, slug)
        recording = replace(recording, hardware=recording.hardware or gpu)
        cases.append(Observed(recording, pooled_gaps(store, slug)))
    if not cases:
        raise NothingToJudgeError(f"no experiment matches {', '.join(patterns)}; see `blis-replay list`")
    return cases


def key_of(case: Observed, by: LeaveOut) -> str:
    """What is left out together with a case: its model, or its workload."""
    return model_of(case.recording) if by == "model" else case.recording.workload


def folds(cases: Sequence[Observed], by: LeaveOut) -> list[Fold]:
    """A fold for each model or workload that the others have something to train for."""
    found = []
    for key in sorted({key_of(case, by) for case in cases}):
        train = tuple(case for case in cases if key_of(case, by) != key and trains(case))
        if train:
            found.append(Fold(key, by, train, tuple(case for case in cases if key_of(case, by) == key)))
    return found


def _usable(
    cases: Sequence[Observed], form: ModelForm, architectures: Mapping[str, Architecture], gpus: Gpus | None
) -> tuple[list[Observed], dict[str, str]]:
    if form == "per-model":
        return list(cases), {}
    usable, not_used = [], {}
    for case in cases:
        if case.recording.hardware is None:
            not_used[case.recording.alias] = "the recording does not name its GPU; do so with --gpu H100-SXM"
            continue
        try:
            known_architecture(architectures, model_of(case.recording))
            gpu_named(case.recording.hardware, gpus)
        except (ReleaseError, ValidateError) as error:
            not_used[case.recording.alias] = str(error)
        else:
            usable.append(case)
    return usable, not_used


def _run(job: _Job) -> FoldResult:
    fold = job.fold
    name = EVERYTHING if fold.left_out is None else f"without-{fold.name}"
    training, targets = [[case.recording for case in cases] for cases in (fold.train, fold.test)]
    trained_on = tuple(recording.alias for recording in training)
    try:
        release, fit = _fit(job, training, targets, name)
    except ExperimentError as error:
        return FoldResult(fold.name, trained_on, None, None, tuple(_not_predicted(c, error) for c in fold.test))
    return FoldResult(fold.name, trained_on, release, fit, tuple(score(case, release) for case in fold.test))


def _fit(
    job: _Job, training: Sequence[Recording], targets: Sequence[Recording], name: str
) -> tuple[CoefficientRelease, PhysicalFit | None]:
    if job.form == "physical":
        return calibrate_physical(training, targets, job.architectures, name, job.gpus)
    # What was left out is the test, so all of the training runs may be used.
    release, _fits = calibrate(training, name, Options(load_release(DEFAULT_PRIOR), split=(DEFAULT_SPLIT[0], 1.0)))
    return release, None


def score(case: Observed, release: CoefficientRelease) -> Score:
    """The errors of a release on one recording, or why it was not predicted; ``StoreError`` if it cannot be read."""
    recording = case.recording
    try:
        with faults_named(recording.alias):
            run = replay(recording, release)
            comparison = compare_replay(run, case.token_gaps)
    except ExperimentError as error:
        return _not_predicted(case, error)
    errors = {
        metric: {name: cell.error for name, cell in cells.items()} for metric, cells in comparison.metrics.items()
    }
    try:
        of_all_steps = step_errors(entry_of(release, recording).latency, step_cycles(recording))[0].mape
    except ValidateError:
        of_all_steps = None
    return Score(recording.slug, recording.alias, recording.ground_truth, case.overloaded, errors, of_all_steps)


def _not_predicted(case: Observed, error: Exception) -> Score:
    recording = case.recording
    return Score(recording.slug, recording.alias, recording.ground_truth, case.overloaded, {}, None, str(error))
