"""Prompt identities from request bodies: what is repeated is exact, what begins alike is within what is stated."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from builders import recorded_file
from client_truth import compare

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.clients.inference_perf import read_requests
from blis_replay.ingest.readers.requests import RawPrompts
from blis_replay.ingest.recording import PromptTree, Recording, SharedPrefix
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.prefix_estimate import estimate_prefix
from blis_replay_labs.planted.experiment import SyntheticExperiment, SyntheticTruth
from blis_replay_labs.planted.files import write_experiment
from blis_replay_labs.planted.generate import generate

REQUESTS = "results/per_request_lifecycle_metrics.json"


def prompts_of(tmp_path: Path, *bodies: dict[str, Any], tokens: int = 100) -> RawPrompts:
    records = [
        {"start_time": i, "end_time": i + 1, "request": json.dumps(body), "info": {"input_tokens": tokens}}
        for i, body in enumerate(bodies)
    ]
    read = read_requests(recorded_file(tmp_path, records), tmp_path / "stamps")
    assert isinstance(read.prefix, RawPrompts)
    return read.prefix


def test_equal_bodies_are_one_prompt_whatever_else_they_ask_for(tmp_path: Path) -> None:
    found = prompts_of(tmp_path, {"prompt": "a" * 400, "max_tokens": 5}, {"max_tokens": 9, "prompt": "a" * 400})
    assert found.prompt.tolist() == [0, 0]
    assert found.tokens.tolist() == [100]


def test_half_a_text_is_half_its_tokens(tmp_path: Path) -> None:
    """The value is 402 bytes with its quotes, 201 of them shared: 12 pieces of 16 and half of the next, 200 of 402."""
    found = prompts_of(tmp_path, {"prompt": "a" * 400}, {"prompt": "a" * 200 + "b" * 200})
    assert (found.prompt.tolist(), found.parent.tolist()) == ([0, 1], [-1, 0])
    assert found.shared_tokens.tolist() == [0, 100 * 200 // 402]


@pytest.mark.parametrize("other", [{"model": "adapter"}, {"cache_salt": "s"}, {"tools": [{"type": "function"}]}])
def test_what_the_server_keeps_apart_shares_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    """vLLM's block hashes take in the adapter and the salt; tools are part of the prompt that a chat template makes."""
    found = prompts_of(tmp_path, {"prompt": "a" * 400}, {"prompt": "a" * 400, **other})
    assert (found.prompt.tolist(), found.shared_tokens.tolist()) == ([0, 1], [0, 0])


def test_the_text_of_a_chat_is_that_of_its_messages(tmp_path: Path) -> None:
    chats = [[{"role": "system", "content": "s" * 300}, {"role": "user", "content": each * 50}] for each in "xyx"]
    found = prompts_of(tmp_path, *({"messages": chat} for chat in chats))
    assert found.prompt.tolist() == [0, 1, 0]
    whole, shared = len(json.dumps(chats[0])), json.dumps(chats[0]).index("x")
    assert abs(found.shared_tokens[1] - 100 * shared / whole) <= 100 * 8 / whole + 1


def test_a_prompt_of_token_ids_is_a_prompt(tmp_path: Path) -> None:
    ids = list(range(1000, 1100))
    found = prompts_of(tmp_path, {"prompt": ids}, {"prompt": [*ids[:50], *ids[:50]]}, {"prompt": ids})
    assert found.prompt.tolist() == [0, 1, 0]
    assert abs(found.shared_tokens[1] - 50) <= 2


def test_without_any_length_there_is_no_identity(tmp_path: Path) -> None:
    records = [{"start_time": 0, "end_time": 1, "request": '{"prompt": "x"}', "info": {}}]
    assert read_requests(recorded_file(tmp_path, records), tmp_path / "stamps").prefix is None


@pytest.fixture(scope="module")
def truth() -> SyntheticTruth:
    """40 prompts of 8 groups; 200 tokens of a system prompt and some 300 of their own."""
    workload = SharedPrefix(8, 5, 200, 300, 12)
    return generate(SyntheticExperiment(shared_prefix=workload, prompt_jitter_tokens=40, requests=160))


def recorded(truth: SyntheticTruth, folder: Path) -> Recording:
    with read_recording(folder_of(truth, folder)) as recording:
        return recording


def folder_of(truth: SyntheticTruth, folder: Path) -> Path:
    write_experiment(truth, folder, files=("exp-config.yaml", "profile.yaml", REQUESTS))
    return folder


def stated_tokens(tree: PromptTree) -> int:
    stated = re.search(r"shared beginnings to (\d+) tokens", tree.source)
    assert stated is not None
    return int(stated[1])


def test_the_prompts_of_a_synthetic_run_are_found(truth: SyntheticTruth, tmp_path: Path) -> None:
    """Which request carries which prompt exactly; the 200 tokens of a group to what is stated, less than a block."""
    tree = recorded(truth, tmp_path).prefix
    assert tree is not None
    assert tree.requests["prompt"].to_list() == truth.prompt.tolist()  # 40 in turn, so numbered alike
    group = truth.group[:40]
    assert stated_tokens(tree) < 16
    for prompt, parent, shared, tokens in tree.prompts.iter_rows():
        earlier = np.flatnonzero(group[:prompt] == group[prompt])
        assert tokens == truth.trace.prompt_tokens[prompt]
        assert (parent is not None and shared > 16) == bool(len(earlier))
        if len(earlier):
            assert parent == earlier[0]
            assert abs(shared - 200) <= stated_tokens(tree)


