"""Closed loops: who waits for whom, by hand, and Little's law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from blis_replay.base.errors import TraceError
from blis_replay.blis.closed_loop import Answered, ClosedLoop, answered_of, simulate_load
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.trace import NEVER_US, BlockKeys, EngineConfig, RequestTrace

# 1 ms per step, whatever is in it.
LATENCY = LatencyModel("blackbox", 1_000_000, 0, 0)


def requests(count: int, output: int = 4) -> RequestTrace:
    full = np.full(count, 10)
    return RequestTrace(np.zeros(count, np.int64), full, full, np.full(count, output), np.full(count, NEVER_US))


def engine(asynchronous: bool = False) -> EngineConfig:
    return EngineConfig(64, 2_048, 4_096, asynchronous)


def test_one_at_a_time() -> None:
    """4 tokens take 4 steps of 1 ms; each request is sent 1 ms after the one before is answered, and queues 2 ms."""
    result = simulate_load(requests(3), engine(), LATENCY, Lifecycle(pre_queue_us=2_000), ClosedLoop(1, think_us=1_000))
    assert result.arrival_us.tolist() == [0, 7_000, 14_000]
    assert result.e2e_us.tolist() == [6_000] * 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_never_more_than_so_many_and_always_as_many(asynchronous: bool) -> None:
    """Little's law: with 8 in the loop, throughput times time in it is 8 while requests are left to send."""
    result = simulate_load(requests(200, 20), engine(asynchronous), LATENCY, loop=ClosedLoop(8))
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
    result = simulate_load(requests(6), engine(), LATENCY, loop=ClosedLoop(3, ramp_us=9_000))
    assert result.arrival_us.tolist() == [0, 3_000, 4_000, 6_000, 7_000, 8_000]
    assert result.e2e_us.tolist() == [4_000] * 6


def test_a_delay_by_prompt_length_keeps_the_order_of_sending() -> None:
    """A long prompt queues 1 us a token later; each of two requests one after the other has its own delay."""
    prompts = np.array([1_000, 10])
    trace = RequestTrace(np.zeros(2, np.int64), prompts, prompts, np.full(2, 4), np.full(2, NEVER_US))
    delays = Lifecycle(pre_queue_per_prompt_token_us=1.0)
    result = simulate_load(trace, engine(), LATENCY, loop=ClosedLoop(1), lifecycle=delays)
    assert result.arrival_us.tolist() == [0, 5_000]
    assert result.e2e_us.tolist() == [5_000, 4_010]


def test_turns_of_a_session_wait_for_each_other() -> None:
    """2 clients, sessions A (3 turns), B (1) and C (2), 4 steps of 1 ms each; 1 ms to think.

    A and B begin at 0.  At 4 ms both are answered.  A's second turn and C's first go out at 5 ms, and so on.
    """
    sessions = np.array([0, 1, 0, 2, 2, 0])
    result = simulate_load(requests(6), engine(), LATENCY, loop=ClosedLoop(2, think_us=1_000), sessions=sessions)
    assert result.arrival_us.tolist() == [0, 0, 5_000, 5_000, 10_000, 10_000]
    assert result.e2e_us.tolist() == [4_000] * 6


def test_a_turn_is_sent_with_its_own_lengths() -> None:
    """One client: session A has the first and the last request, of 2 and 5 tokens; B's, of 3, goes last."""
    full = np.array([10, 20, 30])
    trace = RequestTrace(np.zeros(3, np.int64), full, full, np.array([2, 3, 5]), np.full(3, NEVER_US))
    result = simulate_load(trace, engine(), LATENCY, loop=ClosedLoop(1), sessions=np.array([7, 8, 7]))
    assert result.arrival_us.tolist() == [0, 7_000, 2_000]
    assert result.e2e_us.tolist() == [2_000, 3_000, 5_000]
    assert result.output_tokens.tolist() == [2, 3, 5]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_turn_comes_before_the_answer_to_the_one_before(asynchronous: bool) -> None:
    """40 sessions of 1 to 9 turns, of any length, 8 at a time; always 8 are under way while sessions are left."""
    random = np.random.default_rng(2)
    sessions = random.permutation(np.repeat(np.arange(40), random.integers(1, 10, 40)))
    n = len(sessions)
    prompts = random.integers(5, 400, n)
    trace = RequestTrace(np.zeros(n, np.int64), prompts, prompts, random.integers(1, 60, n), np.full(n, NEVER_US))
    result = simulate_load(trace, engine(asynchronous), LATENCY, loop=ClosedLoop(8), sessions=sessions)
    assert result.completed.all()
    assert result.output_tokens.tolist() == trace.output_tokens.tolist()
    for session in range(40):
        turns = np.flatnonzero(sessions == session)
        ends_us = result.arrival_us[turns] + result.e2e_us[turns]
        assert result.arrival_us[turns[1:]].tolist() == ends_us[:-1].tolist()
    begins_us = np.array([result.arrival_us[sessions == session].min() for session in range(40)])
    until_us = int(begins_us.max())
    ends_us = np.minimum(result.arrival_us + result.e2e_us, until_us)
    level = np.maximum(ends_us - result.arrival_us, 0).sum() / until_us
    assert level == pytest.approx(8, abs=0.01)


