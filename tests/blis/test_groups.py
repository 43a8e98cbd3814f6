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
from blis_replay.blis.grouping import attended_by
from blis_replay.blis.kernel.state import DECODING
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.parallel.ranks import simulate_ranks
from blis_replay.blis.speculation import Speculation
from blis_replay.blis.trace import NEVER_US, EngineConfig, KvCacheGroup, release_arguments

A_MS = LatencyModel("blackbox", intercept_ns=1_000_000, per_prefill_token_ns=0, per_decode_token_ns=0)
A_CONTEXT = replace(A_MS, per_context_token_ns=10_000)
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


CHUNK, STATE = KvCacheGroup("chunk", 64), KvCacheGroup("state")


@pytest.mark.parametrize(
    ("groups", "attended", "contexts"),
    [
        ((), 5_050, [101, 102, 103]),  # 1 + 2 + ... + 100
        ((FULL, FULL), 5_050, [101, 102, 103]),
        # The window: 1 + ... + 64, then 36 times 64, so 4,384.
        ((FULL, WINDOW), 4_717, [83, 83, 84]),
        # The chunks: 1 + ... + 64 and 1 + ... + 36, so 2,746; then 37, 38, 39.
        ((CHUNK, FULL), 3_898, [69, 70, 71]),
        ((STATE, STATE, STATE, FULL), 1_263, [25, 26, 26]),
        ((STATE, STATE), 0, [0, 0, 0]),
    ],
)
def test_a_batch_has_what_a_mean_layer_attends_to(
    groups: tuple[KvCacheGroup, ...], attended: int, contexts: list[int]
) -> None:
    """A prompt of 100 tokens, then three decodes; the table of steps has whole contexts.  Halves are rounded up."""
    running = Engine(make_trace([0], [100], [4]), engine(*groups, enable_prefix_caching=False))
    batches = running.advance_kept(A_MS)
    assert batches["attended_tokens"].tolist() == [attended, 0, 0, 0]
    assert batches["context_tokens"].tolist() == [0, *contexts]
    assert running.result().steps["context_tokens"].tolist() == [0, 101, 102, 103]
    assert attended_by(groups, 0, 100) == pytest.approx(attended, abs=0.51)
    assert attended_by(groups, np.arange(100, 103), 1) == pytest.approx(contexts, abs=0.51)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("groups", [(WINDOW, WINDOW, FULL), (KvCacheGroup("window", 24), CHUNK, FULL)])
def test_what_decodes_attend_to_is_kept_as_they_come_and_go(
    groups: tuple[KvCacheGroup, ...], asynchronous: bool
) -> None:
    """60 requests: some give up, some are preempted, and some are passed over because the budget is short.

    Steps that serve every decode there was are compared; whole contexts tell which.
    """
    rng = np.random.default_rng(1)
    prompts, sent_us, outputs = (rng.integers(*each, 60).tolist() for each in ((10, 300), (0, 200_000), (1, 150)))
    gone_us = [us + 400_000 if i % 7 == 0 else NEVER_US for i, us in enumerate(sorted(sent_us))]
    trace = make_trace(sorted(sent_us), prompts, outputs, abort_us=gone_us)
    config = engine(*groups, asynchronous=asynchronous, num_gpu_blocks=60)
    running = Engine(trace, replace(config, max_num_batched_tokens=9, enable_prefix_caching=False))
    compared, steps = 0, 0
    while True:
        state = running.state
        decoding = state.requests["step_offset"][state.requests["status"] == DECODING]
        contexts = state.at["step"] - decoding + 1
        if (batch := running.schedule()) is None:
            break
        if batch.decode_tokens and state.batch["whole_context_tokens"].item() == contexts.sum():
            mean = attended_by(groups, contexts - 1, 1).sum()
            assert batch.context_tokens == pytest.approx(mean, abs=0.51)
            compared += 1
        running.run(1_000)
        steps += 1
    result = running.result()
    assert result.preemptions.sum() > 0
    assert not result.completed.all()
    assert compared > steps / 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_rank_is_a_server_with_windows_of_its_own(asynchronous: bool) -> None:
    """Dense ranks step by themselves: each serves its requests as one server does, preemptions included."""
    rng = np.random.default_rng(2)
    prompts, sent_us, outputs = (rng.integers(*each, 90).tolist() for each in ((10, 300), (0, 150_000), (1, 90)))
    trace = make_trace(sorted(sent_us), prompts, outputs)
    config = engine(WINDOW, FULL, asynchronous=asynchronous, num_gpu_blocks=60)
    pooled, rank = simulate_ranks(trace, replace(config, data_parallel_size=2), A_CONTEXT)
    assert pooled.preemptions.sum() > 0
    for i in (0, 1):
        alone = simulate(trace.part(rank == i), config, A_CONTEXT)
        assert (pooled.e2e_us[rank == i] == alone.e2e_us).all()
        assert (pooled.preemptions[rank == i] == alone.preemptions).all()
