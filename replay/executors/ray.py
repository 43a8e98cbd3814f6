"""A map over the workers of a Ray cluster, or of a Ray of this machine's own (extra ``ray``)."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar
from uuid import uuid4

from blis_replay.replay.errors import ReplayError
from blis_replay.replay.executors.local import INSIDE_A_WORKER, Ledger, Progress, attempt

Job = TypeVar("Job")
Answer = TypeVar("Answer")

# Of Ray itself, where it is not set: no statistics sent to its makers, no advice on accelerators; and two minutes
# for its server to come up, as a busy machine takes more than the 30 s that it has by default.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_gcs_server_port_wait_time_s": "120",
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
        os.environ.setdefault("POLARS_MAX_THREADS", "1")
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
    address = os.environ.get("RAY_ADDRESS")
    # Ray leaves handles of its own processes and sockets to the garbage collector.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            if address:
                ray.init(address=address, logging_level="ERROR", log_to_driver=False)
            else:
                ray.init(num_cpus=workers, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = f"the cluster at {address}" if address else "a Ray of this machine"
            raise ReplayError(f"{where} does not answer ({str(error).splitlines()[0]}); use --executor local") from None
