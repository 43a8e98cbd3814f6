"""Recordings of data parallelism: replayed on as many ranks, and what that rests on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from blis_runs import release_of
from recordings import ENGINE, make_recording

from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.parallel.ranks import simulate_ranks
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace, release_arguments
from blis_replay.ingest.recording import Recording, Setting
from blis_replay.replay.driver import replay
from blis_replay.replay.engine import not_simulated
from blis_replay.replay.mode import parse_mode
from blis_replay.validate.comparison.compare import compare_replay

LATENCY = LatencyModel("blackbox", 10_000_000, 30_000, 500_000)
RELEASE = release_of(LATENCY, Lifecycle())
SERVER = {"data_parallel_size": 2, "vllm_version": "0.32.0", "max_num_seqs": 8, "api_server_count": 1}


def served_by_two_ranks(count: int = 200) -> Recording:
    """What two ranks of 0.32.0 answer to twice as much as one of them can serve (8 sequences each)."""
    rng = np.random.default_rng(3)
    arrival_us = np.sort(rng.integers(0, 10_000_000, count))
    prompts, outputs = rng.integers(20, 400, count), rng.integers(1, 60, count)
    trace = RequestTrace(arrival_us, prompts, prompts, outputs, np.full(count, NEVER_US))
    arguments = {name: SERVER.get(name, value) for name, value in ENGINE.items()}
    ranks = {"data_parallel_size": 2, "api_server_count": 1}
    result, _ = simulate_ranks(trace, EngineConfig(**arguments, **ranks, **release_arguments(SERVER)), LATENCY)
    columns = {"arrival_us": arrival_us, "prompt_tokens": prompts, "output_tokens": outputs}
    columns |= {"ttft_us": result.ttft_us, "e2e_us": result.e2e_us}
    recording = make_recording({name: values.tolist() for name, values in columns.items()})
    engine = recording.engine | {name: Setting(value, "recorded") for name, value in SERVER.items()}
    return replace(recording, engine=engine)


def test_ranks_are_replayed_and_judged() -> None:
    """The same server again, so nothing is off; as one engine the same requests wait."""
    recording = served_by_two_ranks()
    comparison = compare_replay(replay(recording, RELEASE), queues=True)
    assert comparison.verdict == "PASS"
    assert comparison.metrics["ttft"]["mean"].error == comparison.metrics["e2e"]["mean"].error == 0
    one = replay(recording, RELEASE, parse_mode("data_parallel_size=1"))
    assert one.ttft_us.mean() > 3 * recording.requests["ttft_us"].mean()


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("some/Model", {}, "2 ranks on devices of their own, each by itself, behind vLLM's balancer with 1 front ends"),
        ("mistralai/Mixtral-8x7B-v0.1", {}, "in lockstep, as the model has experts (by its name)"),
        ("Qwen/Qwen3-30B-A3B", {}, "in lockstep, as the model has experts (by its name)"),
        ("some/Model", {"mixture_of_experts": True}, "in lockstep, as the model has experts, behind"),
        ("some/Model", {"vllm_version": "0.12.0"}, "in lockstep, as that release does"),
        ("some/Model", {"api_server_count": None}, "2 front ends, as many as ranks (assumed"),
    ],
)
def test_what_ranks_rest_on_is_said(model: str, arguments: dict[str, object], words: str) -> None:
    recording = served_by_two_ranks(5)
    engine = {name: setting for name, setting in recording.engine.items() if name not in arguments}
    engine |= {name: Setting(value, "recorded") for name, value in arguments.items() if value is not None}
    run = replay(replace(recording, model=model, engine=engine), release_of(LATENCY, Lifecycle(), model))
    assert words in run.plan.basis["data parallelism"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"data_parallel_external_lb": True}, "data_parallel_external_lb True"),
        ({"data_parallel_hybrid_lb": True}, "data_parallel_hybrid_lb True"),
        ({"data_parallel_rank": 0}, "data_parallel_rank 0"),
        ({"data_parallel_start_rank": 2}, "data_parallel_start_rank 2"),
        ({"data_parallel_external_lb": False}, None),
        ({"data_parallel_external_lb": True, "data_parallel_size": 1}, None),  # there is nothing to choose
    ],
)
def test_a_balancer_that_is_not_vllms_own_is_named(arguments: dict[str, object], named: str | None) -> None:
    """vllm/engine/arg_utils.py: a rank of its own makes the balancer an external one, a first rank a hybrid one."""
    refused = not_simulated({"data_parallel_size": 2} | arguments)
    assert [what.partition(";")[0] for what in refused] == ([] if named is None else [named])
