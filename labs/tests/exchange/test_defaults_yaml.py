"""BLIS's own defaults.yaml as a release."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from command_line import Run
from engine_cases import duration_us

from blis_replay.base.errors import ReleaseError
from blis_replay.blis.latency.models import Lifecycle
from blis_replay_labs.exchange.defaults import parse_defaults, rows_of

# Rows of the file as published in March 2026 (blis-semantics, section 8).
PUBLISHED = """
defaults:
  meta-llama/llama-3.1-8b-instruct:
    GPU: H100
    tensor_parallelism: 2
    vllm_version: vllm/vllm-openai:v0.8.4
    hf_repo: meta-llama/Llama-3.1-8B-Instruct
workloads:
  chatbot: {prompt_tokens: 256}
models:
- {GPU: H100, id: meta-llama/llama-3.1-8b-instruct, tensor_parallelism: 2, total_kv_blocks: 132139, best_loss: 424.5,
   vllm_version: v0.8.4, alpha_coeffs: [1601.350510688092, 3.512476196805965, 1805.5430360826988],
   beta_coeffs: [6910.420479880494, 17.67057489844186, 2.8377471109943855]}
- {GPU: A100-80, id: meta-llama/llama-3.1-8b-instruct, tensor_parallelism: 2, vllm_version: v0.8.4,
   alpha_coeffs: [2943.6134268743335, 2.151286397723518, 14229.18244730705],
   beta_coeffs: [8001.630597822392, 26.362876080324924, 14.969035206354745]}
- {GPU: H100, id: codellama/codellama-34b-instruct-hf, tensor_parallelism: 1, vllm_version: v0.8.4,
   alpha_coeffs: [13450.510995636703, 0.041813767451373045, 0.0],
   beta_coeffs: [26595.2781995357, 96.28441960829817, 56.58626882402723]}
"""


@pytest.mark.slow
def test_a_published_row_gives_the_published_step() -> None:
    """Worked vector V6 of blis-semantics: trunc(6910.42 + 17.670575 * 512) = 15,957 us; delays as they stand."""
    row = rows_of(parse_defaults(PUBLISHED, "defaults.yaml"), "H100", None, "defaults.yaml")[0]
    assert duration_us(row.entry.latency, 512, 0) == 15_957
    assert row.entry.lifecycle == Lifecycle(1601.350510688092, 3.512476196805965, 1805.5430360826988)
    assert (row.entry.model, row.gpu) == ("meta-llama/Llama-3.1-8B-Instruct", "H100")


@pytest.mark.parametrize(
    ("gpu", "version", "complaint"),
    [
        (None, None, "has 3 rows, of several GPUs, and a release is of one; choose with --gpu (A100-80, H100)"),
        ("TPU", None, "none is of that GPU and version of vLLM"),
        ("H100", "v0.9", "none is of that GPU and version of vLLM; choose with --gpu (A100-80, H100) and --vllm-ver"),
    ],
)
def test_a_release_is_of_one_gpu(gpu: str | None, version: str | None, complaint: str) -> None:
    with pytest.raises(ReleaseError) as refused:
        rows_of(parse_defaults(PUBLISHED, "defaults.yaml"), gpu, version, "defaults.yaml")
    assert complaint in str(refused.value)


def test_two_versions_of_a_model_leave_a_choice() -> None:
    twice = PUBLISHED.replace("GPU: A100-80", "GPU: H100").replace("26.362876080324924", "1")
    with pytest.raises(ReleaseError, match="several for one model and tensor parallelism"):
        rows_of(parse_defaults(twice, "d"), "H100", None, "d")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1, 2", "not YAML"),
        ("- a\n", "is a list of 1; write key: value pairs"),
        ("[" * 5_000, "not YAML"),
        ("defaults: {}\ntrained_physics_coefficients: {}\n", "field models: is missing; only files of builds with"),
        ("models: 3\n", "field models: is 3; write a list"),
        ("models: [3]\n", "field models[0]: is 3; write key: value pairs"),
        ("models:\n- !!python/object/apply:os.system ['true']\n", "not YAML"),
        (PUBLISHED.replace("6910.420479880494", ".nan"), "field models[0].beta_coeffs[0]: is nan; write a number"),
        (PUBLISHED.replace("6910.420479880494", ".inf"), "field models[0].beta_coeffs[0]: is inf; write a number"),
        (
            PUBLISHED.replace("17.67057489844186, ", ""),
            "models[0].beta_coeffs: is a list of 2; write a list of 3",
        ),
        (PUBLISHED.replace("tensor_parallelism: 2, t", "tensor_parallelism: -2, t"), "models[0].tensor_parallelism"),
        (PUBLISHED.replace("hf_repo: meta-llama/Llama-3.1-8B-Instruct", "hf_repo: 3"), "hf_repo: is 3; write text"),
        (PUBLISHED.replace("GPU: H100, id", "GPU: [H100], id"), "field models[0].GPU: is a list of 1; write text"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(text: str, complaint: str) -> None:
    with pytest.raises(ReleaseError) as refused:
        parse_defaults(text, "defaults.yaml")
    assert str(refused.value).startswith("defaults.yaml")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_command_line_writes_a_release_of_one_gpu(run: Run, tmp_path: Path) -> None:
    """CodeLlama-34B: 26,595.278 us and 56.586 us per decode token, in whole ns."""
    file, out = tmp_path / "defaults.yaml", tmp_path / "release.yaml"
    file.write_text(PUBLISHED)
    read = run("coefficients", "convert", file, "--gpu", "H100", "--out", out, "--json").json
    assert "codellama/codellama-34b-instruct-hf tp 1" in read["models"]
    rows = {row["model"]: row["latency"] for row in yaml.safe_load(out.read_text())["models"]}
    latency = rows["codellama/codellama-34b-instruct-hf"]
    assert (latency["intercept"], latency["per_decode_token"]) == ("26595.278 us", "56.586 us/token")
    assert run("coefficients", "show", out).code == 0
