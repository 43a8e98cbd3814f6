"""``blis-replay study`` as a user calls it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from command_line import Run
from json_docs import documented

from blis_replay_labs.studies import read
from blis_replay_labs.studies.read import study_names
from blis_replay_labs.studies.study import Study


@pytest.mark.slow
def test_the_list_names_every_study(run: Run) -> None:
    answer = run("study", "list")
    assert (answer.code, answer.err) == (0, "")
    shown = answer.out.splitlines()
    assert [line for line in shown[2:] if not line.startswith(" ")] == study_names()
    assert max(map(len, shown)) <= 80
    assert [study["name"] for study in run("study", "list", "--json").json["studies"]] == study_names()
    assert run("study", "list", "--csv").out.splitlines()[0] == "name,family,title,source"


def test_a_study_is_shown_whole(run: Run) -> None:
    answer = run("study", "run", "shared-prefix")
    assert (answer.code, answer.err) == (0, "")
    assert re.search(r"^alone, prefix 512 +23\.86 +22\.74$", answer.out, re.MULTILINE)
    assert "B: refuted; published: refuted (about 27 ms" in answer.out
    assert max(len(line) for line in answer.out.splitlines()) <= 80


def test_the_json_is_documented(run: Run) -> None:
    document = run("study", "run", "determinism", "token-bucket", "--json").json
    assert document["passed"] is True
    assert [study["name"] for study in document["studies"]] == ["determinism", "token-bucket"]
    study = document["studies"][0]
    system = study["systems"][0]
    for mapping in (document, study, system, system["checks"][0], document["studies"][1]["systems"][1]["published"]):
        assert set(mapping) <= documented("study run")
    assert system["measured"]["round-robin fcfs"]["differing_arrays"] == [0.0, 0.0, 0.0]


def test_csv_and_markdown_have_a_row_a_check(run: Run) -> None:
    lines = run("study", "run", "sjf", "--csv").out.splitlines()
    assert lines[0].split(",")[:5] == ["study", "system", "kind", "check", "effect"]
    assert len(lines) == 1 + 4
    assert len(run("study", "run", "sjf", "--markdown").out.splitlines()) == 2 + 4


def test_another_verdict_than_on_record_ends_with_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    load = read.load_study

    def otherwise(name: str) -> Study:
        study = load(name)
        return replace(study, recorded=dict.fromkeys(study.systems, "refuted"), seeds=(42, 123))

    monkeypatch.setattr(read, "load_study", otherwise)
    answer = run("study", "run", "determinism")
    assert answer.code == 1
    assert "ON RECORD: refuted" in answer.out
