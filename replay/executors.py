"""Many replays at once: one ``map`` for whatever runs more than one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

Job = TypeVar("Job")
Answer = TypeVar("Answer")

ExecutorName = Literal["serial"]


def map_jobs(
    work: Callable[[Job], Answer],
    jobs: Sequence[Job],
    *,
    executor: ExecutorName = "serial",
    progress: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """``work`` of every job, in the order of the jobs.

    ``executor``: ``serial``, one after the other in this process.  ``progress(done, all)`` is called after each.
    """
    answers = []
    for job in jobs:
        answers.append(work(job))
        if progress is not None:
            progress(len(answers), len(jobs))
    return answers
