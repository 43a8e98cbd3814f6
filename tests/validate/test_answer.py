"""One answer in every form."""

from __future__ import annotations

import json
import re

import pytest

from blis_replay.ingest.tables import Column, Kind, Number, Table, Toned, Value, columns_named, table_of
from blis_replay.validate.comparison.verdict_text import toned as coloured_word
from blis_replay.validate.report.html import html
from blis_replay.validate.text.answer import Answer, Block, Line, csv, frame, markdown, page_json
from blis_replay.validate.text.cells import cell_text

RECORDS = [
    {"name": "a|b", "count": 1200, "error": -0.0125, "reason": None},
    {"name": "<c>", "count": None, "error": 0.5, "reason": "no steps"},
]
COLUMNS = (Column("name", "text"), Column("count", "count"), Column("error", "error"), Column("reason", "word"))


def test_a_column_says_how_its_values_are_written() -> None:
    """Counts with commas, fractions in percent with a sign, nothing as ``-``; texts flush left, all else right."""
    table = Table("errors", COLUMNS, [list(record.values()) for record in RECORDS], note="per run")
    assert str(Answer([table], {})).splitlines() == [
        "errors:",
        "(per run)",
        "name  count    error    reason",
        "----  -----  -------  --------",
        "a|b   1,200   -1.2 %         -",
        "<c>       -  +50.0 %  no steps",
    ]


@pytest.mark.parametrize(
    ("kind", "value", "written"),
    [
        *(("ms", 9_999_994, "9,999.99"), ("ms", 9_999_996, "10,000"), ("ms_difference", -4.0, "+0.00")),
        *(("error", 9.99949, "+999.9 %"), ("error", 9.9996, "+1,000 %"), ("error_short", -0.0996, "-10 %")),
        *(("share", 0.5, "50.0 %"), ("count", 1234.4, "1,234"), ("time", 12_345_678, "12.35 s")),
        *((Number(2, 100, signed=True), -0.00004, "+0.00"), ("data", 1 / 3, "0.333333"), ("real", None, "")),
        *(("value", 1234.5, "1,234"), ("value", 0.123456, "0.1235"), ("error", "n/a", "n/a")),
    ],
)
def test_a_number_is_written_by_its_kind(kind: Kind, value: Value, written: str) -> None:
    """What rounds up to where decimals end counts as such, and what rounds to nothing is no negative number."""
    assert cell_text(value, kind) == written


def test_rows_for_programs_are_numbers_in_full() -> None:
    rows = table_of(RECORDS)
    assert csv(rows) == "name,count,error,reason\na|b,1200,-0.0125,\n<c>,,0.5,no steps\n"
    assert [str(dtype) for dtype in frame(rows).dtypes] == ["String", "Int64", "Float64", "String"]
    assert rows.records() == RECORDS


def test_integers_beside_floats_are_floats() -> None:
    assert csv(Table("", columns_named("x", kind="data"), [[1], [0.5]])) == "x\n1.0\n0.5\n"
    assert csv(Table("", columns_named("x", kind="real"), [[1]])) == "x\n1.0\n"


def test_markdown_has_six_digits_and_escapes() -> None:
    rows = table_of([{"name": "a|b", "x": 1 / 3, "y": None}])
    assert markdown(rows).splitlines() == ["| name | x | y |", "| --- | --- | --- |", "| a\\|b | 0.333333 |  |"]


def test_html_escapes_and_draws_bars() -> None:
    """The longest bar is the whole of its cell."""
    table = Table("<t>", COLUMNS[:2], [["<a>", 1], ["b", 2]], bars="count")
    shown = html(table)
    assert "<caption>&lt;t&gt;</caption>" in shown
    assert '<th scope="row" class="text">&lt;a&gt;</th><td>1</td>' in shown
    assert "width: 50.0%" in shown and "width: 100.0%" in shown


def test_without_rows_the_document_is_the_only_row() -> None:
    answer = Answer(["done"], {"file": "x.yaml", "models": ["a", "b"]})
    assert csv(answer.table) == "file,models\nx.yaml,a; b\n"
    assert json.loads(page_json(answer.document)) == answer.document


def test_a_number_that_json_cannot_write_is_null() -> None:
    """`gate --json` ended as a fault where a recorded run was overloaded: its intervals rest on no requests."""
    document = {"interval": (float("nan"), 1.0), "runs": [{"error": float("inf")}], "text": "nan"}
    assert json.loads(page_json(document)) == {"interval": [None, 1.0], "runs": [{"error": None}], "text": "nan"}


def test_a_block_without_parts_is_left_out() -> None:
    page = ["first", Block([], "missing"), Block(["- one", Line("- two", mark=Toned("two", "bad"))], "listed")]
    assert str(Answer(page, {})) == "first\n\nlisted:\n- one\n- two"


def test_names_of_others_are_no_formulas_of_a_spreadsheet() -> None:
    """Numbers stay as they are, negative ones too, and so does the sign of nothing."""
    table = Table("", columns_named("name", "n", kind="data"), [["=HYPERLINK(1)", -2], ["@x", 3], ["-5", 4], ["-", 5]])
    assert csv(table).splitlines() == ["name,n", "'=HYPERLINK(1),-2", "'@x,3", "-5,4", "-,5"]


@pytest.mark.parametrize(
    ("word", "tone"),
    [
        *(("PASS", "good"), ("within", "good"), ("FAIL", "bad"), ("beyond", "bad")),
        *(("UNDECIDED", "caution"), ("undecided", "caution"), ("FITS", "heading"), ("NOT JUDGED", "heading")),
    ],
)
def test_a_colour_has_one_meaning(word: str, tone: str) -> None:
    """Green is within, red beyond, magenta undecided; what is none of them is bold."""
    assert coloured_word(word).tone == tone


def test_a_row_without_a_name_has_no_header_without_a_text() -> None:
    """A screen reader would announce it."""
    table = Table("", columns_named("of", "value"), [["a", 1], ["", 2]])
    assert re.findall(r"<t([hd])\b", html(table)) == [*"hh", *"hd", *"dd"]
