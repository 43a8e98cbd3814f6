"""Measure validate --all on a store of 100 recordings with 1.5 million requests, its progress as a terminal sees it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import large_store

COMMAND = (sys.executable, "-m", "blis_replay.validate.cli.main")


@dataclass(frozen=True)
class Watched:
    """A command run under a terminal: seconds, those of CPU, its peak MB, and when it wrote to the terminal."""

    seconds: float
    cpu_s: float
    peak_mb: float
    written_s: list[float]

    def told(self) -> str:
        """When it first said something, and the longest time it was silent after that."""
        silent_s = max((later - sooner for sooner, later in pairwise([*self.written_s, self.seconds])), default=0.0)
        return f"first progress after {self.written_s[0]:.1f} s, never silent for more than {silent_s:.1f} s"


def large(folder: Path) -> Iterator[tuple[str, float, float | None, str]]:
    """Rows of the benchmark table: the first validation, which stores the runs, and another."""
    store = folder / "large.duckdb"
    begin = time.perf_counter()
    subprocess.run([sys.executable, large_store.__file__, store], check=True)
    made = f"made in {time.perf_counter() - begin:.0f} s, {store.stat().st_size / 1e6:.0f} MB"
    requests = large_store.EXPERIMENTS * large_store.REQUESTS
    for what, remark in (("first", f"; store {made}"), ("again", "")):
        run = watched(*COMMAND, "validate", "--all", "--store", str(store))
        rate = f"{run.cpu_s:.0f} s of CPU; {run.told()}"
        yield f"validate --all, {requests:,} requests, {what}", run.seconds, run.peak_mb, rate + remark


def watched(*command: str) -> Watched:
    """Run a command with a terminal as its standard error; ends this program where the command fails."""
    ours, theirs = pty.openpty()
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    written_s = []
    while _more(ours):
        written_s.append(time.perf_counter() - begin)
    _, status, usage = os.wait4(process.pid, 0)
    os.close(ours)
    if os.waitstatus_to_exitcode(status) not in (0, 1) or not written_s:
        sys.exit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    seconds, cpu_s = time.perf_counter() - begin, usage.ru_utime + usage.ru_stime
    return Watched(seconds, cpu_s, usage.ru_maxrss / 1024, written_s)


def _more(terminal: int) -> bool:
    """Whether something was written; False once nobody can write any more."""
    select.select([terminal], [], [])
    try:
        return bool(os.read(terminal, 1 << 16))
    except OSError:  # how a terminal says so
        return False
