"""Experiments replayed and compared with their recordings: one, many, or load stage by load stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from blis_replay.base.errors import ExperimentError, NothingToJudgeError, UnreplayableError, faults_named
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import ARRIVALS
from blis_replay.ingest.store import Store, open_for_reading, open_store, read_stored
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.simulator import EmbeddedEngine, Simulator
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
            f"`blis-replay simulate {recording.alias} --engine FILE --coefficients NAME --out DIR`"
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
    if run.plan.apart is not None:
        from blis_replay.validate.comparison.parts import with_parts  # few servers are a pair

        comparison = with_parts(comparison, run.plan.apart, store)
    return with_objectives(comparison, objectives, gaps)


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
    it) to reason.
    """

    simulator: str
    comparisons: list[Comparison]
    stages: dict[str, list[Comparison]]
    not_judged: dict[str, str]


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
    """Validate experiments, with their ``stages``.

    ``ships``: the embedded engine takes the release that ships for each experiment.  ``repeats``: recordings of the
    same loads, as ``repeats_of``.  ``objectives``: as for ``compare_experiment``.  ``store``: the file, which this
    process must not have open: several processes read it side by side, each the experiment that it is about.
    ``names``: as ``named_experiments``.  ``pool``: of ``map_jobs``.  Raises why the simulator has no answer for the one
    experiment that is named; of several, the reason is returned.
    """
    answer = Validated(simulator.name, [], {}, {})
    with open_for_reading(store) as opened:
        slugs = named_experiments(opened, names)
        repeated: dict[str, Repeats] = {}
        if repeats:
            from blis_replay.validate.comparison.repeats import repeats_of

            repeated = repeats_of(opened, slugs, repeats)
    work = partial(_validated, store, ships, simulator, mode, window, objectives, stages)
    if len(slugs) == 1:
        outcomes = [work(slugs[0])]
    else:
        from blis_replay.replay.executors import map_jobs  # processes, which one experiment does not need

        outcomes = map_jobs(work, slugs, **pool)
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
    return answer


@dataclass(frozen=True)
class _Outcome:
    """``comparison``: None for the ``problem``."""

    slug: str
    alias: str
    comparison: Comparison | None = None
    stages: list[Comparison] = field(default_factory=list)
    problem: Exception | None = None


def _validated(
    path: Path,
    ships: bool,
    simulator: Simulator,
    mode: ReplayMode,
    window: tuple[float, float],
    objectives: Objectives,
    by_stages: bool,
    slug: str,
) -> _Outcome:
    if ships and isinstance(simulator, EmbeddedEngine) and release_that_ships([slug]) != simulator.release.name:
        simulator = replace(simulator, release=release_for(None, [slug]))
    with open_store(path, read_only=True) as store:
        try:
            with faults_named(slug):
                whole = compare_experiment(store, slug, simulator.release, mode, window, simulator, objectives)
        except ExperimentError as error:
            return _Outcome(slug, experiment_row(store, slug).alias, problem=error)
        stages = [light(stage) for stage in by_stage(store, whole)] if by_stages else []
    return _Outcome(slug, whole.alias, light(whole), stages)
