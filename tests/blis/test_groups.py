"""Models whose layers keep several groups of KV blocks: what a window frees, what a prefix needs, how much is held."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.speculation import Speculation
from blis_replay.blis.trace import NEVER_US, BlockKeys, EngineConfig, KvCacheGroup, RequestTrace, release_arguments

A_MS = LatencyModel("blackbox", intercept_ns=1_000_000, per_prefill_token_ns=0, per_decode_token_ns=0)
FULL, WINDOW = KvCacheGroup("full"), KvCacheGroup("window", 64)


def one_after_another(prompts: list[int], outputs: int, keys: list[list[int]] | None = None) -> RequestTrace:
    """Requests that never meet; ``keys``: of their blocks of 16 tokens."""
    prompt = np.array(prompts)
    rows = keys or []
    count = np.array([len(row) for row in rows])
    blocks = BlockKeys(np.cumsum(count) - count, count, np.concatenate(rows).astype(np.int32), 16) if rows else None
    return RequestTrace(
        arrival_us=np.arange(len(prompts)) * 10_000_000,
        prompt_tokens=prompt,
        prefill_tokens=prompt,
        output_tokens=np.full(len(prompts), outputs),
        abort_us=np.full(len(prompts), NEVER_US),
        block_keys=blocks,
    )


def engine(*groups: KvCacheGroup, asynchronous: bool = False, release: str = "0.32.0", **more: int) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=2048,
        async_scheduling=asynchronous,
        kv_cache_groups=groups,
        **{"num_gpu_blocks": 401} | more,  # type: ignore[arg-type]
        **release_arguments({"vllm_version": release}),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_group_of_full_attention_is_scheduled_as_without_groups(asynchronous: bool) -> None:
    """Walked one by one, or counted: 60 requests in 120 blocks, of which some are preempted."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(10, 500, 60)
    trace = RequestTrace(
        arrival_us=np.sort(rng.integers(0, 200_000, 60)),
        prompt_tokens=prompt,
        prefill_tokens=prompt,
        output_tokens=rng.integers(1, 60, 60),
        abort_us=np.full(60, NEVER_US),
    )
    counted, walked = (
        simulate(trace, engine(*groups, asynchronous=asynchronous, num_gpu_blocks=120), A_MS)
        for groups in ((), (FULL,))
    )
    assert counted.preemptions.sum() > 0
    assert (counted.steps == walked.steps).all()
    assert (counted.e2e_us == walked.e2e_us).all()


def test_a_window_frees_what_it_has_left() -> None:
    """A prompt of 200 and 100 tokens more in blocks of 16: full attention ends with ceil(299 / 16) = 19 blocks.

    Before the last token 298 are computed and the next attends to the last 64: tokens up to 235 are left, 14 blocks.
    So a window holds 5 of its 19 blocks, and three windows beside full attention 19 + 3 * 5 = 34.
    """
    result = simulate(one_after_another([200], 100), engine(WINDOW, WINDOW, WINDOW, FULL), A_MS)
    assert 400 - result.steps["free_blocks"][-1] == 34
    assert 400 - result.steps["free_blocks"][0] == 4 * 13
    assert result.steps["free_blocks_end"][-1] == 400


@pytest.mark.parametrize(("release", "kept"), [("0.25.0", 0), ("0.26.0", 1)])
def test_tokens_in_flight_keep_their_blocks_from_0_26_on(release: str, kept: int) -> None:
    """Asynchronously a prompt of 64 has 63 + s tokens computed at step s, of which the last may be in flight.

    A window of 64 leaves its first block of 16 with 16 + 64 - 1 = 79 of them: at step 16, or a step later by those
    that are processed.  Both groups hold ceil(80 / 16) = 5 blocks then, and 6 a step later.
    """
    result = simulate(one_after_another([64], 40), engine(WINDOW, FULL, asynchronous=True, release=release), A_MS)
    held = 400 - result.steps["free_blocks"]
    assert held[15:18].tolist() == [10, 9 + kept, 11]


def test_a_prefix_is_used_as_far_as_every_group_has_it() -> None:
    """A window of 64 in blocks of 16 needs the four blocks before the end of a hit.

    The first prompt of 20 blocks and one token leaves the window's blocks 16 to 19, by its end (retention 0).  The
    same prompt finds all 20.  One that shares 10 blocks finds none: the window of those blocks is not cached.
    """
    shared = list(range(20))
    other = [*range(10), *range(20, 30)]
    trace = one_after_another([321, 321, 321], 4, [shared, shared, other])
    assert simulate(trace, engine(WINDOW, FULL), A_MS).cached_tokens.tolist() == [0, 320, 0]
    # Where windows cache every block (before 0.29), all that is still held or free can be found.
    dense = engine(WINDOW, FULL, release="0.28.0")
    assert simulate(trace, dense, A_MS).cached_tokens.tolist() == [0, 320, 160]
    assert simulate(trace, engine(FULL), A_MS).cached_tokens.tolist() == [0, 320, 160]


def test_groups_need_memory_for_all_of_them() -> None:
    """Two groups of full attention hold twice the blocks; 13 each of a prompt of 200 do not fit into 20."""
    trace = one_after_another([200], 2)
    assert 400 - simulate(trace, engine(FULL, FULL), A_MS).steps["free_blocks"][0] == 26
    with pytest.raises(TraceError, match="26 KV blocks"):
        simulate(trace, engine(FULL, FULL, num_gpu_blocks=21), A_MS)


def test_a_state_is_one_block_for_the_whole_request() -> None:
    """Three groups of linear attention beside ceil(299 / 16) = 19 blocks of full attention at the end."""
    config = replace(engine(FULL), enable_prefix_caching=False, kv_cache_groups=(*[KvCacheGroup("state")] * 3, FULL))
    result = simulate(one_after_another([200], 100), config, A_MS)
    assert 400 - result.steps["free_blocks"][-1] == 19 + 3


def test_what_groups_do_not_go_with_yet() -> None:
    grouped = engine(FULL, WINDOW)
    eagle, ngram = Speculation(2, "eagle"), Speculation(2, "ngram")
    for change in (
        {"data_parallel_size": 2},
        {"speculation": eagle},
        {"kv_cache_groups": (FULL, KvCacheGroup("state"))},
    ):
        with pytest.raises(TraceError, match="kv_cache_groups"):
            replace(grouped, **change)  # type: ignore[arg-type]
    assert replace(grouped, speculation=ngram).walked
    with pytest.raises(TraceError, match="window"):
        KvCacheGroup("window")


def test_a_run_by_rows_is_the_run_by_time() -> None:
    """``serve_rows`` schedules a step a row: what a run with steps of one row each does."""
    trace = replace(one_after_another([200, 90], 30), arrival_us=np.array([0, 3]))
    config = engine(WINDOW, FULL)
    rows = Engine(trace, config).serve_rows(0, 60)
    steps = simulate(trace, config, replace(A_MS, intercept_ns=1_000)).steps
    assert rows[: len(steps), 1].tolist() == steps["prefill_tokens"].tolist()
    assert rows[: len(steps), 3].tolist() == steps["decode_tokens"].tolist()
