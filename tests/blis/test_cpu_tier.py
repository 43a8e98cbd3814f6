"""The CPU tier: what is evicted can be fetched back, at a price, and nothing is there twice or for nothing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.errors import TraceError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.trace import NEVER_US, BlockKeys, EngineConfig, RequestTrace

BLOCK = 16
LATENCY = LatencyModel("blackbox", 1_000_000, 10_000, 5_000)
SMALL = EngineConfig(4, 256, 2_000, async_scheduling=False, num_gpu_blocks=6, num_cpu_blocks=10)
APART_US = 1_000_000


def trace_of(rows: list[tuple[int, int, int]], apart_us: int = APART_US) -> RequestTrace:
    """Requests (text, prompt tokens, output tokens), so far apart; prompts of one text begin alike."""
    text, prompts, outputs = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    length = int(prompts.max()) // BLOCK
    keys = BlockKeys(text * length, prompts // BLOCK, np.arange((text.max() + 1) * length, dtype=np.int32), BLOCK)
    arrival_us = np.arange(len(rows), dtype=np.int64) * apart_us
    return RequestTrace(arrival_us, prompts, prompts, outputs, np.full(len(rows), NEVER_US), block_keys=keys)


@dataclass
class Tiers:
    """The two tiers for requests that never meet, block by block, from the description of the free queue.

    A block is its key (None: no contents) and when it was entered: of two with one key the first entered is found.
    """

    gpu_blocks: int
    cpu_blocks: int
    queue: list[tuple[int | None, int]] = field(default_factory=list)
    cpu: OrderedDict[int, None] = field(default_factory=OrderedDict)
    entered: int = 0
    stored: int = 0
    fetched: int = 0

    def __post_init__(self) -> None:
        self.queue = [(None, 0)] * self.gpu_blocks

    def serve(self, keys: list[int], prompt: int, output: int) -> int:
        """Tokens found in either tier; the last prompt token is always computed, the last output token never."""
        most = (prompt - 1) // BLOCK
        held: list[tuple[int | None, int]] = []
        while len(held) < most and (alike := [block for block in self.queue if block[0] == keys[len(held)]]):
            held.append(min(alike, key=lambda block: block[1]))
            self.queue.remove(held[-1])
        hits = found = len(held)
        while found < most and keys[found] in self.cpu:
            found += 1
        for key in reversed(keys[hits:found]):
            self.cpu.move_to_end(key)
            self.fetched += 1
        self.take(-(-prompt // BLOCK) - hits, held)
        for key in keys[hits:]:
            self.entered += 1
            held.append((key, self.entered))
        total = -(-(prompt + output - 1) // BLOCK)
        self.take(total - -(-prompt // BLOCK), held)
        self.queue += [(None, 0)] * (total - len(held)) + held[::-1]
        return found * BLOCK

    def take(self, blocks: int, held: list[tuple[int | None, int]]) -> None:
        for _ in range(blocks):
            key = self.queue.pop(0)[0]
            if key is not None and all(block[0] != key for block in self.queue + held):
                self.store(key)

    def store(self, key: int) -> None:
        if key not in self.cpu:
            self.stored += 1
            if len(self.cpu) == self.cpu_blocks:
                self.cpu.popitem(last=False)
        self.cpu[key] = None
        self.cpu.move_to_end(key)


def test_evicted_blocks_are_fetched_back_before_the_step() -> None:
    """Five blocks; a text of four, another, the first again.

    The second takes the unused block and the last three of the first, which go to the CPU.  The third finds one on
    the GPU and two there (the last of 64 tokens is computed, and its block with it): the device fetches for 2 x 50 us,
    then computes 16 tokens in 1000 + 160 us.  For its three new blocks the second's last three go to the CPU.
    """
    rows = [(0, 64, 1), (1, 64, 1), (0, 64, 1)]
    result = simulate(trace_of(rows), replace(SMALL, cpu_fetch_us_per_block=50), LATENCY)
    assert result.cached_tokens.tolist() == [0, 0, 48]
    assert result.ttft_us.tolist() == [1640, 1640, 100 + 1160]
    assert result.steps["start_us"].tolist() == [0, 1_000_000, 2_000_100]
    assert (result.stored_blocks, result.fetched_blocks) == (6, 2)


def test_without_a_tier_they_are_computed_again() -> None:
    result = simulate(trace_of([(0, 64, 1), (1, 64, 1), (0, 64, 1)]), replace(SMALL, num_cpu_blocks=0), LATENCY)
    assert result.cached_tokens.tolist() == [0, 0, 16]
    assert result.ttft_us.tolist()[2] == 1480
    assert (result.stored_blocks, result.fetched_blocks) == (0, 0)


def test_a_preempted_request_fetches_what_it_had() -> None:
    """Two of 64 + 60 tokens on 12 blocks cannot both grow to 8: who is preempted finds its blocks in either tier."""
    rows = [(0, 64, 60), (1, 64, 60)]
    scarce = replace(SMALL, num_gpu_blocks=13, num_cpu_blocks=40)
    tiered, single = (simulate(trace_of(rows, 10), e, LATENCY) for e in (scarce, replace(scarce, num_cpu_blocks=0)))
    assert tiered.preemptions.sum() >= 1
    assert tiered.fetched_blocks > 0
    assert tiered.resume_cached_tokens.sum() > single.resume_cached_tokens.sum()


rows_apart = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 120), st.integers(1, 20)), min_size=1, max_size=40)


@pytest.mark.slow
@given(rows_apart, st.integers(9, 20), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_two_tiers_block_by_block(rows: list[tuple[int, int, int]], gpu_blocks: int, cpu_blocks: int) -> None:
    """The kernel's extents and links against lists of blocks: hits, copies there and back."""
    trace = trace_of(rows)
    engine = replace(SMALL, num_gpu_blocks=gpu_blocks + 1, num_cpu_blocks=cpu_blocks, cpu_fetch_us_per_block=7)
    result = simulate(trace, engine, LATENCY)
    tiers, keys = Tiers(gpu_blocks, cpu_blocks), trace.block_keys
    assert keys is not None
    found = []
    for i, (_, prompt, output) in enumerate(rows):
        count = min(int(keys.count[i]), (prompt + output - 1) // BLOCK)
        row = keys.keys[int(keys.start[i]) : int(keys.start[i]) + count].tolist()
        found.append(tiers.serve(row, prompt, output))
    assert result.cached_tokens.tolist() == found
    assert (result.stored_blocks, result.fetched_blocks) == (tiers.stored, tiers.fetched)


@pytest.mark.slow
@given(rows_apart, st.integers(9, 20))
@settings(max_examples=100, deadline=None)
def test_with_room_for_all_a_tier_hits_like_an_endless_gpu(rows: list[tuple[int, int, int]], gpu_blocks: int) -> None:
    tiered = replace(SMALL, num_gpu_blocks=gpu_blocks + 1, num_cpu_blocks=10_000)
    endless = replace(SMALL, num_gpu_blocks=10_000, num_cpu_blocks=0)
    one, other = (simulate(trace_of(rows), engine, LATENCY) for engine in (tiered, endless))
    assert (one.cached_tokens == other.cached_tokens).all()
    assert (one.ttft_us == other.ttft_us).all()  # fetching takes no time here


@pytest.mark.slow
@given(rows_apart, st.integers(9, 20), st.integers(1, 12), st.booleans())
@settings(max_examples=60, deadline=None)
def test_after_every_step_the_tier_is_a_list_of_as_many_blocks_as_it_counts(
    rows: list[tuple[int, int, int]], gpu_blocks: int, cpu_blocks: int, asynchronous: bool
) -> None:
    """Requests that meet, and preempt each other; links lead through every block once, forth and back."""
    engine = replace(SMALL, num_gpu_blocks=gpu_blocks + 1, num_cpu_blocks=cpu_blocks, async_scheduling=asynchronous)
    running = Engine(trace_of(rows, 3_000), engine)
    while running.schedule() is not None:
        running.run(1_000)
        state = running.state
        assert _listed(state.cpu_lru["older"]) == _listed(state.cpu_lru["newer"])[::-1]
        assert len(_listed(state.cpu_lru["older"])) == state.at[0].cpu_used <= cpu_blocks
    assert running.result().completed.all()


def _listed(links: k.Int32s) -> list[int]:
    listed, node = [], int(links[0]) - 1
    while node != 0:
        assert len(listed) < len(links)
        listed.append(node - 1)
        node = int(links[node]) - 1
    return listed


def test_a_negative_tier_is_refused() -> None:
    with pytest.raises(TraceError, match="num_cpu_blocks is -1"):
        replace(SMALL, num_cpu_blocks=-1)
