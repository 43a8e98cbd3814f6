"""Running studies: every configuration, system and seed is one job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from blis_replay.ingest.recording import RECORDED, Recording
from blis_replay.ingest.store import list_experiments, open_store, read_stored
from blis_replay.replay.executor_ledger import Progress
from blis_replay.replay.executors import ExecutorName, map_jobs
from blis_replay.validate.studies.judge import JudgedSystem, Measured, judge
from blis_replay.validate.studies.study import Run, Study
from blis_replay.validate.studies.systems import SYSTEMS


@dataclass(frozen=True)
class Job:
    """One run: of a configuration, on a system, with a seed; or on recordings, of the one at the place ``seed``."""

    run: Run
    system: str
    seed: int
    recordings: tuple[Recording, ...] = ()


@dataclass(frozen=True)
class StudyResult:
    """A study and its verdict on each of its systems; ``absent``: what it needs and is not there, no verdict then."""

    study: Study
    systems: tuple[JudgedSystem, ...]
    absent: str = ""

    @property
    def passed(self) -> bool:
        """Whether every verdict is the one on record, and every difference from a published one is explained."""
        return all(system.passed for system in self.systems)


def run_studies(
    studies: Sequence[Study],
    store_path: Path | None = None,
    *,
    executor: ExecutorName = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[StudyResult]:
    """Run studies, all their jobs in one pool; the same whatever the executor.

    ``store_path``: where recordings are; a study of some that are not there is not judged.  Raises
    ``SimulatorError`` if a configuration cannot be run.
    """
    given = {study.name: what_it_needs(study, store_path) for study in studies}
    jobs = [
        Job(run, system, seed, needs)
        for study in studies
        if not isinstance(needs := given[study.name], str)
        for system in study.systems
        for run in study.configurations.values()
        for seed in study.seeds
    ]
    answers = iter(map_jobs(run_job, jobs, executor=executor, workers=workers, progress=progress))
    results = []
    for study in studies:
        if isinstance(absent := given[study.name], str):
            results.append(StudyResult(study, (), absent))
            continue
        systems = []
        for system in study.systems:
            measured = {name: [next(answers) for _ in study.seeds] for name in study.configurations}
            systems.append(judge(study, system, _by_measure(measured)))
        results.append(StudyResult(study, tuple(systems)))
    return results


def what_it_needs(study: Study, store_path: Path | None) -> tuple[Recording, ...] | str:
    """The recordings of a study, none if it is of none; or in words what is not there."""
    if study.library and find_spec(study.library) is None:
        return f"it takes {study.library}; install the optional extra that has it"
    if not study.recordings:
        return ()
    if store_path is None or not store_path.exists():
        return f"it is of the recordings {', '.join(study.recordings)}, and there is no store; ingest them"
    with open_store(store_path) as store:
        rows = [row for row in list_experiments(store) if row.ground_truth == RECORDED]
        slugs = {name: row.slug for row in rows for name in (row.alias, row.slug)}
        if missing := [name for name in study.recordings if name not in slugs]:
            return f"the store has no recording {', '.join(missing)}; ingest it"
        return tuple(read_stored(store, slugs[name]) for name in study.recordings)


def run_job(job: Job) -> Mapping[str, float]:
    """What one run measures."""
    return job.run(job.recordings or SYSTEMS.get(job.system), job.seed)


def _by_measure(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> Measured:
    return {
        name: {measure: np.array([run[measure] for run in runs], np.float64) for measure in runs[0]}
        for name, runs in measured.items()
    }
