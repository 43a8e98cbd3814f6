"""Tables and lines in the width there is, and colour where there is colour."""

from __future__ import annotations

import re

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.ingest.tables import Column, Table, Toned, columns_named
from blis_replay.validate.cli.main import cli
from blis_replay.validate.text.cells import milliseconds, percent
from blis_replay.validate.text.terminal import table_text, toned, wrap

HEADER = ["name", "number", "detail", "hash"]
ROWS = [["a", "1", "x" * 30, "y" * 40], ["b", Toned("-20 %", "bad"), "x" * 30, "y" * 40]]
TABLE = Table("", columns_named(*HEADER), ROWS)
WIDE = Table("", (*TABLE.columns[:2], Column("detail", wide=1), Column("hash", wide=2)), ROWS)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal of 160 columns."""
    monkeypatch.setattr("blis_replay.validate.text.terminal._is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    return monkeypatch


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def heads(text: str) -> list[str]:
    return plain(text).splitlines()[0].split()


@pytest.mark.parametrize("unit", ["%", "ms", "us", "s"])
def test_no_line_ends_between_a_number_and_its_unit(unit: str) -> None:
    """78 columns stand before the number: with its unit it needs four or more, and goes to the next line."""
    assert wrap(f"{'x' * 77} 5 {unit}, and so on") == f"{'x' * 77}\n  5 {unit}, and so on"
    assert wrap(f"{'x' * 77} 5 steps") == f"{'x' * 77} 5\n  steps"


def test_wide_columns_are_for_terminals_wider_than_80(terminal: pytest.MonkeyPatch) -> None:
    """name, number and detail take 4 + 2 + 6 + 2 + 30 = 44 columns, and the hash 42 more."""
    for columns, shown in (("80", ["name", "number"]), ("85", HEADER[:3]), ("86", HEADER), ("160", HEADER)):
        terminal.setenv("COLUMNS", columns)
        assert heads(table_text(WIDE)) == shown


def test_a_pipe_has_80_columns_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script reads does not depend on the window that it was started in."""
    monkeypatch.setenv("COLUMNS", "160")
    assert heads(table_text(WIDE)) == ["name", "number"]
    assert max(map(len, wrap("word " * 60).splitlines())) <= 80


@pytest.mark.parametrize(("columns", "longest"), [("30", 40), ("60", 60), ("80", 80), ("100", 100), ("300", 100)])
def test_prose_is_never_wider_than_100_columns(terminal: pytest.MonkeyPatch, columns: str, longest: int) -> None:
    """Words of one letter fill a line to its last column but one at most."""
    terminal.setenv("COLUMNS", columns)
    assert longest - 1 <= max(map(len, wrap("a " * 400).splitlines())) <= longest


def test_parts_of_a_table_stand_beside_each_other_where_they_fit(terminal: pytest.MonkeyPatch) -> None:
    parts = {"name": 0, "number": 1, "detail": 2, "hash": 2}
    table = Table("", tuple(Column(name, part=part) for name, part in parts.items()), [["a", "1", "2", "3"]])
    assert [heads(part) for part in table_text(table).split("\n\n")] == [HEADER]
    terminal.setenv("COLUMNS", "80")
    assert [heads(part) for part in table_text(table).split("\n\n")] == [
        ["name", "number"],
        ["name", "detail", "hash"],
    ]


def test_a_spare_column_is_left_out_where_the_table_is_too_wide(terminal: pytest.MonkeyPatch) -> None:
    """name, model and requests take 4 + 2 + 30 + 2 + 60 = 98 columns, and 66 without the model."""
    columns = (Column("name"), Column("model", "text", spare=1), Column("hash"))
    table = Table("", columns, [["a", "x" * 30, "y" * 60]])
    assert heads(table_text(table)) == ["name", "model", "hash"]
    terminal.setenv("COLUMNS", "80")
    assert heads(table_text(table)) == ["name", "hash"]


def test_spare_columns_go_one_by_one_in_their_order(terminal: pytest.MonkeyPatch) -> None:
    """name, a, b and hash take 4 + 2 + 10 + 2 + 10 + 2 + 60 = 90 columns; 78 without either of the two."""
    terminal.setenv("COLUMNS", "80")
    for a, b, left in ((1, 2, "b"), (2, 1, "a")):
        columns = (Column("name"), Column("a", spare=a), Column("b", spare=b), Column("hash"))
        table = Table("", columns, [["n", "x" * 10, "y" * 10, "z" * 60]])
        assert heads(table_text(table)) == ["name", left, "hash"]


