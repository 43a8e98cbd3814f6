"""Pages on terminals of 80 and 160 columns, as a user sees them."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import docs_pictures
import pytest
from command_line import Run

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "blis_replay.validate.cli.main"]


def lines(columns: int, *arguments: str) -> list[str]:
    """What stands on a terminal in the end, without its colours."""
    shown = docs_pictures.screen(docs_pictures.on_terminal([*COMMAND, *arguments], columns))
    text = []
    for line in shown:
        row = ""
        for run in line:
            row = row.ljust(run.column) + run.text
        text.append(row)
    return text


def test_an_80_column_terminal_shows_what_a_pipe_gets(run: Run) -> None:
    piped = run("validate", "--experiment", "34b-general", "--replay", "scheduling=synchronous").out
    shown = lines(80, "validate", "--experiment", "34b-general", "--replay", "scheduling=synchronous")
    assert "\n".join(line.rstrip() for line in shown) == piped.rstrip("\n")


def test_a_160_column_terminal_shows_percentiles_beside_each_other(run: Run) -> None:
    """80 columns show 5 of the 13 errors of a load stage, with the same digits."""
    stages = ("validate", "--experiment", "34b-codegen", "--by-stage")
    shown, piped = lines(160, *stages), run(*stages).out.splitlines()
    header = next(line for line in shown if "by load stage" in line)
    percentiles = ["p50", "p90", "p99"]
    assert header.split()[5:] == ["E2E", *percentiles, "TTFT", *percentiles, "ITL", *percentiles, "TPOT"]
    assert max(map(len, shown)) <= 160
    wide, narrow = ([line for line in page if line.startswith("stage 1")] for page in (shown, piped))
    assert set(narrow[0].split()) < set(wide[0].split())


def test_colours_become_classes_and_wiped_lines_are_gone() -> None:
    written = "working 1\r\x1b[Kworking 2\r\x1b[K\x1b[1mhead\x1b[0m\r\n\x1b[31m\x1b[1m+20 %\x1b[0m <ok>"
    assert docs_pictures.screen(written) == [
        [docs_pictures.Run(0, "head", "bold")],
        [docs_pictures.Run(0, "+20 %", "bold red"), docs_pictures.Run(5, " <ok>", "")],
    ]


def test_a_picture_is_well_formed_and_keeps_its_columns() -> None:
    """Text of the page stands in the picture; each word of a table on the column that the terminal gave it."""
    drawn = docs_pictures.terminal_svg([*COMMAND, "coefficients", "list"], 80)
    root = ElementTree.fromstring(drawn)  # noqa: S314  # our own
    texts = {element.text: element for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"invalid", "stepml-direct"} <= set(texts)
    assert texts["invalid"].get("class") == "bold red"
    assert texts["status"].get("x") == texts["invalid"].get("x")
    assert "prefers-color-scheme: dark" in drawn
