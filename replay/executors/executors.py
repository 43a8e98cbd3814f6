"""Many replays at once: one ``map`` for whatever runs more than one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import ceil
from time import perf_counter
from typing import Literal, TypeVar

from blis_replay.replay.executors.local import INSIDE_A_WORKER, Progress

Job = TypeVar("Job")
Answer = TypeVar("Answer")

ExecutorName = Literal["local", "serial", "ray"]
EXECUTORS: tuple[ExecutorName, ...] = ("local", "serial", "ray")

# What a pool costs: its processes import numpy, polars and the engine (2.3 s measured for two on two processors).
POOL_START_S = 2.0
# The first job of a process loads compiled code; one that takes longer than this is long by itself.
WARM_UP_S = 1.0


def map_jobs(
    work: Callable[[Job], Answer],
    jobs: Sequence[Job],
    *,
    executor: ExecutorName = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Answer]:
    """``work`` of every job, in the order of the jobs; the same whatever the executor.

    ``work`` is a function of a module, or a ``functools.partial`` of one: what it binds (a
    recording) goes to each worker once, a job to the one that does it.  ``executor``: ``serial`` is
    this process, ``local`` a pool of processes, ``ray`` a Ray cluster (``RAY_ADDRESS``) or one of
    this machine's own.  ``workers``: by default one a processor.  ``progress(done, all)`` is called
    after each job.

    ``local`` does the first job here, and the second too if the first took less than ``WARM_UP_S``.
    The rest stays here unless a pool, which costs ``POOL_START_S``, saves more than that at the
    pace of the faster of the two.  What runs in a worker already is done there, one after the other.

    Raises what ``work`` raised, of the first job that failed; ``ReplayError`` if the same job lost
    its worker again and again, or Ray is not there.
    """
    if executor == "serial" or INSIDE_A_WORKER in os.environ:
        return _serial(work, jobs, progress)
    if executor == "ray":
        from blis_replay.replay.executors.ray import ray_map

        return ray_map(work, jobs, workers, progress)
    return _local(work, jobs, workers or processors(), progress)


def processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pool_pays(jobs: int, seconds_each: float, workers: int) -> bool:
    """Whether a pool does so many jobs sooner than this process, its start included."""
    longest_share = ceil(jobs / workers)
    return seconds_each * (jobs - longest_share) > POOL_START_S


def _serial(work: Callable[[Job], Answer], jobs: Sequence[Job], progress: Progress | None) -> list[Answer]:
    answers = []
    for job in jobs:
        answers.append(work(job))
        if progress is not None:
            progress(len(answers), len(jobs))
    return answers


def _local(work: Callable[[Job], Answer], jobs: Sequence[Job], workers: int, progress: Progress | None) -> list[Answer]:
    def with_those_here(done: int, _of_the_rest: int) -> None:
        if progress is not None:
            progress(here + done, len(jobs))

    answers: list[Answer] = []
    here, seconds_each = 0, float("inf")
    while here < min(len(jobs), 2) and (here == 0 or seconds_each < WARM_UP_S):
        started = perf_counter()
        answers += _serial(work, jobs[here : here + 1], None)
        seconds_each = min(seconds_each, perf_counter() - started)
        here += 1
        with_those_here(0, 0)
    rest = jobs[here:]
    if not pool_pays(len(rest), seconds_each, workers):
        return answers + _serial(work, rest, with_those_here)
    from blis_replay.replay.executors.local import pool_map

    return answers + pool_map(work, rest, workers, with_those_here)
