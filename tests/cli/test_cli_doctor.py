"""``blis-replay doctor``, ``--debug``, completion, and the forms of tables."""

from __future__ import annotations

import csv
import io
from importlib.metadata import version
from pathlib import Path

import pytest
from command_line import Answer, Run


def found(answer: Answer) -> dict[str, dict[str, str]]:
    return {one["name"]: one for one in answer.json["found"]}


@pytest.mark.slow
@pytest.mark.usefixtures("stored_demo")
def test_doctor_names_versions_store_cache_and_optional_parts(run: Run) -> None:
    answer = run("doctor", "--json")
    assert (answer.code, answer.json["problems"]) == (0, 0)
    seen = found(answer)
    for package in ("blis-replay", "duckdb", "numba", "polars"):
        assert (seen[package]["topic"], seen[package]["value"]) == ("versions", version(package))
    assert seen["store"]["value"].startswith(".blis-replay/store.duckdb: ")
    assert seen["store"]["value"].endswith("experiments: 1")
    assert {"python", "compiled engine", "compiled scans", "blis", "processors"} <= set(seen)
    page = run("doctor").out
    assert max(map(len, page.splitlines())) <= 80
    assert page.rstrip().endswith("0 problems")


def test_doctor_makes_no_store(run: Run) -> None:
    seen = found(run("doctor", "--json"))
    assert (seen["store"]["state"], "--store" in seen["store"]["fix"]) == ("absent", True)
    assert not Path(".blis-replay").exists()


def test_a_store_that_is_none_is_a_problem(run: Run) -> None:
    Path("store.duckdb").write_text("no database")
    answer = run("doctor", "--store", "store.duckdb", "--json")
    assert (answer.code, answer.json["problems"], found(answer)["store"]["state"]) == (4, 1, "problem")


def test_a_cold_cache_and_one_that_cannot_be_written_are_told_apart(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(Path("cold").absolute()))
    assert found(run("doctor", "--json"))["compiled engine"]["state"] == "absent"
    Path("file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(Path("file").absolute()))
    answer = run("doctor", "--json")
    assert (answer.code, found(answer)["compiled engine"]["state"]) == (4, "problem")
    assert "NUMBA_CACHE_DIR" in found(answer)["compiled scans"]["fix"]


def test_debug_shows_where_an_error_comes_from_and_ends_with_its_line(run: Run) -> None:
    plain, debugged = run("inspect", "--experiment", "nobody"), run("--debug", "inspect", "--experiment", "nobody")
    assert len(plain.err.splitlines()) == 1
    assert debugged.err.startswith("Traceback (most recent call last):")
    assert debugged.err.endswith(plain.err)
    assert (plain.code, debugged.code) == (2, 2)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("timel", ["timeline"]),
        ("timeline --fr", ["--from"]),
        ("report --baseline stepml-di", ["stepml-direct"]),
        ("simulate --coefficients stepml-di", ["stepml-direct"]),
        ("simulate -e 34b-gen", ["34b-general"]),
        ("compare -e 34b-gen", ["34b-general"]),
        ("inspect --check step_cl", ["step_clock"]),
    ],
)
def test_a_shell_completes_verbs_options_and_what_they_take(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: str, found: list[str]
) -> None:
    monkeypatch.setenv("_BLIS_REPLAY_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"blis-replay {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    assert run().out.splitlines() == [f"plain,{name}" for name in found]


def rows_of(answer: Answer) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(answer.out)))


@pytest.mark.slow
def test_csv_has_the_numbers_of_the_json(run: Run) -> None:
    """Sixteen cells, each with its error; the published experiment gives no ITL quantiles."""
    rows = rows_of(run("validate", "--experiment", "34b-general", "--csv"))
    (experiment,) = run("validate", "--experiment", "34b-general", "--json").json["experiments"]
    assert len(rows) == 16
    for row in rows:
        cell = experiment["metrics"][row["metric"]][row["statistic"]]
        for column in ("observed_ms", "simulated_ms", "error"):
            expected = cell[column]
            assert row[column] == "" if expected is None else float(row[column]) == pytest.approx(expected)
        assert (row["alias"], row["stage"], row["verdict"]) == ("34b-general", "", experiment["verdict"])


@pytest.mark.slow
def test_stages_have_rows_of_their_own(run: Run) -> None:
    rows = rows_of(run("validate", "--experiment", "34b-general", "--by-stage", "--csv"))
    assert [row["stage"] for row in rows] == [stage for stage in ("", "0", "1") for _ in range(16)]
