"""``coefficients roofline`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from command_line import Run


@pytest.mark.slow
def test_the_roofline_of_a_model_from_its_configuration(run: Run, tmp_path: Path) -> None:
    """`validate` runs it like any release.  A folder without tables is refused."""
    config = {
        **{"hidden_size": 8192, "intermediate_size": 22016, "num_attention_heads": 64, "num_hidden_layers": 48},
        **{"num_key_value_heads": 8, "torch_dtype": "bfloat16", "vocab_size": 32000},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "roofline.yaml"
    asked = ["coefficients", "roofline", tmp_path / "config.json", "--model", "codellama/CodeLlama-34b-Instruct-hf"]
    asked += ["--tensor-parallelism", "2", "--out", out]
    assert run(*asked, "--mixed", "additive").code == 0
    latency = yaml.safe_load(out.read_text())["models"][0]["latency"]
    assert (latency["kind"], latency["mixed"], latency["per_layer"]) == ("roofline", "additive", "100 us")
    errors = run("validate", "--experiment", "34b-roleplay", "--coefficients", out, "--json").json
    assert errors["experiments"][0]["metrics"]["e2e"]["mean"]["simulated_ms"] > 1_000
    assert run(*asked, "--efficiency", tmp_path).code == 4
    sheet = "RTX-4090: {source: NVIDIA, memory_bandwidth: 1 TB/s, compute: 165 TFLOP/s, link_bandwidth: 32 GB/s}"
    (tmp_path / "gpus.yaml").write_text(sheet)
    assert run(*asked, "--gpu-file", tmp_path / "gpus.yaml").code == 0
    assert yaml.safe_load(out.read_text())["models"][0]["latency"]["gpu"]["name"] == "RTX-4090"
