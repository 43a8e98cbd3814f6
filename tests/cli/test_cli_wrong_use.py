"""Wrong uses: one line on standard error that says what is wrong and what to do; nothing on standard output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import Run
from mistakes import FOLDER, Mistake, mistakes, set_up

from blis_replay.ingest.store import open_store
from blis_replay.validate import STORE_DEFAULT


@pytest.mark.slow
@pytest.mark.usefixtures("all_bundled")
@pytest.mark.parametrize("mistake", mistakes(), ids=lambda mistake: mistake.command)
def test_a_mistake_is_one_line_that_names_the_remedy(run: Run, mistake: Mistake) -> None:
    """Names, files, options, values and places; renew with `python tests/support/mistakes.py`."""
    set_up(Path())
    there = {*Path().iterdir(), STORE_DEFAULT.parent}
    answer = run(*mistake.arguments)
    said = answer.err.replace(str(Path.cwd()), FOLDER)
    assert (answer.code, said) == (mistake.code, f"error: {mistake.message}\n")
    if answer.out:
        assert mistake.arguments[0] == "--json" and answer.json["error"]["exit_code"] == mistake.code
    assert re.search("; |: |[?]", mistake.message), "the problem, then the remedy"
    assert {*Path().iterdir()} <= there, "nothing is written"


def test_the_table_has_sixty_mistakes_each_once() -> None:
    commands = [mistake.command for mistake in mistakes()]
    assert len(commands) == len(set(commands)) >= 60
    assert {mistake.code for mistake in mistakes()} == {2, 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("--help",), ("validate", "--help"), ("inspect", "--checks"), ("coefficients", "list", "--csv")]
)
def test_a_closed_pipe_is_a_closed_pipe_everywhere(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Help of the program too: click itself would end it with 1, which is a failed threshold here."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "blis_replay.validate.cli.main", *arguments]
    ended = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_query_that_is_interrupted_is_an_interruption(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB makes a RuntimeError of Ctrl-C."""

    def interrupted(*_: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("Query interrupted")  # as DuckDB does

    monkeypatch.setattr("blis_replay.validate.inspection.experiments_answer", interrupted)
    answer = run("list")
    assert (answer.code, answer.out) == (130, "")
    assert answer.err == "interrupted; what was finished is stored whole, the rest not at all\n"


def test_the_database_prints_no_progress_of_its_own(tmp_path: Path) -> None:
    """Its bar would stand in the middle of the JSON of a query of some seconds."""
    with open_store(tmp_path / "s.duckdb") as store:
        shown = store.connection.execute("SELECT current_setting('enable_progress_bar')").fetchone()
    assert shown == (False,)


@pytest.mark.slow
def test_an_error_of_the_program_itself_is_one_line(tmp_path: Path) -> None:
    """Libraries may complain while the process ends: DuckDB listed objects that garbage collection had not freed."""
    program = Path(sys.executable).with_name("blis-replay")
    (tmp_path / "server.log").write_text("INFO nothing\n", "utf-8")
    command = [program, "ingest", tmp_path / "server.log", "--store", tmp_path / "store.duckdb"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (4, "", 1)
