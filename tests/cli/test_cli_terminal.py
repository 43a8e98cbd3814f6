"""Pages on terminals of 80 and 160 columns, as a user sees them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from command_line import Run
from terminal import read_to_end

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "blis_replay.validate.cli.main"]


def lines(columns: int, *arguments: str) -> list[str]:
    """What stands on a terminal in the end, without its colours and its wiped progress lines."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    environment = {**kept, "TERM": "xterm-256color"}
    command = [*COMMAND, *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        written = read_to_end(ours)
    assert b"\x1b[1m" in written, "headings are bold on a terminal"
    shown = re.sub(r"\x1b\[[0-9;]*m", "", written.decode()).replace("\r\n", "\n")
    return [line.rpartition("\x1b[K")[2] for line in shown.rstrip("\n").split("\n")]


def test_an_80_column_terminal_shows_what_a_pipe_gets(run: Run) -> None:
    piped = run("validate", "--experiment", "34b-general", "--replay", "scheduling=synchronous").out
    shown = lines(80, "validate", "--experiment", "34b-general", "--replay", "scheduling=synchronous")
    assert "\n".join(line.rstrip() for line in shown) == piped.rstrip("\n")


def test_a_160_column_terminal_shows_percentiles_beside_each_other(run: Run) -> None:
    """80 columns show 5 of the 13 errors of a load stage, with the same digits."""
    stages = ("validate", "--experiment", "34b-codegen", "--by-stage")
    shown, piped = lines(160, *stages), run(*stages).out.splitlines()
    header = next(line for line in shown if "by load stage" in line)
    percentiles = ["p50", "p90", "p99"]
    assert header.split()[5:] == ["E2E", *percentiles, "TTFT", *percentiles, "ITL", *percentiles, "TPOT"]
    assert max(map(len, shown)) <= 160
    wide, narrow = ([line for line in page if line.startswith("stage 1")] for page in (shown, piped))
    assert set(narrow[0].split()) < set(wide[0].split())


def test_an_error_is_broken_between_words() -> None:
    """In a pipe it stays one line, which programs look for."""
    shown = lines(80, "validate", "34b-general", "--coefficients", "stepml-per-model-linear")
    assert len(shown) > 1 and max(map(len, shown)) <= 80
    words = " ".join(shown).split()
    assert words[:3] == ["error:", "release", "stepml-per-model-linear"] and "negative" in words
