"""How far long work is: a bar and the remaining time on a terminal, gone at the end; silence in a pipe."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import read_to_end

from blis_replay.validate.cli.progress import progress_line, progress_text

COMMAND = [sys.executable, "-m", "blis_replay.validate.cli.main", "ingest"]


@pytest.mark.parametrize(
    ("done", "total", "seconds", "text"),
    [
        # 250 of 1,000 in 2 s: the other 750 take 6 s more; a quarter of 16 columns is 4.
        (250, 1_000, 2.0, f"[{'#' * 4}{'.' * 12}] 25%, 6 s left"),
        (1_000, 1_000, 4.0, f"[{'#' * 16}] 100%"),
        # 3 of 12 replays in 30 s take 10 s each, and the other 9 take 90 s.
        (3, 12, 30.0, f"[{'#' * 4}{'.' * 12}] 25%, 1 min 30 s left"),
        (1, 721, 10.0, f"[{'.' * 16}] 0%, 2 h 0 min left"),
        # What a first moment says of the rate means nothing.
        (1, 1_000, 0.01, f"[{'.' * 16}] 0%"),
        (0, 12, 5.0, f"[{'.' * 16}] 0%"),
        (0, 0, 0.0, f"[{'#' * 16}] 100%"),
    ],
)
def test_a_bar_and_the_remaining_time(done: int, total: int, seconds: float, text: str) -> None:
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
    return read_to_end(ours).decode()


@pytest.mark.slow
def test_a_terminal_is_told_and_a_pipe_is_not(recording: Path, tmp_path: Path) -> None:
    arguments = [*COMMAND, str(recording), "--store", str(tmp_path / "s.duckdb")]
    said = on_terminal(arguments)
    assert "] 100% trace.csv" in said
    assert said.endswith("\r\x1b[K")
    piped = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert piped.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "begin", "within"),
    [
        # Opening a large store takes its time.
        (["report", "--experiment", "34b-roleplay", "--out", "page.html"], "\r\x1b[Kreporting ...", ""),
        (["simulate", "--experiment", "34b-codegen", "--sweep", "max_num_seqs=64,128"], "", "] 50%"),
    ],
)
def test_a_terminal_hears_of_work_and_its_line_is_wiped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], begin: str, within: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = on_terminal([*COMMAND[:-1], *arguments, "--store", "s.duckdb"])
    assert said.startswith(begin) and within in said
    assert said.endswith("\r\x1b[K")


def shown_on_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard error, which says that it is a terminal."""
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_the_line_is_wiped_before_an_error_is_printed(
    monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    shown = shown_on_terminal(monkeypatch)
    with pytest.raises(raised), progress_line("replaying") as told:
        assert told is not None
        told(1, 4)
        raise raised
    assert "replaying [####...." in shown.getvalue()
    assert shown.getvalue().endswith("\r\x1b[K")


def test_the_line_is_cut_at_the_edge_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps leaves its first part behind when it is wiped."""
    shown = shown_on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "40")
    with progress_line("experiment-" * 10) as told:
        assert told is not None
        told(1, 4)
    assert max(len(part.replace("\x1b[K", "")) for part in shown.getvalue().split("\r")) == 39


@pytest.mark.slow
def test_interrupted_work_ends_with_130_and_a_clean_line(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    verify = subprocess.Popen(
        [*COMMAND[:-1], "verify"], stderr=theirs, stdout=subprocess.DEVNULL, start_new_session=True
    )
    os.close(theirs)
    said = b""
    while b"verifying [" not in said:
        said += os.read(ours, 1 << 16)
    os.killpg(verify.pid, signal.SIGINT)
    said += read_to_end(ours)
    assert verify.wait() == 130
    *_, before, message = said.decode().strip().splitlines()
    assert message == "interrupted; what was finished is stored whole, the rest not at all"
    assert before.endswith("\x1b[K") or not before
