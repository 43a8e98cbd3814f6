"""Another program, run to its end: with a limit of time, and nothing that it started left behind; and what a run
took.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from blis_replay.ingest.errors import printable

_LAST_LINE_CHARACTERS = 200
# What a program that runs amok can make of a file.
MOST_FILE_BYTES = 4 << 30
# Until it becomes another program a child counts the memory of its parent as its own, so a small program starts it.
# That one ends as its child does, and writes the child's errno or largest memory in KiB.
_STARTER = """
import os, resource, signal, sys
told, most, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
try:
    pid = os.posix_spawnp(words[0], words, os.environ, file_actions=[(os.POSIX_SPAWN_CLOSE, told)])
except OSError as error:
    os.write(told, b"%d 0" % error.errno)
    sys.exit(127)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
os.write(told, b"0 %d" % resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""

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
    """``code``: the exit code of a program; negative: the signal that ended it.

    ``peak_bytes``: the largest memory of it or of one of those that it started; 0 if not known.
    """

    code: int
    peak_bytes: int


def run_to_end(words: Sequence[str], folder: Path, output: int, errors: int, timeout_s: float) -> Ended:
    """Run a program in a folder, without a shell.

    ``output``, ``errors``: file descriptors.  No file of it can have more than ``MOST_FILE_BYTES``.  Raises ``OSError``
    if it cannot be started, and ``subprocess.TimeoutExpired`` if it does not end; whatever it started is ended too.
    """
    ours, theirs = os.pipe()
    try:
        try:
            process = subprocess.Popen(  # noqa: S603 (the program that the user names, and no shell)
                [sys.executable, "-I", "-S", "-c", _STARTER, str(theirs), str(MOST_FILE_BYTES), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd=folder,
                start_new_session=True,
                pass_fds=(theirs,),
            )
        finally:
            os.close(theirs)
        try:
            code = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errno, peak_kib = (int(word) for word in (os.read(ours, 100) or b"0 0").split())
    finally:
        os.close(ours)
    if errno:
        raise OSError(errno, os.strerror(errno), words[0])
    return Ended(code, peak_kib * 1024)


def left_by(path: Path, most_bytes: int) -> bytes | None:
    """What a program left in a file, one byte too many if it is longer.

    None if there is none, or a link or a pipe in its place.  Raises ``OSError`` if it cannot be read.
    """
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(most_bytes + 1)


def ended(code: int) -> str:
    """How a program ended, in words."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def last_line(text: str) -> str:
    """The last line that a program wrote, fit to be printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[-1])[:_LAST_LINE_CHARACTERS] if lines else "it said nothing"