def test_a_turn_finds_the_blocks_of_the_turn_before() -> None:
    """16-token blocks: the second turn of the first session has its first two, the other session has its own."""
    prompts = np.array([32, 32, 48])
    keys = BlockKeys(np.array([0, 2, 4]), np.array([2, 2, 3]), np.array([1, 2, 3, 4, 1, 2, 5], np.int32), 16)
    trace = RequestTrace(np.zeros(3, np.int64), prompts, prompts, np.full(3, 4), np.full(3, NEVER_US), block_keys=keys)
    result = simulate_load(trace, engine(), LATENCY, loop=ClosedLoop(1), sessions=np.array([0, 1, 0]))
    assert result.cached_tokens.tolist() == [0, 0, 32]
    assert result.arrival_us.tolist() == [0, 8_000, 4_000]


def test_a_request_that_waited_for_an_answer_waits_for_the_simulated_one() -> None:
    """Two requests at 0 and 2 ms; the third follows the first, which is answered at 4 ms, by 0.5 ms."""
    trace = replace(requests(3), arrival_us=np.array([0, 2_000, 9_000]))
    answered = Answered(np.array([-1, -1, 0]), np.array([0, 0, 500]))
    result = simulate_load(trace, engine(), LATENCY, answered=answered)
    assert result.arrival_us.tolist() == [0, 2_000, 4_500]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_where_nobody_waits_for_an_answer_it_is_the_open_run(asynchronous: bool) -> None:
    """300 requests, more than are sent ahead, some of them within one step."""
    random = np.random.default_rng(3)
    trace = replace(requests(300, 9), arrival_us=np.sort(random.integers(0, 60_000, 300)))
    alone = Answered(np.full(300, -1), np.zeros(300, np.int64))
    delays = Lifecycle(pre_queue_us=2_000, post_token_us=100)
    closed = simulate_load(trace, engine(asynchronous), LATENCY, answered=alone, lifecycle=delays)
    opened = simulate(trace, engine(asynchronous), LATENCY, delays)
    for name in ("arrival_us", "queued_us", "scheduled_us", "first_token_us", "finished_us"):
        assert (getattr(closed, name) == getattr(opened, name)).all()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_closed_loop_told_by_its_answers_is_that_closed_loop(asynchronous: bool) -> None:
    """Each request follows the answer that it followed in the run of 8 clients, so every time comes again."""
    outputs = np.random.default_rng(4).integers(2, 40, 200)
    trace = replace(requests(200), output_tokens=outputs)
    first = simulate_load(trace, engine(asynchronous), LATENCY, loop=ClosedLoop(8, think_us=300))
    after = answered_of(first.arrival_us, first.arrival_us + first.e2e_us, 8)
    assert (after.after >= 0).sum() == 192
    again = simulate_load(replace(trace, arrival_us=first.arrival_us), engine(asynchronous), LATENCY, answered=after)
    assert again.arrival_us.tolist() == first.arrival_us.tolist()
    assert again.e2e_us.tolist() == first.e2e_us.tolist()


@pytest.mark.parametrize("loop", [False, True])
def test_more_sends_than_are_known_ahead_may_come_before_the_first_reaches_the_queue(loop: bool) -> None:
    """200 requests within 5 ms that reach the queue 20 ms later: nothing moves before all of them are sent."""
    sent_us = np.arange(200) * 25
    delays = Lifecycle(pre_queue_us=20_000)
    trace = replace(requests(200), arrival_us=sent_us)
    alone = Answered(np.full(200, -1), np.zeros(200, np.int64))
    result = (
        simulate_load(trace, engine(), LATENCY, loop=ClosedLoop(200, ramp_us=5_000), lifecycle=delays)
        if loop
        else simulate_load(trace, engine(), LATENCY, answered=alone, lifecycle=delays)
    )
    assert result.arrival_us.tolist() == sent_us.tolist()
    assert result.e2e_us.tolist() == simulate(trace, engine(), LATENCY, delays).e2e_us.tolist()
