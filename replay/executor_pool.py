"""A pool of processes of this machine that outlives the loss of one of them.

Processes are spawned, not forked: the threads of polars and DuckDB and the locks they hold do not
survive a fork.  They never see Ctrl-C (SIGINT is blocked before they exist, so not even while
they start), and end with the map, however that ends; if this process is killed outright, they end
when they come to their next job.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from blis_replay.replay.executor_ledger import INSIDE_A_WORKER, Ledger, Progress, attempt

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
    # The pool has a process for each processor; polars reads this when it is imported.
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    with suppress(EOFError, OSError):
        work = wire.recv_bytes()
        while True:
            wire.send_bytes(attempt(work, wire.recv_bytes()))


def _start(crew: list[_Worker]) -> _Worker:
    """A new member of the crew."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    worker = _Worker(context.Process(target=serve, args=(theirs,), daemon=True), ours)
    with _interrupts_held():
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
def _interrupts_held() -> Iterator[None]:
    """SIGINT waits; a process that is started meanwhile never sees it."""
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
