"""Recorded prompt identities at the engine's block size."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import make_recording

from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.trace import BlockKeys
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import in_send_order
from blis_replay.ingest.recording import SERVER_BLOCKS, PromptTree
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.prefix import engine_block_keys, prefix_identity
from blis_replay.replay.prefix_estimate import cached_tokens
from blis_replay_labs.formats.arrival_traces import prompts_of_blocks
from blis_replay_labs.formats.arrival_traces import read_mooncake as read_requests


def prefix_of(block_tokens: int, *requests: list[int]) -> PromptTree:
    counts = np.array([len(keys) for keys in requests])
    keys = np.array([key for keys in requests for key in keys], np.int64)
    return prompts_of_blocks("test", block_tokens, counts, keys).in_order(np.arange(len(counts)))


def rows_of(keys: BlockKeys) -> list[list[int]]:
    return [keys.keys[s : s + c].tolist() for s, c in zip(keys.start, keys.count, strict=True)]


def shared(first: list[int], second: list[int]) -> int:
    """How many leading keys are equal."""
    pairs = [a == b for a, b in zip(first, second, strict=False)]
    return pairs.index(False) if False in pairs else len(pairs)


def test_a_block_of_512_tokens_becomes_32_of_16() -> None:
    """700 and 1,100 tokens share the first 512: 32 blocks; 700 // 16 = 43 and 1100 // 16 = 68 blocks."""
    keys = engine_block_keys(prefix_of(512, [1, 2], [1, 3, 4]), np.array([700, 1100]), 16)
    first, second = rows_of(keys)
    assert (len(first), len(second), shared(first, second)) == (43, 68, 32)
    assert len(set(first) | set(second)) == 43 + 68 - 32


def test_a_key_after_other_keys_is_another_block() -> None:
    """Key 2 after key 1 is not key 2 after key 3."""
    first, second = rows_of(engine_block_keys(prefix_of(16, [1, 2], [3, 2]), np.array([32, 32]), 16))
    assert set(first) & set(second) == set()


@pytest.mark.parametrize(
    ("recorded_tokens", "prompts", "tokens", "block_size", "common", "blocks"),
    [
        # Recorded by 16, engine by 32: three shared recorded blocks are one shared engine block.
        (16, ([1, 2, 3, 4], [1, 2, 3, 5]), 64, 32, 1, 2),
        # 48-token blocks over 512-token ones: 10 full blocks end within the shared 512 tokens, the 11th does not.
        (512, ([1, 2], [1, 3]), 1024, 48, 10, 21),
    ],
)
def test_blocks_of_another_size_are_shared_as_far_as_is_known(
    recorded_tokens: int, prompts: tuple[list[int], list[int]], tokens: int, block_size: int, common: int, blocks: int
) -> None:
    keys = engine_block_keys(prefix_of(recorded_tokens, *prompts), np.array([tokens] * 2), block_size)
    assert [shared(*rows_of(keys)), keys.count.tolist()] == [common, [blocks] * 2]


