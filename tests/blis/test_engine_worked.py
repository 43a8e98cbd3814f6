"""Worked vectors of blis-semantics section 11: beta (1000, 10, 5) us, alpha (100, 1, 20) us.

Both ways of scheduling, clients that give up and outputs that end at ``max_model_len``: ``test_release_digests``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import ENGINE, make_trace

from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.trace import NEVER_US, EngineConfig

BETA = LatencyModel("blackbox", 1_000_000, 10_000, 5_000, rounding="truncate")
ALPHA = Lifecycle(pre_queue_us=100, pre_queue_per_prompt_token_us=1, post_token_us=20)


def test_one_request_v1() -> None:
    """Queued at 200; 1000 + 10*100 us of prefill; two decodes of 1005; 20 us on every token."""
    result = simulate(make_trace([0], [100], [3]), ENGINE, BETA, ALPHA)
    assert result.queued_us.tolist() == [200]
    assert result.ttft_us.tolist() == [2220]
    assert result.e2e_us.tolist() == [4270]
    assert result.step_end_us.tolist() == [2200, 3205, 4210]


def test_a_step_is_never_overlapped_v2() -> None:
    """B queues at 3300 while A's last step runs until 4210: it starts then, not at once as in BLIS."""
    result = simulate(make_trace([0, 3100], [100, 100], [3, 1]), ENGINE, BETA, ALPHA)
    assert result.steps["start_us"].tolist() == [200, 2200, 3205, 4210]
    assert result.ttft_us.tolist() == [2220, 4210 + 2000 + 20 - 3100]


@pytest.mark.parametrize(("first_token_per_decode_us", "second_us"), [(0, 2430), (30, 2460)])
def test_prefill_and_decode_share_a_step_v3(first_token_per_decode_us: int, second_us: int) -> None:
    """B joins A's decode at 3205: 1000 + 10*100 + 5 = 2005 us for both.

    A first token may wait for those of the decodes in its step: 30 us for A's.  A's own prefill was alone.  B has one
    token only, so its end waits as well; A's later tokens do not.
    """
    delays = replace(ALPHA, first_token_per_decode_us=first_token_per_decode_us)
    result = simulate(make_trace([0, 2800], [100, 100], [3, 1]), ENGINE, BETA, delays)
    assert result.ttft_us.tolist() == [2220, second_us]
    assert result.e2e_us.tolist() == [5270, second_us]


def test_a_long_prompt_is_chunked_by_the_budget_v4() -> None:
    """3000 tokens in chunks of 2048 and 952: 21480 + 10520 us, queued at 3100."""
    result = simulate(make_trace([0], [3000], [1]), ENGINE, BETA, ALPHA)
    assert result.steps["prefill_tokens"].tolist() == [2048, 952]
    assert result.ttft_us.tolist() == [35120]


def test_only_uncached_prompt_tokens_are_computed() -> None:
    """A prompt of 165 tokens with 160 cached computes 5: 1000 + 50 us."""
    result = simulate(make_trace([0], [165], [1], prefill_tokens=[5]), ENGINE, BETA)
    assert result.ttft_us.tolist() == [1050]


@pytest.mark.parametrize(
    ("arrival_us", "outputs", "abort_us", "scheduled_us"),
    [
        # One place: A gives up as its third step ends, so B has its place in the fourth; or as it comes itself.
        ([0, 100], [1000, 1], [3000, NEVER_US], [0, 3000]),
        ([0, 100], [1000, 1], [0, NEVER_US], [-1, 100]),
        # B comes as A's only step ends.
        ([0, 1000], [1, 1], [NEVER_US, NEVER_US], [0, 1000]),
    ],
)
def test_what_happens_as_a_step_ends_counts_for_the_next(
    arrival_us: list[int], outputs: list[int], abort_us: list[int], scheduled_us: list[int]
) -> None:
    """Steps of 1 ms; recorded workloads, whose times are drawn, have no such moment."""
    flat, trace = LatencyModel("blackbox", 1_000_000, 0, 0), make_trace(arrival_us, [10, 10], outputs, None, abort_us)
    assert simulate(trace, replace(ENGINE, max_num_seqs=1), flat).scheduled_us.tolist() == scheduled_us


def test_a_prompt_that_fills_the_model_is_refused() -> None:
    with pytest.raises(TraceError, match="request 1: a prompt of 8192 tokens"):
        simulate(make_trace([0, 0], [10, 8192], [1, 1]), ENGINE, BETA)


def test_no_requests_give_an_empty_result() -> None:
    result = simulate(make_trace([], [], []), ENGINE, BETA)
    assert (len(result.ttft_us), len(result.steps)) == (0, 0)


@pytest.mark.parametrize(
    ("arrivals", "prompts", "prefills", "outputs", "complaint"),
    [
        ([5, 4], [1, 1], [1, 1], [1, 1], "request 1: arrival_us runs backwards"),
        ([-1], [1], [1], [1], "request 0: arrival_us is negative"),
        ([0], [1], [1], [0], "request 0: output_tokens is below 1"),
        ([0], [4], [5], [1], "request 0: prefill_tokens is not within"),
    ],
)
def test_impossible_requests_are_named(
    arrivals: list[int],
    prompts: list[int],
    prefills: list[int],
    outputs: list[int],
    complaint: str,
) -> None:
    with pytest.raises(TraceError, match=complaint):
        make_trace(arrivals, prompts, outputs, prefill_tokens=prefills)


def test_a_budget_below_the_sequences_is_refused() -> None:
    """vLLM refuses it too: a decode of every sequence must fit one step."""
    with pytest.raises(TraceError, match=r"max_num_batched_tokens \(64\) is below max_num_seqs \(128\)"):
        EngineConfig(max_num_seqs=128, max_num_batched_tokens=64, max_model_len=4096, async_scheduling=False)


def test_pooled_gaps_are_the_gaps_between_token_times() -> None:
    """A has tokens at 1100, 2105, 4115; B joins in A's third step and has one token only."""
    result = simulate(make_trace([0, 1200], [10, 100], [3, 1]), ENGINE, BETA)
    gap_us, count = result.inter_token_gaps(np.array([True, True]))
    assert sorted(np.repeat(gap_us, count).tolist()) == [1005, 2005]
