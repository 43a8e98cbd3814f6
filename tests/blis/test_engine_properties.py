"""What must hold for every run of the kernel; that its schedules are vLLM's is shown by ``test_release_digests``."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scenario import intern_blocks

from blis_replay.base.errors import TraceError
from blis_replay.blis import engine as engine_module
from blis_replay.blis import long_run
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US, BlockKeys, EngineConfig, RequestTrace
from blis_replay_labs.verification.conservation import batch_faults, block_faults
from blis_replay_labs.verification.workloads import SlowLatency

# Under pressure: few blocks, shared prompts, priorities, long prompts.
# A prompt is a path in a tree of blocks: two prompts share blocks as far as their paths agree.
pressed_requests = st.lists(
    st.tuples(
        st.integers(0, 40_000),  # arrival
        st.lists(st.integers(0, 1), min_size=1, max_size=9),  # contents of its blocks
        st.integers(1, 3),  # tokens in its last one
        st.integers(1, 14),  # output
        st.integers(0, 2),  # priority
        st.one_of(st.none(), st.integers(0, 60_000)),  # gives up after
    ),
    min_size=1,
    max_size=16,
)
pressed_engines = st.builds(
    EngineConfig,
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 40),
    max_model_len=st.just(64),
    async_scheduling=st.booleans(),
    block_size=st.just(4),
    num_gpu_blocks=st.integers(17, 40),  # one request needs up to 13 blocks
    enable_prefix_caching=st.booleans(),
    long_prefill_token_threshold=st.sampled_from([0, 3, 8]),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
)
Pressed = list[tuple[int, list[int], int, int, int, int | None]]
LATENCY = LatencyModel("blackbox", 900_000, 20_000, 30_000)


def pressed_trace(rows: Pressed) -> RequestTrace:
    """Distinct arrivals, since ties in priority and arrival can evict each other for ever (as in vLLM)."""
    rows = sorted(rows, key=lambda row: row[0])
    arrival_us = np.array([a for a, *_ in rows], np.int64) + np.arange(len(rows))
    prompts = [np.repeat(blocks, 4)[: 4 * len(blocks) - 4 + last] for _, blocks, last, *_ in rows]
    prompt_tokens = np.array([len(prompt) for prompt in prompts], np.int64)
    give_up_us = np.array([NEVER_US if g is None else g for *_, g in rows], np.int64)
    return RequestTrace(
        arrival_us,
        prompt_tokens,
        prompt_tokens,
        np.array([row[3] for row in rows], np.int64),
        np.where(give_up_us == NEVER_US, NEVER_US, np.minimum(arrival_us, 2**60) + np.minimum(give_up_us, 2**60)),
        np.array([row[4] for row in rows], np.int64),
        intern_blocks(prompts, 4),
    )


@pytest.mark.heavy
@given(pressed_requests, pressed_engines)
@settings(max_examples=250, deadline=None)
def test_invariants_at_every_step(rows: Pressed, engine: EngineConfig) -> None:
    """Budget, sequences, block accounts and the cache, recounted after every call; nothing lost at the end."""
    trace = pressed_trace(rows)
    server = Engine(trace, engine)
    while (batch := server.schedule()) is not None:
        assert batch_faults(engine, batch) == []
        assert block_faults(server.state, scheduled=True) == []
        server.run(int(SlowLatency(LATENCY).step_time(batch)))
        assert block_faults(server.state) == []
    result = server.result()
    assert (result.completed | result.aborted).all()
    assert server.state.at[0].free_blocks == engine.num_gpu_blocks - 1  # type: ignore[operator]
    tokens = np.bincount(result.segments[:, 0], result.segments[:, 2], minlength=len(trace))
    assert (tokens == result.output_tokens)[result.completed].all()
    done = result.completed
    assert (result.queued_us <= result.scheduled_us)[done].all()
    assert (result.scheduled_us < result.first_token_us)[done].all()
    assert (result.first_token_us <= result.finished_us)[done].all()
    assert (result.steps["start_us"][1:] >= result.steps["end_us"][:-1]).all()
    assert (result.steps["scheduled_us"] <= result.steps["start_us"]).all()


@pytest.mark.slow
@given(pressed_requests, pressed_engines)
@settings(max_examples=100, deadline=None)
def test_a_step_at_a_time_equals_the_whole_run(rows: Pressed, engine: EngineConfig) -> None:
    trace = pressed_trace(rows)
    assert digest(simulate(trace, engine, SlowLatency(LATENCY))) == digest(simulate(trace, engine, LATENCY))


def digest(result: SimResult) -> str:
    """Of everything that a run returns."""
    parts = (result.steps, result.segments, result.first_step, result.last_step, result.status, result.cached_tokens)
    parts += (result.scheduled_us, result.scheduled_step, result.output_tokens, result.preemptions)
    return hashlib.sha256(b"".join(whole_numbers(part).tobytes() for part in parts)).hexdigest()


def whole_numbers(values: NDArray[Any]) -> NDArray[Any]:
    """As int64, as a long run has some in fewer bytes."""
    return values if values.dtype.names else values.astype(np.int64)


@pytest.mark.slow
@given(pressed_requests, pressed_engines, st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_served_some_after_the_others_requests_get_what_they_get_together(
    rows: Pressed, engine: EngineConfig, stretch: int
) -> None:
    """As a run of many requests is, of which only those under way are in memory."""
    trace = pressed_trace(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "LONG_RUN", 0)
        patch.setattr(long_run, "STRETCH", stretch)
        parts = simulate(trace, engine, LATENCY)
    assert digest(parts) == digest(simulate(trace, engine, LATENCY))


@pytest.mark.parametrize("give_up", [0.0, 0.2, 1.0])
def test_a_run_whose_memory_is_given_back_on_the_way_is_the_same(
    give_up: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3,000 requests fill 33 pages of memory and more, which are given back after every 100 of them."""
    random, n = np.random.default_rng(3), 3_000
    arrival_us = np.cumsum(random.integers(0, 40_000, n))
    abort_us = np.where(random.random(n) < give_up, arrival_us + random.integers(0, 3_000_000, n), NEVER_US)
    prompts = random.integers(1, 400, n)
    trace = RequestTrace(arrival_us, prompts, prompts, random.integers(1, 80, n), abort_us)
    engine = EngineConfig(32, 256, 1000, True, 16, 300)
    whole = simulate(trace, engine, LATENCY)
    monkeypatch.setattr(engine_module, "LONG_RUN", 1_000)
    monkeypatch.setattr(long_run, "STRETCH", 100)
    parts = simulate(trace, engine, LATENCY)
    assert digest(parts) == digest(whole)
    assert (parts.ttft_us == whole.ttft_us).all() and (parts.e2e_us == whole.e2e_us).all()
    assert (parts.last_step_us == whole.last_step_us).all()
    pooled = zip(parts.inter_token_gaps(parts.completed), whole.inter_token_gaps(whole.completed), strict=True)
    assert all((one == other).all() for one, other in pooled)


