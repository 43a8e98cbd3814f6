"""The books of a map over workers: which job is out, what came back, what was lost."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any

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
