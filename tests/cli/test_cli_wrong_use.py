"""Wrong uses: one line on standard error that says what is wrong and what to do; nothing on standard output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Run

from blis_replay.ingest.store import open_store

GENERAL = ("--experiment", "34b-general")
OURS = ("--coefficients", "h100-vllm-0.15.1")
SIMULATE = ("simulate", *OURS, "--model", "codellama-34b-instruct-hf", "--out", "run")

# Arguments, exit code, and what the line says to do.
WRONG = [
    (("nosuch",), 2, "see `blis-replay --help`"),
    (("valdate",), 2, "did you mean 'validate'?"),
    (("explain",), 2, "list them with `blis-replay list`"),
    (("explain", "34b-general", "34b-codegen"), 2, "one experiment at a time"),
    (("inspect", "34b-*"), 2, "34b-* matches 4 experiments, one is needed: "),
    (("list", "--json", "--csv"), 2, "--json and --csv: one form at a time"),
    (("list", "-f", "csv", "--json"), 2, "--csv and --json: one form at a time"),
    (("list", "-o", "absent/list.txt"), 2, "make it first"),
    (("calibrate", "--out", "x.yaml"), 2, "blis-replay calibrate 34b-general --out mine.yaml"),
    (("validate",), 2, "name experiments, or use --all"),
    (("validate", "--experimnt", "x"), 2, "Did you mean one of: '--experiment'"),
    (("validate", "--all", *GENERAL), 2, "name experiments, or use --all"),
    (("validate", "--experiment", "nobody"), 2, "list them with `blis-replay list`"),
    (("validate", "--experiment", "99b-*"), 2, "list them with `blis-replay list`"),
    (("validate", *GENERAL, "--coefficients", "nope"), 2, "releases that ship: "),
    (("validate", *GENERAL, "--coefficients", "folder"), 3, "name a readable file"),
    (("validate", *GENERAL, "--coefficients", "broken.yaml"), 3, "correct or replace the file"),
    (("validate", *GENERAL, "--coefficients", "binary.yaml"), 3, "name a file of coefficients"),
    (("validate", *GENERAL, "--replay", "nope"), 2, "use exact, as-published"),
    (("validate", *GENERAL, "--replay", "scheduling=maybe"), 2, "use scheduling=recorded|synchronous|asynchronous"),
    (("validate", *GENERAL, "--simulator", "none"), 2, "'none' is not one of embedded, blis, both"),
    (("validate", *GENERAL, "--simulator", "blis", "--blis-binary", "absent"), 3, "give its path with --blis-binary"),
    (("validate", *GENERAL, "--window", "2:1"), 2, "use 0 <= from < to <= 1"),
    (("validate", *GENERAL, "--store", "no-store.duckdb"), 3, "choose another path with --store"),
    (("validate", *GENERAL, "--store", "folder"), 2, "is a directory"),
    (("experiments", "--store", "empty.duckdb"), 3, "choose another path with --store"),
    (("--color", "sometimes", "experiments"), 2, "'auto', 'always', 'never'"),
    (("attribute", *GENERAL, "--seed", "-1"), 2, "x>=0"),
    (("attribute", *GENERAL, "--workers", "0"), 2, "x>=1"),
    (("segments", *GENERAL, "--out", "x.txt"), 2, "name a .parquet or a .csv file"),
    (("segments", *GENERAL, "--out", "absent/x.csv"), 2, "make it first"),
    (("timeline", *GENERAL, "--out", "x.json", "--from", "9x"), 2, "write e.g. 600s"),
    (("timeline", *GENERAL, "--out", "x.json", "--from", "99999s"), 3, "choose an earlier --from"),
    (("report", *GENERAL, "--out", "folder"), 2, "is a directory"),
    (("report", *GENERAL, "--out", "absent/report.html"), 2, "make it first"),
    (("inspect",), 2, "list the checks with --checks"),
    (("inspect", *GENERAL, "--check", "nope"), 2, "there are overloaded, token_events"),
    (("ingest", "absent"), 3, "no such"),
    (("ingest", "engine.yaml", "--input-format", "nope"), 2, "is not one of otlp"),
    (("ingest", "engine.yaml", "--columns", "ttft=x:h"), 2, "'h' is not a known unit of time"),
    (("coefficients", "show", "broken.yaml"), 3, "correct or replace the file"),
    (("coefficients", "for-model", "absent.json", "--model", "m", "--out", "x.yaml"), 3, "name a readable file"),
    (("compare", "34b-general"), 2, "name two sides, A and B"),
    (("compare", "a", "b"), 2, "list them with `blis-replay list`"),
    (("gate", *OURS, "--policy", "absent.yaml"), 3, "name a readable file"),
    (("gate", *OURS, "--junit", "absent/x.xml"), 2, "make it first"),
    (("calibrate", "--train", "nobody", "--out", "x.yaml"), 2, "list them with `blis-replay list`"),
    (("calibrate", "--train", "34b-general", "--out", "x.yaml", "--split", "3"), 2, "write e.g. 0.6:0.8"),
    (("generalize",), 2, "--lomo (a model) or --lowo (a workload)"),
    (("generalize", "--lomo", "--config", "x"), 2, "e.g. org/new-3b=config.json"),
    (("whatif", *GENERAL), 2, "--set max_num_seqs=256"),
    (("whatif", *GENERAL, "--set", "nope=1"), 2, "use max_num_seqs"),
    (("whatif", *GENERAL, "--set", "max_num_seqs=x"), 2, "give a whole number"),
    ((*SIMULATE, "--engine", "engine.yaml"), 2, "--requests FILE, --experiment NAME, --workload FILE"),
    ((*SIMULATE, "--engine", "engine.yaml", "--requests", "absent.csv"), 3, "name a readable file"),
    ((*SIMULATE, "--engine", "broken.yaml", "--requests", "absent.csv"), 3, "correct the file"),
    (("export", *GENERAL, "--to", "parquet", "--out", "folder"), 2, "give --force to replace it"),
    (
        (*SIMULATE[:-1], "there", "--engine", "engine.yaml", "--requests", "x.csv"),
        2,
        "choose another folder, or --force",
    ),
    (("collect", "--out", "run", "--listen", "nohost"), 2, "write e.g. 127.0.0.1:4317"),
    (("verify", "--seed", "-1"), 2, "0<=x<=4294967295"),
]


@pytest.mark.parametrize(("arguments", "code", "mend"), WRONG, ids=[" ".join(a) for a, _, _ in WRONG])
def test_a_wrong_use_is_one_line_with_the_mend(run: Run, arguments: tuple[str, ...], code: int, mend: str) -> None:
    Path("folder").mkdir()
    Path("there").mkdir()
    Path("there/summary.json").write_text("{}")
    Path("broken.yaml").write_text("a: [")
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    Path("no-store.duckdb").write_text("no database")
    Path("empty.duckdb").write_text("")
    Path("engine.yaml").write_text(
        "max_num_seqs: 8\nmax_num_batched_tokens: 64\nmax_model_len: 64\nasync_scheduling: true\n"
    )
    answer = run(*arguments)
    assert (answer.code, answer.out) == (code, "")
    assert len(answer.err.splitlines()) == 1
    assert answer.err.startswith("error: ")
    assert mend in answer.err


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
        raise RuntimeError("Query interrupted")

    monkeypatch.setattr("blis_replay.validate.inspection.experiments_answer", interrupted)
    answer = run("experiments")
    assert (answer.code, answer.out) == (130, "")
    assert answer.err == "interrupted; what was finished is stored whole, the rest not at all\n"


def test_the_database_prints_no_progress_of_its_own(tmp_path: Path) -> None:
    """Its bar would stand in the middle of the JSON of a query of some seconds."""
    with open_store(tmp_path / "s.duckdb") as store:
        shown = store.connection.execute("SELECT current_setting('enable_progress_bar')").fetchone()
    assert shown == (False,)
