"""Pages on terminals of 80 and 160 columns, as a user sees them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from command_line import Run

COMMAND = [sys.executable, "-m", "blis_replay.validate.cli.main"]


@pytest.fixture(scope="module")
def shot() -> ModuleType:
    """The script that draws terminals."""
    path = Path(__file__).parents[2] / "scripts" / "terminal_shot.py"
    spec = importlib.util.spec_from_file_location("terminal_shot", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["terminal_shot"] = module
    spec.loader.exec_module(module)
    return module


def lines(shot: ModuleType, columns: int, *arguments: str) -> list[str]:
    """What stands on a terminal in the end, without its colours."""
    shown = shot.screen(shot.on_terminal([*COMMAND, *arguments], columns))
    text = []
    for line in shown:
        row = ""
        for run in line:
            row = row.ljust(run.column) + run.text
        text.append(row)
    return text


def test_an_80_column_terminal_shows_what_a_pipe_gets(shot: ModuleType, run: Run) -> None:
    piped = run("validate", "--experiment", "34b-general", "--replay", "scheduling=synchronous").out
    shown = lines(shot, 80, "validate", "--experiment", "34b-general", "--replay", "scheduling=synchronous")
    assert "\n".join(line.rstrip() for line in shown) == piped.rstrip("\n")


def test_a_160_column_terminal_shows_percentiles_beside_each_other(shot: ModuleType, run: Run) -> None:
    """80 columns show 5 of the 13 errors of a load stage, with the same digits."""
    stages = ("validate", "--experiment", "34b-codegen", "--by-stage")
    shown, piped = lines(shot, 160, *stages), run(*stages).out.splitlines()
    header = next(line for line in shown if "by load stage" in line)
    percentiles = ["p50", "p90", "p99"]
    assert header.split()[5:] == ["E2E", *percentiles, "TTFT", *percentiles, "ITL", *percentiles, "TPOT"]
    assert max(map(len, shown)) <= 160
    wide, narrow = ([line for line in page if line.startswith("stage 1")] for page in (shown, piped))
    assert set(narrow[0].split()) < set(wide[0].split())


def test_colours_become_classes_and_wiped_lines_are_gone(shot: ModuleType) -> None:
    written = "working 1\r\x1b[Kworking 2\r\x1b[K\x1b[1mhead\x1b[0m\r\n\x1b[31m\x1b[1m+20 %\x1b[0m <ok>"
    assert shot.screen(written) == [
        [shot.Run(0, "head", "bold")],
        [shot.Run(0, "+20 %", "bold red"), shot.Run(5, " <ok>", "")],
    ]


def test_a_picture_is_well_formed_and_keeps_its_columns(shot: ModuleType) -> None:
    """Text of the page stands in the picture; each word of a table on the column that the terminal gave it."""
    drawn = shot.terminal_svg([*COMMAND, "coefficients", "list"], 80)
    root = ElementTree.fromstring(drawn)  # noqa: S314  # our own
    texts = {element.text: element for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"invalid", "stepml-direct"} <= set(texts)
    assert texts["invalid"].get("class") == "bold red"
    assert texts["status"].get("x") == texts["invalid"].get("x")
    assert "prefers-color-scheme: dark" in drawn
