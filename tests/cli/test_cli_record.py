"""``blis-replay record``: a server is run with the recorder in it, and its directory can be ingested."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fake_vllm
import pytest
from command_line import Run

from blis_replay.ingest.assemble import read_recording
from blis_replay.recorder.writer import FLUSH_S
from blis_replay.validate.server_recording import ServerRecording, _Run, new_directory

COMMAND = (sys.executable, "-m", "blis_replay.validate.cli.main", "record")
SERVER = (sys.executable, str(Path(fake_vllm.__file__)), "serve", "some/model")


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def recorded(folder: Path, *options: str) -> tuple[str, str, float]:
    """What a server prints first, what ``record`` says, and how long that took from SIGTERM on, which ends both with 7.

    It is sent when the metrics are there.
    """
    command = [*COMMAND, "--out", str(folder), *options, "--", *SERVER, "--port", free_port()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as recording:
        assert recording.stdout is not None
        served = recording.stdout.readline()
        until = time.monotonic() + 30
        while not (folder / "metrics-before.prom").exists() and time.monotonic() < until:
            time.sleep(0.05)
        recording.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        try:
            _out, err = recording.communicate(timeout=60)
        finally:
            recording.send_signal(signal.SIGTERM)
    assert recording.returncode == 7, err
    return served, err, time.monotonic() - signalled


@pytest.mark.slow
def test_a_server_is_recorded_until_a_signal_ends_it(tmp_path: Path) -> None:
    """A server of five requests that ends with 7 on SIGTERM: its steps, spans' address, log, metrics and exit code."""
    folder = tmp_path / "my-server-tp1-chat"
    served, err, seconds = recorded(folder)
    assert re.match(r"served --otlp-traces-endpoint", served)
    # vLLM kills its engine at once; the recorder has written what is a flush and a look at the clock old.
    assert seconds >= FLUSH_S + 0.25
    assert re.search(r"steps-engine0-\d+-\d+\.jsonl\.gz: \d+ steps, 5 requests, none dropped; \d+ us per step", err)
    assert f"blis-replay ingest {folder}" in err
    assert (folder / "vllm.log").read_text("utf-8") == served
    for name in ("metrics-before.prom", "metrics-after.prom"):
        assert (folder / name).read_bytes() == b"vllm:num_requests_running 0\n"
    with read_recording(folder) as read:
        assert read.requests["output_tokens"].to_list() == [3, 4, 5, 6, 7]
        assert read.recorder is not None
        assert read.recorder["requests_conserved"] == 5


