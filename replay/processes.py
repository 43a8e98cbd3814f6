"""A pool of processes of this machine that outlives the loss of one of them.

Processes are spawned, not forked: the threads of polars and DuckDB and the locks they hold do not
survive a fork.  They never see Ctrl-C (SIGINT is blocked before they exist, so not even while
they start), import nothing from the working directory, and end with the map, however that ends; if
this process is killed outright, they end when they come to their next job.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from blis_replay.replay.errors import ReplayError

Progress = Callable[[int, int], None]

# Set in the environment of workers.
INSIDE_A_WORKER = "BLIS_REPLAY_INSIDE_A_WORKER"
# A job that loses its worker is done again so many times.
RETRIES = 2


class Ledger:
    """Jobs 0 .. n-1 of one map.

    Jobs are handed out in order.  When one has failed no later one is, but those before it are
    finished, so that the failure raised is the first in the order of the jobs, as if they had
    been done one after the other.
    """

    def __init__(self, jobs: int, progress: Progress | None) -> None:
        self._outcomes: list[tuple[bool, Any] | None] = [None] * jobs
        self._progress = progress
        self._wanted = jobs  # jobs before this one are to be done: all, or those before the first failure
        self._next, self._done = 0, 0
        self._again: list[int] = []
        self._losses: dict[int, int] = {}
        self._out: set[int] = set()

    def hand_out(self) -> int | None:
        """The next job, None if there is none to be done now."""
        self._again = sorted(job for job in self._again if job < self._wanted)
        if self._again:
            job = self._again.pop(0)
        elif self._next < self._wanted:
            job = self._next
            self._next += 1
        else:
            return None
        self._out.add(job)
        return job

    @property
    def finished(self) -> bool:
        """Whether every job that is to be done is done."""
        waiting = self._next < self._wanted or any(job < self._wanted for job in self._again)
        return not waiting and not any(job < self._wanted for job in self._out)

    def done(self, job: int, outcome: bytes) -> None:
        """Book what ``attempt`` returned of a job."""
        self._out.discard(job)
        succeeded, value = pickle.loads(outcome)  # noqa: S301  # our own processes wrote it
        self._outcomes[job] = succeeded, value
        if not succeeded:
            self._wanted = min(self._wanted, job)
        self._done += 1
        if self._progress is not None and succeeded:
            self._progress(self._done, len(self._outcomes))

    def lost(self, job: int, how: str) -> None:
        """The worker of a job is gone: it is to be done again; ``ReplayError`` if that has been tried enough."""
        self._out.discard(job)
        self._again.append(job)
        self._losses[job] = self._losses.get(job, 0) + 1
        if self._losses[job] > RETRIES:
            raise ReplayError(
                f"job {job + 1} of {len(self._outcomes)} lost its worker {self._losses[job]} times (the last {how}); "
                "if memory is short use fewer --workers, or --executor serial to see what happens"
            )

    def answers(self) -> list[Any]:
        """The answers in the order of the jobs; raises the first failure."""
        answers = []
        for succeeded, value in (outcome for outcome in self._outcomes if outcome is not None):
            if not succeeded:
                raise value
            answers.append(value)
        return answers


def attempt(work: bytes, job: bytes) -> bytes:
    """In a worker: do a pickled job with pickled work; the outcome, answer or exception, for ``Ledger.done``."""
    try:
        return pickle.dumps((True, _loaded(work)(pickle.loads(job))))  # noqa: S301  # our own processes wrote it
    except Exception as error:  # not handled but carried over: it is the caller's, who gets it as itself
        return _carried(error)


def _carried(error: Exception) -> bytes:
    error.add_note("in a worker:\n" + "".join(traceback.format_exception(error)))
    try:
        outcome = pickle.dumps((False, error))
        pickle.loads(outcome)  # noqa: S301  # some can be pickled and not be made again
    except (pickle.PickleError, TypeError, AttributeError, ValueError):
        return pickle.dumps((False, ReplayError(f"{type(error).__name__}: {error}")))
    return outcome


@lru_cache(maxsize=1)
def _loaded(pickled: bytes) -> Any:
    """What was pickled; work comes again with every job, and is unpickled once."""
    return pickle.loads(pickled)  # noqa: S301  # our own processes wrote it


Job = TypeVar("Job")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    wire: Connection[Any, Any]


def pool_map(
    work: Callable[[Job], Answer], jobs: Sequence[Job], workers: int, progress: Progress | None
) -> list[Answer]:
    """``work`` of every job in a pool of spawned processes; see ``executors.map_jobs``."""
    ledger, shipped = Ledger(len(jobs), progress), pickle.dumps(work)
    crew: list[_Worker] = []
    busy: dict[object, tuple[_Worker, int]] = {}  # by wire
    try:
        for _ in range(min(workers, len(jobs))):  # all start before the first is waited for
            _start(crew)
        idle = list(crew)
        for worker in crew:
            _send(worker, shipped)
        while not ledger.finished:
            while idle and (job := ledger.hand_out()) is not None:
                worker = idle.pop()
                busy[worker.wire] = worker, job
                _send(worker, pickle.dumps(jobs[job]))
            for wire in connection.wait([worker.wire for worker, _ in busy.values()]):
                worker, job = busy.pop(wire)
                if (outcome := _received(worker)) is not None:
                    ledger.done(job, outcome)
                else:
                    ledger.lost(job, _how_it_ended(worker))
                    worker = _replaced(worker, crew, shipped)
                idle.append(worker)
    finally:
        for worker in crew:
            _end(worker)
    return ledger.answers()


def serve(wire: Connection[Any, Any]) -> None:
    """The life of a worker: receive work, then jobs, and answer each, until nobody is there."""
    os.environ[INSIDE_A_WORKER] = "1"
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries, as of the command line
    use_one_thread()
    with suppress(EOFError, OSError):
        work = wire.recv_bytes()
        while True:
            wire.send_bytes(attempt(work, wire.recv_bytes()))


def use_one_thread() -> None:
    """In a worker, of which there is one for each processor; polars and numpy read it when they are imported."""
    for name in ("POLARS_MAX_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def _start(crew: list[_Worker]) -> _Worker:
    """A new member of the crew."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    worker = _Worker(context.Process(target=serve, args=(theirs,), daemon=True), ours)
    with _interrupts_held(), _safe_path():
        worker.process.start()
        crew.append(worker)
    theirs.close()
    return worker


def _replaced(lost: _Worker, crew: list[_Worker], shipped: bytes) -> _Worker:
    """A new member of the crew in place of a lost one."""
    crew.remove(lost)
    _end(lost)
    worker = _start(crew)
    _send(worker, shipped)
    return worker


@contextmanager
def _safe_path() -> Iterator[None]:
    """A Python that is started meanwhile imports nothing from the working directory."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """SIGINT waits; a process that is started meanwhile never sees it."""
    # The first process started would start it, and that lets SIGINT through again.
    with _safe_path():
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(worker: _Worker, message: bytes) -> None:
    with suppress(OSError):  # it is gone, which is seen when its answer is waited for
        worker.wire.send_bytes(message)


def _received(worker: _Worker) -> bytes | None:
    """The outcome that a worker sent, None if it is gone."""
    try:
        return worker.wire.recv_bytes()
    except (EOFError, OSError):
        return None


def _how_it_ended(worker: _Worker) -> str:
    """In words, of a worker whose wire is closed at the other end."""
    worker.process.join(1)
    code = worker.process.exitcode
    if code is None:
        return "does not answer"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.process.close()
    worker.wire.close()
