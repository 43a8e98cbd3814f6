"""Experiments replayed, compared with their recordings, and stored: one, many, or load stage by load stage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import polars as pl

from blis_replay.base.errors import ExperimentError, NothingToJudgeError, UnreplayableError, faults_named
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import ARRIVALS
from blis_replay.ingest.store import Store, open_for_reading, open_store, read_stored
from blis_replay.ingest.store.runs import RunRecord, is_stored
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.simulator import EmbeddedEngine, Simulator
from blis_replay.replay.store import (
    leave_tables,
    record_of,
    store_run,
    why_not_all_stored,
    why_not_stored,
    writable_folder,
)
from blis_replay.validate.comparison.compare import compare_replay, light, with_draws, with_objectives, with_repeats
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.experiment import experiment_row, named_experiments, release_for, release_that_ships
from blis_replay.validate.metrics.observed import Selection, pooled_gaps

if TYPE_CHECKING:
    from blis_replay.replay.executors import Pool
    from blis_replay.validate.comparison.repeats import Repeats
    from blis_replay.validate.metrics.objectives import Objectives


def compare_experiment(
    store: Store,
    slug: str,
    release: CoefficientRelease,
    mode: ReplayMode,
    window: tuple[float, float] = (0.0, 1.0),
    simulator: Simulator | None = None,
    objectives: Objectives = (),
) -> Comparison:
    """Replay a stored experiment and compare it with its recording; the store is only read.

    ``simulator``: the embedded engine with ``release`` if None.  ``objectives``: to be said of both sides.
    Raises ``NothingToJudgeError`` for an arrival trace.
    """
    recording = read_stored(store, slug)
    if recording.ground_truth == ARRIVALS:
        raise NothingToJudgeError(
            f"{recording.alias}: an arrival trace: it has no latencies to compare; replay it with "
            f"`blis-replay simulate --experiment {recording.alias} --engine FILE --coefficients NAME --out DIR`"
        )
    simulator = simulator or EmbeddedEngine(release)
    return judged_replay(store, replay(recording, release, mode, simulator), simulator, window, objectives)


def judged_replay(
    store: Store,
    run: ReplayRun,
    simulator: Simulator | None,
    window: tuple[float, float] = (0.0, 1.0),
    objectives: Objectives = (),
) -> Comparison:
    """A replay that was just made, compared with its recording; ``simulator``: for draws, None to leave them out."""
    selection = Selection(window=window)
    gaps = pooled_gaps(store, run.recording.slug, selection.of(run.recording.requests))
    comparison = compare_replay(run, gaps, selection, queues=True)
    comparison = with_draws(comparison, simulator) if simulator else comparison
    return with_objectives(comparison, objectives, gaps)


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
    if comparison.selection.everything and not is_stored(store, record_of(comparison.run)):
        store_run(store, comparison.run, errors_frame(comparison))
    return comparison


def by_stage(store: Store, comparison: Comparison) -> list[Comparison]:
    """The same comparison for each load stage by itself; a stage with nothing to compare is left out."""
    stages: list[Comparison] = []
    for stage in comparison.recording.stages:
        try:
            selection = replace(comparison.selection, stage=stage.stage)
            gaps = pooled_gaps(store, comparison.slug, selection.of(comparison.recording.requests))
            stages.append(compare_replay(comparison.run, gaps, selection))
        except NothingToJudgeError:
            continue
    return stages


@dataclass(frozen=True)
class Validated:
    """What one simulator answered for several experiments.

    ``comparisons``: without the requests and steps, so that memory does not grow with them (``light``).
    ``stages``: by slug, the same of each load stage, where asked for.  ``not_judged``: alias (slug, where two share
    it) to reason.  ``not_stored``: why the runs could not be stored, empty if they were.
    """

    simulator: str
    comparisons: list[Comparison]
    stages: dict[str, list[Comparison]]
    not_judged: dict[str, str]
    not_stored: str = ""


def validate_many(
    store: Path,
    names: Sequence[str] | None,
    mode: ReplayMode,
    window: tuple[float, float],
    simulator: Simulator,
    *,
    ships: bool = False,
    stages: bool = False,
    repeats: Sequence[str] = (),
    objectives: Objectives = (),
    **pool: Unpack[Pool],
) -> Validated:
    """Validate experiments, with their ``stages``, and store whole runs.

    ``ships``: the embedded engine takes the release that ships for each experiment.  ``repeats``: recordings of the
    same loads, as ``repeats_of``.  ``objectives``: as for ``compare_experiment``.  ``store``: the file, which this
    process must not have open: several processes read it side by side, each the experiment that it is about.
    ``names``: as ``named_experiments``.  ``pool``: of ``map_jobs``.  Raises why the simulator has no answer for the one
    experiment that is named; of several, the reason is returned.
    """
    answer = Validated(simulator.name, [], {}, {})
    work = partial(_validated, ships, simulator, mode, window, objectives, stages)
    not_stored = ""
    with open_for_reading(store) as opened:
        slugs = named_experiments(opened, names)
        repeated: dict[str, Repeats] = {}
        if repeats:
            from blis_replay.validate.comparison.repeats import repeats_of

            repeated = repeats_of(opened, slugs, repeats)
        if len(slugs) == 1:
            outcome, run = work(opened, slugs[0])
            outcomes = [outcome]
            if run is not None and outcome.comparison is not None:
                not_stored = why_not_stored(opened, run, errors_frame(outcome.comparison))
    if len(slugs) > 1:
        from blis_replay.replay.executors import map_jobs  # processes, which one experiment does not need

        with tempfile.TemporaryDirectory(dir=writable_folder(store), prefix=".runs-") as scratch:
            job = partial(_validated_in_a_job, store, Path(scratch), work)
            outcomes = map_jobs(job, slugs, **pool)
            left = [(o.run, errors_frame(o.comparison)) for o in outcomes if o.run and o.comparison]
            not_stored = why_not_all_stored(store, Path(scratch), left)
    for outcome in outcomes:
        of_recording = isinstance(outcome.problem, (NothingToJudgeError, UnreplayableError))
        if outcome.problem is not None and not of_recording and names is not None and len(slugs) == 1:
            raise outcome.problem
        if outcome.comparison is None:
            name = outcome.slug if outcome.alias in answer.not_judged else outcome.alias
            answer.not_judged[name] = str(outcome.problem).removeprefix(f"{name}: ")
            continue
        answer.comparisons.append(with_repeats(outcome.comparison, repeated.get(outcome.slug)))
        if stages:
            answer.stages[outcome.slug] = outcome.stages
    return replace(answer, not_stored=not_stored)


@dataclass(frozen=True)
class _Outcome:
    """``comparison``: None for the ``problem``.  ``run``: to be stored."""

    slug: str
    alias: str
    comparison: Comparison | None = None
    stages: list[Comparison] = field(default_factory=list)
    run: RunRecord | None = None
    problem: Exception | None = None


def _validated(
    ships: bool,
    simulator: Simulator,
    mode: ReplayMode,
    window: tuple[float, float],
    objectives: Objectives,
    by_stages: bool,
    store: Store,
    slug: str,
) -> tuple[_Outcome, ReplayRun | None]:
    """The outcome, and the run if it is to be stored."""
    if ships and isinstance(simulator, EmbeddedEngine) and release_that_ships([slug]) != simulator.release.name:
        simulator = EmbeddedEngine(release_for(None, [slug]))
    try:
        with faults_named(slug):
            whole = compare_experiment(store, slug, simulator.release, mode, window, simulator, objectives)
    except ExperimentError as error:
        return _Outcome(slug, experiment_row(store, slug).alias, problem=error), None
    stages = [light(stage) for stage in by_stage(store, whole)] if by_stages else []
    record = record_of(whole.run)
    # Equal input gives equal output; of requests that were made of a summary the store has no recording.
    new = whole.selection.everything and "requests" not in whole.run.plan.basis and not is_stored(store, record)
    return _Outcome(slug, whole.alias, light(whole), stages, record if new else None), whole.run if new else None


def _validated_in_a_job(
    path: Path, scratch: Path, work: Callable[[Store, str], tuple[_Outcome, ReplayRun | None]], slug: str
) -> _Outcome:
    """The tables of the run are handed over as files: only one process at a time can write the store."""
    with open_store(path, read_only=True) as store:
        outcome, run = work(store, slug)
    if run is not None:
        leave_tables(scratch, run)
    return outcome


def errors_frame(comparison: Comparison) -> pl.DataFrame:
    """The table of a comparison in the store's form."""
    columns = ("metric", "statistic", "observed_us", "simulated_us", "error", "reason")
    rows = [(*name, cell.a_us, cell.b_us, cell.error, cell.reason) for name, cell in comparison.cells.items()]
    return pl.DataFrame([dict(zip(columns, row, strict=True)) for row in rows], infer_schema_length=None)
