"""Another program, run to its end: with a limit of time, and nothing that it started left behind; and what a run
took.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from blis_replay.ingest.errors import printable

_LAST_LINE_CHARACTERS = 200
_LONGEST_NAP_S = 0.05

_T = TypeVar("_T")


@dataclass(frozen=True)
class Taken(Generic[_T]):
    """What a call answered, the seconds that it took, and the largest memory of this process meanwhile.

    ``peak_bytes``: None where the system does not tell (it does on Linux).
    """

    answer: _T
    seconds: float
    peak_bytes: int | None


def taken(call: Callable[[], _T]) -> Taken[_T]:
    """Call, and measure it; raises what the call raises."""
    counted = _forget_peak()
    began = time.perf_counter()
    answer = call()
    return Taken(answer, time.perf_counter() - began, _peak_bytes() if counted else None)


def _forget_peak() -> bool:
    """Let the kernel count the largest memory of this process from now on; whether it does (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    except OSError:
        return False
    return True


def _peak_bytes() -> int | None:
    for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


@dataclass(frozen=True)
class Ended:
    """``code``: the exit code of a program; negative: the signal that ended it.  ``peak_bytes``: its largest memory."""

    code: int
    peak_bytes: int


def run_to_end(words: Sequence[str], folder: Path, output: int, errors: int, timeout_s: float) -> Ended:
    """Run a program in a folder, without a shell.

    ``output``, ``errors``: file descriptors.  Raises ``OSError`` if it cannot be started, and
    ``subprocess.TimeoutExpired`` if it does not end; whatever it started is ended too.
    """
    process = subprocess.Popen(  # noqa: S603 (the program that the user names, and no shell)
        list(words), stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=folder, start_new_session=True
    )
    try:
        return _wait(process, timeout_s)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> Ended:
    """As ``Popen.wait``, which does not tell what the program took."""
    until, nap_s = time.monotonic() + timeout_s, 0.001
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return Ended(process.returncode, usage.ru_maxrss * 1024)
        if time.monotonic() >= until:
            raise subprocess.TimeoutExpired(process.args, timeout_s)
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)


def ended(code: int) -> str:
    """How a program ended, in words."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def last_line(text: str) -> str:
    """The last line that a program wrote, fit to be printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[-1])[:_LAST_LINE_CHARACTERS] if lines else "it said nothing"
