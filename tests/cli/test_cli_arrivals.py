"""Arrival traces at the command line: requests without latencies."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run


def test_an_arrival_trace_is_not_validated(run: Run, mooncake: Path) -> None:
    answer = run("validate", "--experiment", "mooncake", "--json")
    assert (answer.code, answer.json["verdict"]) == (4, "NOT JUDGED")
    assert answer.json["not_judged"]["mooncake"].startswith("an arrival trace")
    calibrated = run("calibrate", "--train", "mooncake", "--out", "fit.yaml")
    assert (calibrated.code, calibrated.err.count("\n")) == (4, 1)


@pytest.mark.slow
def test_inspect_shows_identities(run: Run, mooncake: Path) -> None:
    assert run("ingest", "trace.jsonl", "--name", "mooncake").code == 0
    document = run("inspect", "--experiment", "mooncake", "--json").json
    source = "hash_ids of the trace, one for 512 tokens"
    assert document["prefix_identity"] == {"source": source, "requests": 3, "prompts": 3}
    text = run("inspect", "--experiment", "mooncake").out
    assert "model: not recorded" in text
    assert "prefix identity: 3 prompts" in text
    assert max(len(line) for line in text.splitlines()) <= 80
