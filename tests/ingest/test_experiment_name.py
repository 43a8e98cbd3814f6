"""Aliases and workloads, as in the design, section 4."""

from __future__ import annotations

import pytest

from blis_replay.ingest.identity import alias_of, workload_of


@pytest.mark.parametrize(
    ("slug", "model", "workload", "alias"),
    [
        ("20260218-150304-codellama-34b-tp2-general", "codellama/CodeLlama-34b-Instruct-hf", "general", "34b-general"),
        ("20260217-203421-llama-2-70b-hf-tp4-codegen", "meta-llama/Llama-2-70b-hf", "codegen", "70b-hf-codegen"),
        ("20260217-202857-llama-2-70b-tp4-general", "meta-llama/Llama-2-70b-hf", "general", "70b-general"),
        ("20260217-155451-llama-2-7b-tp1-codegen", "meta-llama/Llama-2-7b-hf", "codegen", "7b-codegen"),
        ("20260218-120914-mixtral-8x7b-v0-1-tp2-codegen", "mistralai/Mixtral-8x7B-v0.1", "codegen", "mixtral-codegen"),
        ("jan20-prefill-llama7b-tp1-1", "codellama/CodeLlama-34b-Instruct-hf", "prefillheavy", "34b-prefillheavy"),
        ("x", "Qwen/Qwen2.5-7B-Instruct", "x", "7b-x"),
        ("x", "Qwen/Qwen2.5-1.5B", "x", "1.5b-x"),
        ("x", "openai/gpt_oss", "x", "gpt-oss-x"),
        ("mine", "org/mine", "mine", "mine"),  # a folder called like its model
        ("mine-2", "org/mine", "mine-2", "mine-2"),
        ("x", "org/m-7b", "../../etc", "7b-..-..-etc"),  # an export is called like it, and stays in the folder
    ],
)
def test_the_alias_takes_the_size_from_the_configured_model(slug: str, model: str, workload: str, alias: str) -> None:
    assert alias_of(slug, model, workload) == alias


@pytest.mark.parametrize(
    ("name", "app", "workload"),
    [
        ("20260217-203421-llama-2-70b-hf-tp4-codegen", "inference-perf", "codegen"),
        ("a-tp1-x-tp2-long-chat", None, "long-chat"),
        ("jan20-codellama-train-1", "train", "train"),
        ("jan20-prefill-llama7b-tp1-1", "prefillheavy", "prefillheavy"),
        ("mine", None, "mine"),
    ],
)
def test_the_workload_is_what_follows_the_parallelism(name: str, app: str | None, workload: str) -> None:
    assert workload_of(name, app) == workload
