"""``inspect --check`` and ``--checks``; ``validate`` of a recording with an unusable metric."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from command_line import Run

pytestmark = pytest.mark.slow

# Design, section 8, and the rule on overload.
CHECKS = [
    "overloaded",
    "ledger",
    "token_events",
    "output_length",
    "step_clock",
    "step_cycle",
    "iterations",
    "clocks",
    "stationarity",
    "completeness",
    "prefix_cache",
    "server_metrics",
    "engine_arguments",
    "recorder",
    "schedule",
]
# The others say all in their findings, or have tables of what this recording has not.
WITH_TABLES = ("overloaded", "ledger", "token_events", "engine_arguments")


def test_every_check_is_listed_with_what_it_measures(run: Run) -> None:
    assert list(run("inspect", "--checks", "--json").json["checks"]) == CHECKS
    assert "step_clock: share of engine steps with a recorded time" in run("inspect", "--checks").out


@pytest.mark.parametrize("check", CHECKS)
def test_the_evidence_of_each_check_on_aggregates_alone_and_on_a_recording(run: Run, both: Path, check: str) -> None:
    for name in ("34b-general", "1b-general"):
        answer = run("inspect", "--experiment", name, "--check", check, "--store", both)
        assert answer.code == 0
        assert answer.out.startswith(f"{check}: {name}  (")
        assert "\nmeasures: " in answer.out
        assert "\nthresholds: " in answer.out
        assert max(map(len, answer.out.splitlines())) <= 80
        document = run("inspect", "--experiment", name, "--check", check, "--store", both, "--json").json
        assert document["check"] == check
        assert all(finding["check"] == check for finding in document["findings"])
    assert bool(document["tables"]) == (check in WITH_TABLES)


def test_a_recording_with_long_names_is_shown_in_80_columns(run: Run, demo: Path) -> None:
    """What does not fit is cut at its end, and whole in --json."""
    long_name = "what-somebody-left-here-" + "x" * 90 + ".txt"
    (demo / long_name).write_text("no format\n")
    run("ingest", demo)
    shown = run("inspect", "--experiment", "1b-general").out
    assert max(map(len, shown.splitlines())) <= 80
    assert "what-somebody" in shown
    files = run("inspect", "--experiment", "1b-general", "--json").json["files"]
    assert long_name in [file["name"] for file in files]
    engine = run("inspect", "--experiment", "34b-general").out
    assert max(map(len, engine.splitlines())) <= 80


@pytest.mark.usefixtures("stored_demo")
def test_the_gap_histogram_has_its_two_modes(run: Run) -> None:
    """300 streams of 24 tokens: 23 gaps of a step of 8 ms and more, and 26 of some tens of us: each token's blank
    line, the closing [DONE] right behind the last token, and its blank line."""
    (table,) = run("inspect", "--experiment", "1b-general", "--check", "token_events", "--json").json["tables"]
    counts = {row["gap from"]: row["gaps"] for row in table["rows"]}
    within = sum(n for gap, n in counts.items() if gap.endswith("us"))
    steps = sum(n for gap, n in counts.items() if gap.endswith("ms") and float(gap.split()[0]) >= 5)
    assert (within, steps, sum(counts.values())) == (300 * 26, 300 * 23, 300 * 49)


def test_the_published_quantiles_stand_in_where_no_stamp_was_kept(run: Run) -> None:
    """34b-general: the published p75 of 16.36 ms is the true median (trace-formats, 4.4)."""
    (table,) = run("inspect", "--experiment", "34b-general", "--check", "token_events", "--json").json["tables"]
    (row,) = [row for row in table["rows"] if row["reported"] == "p75"]
    assert (row["stands for"], row["ms"]) == ("p50", row["true ms"])
    assert row["ms"] == pytest.approx(16.36, abs=0.01)


def test_an_unusable_metric_is_refused_by_name(run: Run) -> None:
    run("inspect", "--experiment", "34b-general")  # brings it into the store
    with duckdb.connect(".blis-replay/store.duckdb") as store:
        store.execute("UPDATE findings SET severity = 'unusable' WHERE check_name = 'token_events'")
    answer = run("validate", "--experiment", "34b-general", "-v")
    assert answer.code == 4
    assert answer.out.startswith("NOT JUDGED  34b-general: ITL unusable (token_events: reported ITL")
    (experiment,) = run("validate", "--experiment", "34b-general", "--json").json["experiments"]
    assert experiment["verdict"] == "NOT JUDGED"
    assert experiment["metrics"]["itl"]["mean"]["observed_ms"] is None
    assert run("validate", "--experiment", "34b-general", "--experiment", "34b-codegen").code == 4  # the other passes
