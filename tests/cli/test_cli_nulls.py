"""A null in every column that may have one: never a number of its own, never a crash."""

from __future__ import annotations

import duckdb
import pytest
from command_line import Run

from blis_replay.validate import STORE_DEFAULT

pytestmark = pytest.mark.slow

_RELEASE = ("--coefficients", "release.yaml")
_VERBS = (
    ("validate", "--experiment", "1b-general", "--by-stage", *_RELEASE),
    ("explain", "--experiment", "1b-general", "--segments", *_RELEASE),
    ("compare", "1b-general", "release.yaml", "--experiment", "1b-general"),
    ("coefficients", "test", "--experiment", "1b-general", *_RELEASE),
    ("inspect", "--experiment", "1b-general"),
)
# What every reader fills in; without an output length nothing is replayed, so that has a test of its own.
_ALWAYS = ("arrival_us", "status", "output_tokens")
# The epoch in us is the largest number that means anything.
_LARGEST = 4e15


def _numbers(document: object) -> list[float]:
    if isinstance(document, dict):
        return [number for value in document.values() for number in _numbers(value)]
    if isinstance(document, list):
        return [number for value in document for number in _numbers(value)]
    return [float(document)] if isinstance(document, int | float) else []


@pytest.mark.usefixtures("stored_demo", "poor_release")
def test_a_null_in_each_column_reaches_no_number(run: Run) -> None:
    """Each column has its nulls in rows of its own; warnings, as of a cast of nan, are errors here."""
    with duckdb.connect(str(STORE_DEFAULT)) as connection:
        columns = connection.execute(
            "SELECT table_name, column_name FROM duckdb_columns() WHERE is_nullable AND table_name IN "
            "('requests', 'steps', 'lifecycles', 'journey_events', 'snapshots')"
        ).fetchall()
        for number, (table, column) in enumerate(columns):
            if column not in _ALWAYS:
                connection.execute(f"UPDATE {table} SET {column} = NULL WHERE rowid % 97 = {number}")  # noqa: S608
    for verb in _VERBS:
        answer = run(*verb, "--json")
        assert answer.code in (0, 1, 3, 4), answer.err
        assert all(abs(number) < _LARGEST for number in _numbers(answer.json if answer.out else {})), verb


@pytest.mark.usefixtures("stored_demo")
def test_a_request_of_unknown_length_has_no_gaps(run: Run) -> None:
    """The mean ITL is that of the 299 others; TTFT and E2E have all 300."""
    with duckdb.connect(str(STORE_DEFAULT)) as connection:
        connection.execute("UPDATE requests SET output_tokens = NULL WHERE request_index = 0")
        connection.execute("DELETE FROM token_event_runs")
        expected = connection.execute(
            "SELECT sum(e2e_us - ttft_us) / sum(output_tokens - 1) / 1000 FROM requests WHERE output_tokens > 1"
        ).fetchall()
    answer = run("compare", "1b-general", "1b-general", "--json")
    assert answer.code == 0
    assert answer.json["metrics"]["itl"]["mean"]["a_ms"] == pytest.approx(expected[0][0])
