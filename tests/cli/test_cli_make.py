"""``coefficients make`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from command_line import Run
from small_model import CONFIG

pytestmark = pytest.mark.slow

# 24 * (4 * 2048^2 + 3 * 2048 * 5504 + 2 * 2048) + 2 * 32000 * 2048 + 2048
ENGINE = "max_num_seqs: 8\nmax_num_batched_tokens: 2048\nmax_model_len: 4096\nasync_scheduling: true\n"
PARAMETERS = 1_345_423_360


def test_a_release_for_a_model_that_nobody_recorded(run: Run, tmp_path: Path) -> None:
    """The shared coefficients are those of the release that ships; the architecture is the file's."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ["--model", "org/new", "--tensor-parallelism", "2", "--out", "n.yaml", "--json"]
    answer = run("coefficients", "make", "config.json", *options)
    assert (answer.code, answer.json["parameters"]) == (0, PARAMETERS)
    written = yaml.safe_load(Path("n.yaml").read_text("utf-8"))
    shipped = run("coefficients", "show", "h100-physical", "--json").json
    assert [entry["model"] for entry in written["models"]] == ["org/new"]
    latency = written["models"][0]["latency"]
    assert latency["coefficients"] == shipped["models"][0]["latency"]["coefficients"]
    assert latency["architecture"]["kv_heads"] == 16  # none is given, so as many as attention heads
    assert "org/new" in run("coefficients", "show", "n.yaml").out


SHEET = """
RTX-4090: {source: NVIDIA, memory_bandwidth: 1.008 TB/s, compute: 165.2 TFLOP/s, link_bandwidth: 32 GB/s}
"""


def test_any_gpu_with_a_datasheet(run: Run, tmp_path: Path) -> None:
    """A model on the only GPU of a file; the same release on another one, by ``simulate``, is slower by the bandwidth.

    One request alone, all but its step's constant costs read weights: 3.35 TB/s against 1.008 TB/s.
    """
    for name, text in {"config.json": json.dumps(CONFIG), "gpus.yaml": SHEET, "engine.yaml": ENGINE}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "load.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,500\n")
    made = ["config.json", "--model", "org/new"]
    assert run("coefficients", "make", *made, "--out", "h100.yaml").code == 0
    assert run("coefficients", "make", *made, "--gpu-file", "gpus.yaml", "--out", "rtx.yaml").code == 0
    latency = yaml.safe_load(Path("rtx.yaml").read_text("utf-8"))["models"][0]["latency"]
    assert latency["gpu"] == {
        "name": "RTX-4090",
        "memory_bandwidth": "1008 GB/s",
        "compute": "165.2 TFLOP/s",
        "link_bandwidth": "32 GB/s",
        "source": "NVIDIA",
    }

    def itl_ms(release: str, *options: str) -> float:
        asked = ["--requests", "load.csv", "--engine", "engine.yaml", "--coefficients", release, "--force", *options]
        return float(run("simulate", *asked, "--out", "run", "--json").json["latencies_ms"]["itl"]["mean"])

    assert itl_ms("rtx.yaml") == itl_ms("h100.yaml", "--gpu-file", "gpus.yaml")
    # 24 layers and the output projection: 1.28e9 parameters of 2 bytes, read at 0.98 of the bandwidth or so.
    assert itl_ms("rtx.yaml") - itl_ms("h100.yaml") == pytest.approx(2.56 / 1.008 - 2.56 / 3.35, rel=0.1)
    options = ["--coefficients", "h100-vllm-0.15.1", "--gpu-file", "gpus.yaml", "--set", "max_num_seqs=8"]
    refused = run("simulate", "34b-general", *options)
    assert (refused.code, len(refused.err.strip().splitlines())) == (4, 1)
    assert "are of H100-SXM-80GB and follow from no datasheet; use h100-physical" in refused.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpu-file", "absent.yaml"], "absent.yaml: cannot be read"),
        (["--shared", "h100-vllm-0.15.1"], "release h100-vllm-0.15.1 has no coefficients that its models share"),
        (["--hardware", "TPU"], "no datasheet of the hardware TPU"),
    ],
)
def test_what_cannot_be_scaled_is_refused(run: Run, tmp_path: Path, arguments: list[str], complaint: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    answer = run("coefficients", "make", "config.json", "--model", "m", "--out", "n.yaml", *arguments)
    assert (answer.code, Path("n.yaml").exists()) == (4, False)
    assert complaint in answer.err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": "8"}', '{"hidden_size": 1e999}', "\x00", "{" * 5000])
def test_a_file_that_is_no_configuration_is_refused_in_one_line(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    answer = run("coefficients", "make", "config.json", "--model", "m", "--out", "n.yaml")
    assert answer.code == 4
    assert answer.err.startswith("error: config.json")
    assert len(answer.err.strip().splitlines()) == 1


def test_the_release_that_ships_serves_the_bundled_experiments(run: Run) -> None:
    """Mean E2E within 5 % on the four roleplay runs, which it was not fitted to."""
    for model in ("7b", "34b", "70b", "mixtral"):
        arguments = ["--experiment", f"{model}-roleplay", "--coefficients", "h100-physical", "--json"]
        experiment = run("validate", *arguments).json["experiments"][0]
        assert experiment["judgement"]["subject"]["use"] == "held out"
        assert abs(experiment["metrics"]["e2e"]["mean"]["error"]) < 0.05
