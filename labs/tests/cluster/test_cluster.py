"""A cluster by hand: who goes where, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import ENGINE, make_trace
from scenario import intern_blocks

from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.trace import RequestTrace
from blis_replay_labs.cluster.config import (
    AlwaysBusiest,
    ClusterConfig,
    LeastLoaded,
    Random,
    RoundRobin,
    Router,
    Weighted,
    router_of_text,
)
from blis_replay_labs.cluster.simulate import simulate_cluster

# Every step takes 10 ms, whatever is in it.
TEN_MS = LatencyModel("blackbox", 10_000_000, 0, 0)


def instances_chosen(trace: RequestTrace, router: Router, instances: int = 2) -> list[int]:
    return simulate_cluster(trace, ClusterConfig(instances, router), ENGINE, TEN_MS).instance.tolist()


@pytest.mark.parametrize(
    ("text", "router"),
    [
        ("round-robin", RoundRobin()),
        ("least-loaded", LeastLoaded()),
        ("random", Random()),
        ("always-busiest", AlwaysBusiest()),
        ("weighted", Weighted()),
        ("weighted:prefix-affinity=1,queue_depth=0.5", Weighted(1, 0.5, 0)),
    ],
)
def test_a_router_is_named_by_a_text(text: str, router: Router) -> None:
    assert router_of_text(text) == router


# -- Routers ------------------------------------------------------------------------------------


def test_round_robin() -> None:
    assert instances_chosen(make_trace([0] * 5, [1] * 5, [1] * 5), RoundRobin(), 3) == [0, 1, 2, 0, 1]


def test_random_is_seeded_and_even() -> None:
    """400 draws over 4: 100 each on average, standard deviation sqrt(400 * 1/4 * 3/4) = 8.7; four of those."""
    trace = make_trace(list(range(400)), [1] * 400, [1] * 400)
    chosen = instances_chosen(trace, Random(seed=1), 4)
    assert chosen == instances_chosen(trace, Random(seed=1), 4)
    assert chosen != instances_chosen(trace, Random(seed=2), 4)
    assert np.abs(np.bincount(chosen, minlength=4) - 100).max() <= 35


# Instance 0 gets A, busy for 30 ms (three tokens); instance 1 gets B, whose one token is in at 11 ms.
STAGGERED = [0, 1_000]


def test_least_loaded_sees_a_completion_only_after_it() -> None:
    """At 11 ms, a tie with B's end, the router comes first: 1 against 1: the first.  1 us later 1 against 0."""
    at_its_end = make_trace([*STAGGERED, 11_000], [5] * 3, [3, 1, 1])
    assert instances_chosen(at_its_end, LeastLoaded()) == [0, 1, 0]
    after_it = make_trace([*STAGGERED, 11_001], [5] * 3, [3, 1, 1])
    assert instances_chosen(after_it, LeastLoaded()) == [0, 1, 1]


def test_prefix_affinity_follows_the_prompt() -> None:
    """A and B share no block; the third begins as B did, with 2 of its 3 blocks: score 2/3 against 0."""
    rows = [np.arange(48), np.arange(100, 148), np.concatenate([np.arange(100, 132), np.arange(16)])]
    trace = replace(make_trace([0, 1, 2], [48] * 3, [4] * 3), block_keys=intern_blocks(rows, 16))
    assert instances_chosen(trace, Weighted(1, 1, 0)) == [0, 1, 1]  # depths equal: 1/2 against 1/2 + 1/3


def test_weights_decide_between_affinity_and_load() -> None:
    """The same prompt again: affinity 1 for the instance that has it, queue depth 1 for the other, idle one."""
    rows = [np.arange(48)] * 2
    trace = replace(make_trace([0, 1], [48] * 2, [4] * 2), block_keys=intern_blocks(rows, 16))
    assert instances_chosen(trace, Weighted(3, 2, 0)) == [0, 0]
    assert instances_chosen(trace, Weighted(2, 3, 0)) == [0, 1]


# -- The engines behind it ----------------------------------------------------------------------


def test_nobody_queues_before_the_router_has_seen_it() -> None:
    """An observed delay may be negative (clocks); in a cluster the request queues when it is routed."""
    trace = replace(make_trace([0, 50_000], [5, 5], [1, 1]), pre_queue_us=np.array([0, -20_000]))
    result = simulate_cluster(trace, ClusterConfig(1), ENGINE, TEN_MS)
    assert result.whole.ttft_us.tolist() == [10_000, 10_000]


def test_an_empty_trace_has_an_empty_result() -> None:
    result = simulate_cluster(make_trace([], [], []), ClusterConfig(2, LeastLoaded()), ENGINE, TEN_MS)
    assert len(result.instance) == 0
    assert [len(run.steps) for run in result.instances] == [0, 0]


def test_long_runs_find_room() -> None:
    """9,000 tokens one after the other on the instance that gets all: more steps than there is room for at first."""
    engine = replace(ENGINE, max_model_len=20_000, max_num_batched_tokens=20_000)
    trace = make_trace([0, 1, 2], [5] * 3, [9_000, 1, 1])
    result = simulate_cluster(trace, ClusterConfig(4, AlwaysBusiest()), engine, TEN_MS)
    assert result.whole.e2e_us[0] == 9_000 * 10_000
    assert result.instances[0].steps.tobytes() == simulate(trace, engine, TEN_MS).steps.tobytes()


def test_one_instance_may_get_more_than_its_share() -> None:
    """All 200 requests to the first of four: more than twice the even share, for which there is room at first."""
    trace = make_trace(list(range(0, 200_000, 1_000)), [20] * 200, [3] * 200)
    trace = replace(trace, priority=np.arange(200) % 3)
    engine = replace(ENGINE, scheduling_policy="priority", max_num_seqs=4)
    result = simulate_cluster(trace, ClusterConfig(4, AlwaysBusiest()), engine, TEN_MS)
    assert (result.instance == 0).all()
    assert (result.whole.e2e_us == simulate(trace, engine, TEN_MS).e2e_us).all()


# -- What it refuses ----------------------------------------------------------------------------


def test_affinity_needs_prompts_that_are_known() -> None:
    with pytest.raises(TraceError, match="prefix affinity needs to know which prompts are alike"):
        instances_chosen(make_trace([0, 1], [5, 5], [1, 1]), Weighted())


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(TraceError, match="a cluster of 0 instances"):
        ClusterConfig(0)
    with pytest.raises(TraceError, match="none may be negative"):
        Weighted(1, -1, 1)
    with pytest.raises(TraceError, match="one must be positive"):
        Weighted(0, 0, 0)


def test_a_request_too_large_for_any_instance_is_named() -> None:
    with pytest.raises(TraceError, match="request 1: it needs 7 KV blocks and the engine has 3"):
        engine = replace(ENGINE, num_gpu_blocks=4)
        simulate_cluster(make_trace([0, 1], [16, 100], [1, 1]), ClusterConfig(2), engine, TEN_MS)
