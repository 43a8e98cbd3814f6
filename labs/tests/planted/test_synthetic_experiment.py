"""The truth of synthetic experiments: what is asked for is what happens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from blis_replay.blis.latency.models import Lifecycle
from blis_replay.blis.trace import EngineConfig
from blis_replay.ingest.recording import SharedPrefix
from blis_replay_labs.planted.experiment import SyntheticExperiment, step_records
from blis_replay_labs.planted.generate import cached_prompt_tokens, generate

SPEC = SyntheticExperiment()
SYNCHRONOUS = EngineConfig(128, 2048, 4096, async_scheduling=False)


def test_the_default_experiment_has_three_hundred_requests_in_two_stages() -> None:
    # 10/s for 15 s and 15/s for 10 s.
    truth = generate(SPEC)
    assert len(truth) == 300
    assert np.bincount(truth.stage).tolist() == [150, 150]
    assert truth.trace.arrival_us[0] == 0
    # The second stage starts 15 s and a gap of 1 s after the first, less the first arrival taken as zero.
    assert 15_000_000 < truth.trace.arrival_us[150] < 16_500_000


def test_one_request_by_hand() -> None:
    # Prompt 500 tokens, cold, synchronous: 5,000 us before the queue, one prefill step of 8,000 + 30 x 500 = 23,000 us,
    # then 2 decode steps of 8,060 us; every token 100 us on its way out, 400 us at the end.
    spec = replace(
        SPEC,
        requests=1,
        prompt_jitter_tokens=0,
        shared_prefix=SharedPrefix(1, 1, 100, 400, 3),
        engine=SYNCHRONOUS,
        lifecycle=Lifecycle(pre_queue_us=5_000, post_token_us=100, post_request_us=400),
    )
    truth = generate(spec)
    assert truth.token_times_us(0).tolist() == [28_100, 36_260, 44_420]
    assert truth.result.ttft_us.tolist() == [28_100]
    assert truth.client_end_us.tolist() == [44_820]


def test_prefix_cache_by_hand() -> None:
    # Two groups of two prompts (500, 481, 97, 100 tokens), system prompt of 100: 6 blocks of 16 = 96 cached for the
    # second of a group; sent again, all full blocks but the one of the last token: 16 x floor(499/16) = 496,
    # 16 x floor(480/16) = 480, 16 x floor(96/16) = 96, 16 x floor(99/16) = 96.
    cached = cached_prompt_tokens(np.array([500, 481, 97, 100]), np.array([0, 1, 1, 0]), 6, 100, 16)
    assert cached.tolist() == [0, 0, 96, 96, 496, 480]
    assert cached_prompt_tokens(np.array([500, 481, 97, 100]), np.array([0, 1, 1, 0]), 8, 100, 16)[6:].tolist() == [
        96,
        96,
    ]


def test_failed_requests_end_when_their_client_gives_up() -> None:
    # 227 ms is the mean E2E of this load, so a time-out of 100 ms is reached by each of the chosen.
    truth = generate(replace(SPEC, failures=20, timeout_us=100_000))
    assert (~truth.ok).sum() == 20
    held_us = truth.client_end_us - truth.trace.arrival_us
    assert (held_us[~truth.ok] == 100_000).all()
    assert all(len(truth.token_times_us(int(request))) == 0 for request in np.flatnonzero(~truth.ok))


def blocks_used(records: dict[str, np.ndarray]) -> np.ndarray:  # type: ignore[type-arg]
    """Blocks held after each schedule(): all requests of these tests together never need more than 32."""
    return 32 - records["kv_blocks_free"]


def test_batch_split_lags_one_step_under_asynchronous_scheduling() -> None:
    # One request of 500 tokens and 3 outputs: step 2 is scheduled before the first token is in, so its one decode
    # token is booked as prefill; step 3 is scheduled after.
    spec = replace(SPEC, requests=1, prompt_jitter_tokens=0, shared_prefix=SharedPrefix(1, 1, 100, 400, 3))
    lagging, exact = step_records(generate(spec)), step_records(generate(replace(spec, phase_lag=False)))
    assert lagging["prefill_requests"].tolist() == [1, 1, 0]
    assert lagging["prefill_tokens"].tolist() == [500, 1, 0]
    assert lagging["decode_tokens"].tolist() == [0, 0, 1]
    assert exact["prefill_tokens"].tolist() == [500, 0, 0]
    assert exact["decode_tokens"].tolist() == [0, 1, 1]
    synchronous = step_records(generate(replace(spec, engine=replace(SYNCHRONOUS, num_gpu_blocks=33))))
    assert synchronous["prefill_tokens"].tolist() == [500, 0, 0]
    # 500, 501 and 502 tokens in blocks of 16.
    assert blocks_used(synchronous).tolist() == [32, 32, 32]
