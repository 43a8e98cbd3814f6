"""Work for the executors' tests: functions of a module, as workers need them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from blis_replay.replay.executors import map_jobs


def drawn(seed: int) -> float:
    """A number that only its seed decides."""
    return float(np.random.default_rng(seed).random())


def process_of(job: int) -> int:
    return os.getpid()


def process_of_a_long(job: int) -> int:
    time.sleep(1.1)
    return os.getpid()


def failing_from_four(job: int) -> int:
    """Job 4 fails last, though it is the first in order."""
    if job >= 4:
        time.sleep(0.3 if job == 4 else 0)
        raise KeyError(job)
    return job


class StubbornError(Exception):
    """Can be pickled, and cannot be made again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def stubborn(job: int) -> int:
    raise StubbornError("no", str(job))


def killed_always(marks: Path, job: int) -> int:
    if job == 2:
        (marks / f"{time.monotonic_ns()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return job


class Large:
    """Notes each process that it is unpickled in."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.notes,)


def _unpickled(notes: Path) -> Large:
    with notes.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return Large(notes)


def with_large(large: Large, job: int) -> int:
    time.sleep(0.02)
    return job


def map_inside(job: int) -> list[int]:
    return [os.getpid(), *map_jobs(process_of, [1, 2, 3])]


def slow(notes: Path, job: int) -> int:
    (notes / str(os.getpid())).touch()
    time.sleep(60 if job else 1.1)
    return job
