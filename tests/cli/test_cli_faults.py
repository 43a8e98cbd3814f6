"""What nobody foresaw: an exit code of its own, one line, and the other experiments go on."""

from __future__ import annotations

import warnings
from pathlib import Path

import click
import pytest
from command_line import Run

from blis_replay.base.errors import StoreError
from blis_replay.validate.cli.main import VERBS

pytestmark = pytest.mark.slow


def _broken(*_: object, **__: object) -> None:
    warnings.warn("of a library", RuntimeWarning, stacklevel=1)
    raise ValueError("Diagonal length 0\nand more")


@pytest.mark.filterwarnings("default")
def test_a_crash_is_one_line_and_no_verdict(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 would mean a failed threshold; a warning of a library is nothing to a user."""
    monkeypatch.setattr("blis_replay.validate.comparison.validated.replay", _broken)
    answer = run("validate", "--experiment", "34b-general")
    assert (answer.code, answer.out) == (70, "")
    assert len(answer.err.splitlines()) == 1
    assert "a fault of blis-replay: ValueError: Diagonal length 0; " in answer.err
    monkeypatch.setattr("blis_replay.ingest.store.open_for_reading", _broken)
    assert run("compare", "34b-codegen", "34b-general").code == 70


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("of a library"), 70),
        (AssertionError(), 70),
        (RecursionError("maximum"), 70),
        (SystemExit(1), 70),
        (KeyError("x"), 70),
        (OSError(28, "No space left on device"), 4),
        (MemoryError(), 4),
        (click.ClickException("of click, whose own code is 1"), 4),
        (StoreError("locked"), 4),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_no_verb_answers_1_without_a_judgement(
    run: Run, monkeypatch: pytest.MonkeyPatch, verb: str, error: BaseException, code: int
) -> None:
    """Whatever leaves a verb, 1 means that a threshold failed, and nothing else does."""

    def leaves(_self: object, _ctx: object) -> None:
        raise error

    monkeypatch.setattr(click.Command, "invoke", leaves)
    answer = run(verb)
    assert (answer.code, answer.out, "Traceback" in answer.err) == (code, "", False)
    assert len(answer.err.strip().splitlines()) == 1


def test_debug_shows_where_a_crash_comes_from(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blis_replay.ingest.store.open_for_reading", lambda *_, **__: 1 // 0)
    answer = run("--debug", "compare", "34b-codegen", "34b-general")
    assert answer.code == 70
    assert "Traceback" in answer.err
    assert answer.err.splitlines()[-1].startswith("error: a fault of blis-replay: ZeroDivisionError: ")


def test_an_attribution_that_fails_leaves_the_page_of_the_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blis_replay.validate.report.evidence.attribute", _broken_quietly)
    answer = run("report", "--experiment", "34b-general", "--out", "page.html")
    assert answer.code == 0
    assert "a fault of blis-replay: ValueError" in Path("page.html").read_text()


def _broken_quietly(*_: object, **__: object) -> None:
    raise ValueError("one bin")
