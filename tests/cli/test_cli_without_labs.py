"""The command line where our labs are not installed: one line names the remedy, and everything else works."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
from command_line import Run

from blis_replay.base import addons
from blis_replay.validate.cli.main import LABS


@pytest.fixture(autouse=True)
def no_labs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No entry points, as seen by whoever asks for an add-on."""
    monkeypatch.setattr(addons, "entry_points", lambda **_group: ())
    addons.addons.cache_clear()
    yield
    addons.addons.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        *(([verb], f"the verb '{verb}'") for verb in LABS),
        (["coefficients", "convert", "defaults.yaml"], "the verb 'coefficients convert'"),
        (["coefficients", "make", "config.json", "--model", "m", "--operators", "-o", "x.yaml"], "--operators"),
        (["compare", "--published"], "--published"),
        (["compare", "7b-train", "--simulators", "all"], "--simulators"),
        (["simulate", "7b-train", "--find", "rate", "--slo", "ttft.p95=500ms"], "--find"),
        (["simulate", "7b-train", "--to", "mooncake"], "--to"),
        (["simulate", "7b-train", "--engine", "e.yaml", "--coefficients", "mine.yaml", "-o", "run"], "--engine"),
        (["validate", "7b-train", "--simulator", "floor:line"], "floor:line: this simulator"),
    ],
)
def test_what_is_in_the_labs_says_what_to_install(run: Run, arguments: list[str], what: str) -> None:
    answer = run(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: {what} needs the labs; install them with `pip install ./labs`")


def test_help_names_no_lab_and_a_verdict_is_given(run: Run) -> None:
    assert "Labs:" not in run("--help").out
    assert run("validate", "7b-train").code in (0, 1)


@pytest.mark.parametrize(
    ("verb", "target"), [("study", "blis_replay.base.addons:gone"), ("verify", "blis_replay.no_such_lab:verb")]
)
def test_labs_of_another_version_end_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, verb: str, target: str
) -> None:
    """Their entry point names an object, or a module, that is not there."""
    point = EntryPoint(f"verb.{verb}", target, "blis_replay.addons")
    monkeypatch.setattr(addons, "entry_points", lambda **_group: (point,))
    addons.addons.cache_clear()
    answer = run(verb)
    assert (answer.code, answer.out, answer.err.count("\n")) == (4, "", 1)
    assert answer.err.startswith(f"error: add-on verb.{verb} of its distribution cannot be loaded")