def test_what_has_no_room_stands_below_its_row(terminal: pytest.MonkeyPatch) -> None:
    table = Table("", (Column("name"), Column("why", below=True), Column("how", below=True)), [["a", "b", "c"]])
    assert plain(table_text(table)).splitlines()[2] == "a       b    c"
    terminal.setenv("COLUMNS", "80")
    assert plain(table_text(table)).splitlines() == ["name", "----", "a", "      b; c"]


def test_what_would_be_cut_on_a_wide_line_stands_below_its_row_too(terminal: pytest.MonkeyPatch) -> None:
    """In 160 columns a name of 4 and a reason of 160 take 4 + 2 + 160: the reason keeps every letter below."""
    terminal.setenv("COLUMNS", "160")
    table = Table("", (Column("name"), Column("why", below=True)), [["a", "y" * 160]], cut=True)
    assert "".join(plain(table_text(table)).split()).endswith("a" + "y" * 160)


def test_the_longest_cells_are_cut_to_the_width_there_is(terminal: pytest.MonkeyPatch) -> None:
    table = Table("", columns_named("one", "two"), [["a" * 70, "b" * 70]], cut=True)
    assert plain(table_text(table)).splitlines()[2] == f"{'a' * 70}  {'b' * 70}"
    terminal.setenv("COLUMNS", "80")
    line = plain(table_text(table)).splitlines()[2]
    assert (len(line), line.count("...")) == (80, 2)


def test_text_without_colour_has_no_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toned("fail", "bad") == "fail"
    assert "\x1b" not in table_text(TABLE) + wrap("verdict: fail", mark=Toned("fail", "bad"))


def test_colour_marks_headings_and_cells_and_moves_nothing(terminal: pytest.MonkeyPatch) -> None:
    shown = table_text(TABLE)
    assert "\x1b[1mname\x1b[0m" in shown
    assert f"\x1b[31m\x1b[1m-20 %\x1b[0m  {'x' * 30}" in shown
    terminal.setattr("blis_replay.validate.text.terminal._is_terminal", lambda: False)
    assert plain(shown) == table_text(TABLE)


@pytest.mark.slow
@given(st.lists(st.lists(st.text(max_size=12), min_size=3, max_size=3), max_size=5), st.sampled_from(["80", "160"]))
def test_nothing_in_a_cell_can_paint_or_break_a_line(rows: list[list[str]], columns: str) -> None:
    """Two lines of header, one a row; the only escapes are those of the tones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blis_replay.validate.text.terminal._is_terminal", lambda: True)
        patch.setenv("COLUMNS", columns)
        cells = [[Toned(one, "bad"), two, three] for one, two, three in rows]
        shown = table_text(Table("", columns_named("a", "b", "c"), cells))
    assert len(shown.split("\n")) == 2 + len(rows)
    assert "\x1b" not in plain(shown)


@pytest.mark.parametrize(
    ("arguments", "environment", "coloured"),
    [
        ([], {}, None),
        ([], {"NO_COLOR": "1"}, False),
        ([], {"NO_COLOR": ""}, None),  # no-color.org: present and not empty
        ([], {"FORCE_COLOR": "1"}, True),
        ([], {"FORCE_COLOR": "0"}, None),
        ([], {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ([], {"TERM": "dumb"}, False),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_is_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict[str, str], coloured: bool | None
) -> None:
    """None: on a terminal, and not in a pipe."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    context = cli.make_context("blis-replay", [*arguments, "list"])
    with context:
        context.invoke(cli.callback, **context.params)  # type: ignore[arg-type]
    assert context.color is coloured
    assert isinstance(context, click.Context)


def test_a_command_that_would_be_broken_has_a_line_of_its_own() -> None:
    command = "blis-replay calibrate --train 7b-fcfs-async --out mine.yaml"
    assert wrap("calibrate:", command=command) == f"calibrate: {command}"
    assert wrap("its steps do not take as long as the server's; calibrate:", command=command).splitlines() == [
        "its steps do not take as long as the server's; calibrate:",
        f"  {command}",
    ]


def test_what_rounds_to_nothing_has_no_minus() -> None:
    assert [percent(error) for error in (-0.0004, -0.0006, 0.0, None)] == ["+0.0 %", "-0.1 %", "+0.0 %", "-"]
    assert [percent(error) for error in (9.999, 114.585, -11.45)] == ["+999.9 %", "+11,458 %", "-1,145 %"]
    assert [milliseconds(us) for us in (9_999_990, 9_999_999, 473_032_750)] == ["9,999.99", "10,000", "473,033"]
