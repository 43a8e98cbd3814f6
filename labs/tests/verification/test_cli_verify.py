"""``blis-replay verify`` as a user calls it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from command_line import Run

from blis_replay_labs.verification import suite
from blis_replay_labs.verification.workloads import VerificationRow

GOOD = VerificationRow("causality, faults", "6 workloads", 0.0, 0.0, True, "12 timestamps")
BAD = VerificationRow("mean wait against M/M/1, ms", "rho 0.9", 9000.0, 8000.0, False, "+- 1.00; 4 x 10 requests")


def answering(*rows: VerificationRow) -> object:
    def verify(*arguments: object) -> Iterator[VerificationRow]:
        yield from rows

    return verify


@pytest.mark.heavy
def test_quick_passes_and_its_json_is_whole(run: Run) -> None:
    answer = run("verify", "--quick", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert answer.json["passed"] is True
    rows = answer.json["checks"]
    assert {frozenset(row) for row in rows} == {
        frozenset({"check", "configuration", "measured", "expected", "passed", "detail"})
    }
    assert all(math.isfinite(row["measured"]) and row["passed"] for row in rows)
    assert len(rows) == 40


def test_a_table_with_a_failed_check_ends_with_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "verify", answering(GOOD, BAD))
    answer = run("verify", "--seed", 3, "-v")
    assert answer.code == 1
    lines = answer.out.splitlines()
    assert lines[2].split() == ["pass", *GOOD.check.split(), "0", "0"]
    assert lines[3] == "      6 workloads; 12 timestamps"
    assert lines[4].startswith("FAIL  mean wait against M/M/1, ms")
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "1 of 2 checks passed (seed 3)"


def test_without_v_each_kind_of_check_is_one_line_and_what_failed_stands_below(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "verify", answering(GOOD, GOOD, BAD))
    answer = run("verify", "--seed", 3)
    assert answer.code == 1
    groups, failed, counted = answer.out.strip().split("\n\n")
    assert [line.split()[0] for line in groups.splitlines()[2:]] == ["pass", "FAIL"]
    assert groups.splitlines()[2].endswith("2 of 2")
    assert "rho 0.9" in failed
    assert "6 workloads" not in answer.out
    assert counted.splitlines()[0] == "2 of 3 checks passed (seed 3)"


def test_json_of_a_failed_check_ends_with_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "verify", answering(GOOD, BAD))
    answer = run("verify", "--json", "--quick")
    assert (answer.code, answer.json["passed"], answer.json["quick"]) == (1, False, True)
    assert [row["passed"] for row in answer.json["checks"]] == [True, False]


def test_all_passed_ends_with_zero(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "verify", answering(GOOD))
    assert run("verify").code == 0
