"""How far an ingest is: rate and remaining time on a terminal, silence in a pipe and with --json."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from blis_replay.validate.cli.ingest_verb import progress_text

COMMAND = [sys.executable, "-m", "blis_replay.validate.cli.main", "ingest"]


@pytest.mark.parametrize(
    ("done", "total", "seconds", "text"),
    [
        # 250 MB of 1 GB in 2 s are 125 MB/s, and 750 MB are 6 s more.
        (250_000_000, 1_000_000_000, 2.0, " 25 %, 125 MB/s, 6 s left"),
        (1_000_000_000, 1_000_000_000, 4.0, "100 %, 250 MB/s"),
        # What a first moment says of the rate means nothing.
        (1_000_000, 1_000_000_000, 0.01, "  0 %"),
        (0, 0, 0.0, "100 %"),
    ],
)
def test_share_rate_and_remaining_time(done: int, total: int, seconds: float, text: str) -> None:
    assert progress_text(done, total, seconds) == text


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    directory = tmp_path / "20260101-000000-m-7b-tp1-chat"
    directory.mkdir()
    (directory / "exp-config.yaml").write_text("model: org/m-7b\n")
    header = "request_id,input_tokens,output_tokens,send_time_us,first_chunk_time_us,last_chunk_time_us,status"
    (directory / "trace.csv").write_text(f"{header}\na,5,3,0,10,90,ok\n")
    return directory


def on_terminal(arguments: list[str]) -> str:
    """What a command writes to a terminal that is its standard error."""
    ours, theirs = pty.openpty()
    subprocess.run(arguments, stderr=theirs, stdout=subprocess.DEVNULL, check=True)
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 1 << 16):
            said += piece
    except OSError:
        pass  # how a terminal says that nobody writes to it any more
    os.close(ours)
    return said.decode()


def test_a_terminal_is_told_and_a_pipe_is_not(recording: Path, tmp_path: Path) -> None:
    arguments = [*COMMAND, str(recording), "--store", str(tmp_path / "s.duckdb")]
    assert "trace.csv 100 %" in on_terminal(arguments)
    assert on_terminal([*arguments, "--json"]) == ""
    piped = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert piped.stderr == ""


def test_a_terminal_hears_something_before_the_store_is_read(tmp_path: Path) -> None:
    """Opening a large store takes its time; the line is overwritten by what comes next."""
    page = [*COMMAND[:-1], "report", "--experiment", "34b-roleplay", "--out", str(tmp_path / "page.html")]
    said = on_terminal([*page, "--store", str(tmp_path / "s.duckdb")])
    assert said.startswith("\r\x1b[Kreading the store")
    assert said.endswith("\r\x1b[K")


def test_a_sweep_counts_its_replays_on_a_terminal_and_wipes_the_line(tmp_path: Path) -> None:
    whatif = [*COMMAND[:-1], "whatif", "--experiment", "34b-codegen", "--sweep", "max_num_seqs=64,128"]
    said = on_terminal([*whatif, "--store", str(tmp_path / "s.duckdb")])
    assert "replaying: 1 of 2" in said
    assert said.endswith("\r\x1b[K")
