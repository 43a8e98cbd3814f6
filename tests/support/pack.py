"""The folders of the data pack that tests go through, by name: what is added to it later breaks no test."""

from __future__ import annotations

from pathlib import Path

from blis_replay.fixtures.bundled import bundled_slugs

# The twelve recorded H100 experiments; of roleplay only aggregates were published.
H100 = tuple(slug for slug in bundled_slugs() if not slug.endswith("roleplay"))
# Those with step spans.
WITH_SPANS = (
    "20260217-202857-llama-2-70b-tp4-general",
    "20260217-203421-llama-2-70b-hf-tp4-codegen",
    "20260218-150304-codellama-34b-tp2-general",
)
# Server spans of vLLM 0.11.
JANUARY = ("jan20-codellama-train-1", "jan20-prefill-llama7b-tp1-1", "jan21-llama7b-train-1")
# Traces with truth of the scheduler of vLLM 0.15.1, driven without a GPU.
VLLM_TRACES = (
    "fcfs-async",
    "kv-tight-sync",
    "long-prompts-sync",
    "shared-prefix-async",
    "shared-prefix-async-10pct",
)
# Runs of inference-perf with per-request records, by version.
INFERENCE_PERF = {
    "0.1.1": ("random-poisson",),
    "0.2.0": ("bos-rough", "faults", "random-poisson", "shared-constant", "unary"),
    "0.3.0": ("shared-constant",),
    "0.4.0": ("bos-rough", "random-poisson", "shared-constant"),
    "0.5.0": ("bos-rough", "random-poisson", "shared-constant"),
    "0.6.1": ("bos-rough", "shared-constant"),
    "0.7.0": ("bos-rough", "faults", "random-poisson", "shared-constant", "unary"),
}


def h100_folders(data_pack: Path) -> list[Path]:
    """The folders of the twelve recorded H100 experiments."""
    return [data_pack / "h100" / slug for slug in H100]


def inference_perf_records(data_pack: Path, version: str) -> list[Path]:
    """The files of per-request records that a version of inference-perf wrote, some of them compressed."""
    reports = [data_pack / "clients" / f"inference-perf-{version}" / run / "reports" for run in INFERENCE_PERF[version]]
    return [next(folder.glob("per_request_lifecycle_metrics.json*")) for folder in reports]
