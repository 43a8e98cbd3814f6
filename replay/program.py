"""Another program, run to its end: with a limit of time, and nothing that it started left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from blis_replay.ingest.errors import printable

_LAST_LINE_CHARACTERS = 200


def run_to_end(words: Sequence[str], folder: Path, output: int, errors: int, timeout_s: float) -> int:
    """The exit code of a program, run in a folder without a shell; negative: the signal that ended it.

    ``output``, ``errors``: file descriptors.  Raises ``OSError`` if it cannot be started, and
    ``subprocess.TimeoutExpired`` if it does not end; whatever it started is ended too.
    """
    process = subprocess.Popen(  # noqa: S603 (the program that the user names, and no shell)
        list(words), stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=folder, start_new_session=True
    )
    try:
        return process.wait(timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(code: int) -> str:
    """How a program ended, in words."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def last_line(text: str) -> str:
    """The last line that a program wrote, fit to be printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[-1])[:_LAST_LINE_CHARACTERS] if lines else "it said nothing"
