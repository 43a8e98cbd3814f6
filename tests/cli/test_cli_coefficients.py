"""``coefficients`` as a user meets it: releases shown and made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from command_line import Run


@pytest.mark.parametrize("release", ["h100-physical", "stepml-direct", "cpu-vllm-0.32.0"])
def test_a_release_is_shown_in_80_columns_and_is_the_same(run: Run, release: str) -> None:
    shown = run("coefficients", "show", release).out
    # But for a hash, which is one word.
    assert max(len(line) for line in shown.splitlines() if "requests_hash" not in line) <= 80
    written = run("coefficients", "show", release, "--json").json
    assert {**yaml.safe_load(shown), "sha256": written["sha256"]} == written


@pytest.mark.slow
def test_the_roofline_of_a_model_from_its_configuration(run: Run, tmp_path: Path) -> None:
    """It is validated with like any release; one GPU, and tables are refused where there are none."""
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
    assert run(*asked, "--efficiency", tmp_path).code == 3
