"""Another program, run to its end: with a time limit, and with nothing that it started left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blis_replay.base.errors import printable

_LAST_LINE_CHARACTERS = 200
# Largest file that a program can write.
MOST_FILE_BYTES = 4 << 30
# A child counts its parent's memory as its own until it executes another program, so a small program starts it.  The
# starter ends as its child does, and writes the child's errno or peak memory in KiB.
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


@dataclass(frozen=True)
class Ended:
    """``code``: the exit code of a program; negative: the signal that ended it.

    ``peak_bytes``: the peak memory of it or of one of its children; 0 if not known.
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


# The end of a program's output that is read.
_OUTPUT_BYTES = 1 << 20


def run_captured(
    words: Sequence[str], folder: Path, timeout_s: float, named: tuple[str, str], error: type[Exception], *, both: bool
) -> tuple[Ended, str]:
    """Run a program; how it ended, and the last megabyte of its errors, with ``both`` of what it prints as well.

    ``named``: what messages call it, and what to do if it cannot be started.  Raises ``error`` in that case, and if it
    does not end within the limit.
    """
    name, remedy = named
    try:
        with tempfile.TemporaryFile() as captured:
            output = captured.fileno() if both else subprocess.DEVNULL
            end = run_to_end(words, folder, output, captured.fileno(), timeout_s)
            captured.seek(max(captured.seek(0, os.SEEK_END) - _OUTPUT_BYTES, 0))
            return end, captured.read().decode("utf-8", "replace")
    except OSError as problem:
        raise error(f"{words[0]}: cannot be run ({problem.strerror}); {remedy}") from None
    except subprocess.TimeoutExpired:
        raise error(f"{name} did not end within {timeout_s:g} s and was stopped; raise --simulator-timeout") from None


def left_by(path: Path, most_bytes: int) -> bytes | None:
    """The content of a file that a program wrote, at most ``most_bytes`` + 1 of it.

    None if it is missing, or is a link or a pipe.  Raises ``OSError`` if it cannot be read.
    """
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(most_bytes + 1)


def ended(code: int) -> str:
    """How a program ended, in words."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def last_line(text: str) -> str:
    """The last line that a program wrote, printable."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[-1])[:_LAST_LINE_CHARACTERS] if lines else "it said nothing"
