"""``blis-replay explain`` as a user meets it."""

from __future__ import annotations

import re

import duckdb
import pytest
from command_line import Run
from json_docs import documented

pytestmark = pytest.mark.slow


def test_the_missing_cycle_is_named_with_the_command_that_mends_it(run: Run) -> None:
    """34b-general with synchronous scheduling: published TTFT 51.59 ms; a cycle of 16.4 ms is 31.7 % of it."""
    answer = run("explain", "--experiment", "34b-general", "--replay", "scheduling=synchronous")
    assert (answer.code, answer.err) == (0, "")
    text = " ".join(answer.out.split())
    assert re.search(
        r"TTFT mean is under-predicted by 32\.\d %; 31\.\d points come from scheduling mode: the simulator schedules",
        text,
    )
    assert "; replay it as recorded: --replay scheduling=recorded 34b-general (2026" in text, "above the table"
    assert max(len(line) for line in answer.out.splitlines()) <= 80


def test_explain_says_the_verdict_and_the_interval_of_validate(run: Run) -> None:
    """With the same repeat: the interval of E2E in the table is that of the verdict."""
    judged = ("tiny-live-a2", "--repeat", "tiny-live-a")
    seen, told = (run(verb, *judged, "--json").json for verb in ("validate", "explain"))
    assert told["judgement"] == seen["experiments"][0]["judgement"]
    (e2e,) = (one for one in told["errors"] if (one["metric"], one["statistic"]) == ("e2e", "mean"))
    span = [100 * e2e["error_ms"][end] / e2e["observed_ms"] for end in ("low", "high")]
    assert f"{span[0]:+.1f} .. {span[1]:+.1f} %" in run("explain", *judged).out


def test_of_an_overloaded_recording_the_queue_is_named_before_any_number(run: Run) -> None:
    text = run("explain", "34b-reasoning").out
    assert "the recording is overloaded, so its latencies measure how long the queue" in text.partition("E2E mean")[0]


@pytest.mark.heavy
@pytest.mark.usefixtures("calibrated")
def test_every_field_of_the_json_is_documented(run: Run) -> None:
    own = ("--experiment", "1b-general", "--coefficients", "mine.yaml", "--json")
    document = run("explain", *own, "--replay", "arrivals=flat").json
    assert document["next_recording"]["command"].startswith("vllm bench serve")
    error = document["errors"][0]
    fields = {*document, *error, *error["error_ms"], *document["components"][0]}
    assert sorted(fields - documented("explain")) == []
    shares = sum(share["value"] for share in error["shares_ms"].values()) + error["residual_ms"]["value"]
    assert shares == pytest.approx(error["error_ms"]["value"])
    segments = document["segments"]
    assert sorted({*segments, *segments["parts"][0]} - documented("explain")) == []


@pytest.mark.usefixtures("calibrated")
def test_the_store_is_opened_once_for_all_replays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay looks into several tables of it."""
    opened = []
    connect = duckdb.connect
    monkeypatch.setattr("duckdb.connect", lambda *path, **settings: opened.append(path) or connect(*path, **settings))
    assert run("explain", "1b-general", "--coefficients", "mine.yaml", "--jobs", "1").code == 0
    assert len([path for path in opened if "store" in str(path)]) == 1


@pytest.mark.usefixtures("calibrated")
def test_where_the_time_of_a_request_goes_is_printed_where_asked_for(run: Run) -> None:
    own = ("explain", "--experiment", "1b-general", "--coefficients", "mine.yaml")
    shown = run(*own, "--segments").out
    assert "to last token" in shown
    assert "to last token" not in run(*own).out
    assert max(map(len, shown.splitlines())) <= 80
    assert run("explain", "34b-general", "--json").json["segments"] is None  # a summary has no single requests
