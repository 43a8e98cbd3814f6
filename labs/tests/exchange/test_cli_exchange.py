"""``coefficients import-defaults`` and ``export-defaults`` as a user meets them."""

from __future__ import annotations

from pathlib import Path

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
