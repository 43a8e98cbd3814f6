"""``blis-replay timeline`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run

pytestmark = pytest.mark.slow


@pytest.fixture
def mine(calibrated: Path) -> str:
    """A release for the demo, which is in the store."""
    del calibrated
    return "mine.yaml"


def test_both_sides_of_a_recording_are_written(run: Run, mine: str) -> None:
    answer = run(
        *("timeline", "--experiment", "1b-general", "--coefficients", mine),
        *("--from", "5s", "--for", "1500ms", "--out", "trace.json", "--json"),
    )
    assert answer.code == 0
    document = answer.json
    assert (document["from_ms"], document["until_ms"], document["file"]) == (5000.0, 6500.0, "trace.json")
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert document["events"] == sum(event["ph"] != "M" for event in events)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"steps observed", "steps simulated"} < names
    assert document["requests"] == len({name.split()[1] for name in names if name.startswith("request")})
    # Its steps are a sample of a tenth, its requests have no stamps of the server.
    assert document["absent"] == ["observed queue wait and prefill of requests (no stamps of the server)"]
    assert answer.err.strip() == "absent, because not recorded: " + document["absent"][0]


def test_one_request_is_one_request(run: Run, mine: str) -> None:
    asked = ("timeline", "1b-general", "--coefficients", mine, "--request", "0", "--out", "trace.json")
    assert ", 1 request, " in " ".join(run(*asked).out.split())


def test_a_published_experiment_has_the_simulated_side_only(run: Run) -> None:
    answer = run("timeline", "--experiment", "34b-general", "--for", "500ms", "--out", "trace.json")
    assert answer.code == 0
    assert "0 observed" in answer.out and "reconstructed from published aggregates" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80
    assert answer.err.startswith("absent, because not recorded: observed lanes; the observed step track; ")
    assert len(answer.err.splitlines()) == 1
    assert Path("trace.json").stat().st_size > 1000
