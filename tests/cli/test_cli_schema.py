"""JSON answers against the published schema, and JSON where there is no answer."""

from __future__ import annotations

import pytest
from command_line import Run
from schemas import problems


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("validate", ("tiny-live-c", "--by-stage")),
        ("validate", ("7b-train", "tiny-live-e")),
        ("gate", ("cpu-vllm-0.32.0", "--experiment", "tiny-live-*", "--baseline", "cpu-vllm-0.32.0")),
        ("explain", ("tiny-live-c",)),
        ("simulate", ("tiny-live-c", "--set", "max_num_seqs=4")),
        ("report", ("tiny-live-c", "--out", "report.html")),
        ("list", ()),
        ("inspect", ("tiny-live-c",)),
        ("doctor", ()),
        ("coefficients", ("list",)),
    ],
)
def test_an_answer_is_as_its_schema_says(run: Run, verb: str, arguments: tuple[str, ...]) -> None:
    answer = run(verb, *arguments, "--json")
    name = "coefficients-list" if verb == "coefficients" else verb
    assert answer.json["schema"] == f"blis-replay/{name}/1"
    assert list(problems(answer.json)) == []


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (("validate", "99b-general", "--json"), 2, "wrong use"),
        (("validate", "--nosuch", "--json"), 2, "wrong use"),
        (("gate", "stepml-per-model-linear", "--json"), 4, "bad data"),
    ],
)
def test_an_error_is_json_where_json_was_asked_for(run: Run, arguments: tuple[str, ...], code: int, kind: str) -> None:
    answer = run(*arguments)
    assert answer.code == code
    assert list(problems(answer.json)) == []
    assert (answer.json["error"]["exit_code"], answer.json["error"]["kind"]) == (code, kind)
    assert answer.err.startswith("error: ")


def test_a_fault_is_json_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr("blis_replay.validate.inspection.experiments_answer", broken)
    answer = run("list", "--json")
    assert (answer.code, answer.json["error"]["kind"]) == (70, "fault")


def test_a_schema_that_is_not_kept_is_told() -> None:
    assert list(problems({"schema": "blis-replay/error/1", "version": "1", "error": {"exit_code": "4"}})) == [
        "/error: lacks kind",
        "/error: lacks message",
        "/error/exit_code: '4' is not ['integer']",
    ]
