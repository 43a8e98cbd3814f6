"""``coefficients import-stepml``, ``import-defaults`` and ``export-defaults`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from command_line import Run


def test_a_release_goes_to_blis_and_comes_back(run: Run, tmp_path: Path) -> None:
    """CodeLlama-34B of the published direct calibration: 14,196.05 us and 25.803 us a decode."""
    out, back = tmp_path / "defaults.yaml", tmp_path / "back.yaml"
    written = run("coefficients", "export-defaults", "stepml-direct", "--out", out, "--json")
    assert written.code == 0
    assert "not carried: total_kv_blocks" in written.err
    assert written.json["not_carried"][-1].startswith("total_kv_blocks")
    read = run("coefficients", "import-defaults", out, "--out", back, "--json").json
    assert "codellama/CodeLlama-34b-Instruct-hf tp 2" in read["models"]
    rows = {row["model"]: row["latency"] for row in yaml.safe_load(back.read_text())["models"]}
    assert rows["codellama/CodeLlama-34b-Instruct-hf"]["intercept"] == "14196.05 us"
    assert run("coefficients", "show", back).code == 0


@pytest.mark.slow
def test_a_stepml_artifact_becomes_a_release_that_validates(run: Run, tmp_path: Path) -> None:
    """A cycle of 13,546 + 40 us per decode is close to the recorded one of 34b-general (design, section 9)."""
    artifact, out = tmp_path / "artifact.json", tmp_path / "mine.yaml"
    step_time = {
        "model_type": "linear",
        "intercept": 13_546.0,
        "feature_coefficients": {"num_decode_reqs": 40.3, "prefill_tokens": 30.5},
    }
    queueing = {"model_type": "linear", "intercept": 9300.0, "feature_coefficients": {}}
    artifact.write_text(json.dumps({"version": 1, "step_time": step_time, "queueing_time": queueing}))
    model = ("--model", "codellama/CodeLlama-34b-Instruct-hf", "--tensor-parallelism", 2)
    assert run("coefficients", "import-stepml", artifact, *model, "--out", out).code == 0
    (experiment,) = run("validate", "--experiment", "34b-general", "--coefficients", out, "--json").json["experiments"]
    assert abs(experiment["metrics"]["e2e"]["mean"]["error"]) < 0.02