def test_blocks_beyond_the_recorded_ones_have_no_key() -> None:
    keys = engine_block_keys(prefix_of(512, [1], []), np.array([700, 700]), 16)
    assert keys.count.tolist() == [32, 0]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=2, max_size=4),
    recorded_tokens=st.sampled_from([2, 3, 4]),
    block=st.sampled_from([1, 2, 3, 4, 6]),
)
def test_what_is_shared_is_what_tokens_say(prompts: list[list[int]], recorded_tokens: int, block: int) -> None:
    """Against the tokens themselves: no more is shared, and no less than the recorded blocks tell."""
    whole = [prompt[: len(prompt) // recorded_tokens * recorded_tokens] for prompt in prompts]
    numbers: dict[tuple[int, ...], int] = {}
    parts = [
        [numbers.setdefault(tuple(p[i : i + recorded_tokens]), len(numbers)) for i in range(0, len(p), recorded_tokens)]
        for p in whole
    ]
    rows = rows_of(engine_block_keys(prefix_of(recorded_tokens, *parts), np.array([len(p) for p in whole]), block))
    for i in range(1, len(whole)):
        tokens = shared(whole[0], whole[i])
        told = shared(parts[0], parts[i]) * recorded_tokens
        assert told // block == shared(rows[0], rows[i]) <= tokens // block


def test_the_last_token_is_computed_even_of_a_prompt_that_was_there_before() -> None:
    """48 tokens are 3 blocks, of which a repetition finds 2; of 49 tokens it finds 3."""
    prompts = np.array([48, 48, 49])
    keys = engine_block_keys(prefix_of(16, [1, 2, 3], [1, 2, 3], [1, 2, 3]), prompts, 16)
    assert cached_tokens(keys, prompts).tolist() == [0, 32, 48]


def test_a_replay_finds_recorded_prefixes_in_the_simulated_cache() -> None:
    """The second of two prompts that share 512 of 600 tokens hits 32 blocks of 16."""
    columns = {"arrival_us": [0, 1_000_000], "prompt_tokens": [600, 600], "output_tokens": [2, 2]}
    recording = replace(make_recording(columns), prefix=prefix_of(512, [1, 2], [1, 3]))
    plan = plan_replay(recording, ReplayMode())
    assert plan.basis["prefix cache"] == "test"
    result = simulate(plan.trace, plan.engine, LatencyModel("blackbox", 1_000_000, 0, 0, 0))
    assert result.cached_tokens.tolist() == [0, 512]


@pytest.mark.parametrize(
    ("cached", "known"),
    [
        ((0, 32, 0), True),  # the second request finds what the first one left
        ((32, 32, 0), False),  # the first one did too: a load before this recording
        ((0, 32, None), True),
    ],
)
def test_a_cache_of_another_load_is_known_by_its_hits_only(cached: tuple[int | None, ...], known: bool) -> None:
    """Prompts of 48 tokens, the first two alike, by the hashes of the server's own blocks of 16."""
    tree = replace(prefix_of(16, [1, 2, 3], [1, 2, 3], [7, 8, 9]), source=SERVER_BLOCKS)
    columns = {"prompt_tokens": [48] * 3, "output_tokens": [2] * 3, "cached_prompt_tokens": list(cached)}
    recording = replace(make_recording(columns), prefix=tree)
    assert (prefix_identity(recording) is not None) == known


def test_hits_of_the_conversation_trace_in_an_endless_cache(data_pack: Path) -> None:
    """Leading ids that an earlier request had, counted on the file's own lists, are the shared keys here."""
    path = data_pack / "public-traces" / "mooncake" / "conversation_trace.jsonl.gz"
    read = read_requests(RecordedFile(path, path.name))
    _frame, order, _zero_us = in_send_order(read.rows)
    assert read.prefix is not None
    with gzip.open(path) as lines:
        ids_of = [json.loads(line)["hash_ids"] for line in lines]
    prompts = read.frame["prompt_tokens"].to_numpy()[order]
    keys = engine_block_keys(read.prefix.in_order(order), prompts, 16)
    seen_ids, seen_keys = set(), np.zeros(int(keys.keys.max()) + 1, np.bool_)
    by_ids = by_keys = 0
    for i, length in enumerate(prompts.tolist()):
        ids = ids_of[i]
        hits = next((j for j, key in enumerate(ids) if key not in seen_ids), len(ids))
        by_ids += min(hits * 512, length) // 16
        row = keys.keys[keys.start[i] : keys.start[i] + keys.count[i]]
        by_keys += int(seen_keys[row].sum())
        seen_ids.update(ids)
        seen_keys[row] = True
    assert by_keys == by_ids > 0
    assert cached_tokens(keys, prompts + 1).sum() == 16 * by_ids  # the last token aside
