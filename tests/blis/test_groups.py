"""Models whose layers keep several groups of KV blocks: one group is none, what does not fit, what is refused.

That the schedules are those of vLLM is shown by the workloads ``groups-...`` and ``states-...`` of
``test_release_digests``: what a window frees, what a prefix needs, how much is held.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import make_trace

from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.speculation import Speculation
from blis_replay.blis.trace import EngineConfig, KvCacheGroup, release_arguments

A_MS = LatencyModel("blackbox", intercept_ns=1_000_000, per_prefill_token_ns=0, per_decode_token_ns=0)
FULL, WINDOW = KvCacheGroup("full"), KvCacheGroup("window", 64)


def engine(*groups: KvCacheGroup, asynchronous: bool = False, **more: int) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=2048,
        async_scheduling=asynchronous,
        kv_cache_groups=groups,
        **{"num_gpu_blocks": 401} | more,  # type: ignore[arg-type]
        **release_arguments({"vllm_version": "0.32.0"}),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_group_of_full_attention_is_scheduled_as_without_groups(asynchronous: bool) -> None:
    """Walked one by one, or counted: 60 requests in 120 blocks, of which some are preempted."""
    rng = np.random.default_rng(1)
    prompts, sent_us, outputs = (rng.integers(*each, 60).tolist() for each in ((10, 500), (0, 200_000), (1, 60)))
    trace = make_trace(sorted(sent_us), prompts, outputs)
    counted, walked = (
        simulate(trace, engine(*groups, asynchronous=asynchronous, num_gpu_blocks=120), A_MS)
        for groups in ((), (FULL,))
    )
    assert counted.preemptions.sum() > 0
    assert (counted.steps == walked.steps).all()
    assert (counted.e2e_us == walked.e2e_us).all()


def test_groups_need_memory_for_all_of_them() -> None:
    """Two groups of full attention hold twice the blocks; 13 each of a prompt of 200 do not fit into 20."""
    trace = make_trace([0], [200], [2])
    assert 400 - simulate(trace, engine(FULL, FULL), A_MS).steps["free_blocks"][0] == 26
    with pytest.raises(TraceError, match="26 KV blocks"):
        simulate(trace, engine(FULL, FULL, num_gpu_blocks=21), A_MS)


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
    trace = make_trace([0, 3], [200, 90], [30, 30])
    config = engine(WINDOW, FULL)
    rows = Engine(trace, config).serve_rows(0, 60)
    steps = simulate(trace, config, replace(A_MS, intercept_ns=1_000)).steps
    assert rows[: len(steps), 1].tolist() == steps["prefill_tokens"].tolist()
    assert rows[: len(steps), 3].tolist() == steps["decode_tokens"].tolist()
