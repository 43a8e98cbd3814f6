"""Running studies: every configuration, system and seed is one job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from blis_replay.replay.executor_ledger import Progress
from blis_replay.replay.executors import ExecutorName, map_jobs
from blis_replay.validate.studies.judge import JudgedSystem, Measured, judge
from blis_replay.validate.studies.study import Run, Study
from blis_replay.validate.studies.systems import SYSTEMS


@dataclass(frozen=True)
class Job:
    """One run: of a configuration, on a system, with a seed."""

    run: Run
    system: str
    seed: int


@dataclass(frozen=True)
class StudyResult:
    """A study and its verdict on each of its systems."""

    study: Study
    systems: tuple[JudgedSystem, ...]

    @property
    def passed(self) -> bool:
        """Whether every verdict is the one on record, and every difference from a published one is explained."""
        return all(system.passed for system in self.systems)


def run_studies(
    studies: Sequence[Study],
    *,
    executor: ExecutorName = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[StudyResult]:
    """Run studies, all their jobs in one pool; the same whatever the executor.

    Raises ``SimulatorError`` if a configuration cannot be run.
    """
    jobs = [
        Job(run, system, seed)
        for study in studies
        for system in study.systems
        for run in study.configurations.values()
        for seed in study.seeds
    ]
    answers = iter(map_jobs(run_job, jobs, executor=executor, workers=workers, progress=progress))
    results = []
    for study in studies:
        systems = []
        for system in study.systems:
            measured = {name: [next(answers) for _ in study.seeds] for name in study.configurations}
            systems.append(judge(study, system, _by_measure(measured)))
        results.append(StudyResult(study, tuple(systems)))
    return results


def run_job(job: Job) -> Mapping[str, float]:
    """What one run measures."""
    return job.run(SYSTEMS.get(job.system), job.seed)


def _by_measure(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> Measured:
    return {
        name: {measure: np.array([run[measure] for run in runs], np.float64) for measure in runs[0]}
        for name, runs in measured.items()
    }
