"""Many replays at once: one ``map`` for whatever runs more than one, on one machine or several (Ray)."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from math import ceil
from time import perf_counter
from types import ModuleType
from typing import Any, Literal, TypedDict, TypeVar
from uuid import uuid4

from blis_replay.replay.errors import ReplayError
from blis_replay.replay.processes import INSIDE_A_WORKER, Ledger, Progress, attempt, pool_map, use_one_thread

Job = TypeVar("Job")
Answer = TypeVar("Answer")

ExecutorName = Literal["local", "serial", "ray"]
EXECUTORS: tuple[ExecutorName, ...] = ("local", "serial", "ray")


class Workers(TypedDict, total=False):
    """Who does the jobs of ``map_jobs``."""

    executor: ExecutorName
    workers: int | None


class Pool(Workers, total=False):
    """How ``map_jobs`` does its jobs, for the functions that hand it on."""

    progress: Progress | None


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
    return answers + pool_map(work, rest, workers, with_those_here)


# Of Ray itself, where it is not set: no statistics sent to its makers, no advice on accelerators; and a minute for its
# server to come up, as a busy machine takes more than the 30 s that it has by default.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_gcs_server_port_wait_time_s": "60",
}

# In a worker: the work of the map that it serves, by the map's key.
_held: dict[str, bytes] = {}


def ray_map(
    work: Callable[[Job], Answer], jobs: Sequence[Job], workers: int | None, progress: Progress | None
) -> list[Answer]:
    """``work`` of every job on Ray; see ``executors.map_jobs``.

    The Ray that this process is connected to already is used; else the cluster of ``RAY_ADDRESS``,
    else one is started here, and ended with the map.  The nodes of a cluster need this package.
    """
    ray = _imported()
    ours = not ray.is_initialized()
    try:
        if ours:
            _start(ray, workers)
        return _mapped(ray, work, jobs, workers, progress)
    finally:
        if ours:
            ray.shutdown()


def _mapped(
    ray: Any, work: Callable[[Job], Answer], jobs: Sequence[Job], workers: int | None, progress: Progress | None
) -> list[Answer]:
    ledger, key = Ledger(len(jobs), progress), uuid4().hex
    # In a list, a task is given the reference, and the worker fetches what is behind it once.
    shipped = [ray.put((sys.path, pickle.dumps(work)))]
    task = ray.remote(num_cpus=1, max_retries=0)(_attempt)
    at_once = workers or max(int(ray.cluster_resources().get("CPU", 1)), 1)
    out: dict[Any, int] = {}
    try:
        while not ledger.finished:
            while len(out) < at_once and (job := ledger.hand_out()) is not None:
                out[task.remote(key, shipped, pickle.dumps(jobs[job]))] = job
            (ready, *_), _ = ray.wait(list(out))
            job = out.pop(ready)
            try:
                ledger.done(job, ray.get(ready))
            except ray.exceptions.RayError as error:
                ledger.lost(job, f"ended with {type(error).__name__}")
    finally:
        for task_out in out:
            ray.cancel(task_out, force=True)
    return ledger.answers()


def _attempt(key: str, shipped: list[Any], job: bytes) -> bytes:
    """In a worker of Ray, which outlives the task."""
    if key not in _held:
        _held.clear()
        paths, _held[key] = _imported().get(shipped[0])
        sys.path.extend(path for path in paths if path not in sys.path)  # as the processes of a local pool get it
        os.environ[INSIDE_A_WORKER] = "1"
        use_one_thread()
    return attempt(_held[key], job)


def _imported() -> Any:
    os.environ.update({name: value for name, value in _SETTINGS.items() if name not in os.environ})
    try:
        import ray
    except ImportError:
        raise ReplayError(
            "Ray is not installed; `pip install 'blis-replay[ray]'` installs it, or use --executor local"
        ) from None
    module: ModuleType = ray
    return module


def _start(ray: Any, workers: int | None) -> None:
    """Connect to the cluster of ``RAY_ADDRESS``, or start a Ray here, once more if it does not come up.

    Its server has been seen not to come up within two minutes, without a line in its log, and to do so the next time.
    """
    address = os.environ.get("RAY_ADDRESS")
    asked: dict[str, Any] = {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
    # Ray leaves handles of its own processes and sockets to the garbage collector.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for is_last in (bool(address), True):
            try:
                ray.init(**asked, logging_level="ERROR", log_to_driver=False)
                return
            except Exception as error:
                # A node that does not register in time is told of by a bare Exception, which nothing else raises.
                named = (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError)
                if not isinstance(error, named) and type(error) is not Exception:
                    raise
                where = f"the cluster at {address}" if address else "a Ray of this machine"
                why = f"{where} does not answer ({str(error).splitlines()[0]})"
                if is_last or isinstance(error, ValueError):
                    raise ReplayError(f"{why}; use --executor local") from None
            print(f"{why}; starting it once more", file=sys.stderr, flush=True)
            gc.collect()  # those of this try, while their warnings are ignored
