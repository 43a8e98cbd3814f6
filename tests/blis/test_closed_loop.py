"""Closed loops: who waits for whom, by hand, and Little's law."""

from __future__ import annotations

import numpy as np
import pytest

from blis_replay.blis.closed_loop import ClosedLoop, simulate_closed_loop
from blis_replay.blis.errors import TraceError
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

# 1 ms per step, whatever is in it.
LATENCY = LatencyModel("blackbox", 1_000_000, 0, 0)


def requests(count: int, output: int = 4) -> RequestTrace:
    full = np.full(count, 10)
    return RequestTrace(np.zeros(count, np.int64), full, full, np.full(count, output), np.full(count, NEVER_US))


def engine(asynchronous: bool = False) -> EngineConfig:
    return EngineConfig(64, 2_048, 4_096, asynchronous)


def test_one_at_a_time() -> None:
    """4 tokens take 4 steps of 1 ms; each request is sent 1 ms after the one before is answered, and queues 2 ms."""
    result = simulate_closed_loop(
        requests(3), engine(), LATENCY, ClosedLoop(1, think_us=1_000), Lifecycle(pre_queue_us=2_000)
    )
    assert result.arrival_us.tolist() == [0, 7_000, 14_000]
    assert result.e2e_us.tolist() == [6_000] * 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_never_more_than_so_many_and_always_as_many(asynchronous: bool) -> None:
    """Little's law: with 8 in the loop, throughput times time in it is 8 while requests are left to send."""
    result = simulate_closed_loop(requests(200, 20), engine(asynchronous), LATENCY, ClosedLoop(8))
    assert result.completed.all()
    assert int(result.steps["running_depth"].max()) == 8
    until_us = int(result.arrival_us[-1])
    level = (np.minimum(result.arrival_us + result.e2e_us, until_us) - result.arrival_us).sum() / until_us
    assert level == pytest.approx(8, abs=0.01)


def test_what_a_closed_loop_cannot_take_is_refused() -> None:
    with pytest.raises(TraceError, match="a closed loop of 0 requests"):
        ClosedLoop(0)


def test_clients_begin_one_after_the_other() -> None:
    """3 clients over 9 ms begin at 0, 3 and 6 ms; 4 steps of 1 ms answer each, alone, and it sends again at once."""
    result = simulate_closed_loop(requests(6), engine(), LATENCY, ClosedLoop(3, ramp_us=9_000))
    assert result.arrival_us.tolist() == [0, 3_000, 4_000, 6_000, 7_000, 8_000]
    assert result.e2e_us.tolist() == [4_000] * 6


def test_a_delay_by_prompt_length_keeps_the_order_of_sending() -> None:
    """A long prompt queues 1 us a token later; each of two requests one after the other has its own delay."""
    prompts = np.array([1_000, 10])
    trace = RequestTrace(np.zeros(2, np.int64), prompts, prompts, np.full(2, 4), np.full(2, NEVER_US))
    delays = Lifecycle(pre_queue_per_prompt_token_us=1.0)
    result = simulate_closed_loop(trace, engine(), LATENCY, ClosedLoop(1), delays)
    assert result.arrival_us.tolist() == [0, 5_000]
    assert result.e2e_us.tolist() == [5_000, 4_010]
