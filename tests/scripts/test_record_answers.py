"""The recorded answers of two versions: what differs is named by its path, and numbers may differ by a share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import record_answers

Record = Callable[[str, object], Path]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Write a folder of this name with one answer."""

    def write(name: str, answer: object) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "validate.json").write_text(json.dumps({"exit_code": 0, "answer": answer}), "utf-8")
        return tmp_path / name

    return write


def _compared(*arguments: object) -> Result:
    return CliRunner().invoke(record_answers.cli, ["compare", *map(str, arguments)])


ANSWER = {"experiments": [{"alias": "a", "e2e": {"error": 0.125, "requests": 7}}], "seconds": 1.5}


def test_equal_answers_pass(record: Record) -> None:
    ended = _compared(record("before", ANSWER), record("after", ANSWER))
    assert (ended.exit_code, ended.output) == (0, "all answers are equal\n")


@pytest.mark.parametrize(
    ("error", "options", "exit_code"),
    [
        (0.126, (), 1),
        (0.125 * (1 + 1e-12), (), 0),  # below the tolerance of 1e-9
        (0.126, ("--tolerance", "0.01"), 0),  # 0.8 %
        (0.126, ("--ignore", "e2e"), 0),
        (0.126, ("--ignore", "validate.json:answer.experiments*error"), 0),
        (0.126, ("--ignore", "seconds"), 1),
        (None, ("--tolerance", "1"), 1),
        ("0.125", (), 1),
    ],
)
def test_one_number_differs(record: Record, error: object, options: tuple[str, ...], exit_code: int) -> None:
    other = ANSWER | {"experiments": [{"alias": "a", "e2e": {"error": error, "requests": 7}}]}
    ended = _compared(record("before", ANSWER), record("after", other), *options)
    assert ended.exit_code == exit_code
    path = f"validate.json: answer.experiments[0].e2e.error: 0.125 -> {json.dumps(error)}\n"
    assert (path in ended.output) == (exit_code == 1)


def test_a_row_a_field_and_a_command_too_many_are_named(record: Record) -> None:
    before, after = record("before", {"rows": [1, True]}), record("after", {"rows": [1, 1, 2], "new": "x"})
    (after / "gate.json").write_text("{}", "utf-8")
    assert _compared(before, after).output.splitlines() == [
        'gate.json: : "(absent)" -> {}',
        "validate.json: answer.rows[1]: true -> 1",
        'validate.json: answer.rows[2]: "(absent)" -> 2',
        'validate.json: answer.new: "(absent)" -> "x"',
        "4 differences",
    ]
