"""Many replays at once: one ``map``, in this process or in a pool of processes of this machine.

Processes are spawned, not forked: the threads of polars and DuckDB and the locks they hold do not survive a fork.
They never see Ctrl-C, import nothing from the working directory, and end with the process that started them.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from math import ceil
from multiprocessing import active_children, get_context, parent_process
from time import perf_counter
from typing import Any, TypedDict, TypeVar

from blis_replay.base.errors import ReplayError

Job = TypeVar("Job")
Answer = TypeVar("Answer")
Progress = Callable[[int, int], None]


class Workers(TypedDict, total=False):
    """How many processes do the jobs of ``map_jobs``."""

    workers: int | None


class Pool(Workers, total=False):
    """The options of ``map_jobs``, for functions that pass them on."""

    progress: Progress | None


# Seconds to start a pool: its processes import numpy, polars and the engine (2.3 s measured for two on two processors).
POOL_START_S = 2.0
# Seconds: a first job that takes longer does so by itself, and not because it loads compiled code.
WARM_UP_S = 1.0


def map_jobs(
    work: Callable[[Job], Answer],
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Answer]:
    """Map ``work`` over ``jobs``. Results keep the order of the jobs, however many processes there are.

    ``work`` is a function of a module, or a ``functools.partial`` of one: what it binds (a recording) goes to each
    worker once.  ``workers``: processes; 1 is this process, by default one per processor.  ``progress(done, all)`` is
    called after each job.

    With several workers this process does the first job, and the second too if the first took less than ``WARM_UP_S``.
    The rest stays here unless a pool, which costs ``POOL_START_S``, saves more than that at the pace of the faster of
    the two.  A map inside a worker stays in that worker.

    Raises what ``work`` raised for the first job that failed; ``ReplayError`` if a worker was killed.
    """
    if workers == 1 or parent_process() is not None:
        return _taken(map(work, jobs), len(jobs), progress)
    return _local(work, jobs, workers or processors(), progress)


def processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pool_pays(jobs: int, seconds_each: float, workers: int) -> bool:
    """Whether a pool, its start included, does the jobs sooner than this process."""
    longest_share = ceil(jobs / workers)
    return seconds_each * (jobs - longest_share) > POOL_START_S


def _taken(answers: Iterator[Answer], jobs: int, progress: Progress | None) -> list[Answer]:
    """The answers as they come; ``jobs``: how many there will be."""
    taken = []
    for answer in answers:
        taken.append(answer)
        if progress is not None:
            progress(len(taken), jobs)
    return taken


def _local(work: Callable[[Job], Answer], jobs: Sequence[Job], workers: int, progress: Progress | None) -> list[Answer]:
    def with_those_here(done: int, _of_the_rest: int) -> None:
        if progress is not None:
            progress(here + done, len(jobs))

    answers: list[Answer] = []
    here, seconds_each = 0, float("inf")
    while here < min(len(jobs), 2) and (here == 0 or seconds_each < WARM_UP_S):
        started = perf_counter()
        answers.append(work(jobs[here]))
        seconds_each = min(seconds_each, perf_counter() - started)
        here += 1
        with_those_here(0, 0)
    rest = jobs[here:]
    if not pool_pays(len(rest), seconds_each, workers):
        return answers + _taken(map(work, rest), len(rest), with_those_here)
    return answers + pool_map(work, rest, workers, with_those_here)


def pool_map(
    work: Callable[[Job], Answer], jobs: Sequence[Job], workers: int, progress: Progress | None
) -> list[Answer]:
    """``work`` of every job in a pool of processes; see ``map_jobs``."""
    others = set(active_children())
    with _inherited_by_workers():  # multiprocessing starts a process of its own, too
        pool = ProcessPoolExecutor(min(workers, max(len(jobs), 1)), get_context("spawn"), _begin, (work,))
    try:
        with _inherited_by_workers():
            answers = pool.map(_do, jobs)
        return _taken(answers, len(jobs), progress)
    except BrokenProcessPool:
        raise ReplayError(
            "a worker process was killed; if memory is short use fewer --jobs, or 1 to see what happens"
        ) from None
    finally:  # by Ctrl-C for example, in the midst of their jobs
        for process in set(active_children()) - others:
            process.kill()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _inherited_by_workers() -> Iterator[None]:
    """What a process that is started meanwhile keeps: one thread per library, a safe path, and SIGINT blocked."""
    here = {"PYTHONSAFEPATH": "1", "POLARS_MAX_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    added = {name: value for name, value in here.items() if name not in os.environ}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a worker: what it does with each job.
_work: Callable[[Any], Any]


def _begin(work: Callable[[Any], Any]) -> None:
    """In a worker, before its first job."""
    global _work  # of this process, which does nothing else
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries; the command line hides them too
    _work = work


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _do(job: Any) -> Any:
    try:
        return _work(job)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  # some can be pickled and not be made again
        except Exception:  # whatever it raises, such an exception would break the pool
            raise ReplayError(f"{type(error).__name__}: {error}") from None
        raise
