"""``blis-replay gate`` as a user and a CI job meet it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import Run
from json_docs import documented

_DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.heavy
def test_exit_codes_and_files(run: Run, tmp_path: Path) -> None:
    """Against the published direct calibration, ours is better on 34b-roleplay; the other way round it is worse."""
    files = ("--junit", "gate.xml", "--summary", "gate.md")
    chosen = ("--experiment", "34b-roleplay")
    passed = run("gate", "h100-vllm-0.15.1", "--baseline", "stepml-direct", *chosen, *files)
    assert (passed.code, passed.err) == (0, "")
    assert passed.out.startswith("PASS  h100-vllm-0.15.1: ")
    assert max(len(line) for line in passed.out.splitlines()) <= 80
    assert ElementTree.parse(tmp_path / "gate.xml").getroot().get("failures") == "0"  # noqa: S314 (our own file)
    assert (tmp_path / "gate.md").read_text("utf-8").startswith("## PASS: coefficient gate")
    # What stepml-direct was fitted on it does not say.
    (tmp_path / "all.yaml").write_text("schema: blis-replay/gate-policy/1\nheld_out_only: false\n")
    options = ("--baseline", "h100-vllm-0.15.1", "--policy", "all.yaml", *chosen, *files, "--json")
    failed = run("gate", "stepml-direct", *options)
    assert (failed.code, failed.json["verdict"]) == (1, "FAIL")
    assert (tmp_path / "gate.md").read_text("utf-8").startswith("## FAIL: coefficient gate")


@pytest.mark.slow
def test_json_has_the_documented_form(run: Run) -> None:
    document = run("gate", "h100-vllm-0.15.1", "--experiment", "34b-roleplay", "--json").json
    fields = {"schema", "version", "verdict", "candidate", "baseline", "policy", "experiments", "checks", "left_out"}
    assert set(document) == fields
    (experiment,) = document["experiments"]
    assert (experiment["alias"], experiment["outcome"]) == ("34b-roleplay", "PASS")
    check = next(c for c in experiment["checks"] if (c["rule"], c["metric"]) == ("threshold", "e2e"))
    assert check["limit"] == 0.1
    assert abs(check["value"]) < 0.02
    fields |= {*document, *experiment, *check, *document["policy"], *document["candidate"], *experiment["p99"]["e2e"]}
    assert sorted(fields - documented("gate")) == []


@pytest.mark.slow
def test_a_gate_says_what_other_coefficients_that_fit_simulate(run: Run) -> None:
    """As ``validate`` does, for the means that are judged."""
    one = run("gate", "h100-vllm-0.15.1", "34b-roleplay", "--json").json["experiments"][0]
    (other,) = run("validate", "34b-roleplay", "--json").json["experiments"]
    expected = {metric: other["metrics"][metric]["mean"]["simulated_between_ms"] for metric in ("e2e", "ttft", "itl")}
    assert one["simulated_between_ms"] == expected
