"""Worked vectors of blis-semantics section 11: beta (1000, 10, 5) us, alpha (100, 1, 20) us."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import ENGINE, make_trace

from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.trace import EngineConfig

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


def test_async_costs_an_arrival_one_more_step() -> None:
    """Semantics section 9: an arrival during batch k runs in batch k + 2.

    With steps of 1000 us flat, A runs 0..10,000.  B arrives at 500 during batch 0: in
    sync mode its first token is there at 2000, in async mode batch 1 is already
    scheduled, so it is there at 3000.
    """
    flat = LatencyModel("blackbox", 1_000_000, 0, 0)
    trace = make_trace([0, 500], [10, 10], [10, 1])
    assert simulate(trace, ENGINE, flat).ttft_us.tolist() == [1000, 1500]
    assert simulate(trace, replace(ENGINE, async_scheduling=True), flat).ttft_us.tolist() == [1000, 2500]


def test_async_holds_a_sequence_slot_one_step_longer() -> None:
    """With one slot, B waits for A's last token to be in: an empty turn, then its prefill.

    A runs 0..2000 (two tokens).  Sync: B starts at 2000.  Async: the batch after A's last
    was scheduled at 1000 with A still in the list and is empty; at 2000 B is scheduled.
    """
    flat = LatencyModel("blackbox", 1_000_000, 0, 0)
    trace = make_trace([0, 100], [10, 10], [2, 1])
    one = replace(ENGINE, max_num_seqs=1)
    assert simulate(trace, one, flat).finished_us.tolist() == [2000, 3000]
    assert simulate(trace, replace(one, async_scheduling=True), flat).finished_us.tolist() == [2000, 3000]
    result = simulate(trace, replace(one, async_scheduling=True), flat)
    assert result.scheduled_us.tolist() == [0, 2000]


def test_a_client_that_gives_up_frees_its_slot() -> None:
    """A (1000 tokens, flat 1000 us steps) is dropped at the turn after 2500, i.e. at 3000; B follows."""
    flat = LatencyModel("blackbox", 1_000_000, 0, 0)
    trace = make_trace([0, 100], [10, 10], [1000, 1], abort_us=[2500, 2**62])
    result = simulate(trace, replace(ENGINE, max_num_seqs=1), flat)
    assert result.completed.tolist() == [False, True]
    assert result.finished_us.tolist() == [-1, 4000]


def test_outputs_end_at_max_model_len() -> None:
    """Semantics section 7: a prompt of 4090 with a limit of 4096 yields 6 tokens, 4095 yields 1."""
    limited = replace(ENGINE, max_model_len=4096)
    result = simulate(make_trace([0, 0], [4090, 4095], [50, 50]), limited, BETA)
    assert result.output_tokens.tolist() == [6, 1]


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
