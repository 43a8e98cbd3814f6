"""``blis-replay gate`` as a user and a CI job meet it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
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


@pytest.mark.heavy
def test_the_example_workflow_works_command_by_command(tmp_path: Path, demo: Path, made_fit: Path) -> None:
    """The steps of docs/release-in-ci.md in a repository as it describes, but for those that install."""
    (block,) = re.findall(r"```yaml\n(name: .*?)```", (_DOCS / "release-in-ci.md").read_text("utf-8"), re.DOTALL)
    job = yaml.safe_load(block)["jobs"]["gate"]
    commands = [step["run"] for step in job["steps"] if "run" in step and step["name"] != "Install"]
    assert len(commands) == 4
    (tmp_path / "recordings").mkdir()
    shutil.move(demo, tmp_path / "recordings")
    (tmp_path / "coefficients").mkdir()
    (tmp_path / "coefficients" / "policy.yaml").write_text("schema: blis-replay/gate-policy/1\nheld_out_only: false\n")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "BASE_REF": "main",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }

    def shell(command: str) -> int:
        ended = subprocess.run(
            ["bash", "-e", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return ended.returncode

    assert shell(commands[0]) == 0
    shutil.copy(made_fit, tmp_path / "coefficients" / "h100.yaml")
    # What `actions/checkout` leaves of the target branch.
    commit = "git -c user.name=test -c user.email=test@localhost commit -qm release"
    assert (
        shell(f"git init -q . && git add -f coefficients && {commit} && git update-ref refs/remotes/origin/main HEAD")
        == 0
    )
    assert [shell(command) for command in commands[1:]] == [0, 0, 0]
    assert (tmp_path / "summary.md").read_text("utf-8").startswith("## FITS: coefficient gate")

    release = tmp_path / "coefficients" / "h100.yaml"
    text = release.read_text("utf-8")
    intercept_us = float(re.findall(r"intercept: ([\d.]+) us", text)[0])
    release.write_text(re.sub(r"intercept: [\d.]+ us", f"intercept: {1.05 * intercept_us} us", text))
    assert [shell(command) for command in commands[1:]] == [0, 1, 0]
    assert (tmp_path / "summary.md").read_text("utf-8").count("## FAIL: coefficient gate") == 1
