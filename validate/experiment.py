"""The main job: an experiment by name, replayed, compared and stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import polars as pl

from blis_replay.blis.errors import SimulatorError
from blis_replay.blis.release import CoefficientRelease
from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.checks import overload
from blis_replay.ingest.errors import UnknownExperimentError
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import ARRIVALS, RECORDED, Finding, Recording
from blis_replay.ingest.store import (
    ExperimentRow,
    Store,
    inter_token_gaps,
    list_experiments,
    open_store,
    read_findings,
    read_stored,
    resolve,
)
from blis_replay.replay.driver import ReplayRun, replay, without_rows
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.simulator import Simulator
from blis_replay.replay.store import store_run
from blis_replay.validate.comparison.compare import Comparison, compare
from blis_replay.validate.comparison.saturation import saturation
from blis_replay.validate.errors import NothingToJudgeError, ValidateError
from blis_replay.validate.observed import Gaps, Selection

DEFAULT_RELEASE = "h100-vllm-0.15.1"

_WILDCARDS = set("*?[")


@dataclass(frozen=True)
class BundledExperiment:
    """An experiment that ships with the package and is not in the store."""

    slug: str
    alias: str


def find_experiment(store: Store, name: str) -> str:
    """The slug of a stored or bundled experiment; a bundled one is brought into the store.

    A recording that was ingested under a bundled slug takes precedence.  Raises
    ``UnknownExperimentError`` for an unknown or ambiguous name.
    """
    bundled = _bundled_not_stored(store)
    slug = resolve([*list_experiments(store), *bundled], name)
    if slug in {experiment.slug for experiment in bundled}:
        ingest_recording(store, bundled_recording(slug))
    return slug


def stored_experiment(store_path: Path, name: str) -> Recording:
    """The stored or bundled experiment of that name; raises ``UnknownExperimentError``."""
    with open_store(store_path) as store:
        return read_stored(store, find_experiment(store, name))


def all_experiments(store: Store) -> list[str]:
    """Slugs of all experiments, stored and bundled; the bundled are brought into the store."""
    for experiment in _bundled_not_stored(store):
        ingest_recording(store, bundled_recording(experiment.slug))
    return [row.slug for row in list_experiments(store)]


def select_experiments(store: Store, selectors: Sequence[str]) -> list[str]:
    """Slugs that a list of slugs, aliases and patterns (``34b-*``) means, without repetition.

    A pattern is matched against aliases and slugs of stored and bundled experiments.  Raises
    ``UnknownExperimentError`` for a name that is none and for a pattern that matches nothing.
    """
    known: list[ExperimentRow | BundledExperiment] = [*list_experiments(store), *_bundled_not_stored(store)]
    slugs: list[str] = []
    for selector in selectors:
        if not set(selector) & _WILDCARDS:
            slugs.append(find_experiment(store, selector))
            continue
        matched = [e.slug for e in known if fnmatchcase(e.alias, selector) or fnmatchcase(e.slug, selector)]
        if not matched:
            raise UnknownExperimentError(f"no experiment matches {selector}; list them with `blis-replay experiments`")
        slugs += [find_experiment(store, slug) for slug in sorted(matched)]
    return list(dict.fromkeys(slugs))


def named_experiments(store: Store, selectors: Sequence[str] | None) -> list[str]:
    """Slugs as ``select_experiments`` finds them; of None, all stored and bundled experiments."""
    return all_experiments(store) if selectors is None else select_experiments(store, selectors)


def recorded_experiments(store: Store, selectors: Sequence[str]) -> list[str]:
    """As ``select_experiments``; of a pattern only recordings of single requests, not overloaded, if it has any.

    Raises ``UnknownExperimentError`` as that does.
    """
    slugs: list[str] = []
    for selector in selectors:
        matched = select_experiments(store, [selector])
        rows = [row for row in list_experiments(store) if row.slug in matched]
        recorded = {row.slug for row in rows if row.ground_truth == RECORDED and not row.overloaded}
        named = not set(selector) & _WILDCARDS
        slugs += matched if named or not recorded else [slug for slug in matched if slug in recorded]
    return list(dict.fromkeys(slugs))


def _bundled_not_stored(store: Store) -> list[BundledExperiment]:
    stored = {row.slug for row in list_experiments(store)}
    return [BundledExperiment(slug, alias) for alias, slug in bundled_aliases().items() if slug not in stored]


def experiment_row(store: Store, slug: str) -> ExperimentRow:
    """The short form of a stored experiment."""
    return next(row for row in list_experiments(store) if row.slug == slug)


@dataclass(frozen=True)
class StoredExperiment:
    """A recording with what else a comparison of its whole run takes, so that any process can make one."""

    recording: Recording
    findings: tuple[Finding, ...]
    overloaded: bool
    token_gaps: Gaps | None


def read_experiment(store: Store, slug: str) -> StoredExperiment:
    """A stored experiment; raises ``UnknownExperimentError`` if there is none of that slug."""
    gaps = inter_token_gaps(store, slug)
    recording = read_stored(store, slug)
    return StoredExperiment(
        recording=recording,
        findings=recording.findings,
        overloaded=_overloaded(recording.findings),
        token_gaps=gaps if len(gaps[0]) else None,
    )


def compare_whole(experiment: StoredExperiment, run: ReplayRun) -> Comparison:
    """Compare a replay with the whole of its recording; raises as ``compare`` does."""
    return compare(run, experiment.findings, overloaded=experiment.overloaded, token_gaps=experiment.token_gaps)


def compare_experiment(
    store: Store,
    slug: str,
    release: CoefficientRelease,
    mode: ReplayMode,
    window: tuple[float, float] = (0.0, 1.0),
    simulator: Simulator | None = None,
) -> Comparison:
    """Replay a stored experiment and compare it with its recording; the store is only read.

    ``simulator``: the embedded engine with ``release`` if None.  Raises ``NothingToJudgeError``
    for an arrival trace.
    """
    recording = read_stored(store, slug)
    if recording.ground_truth == ARRIVALS:
        raise NothingToJudgeError(
            f"{recording.alias}: an arrival trace: it has no latencies to compare; replay it with "
            f"`blis-replay simulate --experiment {recording.alias} --engine FILE --coefficients NAME --out DIR`"
        )
    return judge(store, replay(recording, release, mode, simulator), Selection(window=window))


def validate_experiment(
    store: Store,
    slug: str,
    release: CoefficientRelease,
    mode: ReplayMode,
    window: tuple[float, float] = (0.0, 1.0),
    simulator: Simulator | None = None,
) -> Comparison:
    """As ``compare_experiment``, and run and errors of a whole run are stored."""
    comparison = compare_experiment(store, slug, release, mode, window, simulator)
    if comparison.selection.everything:
        store_run(store, comparison.run, errors_frame(comparison))
    return comparison


@dataclass(frozen=True)
class Validated:
    """What one simulator answered for several experiments.

    ``comparisons``: their runs are without rows (``without_rows``), so that memory does not grow with their number.
    ``stages``: by slug, the same of each load stage, where asked for.  ``not_judged``: alias (slug, where two share
    it) to reason.
    """

    simulator: str
    comparisons: list[Comparison]
    stages: dict[str, list[Comparison]]
    not_judged: dict[str, str]


def validate_many(
    store: Store,
    slugs: Iterable[str],
    release: CoefficientRelease,
    mode: ReplayMode,
    window: tuple[float, float],
    simulator: Simulator,
    *,
    stages: bool = False,
    tolerant: bool = True,
) -> Validated:
    """Validate several experiments, with their ``stages``.

    ``tolerant``: those that cannot be judged are returned with the reason; else it is raised.
    """
    answer = Validated(simulator.name, [], {}, {})
    for slug in slugs:
        try:
            whole = validate_experiment(store, slug, release, mode, window, simulator)
        except (SimulatorError, ReplayError, ValidateError) as error:
            if not tolerant:
                raise
            alias = experiment_row(store, slug).alias
            answer.not_judged[slug if alias in answer.not_judged else alias] = str(error)
            continue
        if stages:
            answer.stages[slug] = [_light(stage) for stage in by_stage(store, whole)]
        answer.comparisons.append(_light(whole))
    return answer


def _light(comparison: Comparison) -> Comparison:
    return replace(comparison, run=without_rows(comparison.run))


def judge(store: Store, run: ReplayRun, selection: Selection) -> Comparison:
    """Compare a replay with what the store holds of its recording."""
    findings = read_findings(store, run.recording.slug)
    gaps = inter_token_gaps(store, run.recording.slug, selection.of(run.recording.requests))
    comparison = compare(
        run,
        findings,
        overloaded=_overloaded(findings),
        selection=selection,
        token_gaps=gaps if len(gaps[0]) else None,
    )
    return replace(comparison, saturation=saturation(run)) if selection.stage is None else comparison


def _overloaded(findings: Iterable[Finding]) -> bool:
    return any(finding.check == overload.CHECK for finding in findings)


def by_stage(store: Store, comparison: Comparison) -> list[Comparison]:
    """The same comparison for each load stage by itself; a stage with nothing to compare is left out."""
    recording: Recording = comparison.run.recording
    stages: list[Comparison] = []
    for stage in recording.stages:
        try:
            stages.append(judge(store, comparison.run, replace(comparison.selection, stage=stage.stage)))
        except NothingToJudgeError:
            continue
    return stages


_NUMBERS = {
    **dict.fromkeys(("experiment", "alias", "simulator"), pl.String),
    "stage": pl.Int64,
    **dict.fromkeys(("verdict", "metric", "statistic"), pl.String),
    **dict.fromkeys(("observed_ms", "simulated_ms", "error"), pl.Float64),
    "reason": pl.String,
}


def comparisons_frame(comparisons: Sequence[Comparison]) -> pl.DataFrame:
    """A row a metric and statistic, named by experiment, stage (null: the whole run) and simulator; times in ms."""
    frames = [_named_errors(comparison) for comparison in comparisons]
    return pl.concat([pl.DataFrame(schema=_NUMBERS), *frames])


def _named_errors(comparison: Comparison) -> pl.DataFrame:
    named = {
        "experiment": comparison.slug,
        "alias": comparison.alias,
        "simulator": comparison.run.simulator,
        "stage": comparison.selection.stage,
        "verdict": comparison.verdict,
    }
    return (
        errors_frame(comparison)
        .with_columns(
            *(pl.lit(value).alias(name) for name, value in named.items()),
            *((pl.col(f"{side}_us").cast(pl.Float64) / 1000).alias(f"{side}_ms") for side in ("observed", "simulated")),
        )
        .select(pl.col(name).cast(kind) for name, kind in _NUMBERS.items())
    )


def errors_frame(comparison: Comparison) -> pl.DataFrame:
    """The table of a comparison in the store's form."""
    return pl.DataFrame(
        [
            {
                "metric": metric,
                "statistic": statistic,
                "observed_us": cell.observed_us,
                "simulated_us": cell.simulated_us,
                "error": cell.error,
                "reason": cell.reason,
            }
            for metric, cells in comparison.metrics.items()
            for statistic, cell in cells.items()
        ],
        infer_schema_length=None,
    )