def test_twins_and_partly_shared_pieces_by_hand() -> None:
    """Budget 8, blocks of 4: two prompts of 5 blocks that part after 2, in the same turn, and a third like the first.

    Turn 1: the first gets 8 tokens (blocks 0, 1).  Turn 2: its next 8 (blocks 2, 3).  Turn 3: its last 4,
    and the second is admitted with 2 blocks found, for 4 tokens.  The third finds 4 of 5 blocks: the
    last holds the last token, and is computed again (a twin).
    """
    prompts = [np.repeat([0, 0, 0, 0, 0], 4), np.repeat([0, 0, 1, 1, 1], 4), np.repeat([0, 0, 0, 0, 0], 4)]
    engine = EngineConfig(4, 8, 64, False, 4, 40)
    tokens = np.full(3, 20)
    arrival_us = np.array([0, 1, 2])
    keys = intern_blocks(prompts, 4)
    trace = RequestTrace(arrival_us, tokens, tokens, np.full(3, 3), np.full(3, NEVER_US), block_keys=keys)
    result = simulate(trace, engine, LATENCY)
    assert result.cached_tokens.tolist() == [0, 8, 16]


def test_keys_that_number_blocks_and_not_chains_are_refused() -> None:
    """Key 1 behind key 0 and behind nothing: two requests would share what they do not."""
    with pytest.raises(TraceError, match="key 1 stands behind two different keys"):
        BlockKeys(np.array([0, 1]), np.array([2, 1]), np.array([0, 1], np.int32), 16)
    chained = BlockKeys(np.array([0, 0]), np.array([2, 1]), np.array([0, 1], np.int32), 16)
    assert replace(chained, count=np.array([2, 2])).count.tolist() == [2, 2]
