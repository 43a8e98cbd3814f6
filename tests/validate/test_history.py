"""The history file: what is written and read, how two branches merge, and what it says of commits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from git_commands import git
from json_docs import documented
from schemas import problems

from blis_replay.base.errors import ValidateError
from blis_replay.validate.cli.answers import with_schema
from blis_replay.validate.comparison.bounds import parse_bound
from blis_replay.validate.history import Entry, append, commit_here, history_of, read
from blis_replay.validate.history_text import history_answer
from blis_replay.validate.judgement import State
from blis_replay.validate.report.history_chart import history_chart

_FIRST = datetime(2026, 11, 1, tzinfo=UTC)


def entry(day: int, error: float, limit: float = 0.10, **more: object) -> Entry:
    state: State = "beyond" if abs(error) > limit else "within"
    known = {"simulator": "cmd:sim", "verdict": "FAIL" if state == "beyond" else "PASS", "metric": "e2e"}
    known |= {"statistic": "mean", "name": "E2E", "judged": True, "experiment": "mine", "alias": "mine"}
    date = _FIRST + timedelta(days=day)
    known |= {"commit": f"{day:040x}", "date": date, "dirty": False, "error": error, "limit": limit, "state": state}
    made = Entry(**known)
    return msgspec.structs.replace(made, **more)


def test_lines_come_back_in_order_of_date_and_each_once(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    for day in (2, 0, 1, 2):
        append(file, [entry(day, 0.01 * day)])
    assert [one.error for one in read(file)] == [0.0, 0.01, 0.02]
    assert len(file.read_text("utf-8").splitlines()) == 3


def test_a_line_that_was_not_ended_is_ended_first(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    append(file, [entry(0, 0.0)])
    file.write_bytes(file.read_bytes().removesuffix(b"\n"))
    append(file, [entry(1, 0.0)])
    assert len(read(file)) == 2


def test_of_one_commit_and_number_the_last_line_counts(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    append(file, [entry(0, 0.01), entry(0, 0.03)])
    assert [one.error for one in read(file)] == [0.03]


def test_changed_files_are_judged_beside_their_commit_and_after_it(tmp_path: Path) -> None:
    """An uncommitted fault does not count against the commit below it."""
    file = tmp_path / "history.jsonl"
    append(file, [entry(0, 0.20, dirty=True), entry(0, 0.30, dirty=True), entry(0, 0.01)])
    (series,) = history_of(read(file)).series
    assert [(one.error, one.dirty) for one in series.entries] == [(0.01, False), (0.30, True)]
    (stretch,) = series.beyond()
    assert stretch.after is not None
    assert (stretch.after.dirty, stretch.first.dirty) == (False, True)


def test_what_has_no_end_is_no_history() -> None:
    with pytest.raises(ValidateError):
        read(Path("/dev/zero"))


def test_experiments_are_named_by_pattern() -> None:
    entries = [entry(0, 0.0, alias=alias, experiment=f"slug-{alias}") for alias in ("7b-a", "7b-b", "34b-a")]
    assert len(history_of(entries, ["7b-*"]).series) == 2
    assert len(history_of(entries, ["slug-34b-a"]).series) == 1


def test_two_branches_merge_as_a_union(tmp_path: Path) -> None:
    """Both add a line at the same place; with merge=union neither is lost and nothing conflicts."""
    file = tmp_path / "history.jsonl"
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / ".gitattributes").write_text("*.jsonl merge=union\n")
    append(file, [entry(0, 0.0)])
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    for branch, days in (("one", (1, 3)), ("two", (2, 3))):
        git(tmp_path, "checkout", "-q", "-b", branch, "main")
        append(file, [entry(day, 0.01 * day) for day in days])
        git(tmp_path, "commit", "-q", "-am", branch)
    git(tmp_path, "merge", "-q", "-m", "both", "one")
    assert [one.error for one in read(file)] == [0.0, 0.01, 0.02, 0.03]


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history itself may differ: a CI job that adds to it is not dirty by that."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "history.jsonl"
    assert commit_here(file).commit == ""
    git(tmp_path, "init", "-q")
    (tmp_path / "sim.py").write_text("1\n")
    file.write_text("")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    (tmp_path / "untracked").write_text("")
    file.write_text("\n")
    commit = commit_here(file)
    assert (commit.commit, commit.dirty) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "sim.py").write_text("2\n")
    assert commit_here(file).dirty


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<<<<<<< HEAD\n", "merge=union"),
        ("{}\n", "line 1"),
        ('{"schema": "blis-replay/history/2"}\n', "line 1.*another version"),
        ("\x00\xff\n", "line 1"),
        ("[" * 5000, "line 1"),
    ],
)
def test_a_line_that_is_none_is_one_error(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text(text, "utf-8")
    with pytest.raises(ValidateError, match=said):
        read(file)


def test_a_stretch_beyond_the_limit_has_its_commits() -> None:
    errors = [0.01] * 6 + [0.20] * 6 + [0.01]
    (series,) = history_of([entry(day, error) for day, error in enumerate(errors)]).series
    (stretch,) = series.beyond()
    days = (stretch.after, stretch.first, stretch.last, stretch.fixed)
    assert [one and int(one.commit, 16) for one in days] == [5, 6, 11, 12]
    assert [int(one.first.commit, 16) for one in series.moved] == [6, 12]


def test_what_else_changed_at_a_change_is_named() -> None:
    old = [entry(day, 0.01, recording="a", release_hash="r") for day in range(5)]
    new = [entry(day, 0.03, recording="b", release_hash="r") for day in range(5, 10)]
    (series,) = history_of([*old, *new]).series
    assert [one.also for one in series.moved] == [("the recording",)]


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([0.01] * 5 + [0.04] * 5, 1),  # 3 points worse, and still so
        ([0.01] * 5 + [0.04] * 5 + [0.01] * 5, 0),  # fixed
        ([0.04] * 5 + [0.01] * 5, 0),  # better
        ([-0.02] * 5 + [0.03] * 5, 0),  # one point worse, of the other sign
    ],
)
def test_a_bound_of_two_points_fails_while_an_error_is_larger_than_it_was(errors: list[float], code: int) -> None:
    history = history_of([entry(day, error) for day, error in enumerate(errors)])
    assert history_answer("h.jsonl", history, [parse_bound("e2e=+2%")]).exit_code == code
    assert history_answer("h.jsonl", history).exit_code == 0


def test_a_commit_at_which_nothing_was_judged_is_marked() -> None:
    """A dash where the experiment carries no verdict, a blank where a commit has no line of the number."""
    nothing = msgspec.structs.replace(entry(1, 0.0), metric="", error=None, state="absent", verdict="NOT JUDGED")
    other = entry(2, 0.0, metric="itl", name="ITL")
    answer = history_answer("h.jsonl", history_of([entry(0, 0.0), nothing, other, entry(3, 0.2)]))
    assert ".- X" in str(answer)


def test_an_experiment_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValidateError, match="mine"):
        history_of([entry(0, 0.0)], ["yours"])
    with pytest.raises(ValidateError, match="no line"):
        history_of([])


def test_a_history_of_nothing_that_was_judged_is_shown() -> None:
    nothing = entry(0, 0.0, metric="", state="absent", verdict="NOT JUDGED", judged=False)
    assert str(history_answer("h.jsonl", history_of([nothing]))).startswith("NOT JUDGED  h.jsonl: 1 commit")


def test_the_document_is_as_its_schema_says() -> None:
    history = history_of([entry(day, 0.01 if day < 5 else 0.2) for day in range(10)])
    document = with_schema("history", history_answer("h.jsonl", history, [parse_bound("e2e=+2%")]).document)
    assert list(problems(document)) == []
    (series,) = document["series"]
    fields = {*document, *series, *series["points"][0], *series["beyond"][0], *series["changes"][0]}
    assert sorted(fields - documented("compare --history")) == []


def test_the_report_draws_what_is_judged_and_where_it_changed() -> None:
    """A row per commit, a panel per number, and the short id at each change."""
    errors = [0.01] * 6 + [0.06] * 6
    history = history_of([entry(day, error) for day, error in enumerate(errors)])
    chart = history_chart(history, "mine")
    assert chart is not None
    assert [row[2] for row in chart.numbers.rows] == errors
    assert f">{history.commits[6].commit[:8]}<" in chart.svg
    assert history_chart(history, "another") is None