def test_a_recording_is_not_written_over(run: Run, tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text("of another run", "utf-8")
    answer = run("record", "--out", str(tmp_path), "--", *SERVER)
    assert (answer.code, answer.out) == (4, "")
    assert "there is a recording in it; name another directory with --out" in answer.err
    assert (tmp_path / "vllm.log").read_text("utf-8") == "of another run"


def test_a_server_of_which_nothing_is_known_is_not_to_be_ingested(run: Run, tmp_path: Path) -> None:
    """The command that it was sent on to was refused."""
    answer = run("record", "--out", "my run", "--no-spans", "--", "sh", "-c", "exit 1")
    assert answer.code == 1
    assert "ingest" not in answer.err
    quoted = f"'{tmp_path}/my run/vllm.log'"
    assert f"next: see why in {quoted}, and record again into another directory" in answer.err


def test_a_server_that_ends_as_its_metrics_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer and the cancellation in one turn of the loop: Python's ``wait_for`` went on for ever then (3.11)."""

    async def was_cancelled() -> bool:
        answered = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(asyncio, "to_thread", lambda *_: answered)
        server = _Run(("serve",), ServerRecording(tmp_path), {}, None)
        metrics = asyncio.create_task(server._first_metrics())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answered.set_result(b"")
        metrics.cancel()
        await asyncio.wait({metrics}, timeout=5)
        return metrics.cancelled()

    assert asyncio.run(was_cancelled())


def test_what_a_killed_server_leaves_behind_is_ended(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine goes on after ``kill -9`` of its server, and keeps its output open: here for a minute."""
    monkeypatch.setattr("blis_replay.validate.server_recording._LEFT_S", 0.1)
    begin = time.monotonic()
    answer = run("record", "--out", str(tmp_path / "run"), "--no-spans", "--", "sh", "-c", "sleep 60 & kill -9 $$")
    assert time.monotonic() - begin < 30
    assert answer.code == 128 + signal.SIGKILL
    assert "it was killed and left processes behind" in answer.out + answer.err


def test_a_server_that_a_script_leaves_in_the_background_is_recorded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script ends at once and by itself; what it started goes on for two seconds, and is not ended."""
    monkeypatch.setattr("blis_replay.validate.server_recording._LEFT_S", 0.1)
    script = "(sleep 2; echo served) & exit 0"
    assert run("record", "--out", str(tmp_path / "run"), "--no-spans", "--", "sh", "-c", script).code == 0
    assert "served" in (tmp_path / "run" / "vllm.log").read_text("utf-8")


def test_a_log_that_is_a_link_is_not_written_through(run: Run, tmp_path: Path) -> None:
    """And no server is started that would be left alone."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "vllm.log").symlink_to(tmp_path / "elsewhere")
    program = (sys.executable, "-c", f"open({str(tmp_path / 'started')!r}, 'w')")
    answer = run("record", "--out", str(folder), "--no-spans", "--", *program)
    assert answer.code == 4
    assert "vllm.log: cannot be made (File exists); name another directory with --out" in answer.err
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.slow
def test_metrics_that_cannot_be_written_keep_no_server_from_its_end(tmp_path: Path) -> None:
    """As on a full disk: a folder stands in their place."""
    folder = tmp_path / "my-server-tp1-chat"
    (folder / "metrics-after.prom").mkdir(parents=True)
    _served, err, _seconds = recorded(folder, "--no-spans")
    assert "metrics-after.prom: cannot be written (Is a directory" in err


def test_modules_of_the_working_directory_do_not_answer_for_the_server(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it can send spans is asked of its Python, which would run what lies where it is asked."""
    folder, ran = tmp_path / "working", tmp_path / "ran"
    folder.mkdir()
    (folder / "opentelemetry.py").write_text(f"open({str(ran)!r}, 'w')")
    monkeypatch.chdir(folder)
    server = tmp_path / "vllm"
    server.write_text(f"#!{sys.executable}\n")
    server.chmod(0o755)
    assert run("record", "--out", str(tmp_path / "run"), "--", str(server), "serve", "some/model").code == 0
    assert not ran.exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("vllm serve meta-llama/Llama-3.1-8B --port 1", r"runs/\d{8}-\d{6}-Llama-3\.1-8B-tp1-recorded"),
        ("vllm serve --model /models/tiny -tp 4", r"runs/\d{8}-\d{6}-tiny-tp4-recorded"),
        ("python -m x --tensor-parallel-size=2", r"runs/\d{8}-\d{6}-model-tp2-recorded"),
    ],
)
def test_the_directory_is_named_after_date_and_model(command: str, name: str) -> None:
    assert re.fullmatch(name, str(new_directory(command.split())))


def test_what_was_recorded_as_json_beside_a_server_that_ends_at_once(run: Run, tmp_path: Path) -> None:
    program = (sys.executable, "-c", "print('up'); raise SystemExit(5)")
    answer = run("record", "--out", str(tmp_path / "run"), "--json", "--", *program)
    assert answer.code == 5
    recorded = answer.json["recorded"]
    assert (recorded["exit_code"], recorded["step_logs"], recorded["spans"]) == (5, {}, 0)
    assert "spans: no `vllm serve`, so its arguments were left alone" in recorded["not_recorded"]
    assert (tmp_path / "run" / "vllm.log").read_text("utf-8") == "up\n"
