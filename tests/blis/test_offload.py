"""Offload of KV blocks to CPU memory: a prompt that the GPU has lost is loaded, and what that takes, worked by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from engine_cases import ENGINE, make_trace

from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.speculation import Speculation
from blis_replay.blis.trace import NEVER_US, BlockKeys, KvCacheGroup, Offloading, RequestTrace

TEN_MS = LatencyModel("blackbox", 10_000_000, 0, 0, 0)
# Four blocks on the GPU, one request at a time.  A load of three blocks takes 2 + 3 * 1 ms, a store 0.5 ms.
SMALL = replace(
    ENGINE,
    max_num_seqs=1,
    block_size=16,
    num_gpu_blocks=5,
    offloading=Offloading(cpu_blocks=6, load_us=2_000, load_block_us=1_000, store_us=500, store_block_us=0),
)


def three_prompts() -> RequestTrace:
    """Prompts of 49 tokens, three full blocks and a token: the third one repeats the first one."""
    keys = BlockKeys(np.array([0, 3, 0]), np.full(3, 3), np.arange(6, dtype=np.int32), 16)
    return replace(make_trace([0, 0, 0], [49, 49, 49], [1, 1, 1]), block_keys=keys)


def test_a_prompt_that_the_gpu_has_lost_is_loaded() -> None:
    """Step 0 computes the first prompt to 10.0 ms.

    Step 1 takes its blocks, so it waits for their store, from 10.0 to 10.5 ms, and ends at 20.5 ms.  The next turn
    parks the third request, and waits for the store of the second one to 21.0 ms.  The load ends at 26.0 ms.  The
    engine looks each millisecond, from 22.0 on; the turn of 26.0 ms sees it, and that of 27.0 ms acts on it.  Only the
    last token is left to compute.
    """
    result = simulate(three_prompts(), SMALL, TEN_MS)
    assert result.steps["start_us"].tolist() == [0, 10_500, 27_000]
    assert result.e2e_us.tolist() == [10_000, 20_500, 37_000]
    assert result.cached_tokens.tolist() == [0, 0, 48]
    assert result.steps["prefill_tokens"].tolist() == [49, 49, 1]


def test_cpu_memory_without_room_keeps_what_is_there() -> None:
    """Two blocks of CPU memory never take the three of a prompt: all is computed, and nothing is transferred."""
    tiny = replace(SMALL, offloading=replace(SMALL.offloading, cpu_blocks=2))  # type: ignore[type-var]
    result = simulate(three_prompts(), tiny, TEN_MS)
    assert result.e2e_us.tolist() == [10_000, 20_000, 30_000]
    assert result.cached_tokens.tolist() == [0, 0, 0]


def test_a_client_that_gives_up_during_its_load_leaves_the_blocks_until_it_ends() -> None:
    """At 23.0 ms three of four blocks are still held for the load; at the end all are free, which the run checks."""
    trace = three_prompts()
    trace = replace(trace, abort_us=np.array([*trace.abort_us[:2], 22_500]))
    engine = Engine(trace, SMALL)
    engine.advance(TEN_MS, 24_000)
    assert engine.state.at["free_blocks"].item() == 1
    twin = copy.deepcopy(engine)
    twin.advance(TEN_MS)
    assert twin.state.at["free_blocks"].item() == 4
    assert twin.result().aborted.tolist() == [False, False, True]
    simulate(trace, SMALL, TEN_MS)


def test_tokens_of_another_server_are_loaded_and_the_last_one_is_computed() -> None:
    """All 48 tokens of a prompt come from elsewhere: three blocks in 2 + 3 * 1 ms, from its first turn on.

    The turn of 5.0 ms sees the end of the load, and that of 6.0 ms computes the last token once more.
    """
    remote = replace(SMALL, offloading=replace(SMALL.offloading, cpu_blocks=0))  # type: ignore[type-var]
    trace = replace(make_trace([0], [48], [1]), external_tokens=np.array([48]))
    result = simulate(trace, remote, TEN_MS)
    assert result.steps["start_us"].tolist() == [6_000]
    assert result.steps["prefill_tokens"].tolist() == [1]
    assert result.cached_tokens.tolist() == [47]
    with pytest.raises(TraceError, match="offloading with cpu_blocks 0"):
        simulate(trace, SMALL, TEN_MS)
    with pytest.raises(TraceError, match="request 0: external_tokens is not within 0 and prompt_tokens"):
        replace(trace, external_tokens=np.array([49]))


def test_a_request_that_has_ended_holds_its_blocks_until_they_are_fetched() -> None:
    """Four blocks: the second prompt of 49 tokens waits until the first one's four blocks are fetched at 30.0 ms.

    The first one ends at 10.0 ms.  The engine looks each millisecond: the turn of 30.0 ms sees the fetch, and that of
    31.0 ms has the blocks.  Without a fetch the second one begins at 10.0 ms.
    """
    producer = replace(SMALL, offloading=Offloading(0, 0, 0, 0, 0))
    trace = make_trace([0, 0], [49, 49], [1, 1])
    for wrong in (-2, NEVER_US):
        with pytest.raises(TraceError, match="request 1: fetched_us is not -1 or a time"):
            replace(trace, fetched_us=np.array([-1, wrong]))
    held = simulate(replace(trace, fetched_us=np.array([30_000, -1])), producer, TEN_MS)
    assert held.steps["start_us"].tolist() == [0, 31_000]
    assert held.steps["free_blocks_end"].tolist() == [0, 4]
    free = simulate(replace(trace, fetched_us=np.array([-1, -1])), producer, TEN_MS)
    assert free.steps["start_us"].tolist() == [0, 10_000]
    with pytest.raises(TraceError, match="fetched_us: give offloading with cpu_blocks 0"):
        simulate(replace(trace, fetched_us=np.array([0, 0])), SMALL, TEN_MS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"speculation": Speculation(2, "ngram")}, "drafts"),
        ({"data_parallel_size": 2}, "several ranks"),
        ({"kv_cache_groups": (KvCacheGroup("full"), KvCacheGroup("window", 64))}, "several groups"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"prefill_schedule_interval": 2}, "prefill_schedule_interval"),
    ],
)
def test_what_an_offload_was_not_compared_with_is_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(TraceError, match=f"not simulated with {why}"):
        replace(SMALL, **change)  # type: ignore[arg-type]


def test_hits_that_are_known_as_a_number_only_are_refused() -> None:
    """Which blocks they are decides what the CPU has to load."""
    trace = replace(three_prompts(), prefill_tokens=np.array([49, 49, 1]))
    with pytest.raises(TraceError, match="needs block_keys"):
        simulate(trace, SMALL, TEN_MS)
