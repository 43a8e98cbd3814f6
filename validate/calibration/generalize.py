"""Does a model of the step time transfer?  Leave one model or one workload out, fit to the rest, try it on that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from blis_replay.blis.architecture import Architecture
from blis_replay.blis.errors import ReleaseError, SimulatorError
from blis_replay.blis.gpu import gpu_named
from blis_replay.blis.release import CoefficientRelease
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.recording import ARRIVALS, PUBLISHED, Finding, Recording
from blis_replay.ingest.store import Store, inter_token_gaps, list_experiments, read_findings, read_stored
from blis_replay.replay.driver import replay
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.executor_ledger import Progress
from blis_replay.replay.executors import ExecutorName, map_jobs
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import model_of
from blis_replay.validate.calibration.calibrate import DEFAULT_SPLIT, Options, calibrate
from blis_replay.validate.calibration.physical_fit import PRIORS, PhysicalFit, Prior, known_architecture
from blis_replay.validate.calibration.physical_release import calibrate_physical
from blis_replay.validate.calibration.prior import DEFAULT_PRIOR
from blis_replay.validate.calibration.step_errors import step_mape
from blis_replay.validate.comparison.compare import compare
from blis_replay.validate.errors import NothingToJudgeError, ValidateError
from blis_replay.validate.experiment import experiment_row, find_experiment
from blis_replay.validate.observed import Gaps, Selection

LeaveOut = Literal["model", "workload"]
ModelForm = Literal["physical", "per-model"]

EVERYTHING = "all"


@dataclass(frozen=True)
class Case:
    """An experiment with all that judging it takes, so that another process can."""

    recording: Recording
    findings: tuple[Finding, ...]
    overloaded: bool
    token_gaps: Gaps | None

    @property
    def trains(self) -> bool:
        """Whether coefficients may be fitted to it: overloaded runs and published aggregates are only predicted."""
        return not self.overloaded and self.recording.ground_truth != PUBLISHED


@dataclass(frozen=True)
class Fold:
    """What is left out, the cases to fit to, and those to predict.

    ``left_out`` None: nothing, every case is predicted by a fit that may have seen it.  A fold
    that would train on what it tests cannot be made: ``ValueError``.
    """

    left_out: str | None
    by: LeaveOut
    train: tuple[Case, ...]
    test: tuple[Case, ...]

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
    ground_truth: str
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
    priors: Mapping[str, Prior]


def generalize(
    cases: Sequence[Case],
    by: LeaveOut,
    form: ModelForm,
    architectures: Mapping[str, Architecture],
    *,
    priors: Mapping[str, Prior] = PRIORS,
    executor: ExecutorName = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Generalisation:
    """Fit and predict every fold, and once with nothing left out.

    ``form`` ``physical``: coefficients that all models share, on each architecture of
    ``architectures`` (by model name); ``per-model``: a line for each model, which can leave out
    workloads only.  ``priors``: of the shared coefficients.  ``executor``, ``workers``,
    ``progress``: of ``map_jobs``.
    Raises ``ValidateError`` if the form cannot do it, ``NothingToJudgeError`` if
    there is nothing to leave out.
    """
    if by == "model" and form == "per-model":
        raise ValidateError("coefficients of one model do not transfer to another; use --model-form physical")
    usable, not_used = _usable(cases, form, architectures)
    left_out = folds(usable, by)
    if not left_out:
        others = "".join(f"; {alias} left aside: {why}" for alias, why in list(not_used.items())[:1])
        raise NothingToJudgeError(
            f"recordings of at least two {by}s are needed, one to leave out and one to fit to; overloaded runs and "
            f"published aggregates are never fitted to{others}"
        )
    jobs = [_Job(fold, form, architectures, priors) for fold in [*left_out, _nothing_left_out(usable, by)]]
    *results, everything = map_jobs(_run, jobs, executor=executor, workers=workers, progress=progress)
    return Generalisation(by, form, tuple(results), everything, not_used)


def read_cases(store: Store, patterns: Sequence[str] = (), gpu: str | None = None) -> list[Case]:
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
        gaps = inter_token_gaps(store, slug, Selection().of(recording.requests))
        findings = tuple(read_findings(store, slug))
        cases.append(Case(recording, findings, row.overloaded, gaps if len(gaps[0]) else None))
    if not cases:
        raise NothingToJudgeError(f"no experiment matches {', '.join(patterns)}; see `blis-replay experiments`")
    return cases


def key_of(case: Case, by: LeaveOut) -> str:
    """What is left out together with a case: its model, or its workload."""
    return model_of(case.recording) if by == "model" else case.recording.workload


def folds(cases: Sequence[Case], by: LeaveOut) -> list[Fold]:
    """A fold for each model or workload that the others have something to train for."""
    made = []
    for key in sorted({key_of(case, by) for case in cases}):
        train = tuple(case for case in cases if key_of(case, by) != key and case.trains)
        if train:
            made.append(Fold(key, by, train, tuple(case for case in cases if key_of(case, by) == key)))
    return made


def _nothing_left_out(cases: Sequence[Case], by: LeaveOut) -> Fold:
    return Fold(None, by, tuple(case for case in cases if case.trains), tuple(cases))


def _usable(
    cases: Sequence[Case], form: ModelForm, architectures: Mapping[str, Architecture]
) -> tuple[list[Case], dict[str, str]]:
    if form == "per-model":
        return list(cases), {}
    usable, not_used = [], {}
    for case in cases:
        if case.recording.hardware is None:
            not_used[case.recording.alias] = "the recording does not name its GPU; do so with --gpu H100-SXM"
            continue
        try:
            known_architecture(architectures, model_of(case.recording))
            gpu_named(case.recording.hardware)
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
    except (SimulatorError, ReplayError, ValidateError) as error:
        return FoldResult(fold.name, trained_on, None, None, tuple(_not_predicted(c, error) for c in fold.test))
    return FoldResult(fold.name, trained_on, release, fit, tuple(_score(case, release) for case in fold.test))


def _fit(
    job: _Job, training: Sequence[Recording], targets: Sequence[Recording], name: str
) -> tuple[CoefficientRelease, PhysicalFit | None]:
    if job.form == "physical":
        return calibrate_physical(training, targets, job.architectures, name, job.priors)
    # What was left out is the test, so all of the training runs may be used.
    release, _fits = calibrate(training, name, Options(load_release(DEFAULT_PRIOR), split=(DEFAULT_SPLIT[0], 1.0)))
    return release, None


def _score(case: Case, release: CoefficientRelease) -> Score:
    recording = case.recording
    try:
        run = replay(recording, release)
        comparison = compare(run, case.findings, overloaded=case.overloaded, token_gaps=case.token_gaps)
    except (SimulatorError, ReplayError, ValidateError) as error:
        return _not_predicted(case, error)
    errors = {
        metric: {name: cell.error for name, cell in cells.items()} for metric, cells in comparison.metrics.items()
    }
    latency = release.entry_for(model_of(recording), recording.tensor_parallelism, recording.alias).latency
    steps = step_mape(recording, latency)
    return Score(recording.slug, recording.alias, recording.ground_truth, case.overloaded, errors, steps)


def _not_predicted(case: Case, error: Exception) -> Score:
    recording = case.recording
    return Score(recording.slug, recording.alias, recording.ground_truth, case.overloaded, {}, None, str(error))
