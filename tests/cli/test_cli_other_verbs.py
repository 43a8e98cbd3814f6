"""The other verbs: ingest, experiments, inspect, coefficients, calibrate, help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from command_line import Answer, Run

from blis_replay.ingest.ingest import IngestOutcome
from blis_replay.validate.cli.main import LABS, VERBS, cli
from blis_replay.validate.cli.recordings import outcome_lines
from blis_replay.validate.text.answer import Block, part_text


@pytest.mark.slow
def test_ingest_says_what_it_did_and_is_idempotent(run: Run, demo: Path) -> None:
    first, second = run("ingest", demo, "--json").json, run("ingest", demo, "--json").json
    assert [o["ingested"][0]["outcome"] for o in (first, second)] == ["new", "unchanged"]
    assert first["ingested"][0]["requests"] == 300
    assert run("ingest", demo, "--name", "other", "--json").json["ingested"][0]["before"] == ""
    with duckdb.connect(".blis-replay/store.duckdb") as store:
        store.execute("UPDATE experiments SET read_by = NULL, derived_hash = ''")
    again = run("ingest", demo, "--name", "other", "--json").json["ingested"][0]
    assert again["outcome"] == "replaced" and again["before"].startswith("300 requests, ")


def test_what_ingest_says_of_a_recording_fits_80_columns() -> None:
    outcome = IngestOutcome(
        slug="a", alias="a", outcome="new", requests=1, steps=0, iterations=6_094, findings=16, rejected=0, bytes=1,
        seconds=0.1, not_used="notes.txt (its format is not known), client.csv (the requests are those of bench.json)",
    )  # fmt: skip
    assert max(map(len, part_text(Block(outcome_lines(outcome))).splitlines())) <= 80


@pytest.mark.slow
def test_a_directory_that_cannot_be_read_does_not_stop_the_others(run: Run, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    answer = run("ingest", tmp_path / "empty", demo, tmp_path / "absent")
    assert answer.code == 4
    assert "300 requests" in answer.out
    assert len(answer.err.strip().splitlines()) == 2


@pytest.mark.slow
def test_a_truncated_recording_leaves_the_store_as_it_was(run: Run, stored_demo: Path) -> None:
    before = run("list", "--json").out
    trace = stored_demo / "trace.csv.gz"
    trace.write_bytes(trace.read_bytes()[:200])
    results = stored_demo / "results" / "per_request_lifecycle_metrics.json"
    results.write_bytes(results.read_bytes()[:0])
    (stored_demo / "exp-config.yaml").write_text("model: [")
    answer = run("ingest", stored_demo)
    assert answer.code == 4
    assert "exp-config.yaml" in answer.err
    assert "Traceback" not in answer.err
    assert run("list", "--json").out == before


@pytest.mark.slow
def test_every_column_of_the_list_has_a_name_and_all_are_shown_when_asked_for(run: Run, all_bundled: None) -> None:
    """Which recordings are overloaded is said below, so the columns are those of a store that nobody has used."""
    brief, whole = run("list").out, run("list", "-v").out
    head, rule = brief.splitlines()[:2]
    assert head == run("list", "--store", "new.duckdb").out.splitlines()[0]
    assert ("model" in head.split(), len(rule.split())) == (True, 6)
    assert brief.splitlines()[-1].startswith("overloaded: ")
    names = {name for line in whole.splitlines() if line.startswith("alias") for name in line.split()}
    assert names >= {"model", "load", "workload", "findings", "slug"}
    assert max(map(len, whole.splitlines())) <= 80


@pytest.mark.slow
def test_an_experiment_that_is_taken_out_of_the_store_leaves_nothing(run: Run, demo: Path) -> None:
    assert run("list", "--remove", "mine").code == 4, "there is no store"
    for name in ("mine", "other"):
        assert run("ingest", demo, "--name", name).code == 0
    assert [run("list", "--remove", name).code for name in ("nobody", "34b-general")] == [2, 2]
    assert run("list", "--remove", "mine", "--remove", "nobody").code == 2, "all of them or none"
    with duckdb.connect(".blis-replay/store.duckdb", read_only=True) as store:
        tables = [name for (name,) in store.execute("SELECT table_name FROM duckdb_tables()").fetchall()]
        having = "SELECT count(*) FROM {} WHERE slug = 'mine'"
        held = [one for one in tables if "slug" in store.table(one).columns]
        assert any(store.execute(having.format(one)).fetchone() != (0,) for one in held)
    left = run("list", "--remove", "mine", "--json")
    assert [row["slug"] for row in left.json["experiments"] if row["stored"]] == ["other"]
    with duckdb.connect(".blis-replay/store.duckdb", read_only=True) as store:
        assert {store.execute(having.format(one)).fetchone() for one in held} == {(0,)}


@pytest.mark.slow
def test_experiments_lists_bundled_and_stored(run: Run, demo: Path) -> None:
    """Sixteen that are known by their aggregates, and seven that were recorded."""
    assert len(run("list", "--json").json["experiments"]) == 23
    run("ingest", demo)
    rows = run("list", "--json").json["experiments"]
    assert len(rows) == 24
    assert next(row for row in rows if row["alias"] == "1b-general")["ground_truth"] == "recorded"


@pytest.mark.slow
@pytest.mark.usefixtures("stored_demo")
def test_inspect_names_sources_and_findings(run: Run) -> None:
    document = run("inspect", "--experiment", "1b-general", "--json").json
    assert document["engine"]["max_num_seqs"]["source"] == "recorded"
    checks = {finding["check"] for finding in document["findings"]}
    assert {"token_events", "output_length", "step_cycle", "step_clock", "stationarity", "completeness"} <= checks
    text = run("inspect", "--experiment", "1b-general").out
    assert "two stream events per token" in " ".join(text.split())


@pytest.mark.slow
def test_inspect_tells_what_was_declared_beside_what_ran(run: Run) -> None:
    """The profile of the run asks for 9 groups of 5 users with conversations; a build that ignored it ran 10 x 10."""
    document = run("inspect", "--experiment", "34b-general", "--json").json
    assert document["shared_prefix"]["num_groups"] == 10
    declared = document["load_profile"]
    assert (declared["arrivals"], declared["multi_turn"], declared["shared_prefix"]["num_groups"]) == (
        "constant",
        True,
        9,
    )
    text = run("inspect", "--experiment", "34b-general").out
    assert "  shared prefixes: 10 groups of 10 prompts, 100 + 447 tokens\n" in text
    assert "  declared in profile.yaml: constant arrivals; 9 groups of 5 prompts, 100 + 447\n    tokens; conv" in text


def test_releases_are_listed_and_shown(run: Run) -> None:
    names = {release["name"]: release["status"] for release in run("coefficients", "list", "--json").json["releases"]}
    assert names["stepml-per-model-linear"] == "invalid"
    assert {"h100-vllm-0.15.1", "stepml-direct", "stepml-overhead-floor"} <= set(names)
    shown = run("coefficients", "show", "stepml-direct")
    assert "intercept: 14196.05 us" in shown.out
    assert (
        json.loads(run("coefficients", "show", "stepml-direct", "--json").out)["published_errors"]["e2e_percent"] == 5.7
    )
    assert "below a batch of 26 decodes" in " ".join(
        run("coefficients", "show", "stepml-per-model-linear").out.replace("\n#", "").split()
    )


def test_help_imports_nothing_heavy() -> None:
    """Help must be instant, so no data or array library may be loaded for it."""
    heavy = ("numpy", "polars", "duckdb", "numba", "scipy", "yaml", "pyarrow", "matplotlib", "jinja2")
    code = (
        "import sys\nfrom blis_replay.validate.cli.main import cli\n"
        "try: cli(['--help'])\nexcept SystemExit: pass\n"
        f"loaded = [name for name in {heavy!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("set_to", "threads"), [(None, "1"), ("2", "2")])
def test_matrices_are_multiplied_in_one_thread_unless_it_is_said_otherwise(set_to: str | None, threads: str) -> None:
    """numpy reads the variable when it is imported, so it is set before."""
    kept = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    code = (
        "import os, sys\nfrom blis_replay.validate.cli.main import main\nsys.argv = ['blis-replay', '--version']\n"
        "assert 'numpy' not in sys.modules\ntry: main()\nexcept SystemExit: pass\n"
        "sys.exit(os.environ['OPENBLAS_NUM_THREADS'])"
    )
    environment = kept if set_to is None else kept | {"OPENBLAS_NUM_THREADS": set_to}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert ended.stderr.strip() == threads


_TELLS = "import atexit; atexit.register(print, 'left')\n"
_WORKS = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), print('worked'))).start()\n"


@pytest.mark.parametrize(
    ("before", "arguments", "code", "printed"),
    [
        (_TELLS, ["--version"], 0, ["left"]),
        (_TELLS, ["no-such-verb"], 2, ["left"]),
        (_TELLS + _WORKS, ["--version"], 0, ["worked", "left"]),  # a thread is waited for
    ],
)
def test_the_program_ends_whole(before: str, arguments: list[str], code: int, printed: list[str]) -> None:
    program = f"{before}import sys; sys.argv[1:] = {arguments}\n"
    program += "from blis_replay.validate.cli.main import program; program()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert [line for line in ended.stdout.splitlines() if "version" not in line] == printed


def test_verbs_are_what_the_group_lists() -> None:
    assert set(cli.list_commands(None)) == {*VERBS, *LABS}  # type: ignore[arg-type]


def test_every_verb_answers_a_question_of_the_page_of_commands() -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text("utf-8").split("<!-- begin")[0]
    assert [verb for verb in [*VERBS, *LABS] if f"`blis-replay {verb}" not in page] == []


@pytest.mark.slow
def test_ingest_writes_its_answer_where_it_is_told_and_says_nothing_when_quiet(run: Run, demo: Path) -> None:
    """A line per experiment, as a table where the file is called .csv; the recording has 300 requests."""
    assert run("ingest", demo, "--quiet") == Answer(0, "", "")
    assert run("ingest", demo, "-o", "read.csv") == Answer(0, "", "")
    header, row = Path("read.csv").read_text("utf-8").splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["requests"] == "300"
    run("ingest", demo, "-o", "read.txt")
    assert ": unchanged; 300 requests," in Path("read.txt").read_text("utf-8")


@pytest.mark.slow
def test_a_file_is_ingested_like_its_directory_and_under_the_name_given(run: Run, demo: Path) -> None:
    files = [demo / "trace.csv.gz", demo / "exp-config.yaml"]
    (outcome,) = run("ingest", *files, "--name", "mine", "--json").json["ingested"]
    assert (outcome["slug"], outcome["requests"]) == ("mine", 300)