def test_the_simulated_cache_finds_what_the_real_one_found(truth: SyntheticTruth, tmp_path: Path) -> None:
    """All repetitions to the token; first uses within a block: what 200 tokens, give or take a few, can be off."""
    recording = recorded(truth, tmp_path)
    plan = plan_replay(recording, ReplayMode())
    assert recording.prefix is not None
    assert plan.basis["prefix cache"] == recording.prefix.source  # not the drawn groups of the configuration
    for cached in (
        truth.trace.prompt_tokens - estimate_prefix(recording).prefill_tokens,
        simulated_cached(plan, truth),
    ):
        assert cached[40:].tolist() == truth.cached_prompt_tokens[40:].tolist()
        assert np.abs(cached[:40] - truth.cached_prompt_tokens[:40]).max() <= 16


def simulated_cached(plan: Any, truth: SyntheticTruth) -> np.ndarray[Any, np.dtype[np.int64]]:
    from blis_replay.blis.engine import simulate

    result = simulate(plan.trace, plan.engine, truth.spec.latency, truth.spec.lifecycle)
    return np.asarray(result.cached_tokens)


def test_no_text_is_in_the_recording(truth: SyntheticTruth, tmp_path: Path) -> None:
    from blis_replay.ingest.store import open_store
    from blis_replay.ingest.store.writing import write_recording
    from blis_replay.ingest.stream import PLAIN

    path = tmp_path / "s.duckdb"
    with read_recording(folder_of(truth, tmp_path / "x")) as recording, open_store(path) as store:
        write_recording(store, recording, PLAIN)
    text = json.loads(json.loads((tmp_path / "x" / REQUESTS).read_text("utf-8"))[0]["request"])["prompt"]
    assert text[:24].encode() not in path.read_bytes()


def group_sizes(tree: PromptTree) -> list[int]:
    """How many prompts hang, directly or not, on each that shares less than 50 tokens with any before it."""
    roots: list[int] = []
    for prompt, parent, shared, _ in tree.prompts.iter_rows():
        roots.append(prompt if shared < 50 else roots[parent])
    return [roots.count(root) for root in set(roots)]


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.1", "0.7.0"])
def test_repeated_prompts_of_a_real_client_are_those_that_its_server_saw(
    data_pack: Path, tmp_path: Path, version: str
) -> None:
    """The server wrote down a hash of every prompt's text; 3 groups of 5 prompts, 112 requests."""
    folder = data_pack / "clients" / f"inference-perf-{version}" / "shared-constant"
    with read_recording(folder) as recording:
        pairs = compare(recording, folder, tmp_path / "s.duckdb").pairs
    tree = recording.prefix
    assert tree is not None
    both = tree.requests.join(pairs, on="request_index")
    assert both.height == 112
    distinct = both.select("prompt", "prompt_sha256").unique()
    assert distinct.height == pairs["prompt_sha256"].n_unique() == tree.prompts.height == 15
    assert group_sizes(tree) == [5, 5, 5]


@pytest.mark.parametrize("version", ["0.5.0", "0.6.1", "0.7.0"])
def test_system_prompts_of_a_real_client_are_found_to_what_is_stated(data_pack: Path, version: str) -> None:
    """``system_prompt_len: 100``; the server puts a token (BOS) before some.

    Of earlier versions the number is not known: they turn the tokens into text, which has others again.
    """
    with read_recording(data_pack / "clients" / f"inference-perf-{version}" / "shared-constant") as recording:
        tree = recording.prefix
    assert tree is not None
    shared = tree.prompts.filter(pl.col("shared_tokens") > 50)["shared_tokens"].to_numpy()
    assert len(shared) == 15 - 3
    assert np.abs(shared - 100).max() <= stated_tokens(tree) + 1
    assert stated_tokens(tree) <= 6


def test_shared_prefixes_of_the_real_scheduler_are_those_of_its_groups(data_pack: Path, tmp_path: Path) -> None:
    """8 groups share 576 tokens: the real cache found 576 in 492 of 500 requests, none in the first of each group."""
    truth = pl.read_csv(data_pack / "vllm-traces" / "shared-prefix-async" / "requests.csv").sort("arrived_us")
    columns = ("prefix_group", "prefix_length", "input_tokens", "output_tokens", "send_time_us")
    rows = [
        f"group-{group},576,{prompt - 576},{output},{arrived:.0f},0,0,ok"
        for group, prompt, output, arrived in truth.select(
            "prefix_group", "prompt_tokens", "output_tokens", "arrived_us"
        ).iter_rows()
    ]
    header = ",".join((*columns, "first_chunk_time_us", "last_chunk_time_us", "status"))
    (tmp_path / "trace.csv").write_text("\n".join([header, *rows]) + "\n", "utf-8")
    with read_recording(tmp_path) as recording:
        pass
    assert recording.prefix is not None
    assert recording.prefix.prompts.height == 8
    estimate = estimate_prefix(replace(recording, model="m"))
    cached = recording.requests["prompt_tokens"].to_numpy() - estimate.prefill_tokens
    assert np.count_nonzero(cached == 576) == truth["cached_tokens"].eq(576).sum() == 492
    assert (cached == truth["cached_tokens"].to_numpy()).all()
