"""The engine against the real vLLM 0.15.1 scheduler, on its recorded schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scenario import first_difference, read_scenario

from blis_replay.blis.engine import simulate

SCENARIOS = ["A_steady", "C_kv_tight", "D_shared_prefix", "D_async", "F_edge", "F_async"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_equal_to_the_microsecond(data_pack: Path, name: str) -> None:
    """Step table with free blocks, every token, preemptions and cache hits: all equal."""
    assert first_difference(read_scenario(data_pack / "vllm-oracle" / name)) is None


def test_the_comparison_sees_a_difference(data_pack: Path) -> None:
    """Nine blocks fewer, one request less at once, no prefix cache: each is noticed."""
    scenario = read_scenario(data_pack / "vllm-oracle" / "C_kv_tight")
    for change in ({"num_gpu_blocks": 1491}, {"max_num_seqs": 39}, {"enable_prefix_caching": False}):
        result = simulate(scenario.trace, replace(scenario.engine, **change), scenario.latency)  # type: ignore[arg-type]
        assert first_difference(scenario, result) is not None


def test_what_kv_pressure_does(data_pack: Path) -> None:
    """C_kv_tight, of its summary: 220 preemptions of 172 requests, 105,280 tokens found again."""
    scenario = read_scenario(data_pack / "vllm-oracle" / "C_kv_tight")
    result = simulate(scenario.trace, scenario.engine, scenario.latency)
    assert (int(result.preemptions.sum()), int((result.preemptions > 0).sum())) == (220, 172)
    assert int(result.resume_cached_tokens.sum()) == 105_280
    assert int(result.steps["free_blocks"].min()) == 0
