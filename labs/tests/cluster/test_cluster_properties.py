"""What must hold for every cluster: nothing lost, nothing by chance, nothing seen before it happens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cluster_reference import RouterMemory, loads, used_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.blis.engine import simulate
from blis_replay.blis.trace import NEVER_US, BlockKeys, EngineConfig, RequestTrace
from blis_replay_labs.cluster import router as cluster_router
from blis_replay_labs.cluster.config import (
    AlwaysBusiest,
    ClusterConfig,
    LeastLoaded,
    Random,
    RoundRobin,
    Router,
    Weighted,
)
from blis_replay_labs.cluster.simulate import ClusterResult, simulate_cluster
from blis_replay_labs.verification.workloads import LATENCY, LIFECYCLE, Scenario, random_trace, scenarios

BLOCK = 16
SHARED_BLOCKS = 6

request_lists = st.lists(
    st.tuples(
        st.integers(0, 400_000),  # arrival
        st.integers(1, 200),  # prompt
        st.integers(1, 20),  # output
        st.integers(0, 3),  # prefix group
        st.one_of(st.none(), st.integers(0, 300_000)),  # gives up after
    ),
    min_size=1,
    max_size=40,
)
routers = st.one_of(
    st.just(RoundRobin()),
    st.builds(Random, st.integers(0, 5)),
    st.just(LeastLoaded()),
    st.just(AlwaysBusiest()),
    st.builds(Weighted, st.integers(0, 3), st.integers(1, 3), st.integers(0, 3)),
)
engines = st.builds(
    EngineConfig,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(16, 256),
    max_model_len=st.just(1000),
    async_scheduling=st.booleans(),
    num_gpu_blocks=st.integers(24, 40),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
)
clusters = st.builds(ClusterConfig, instances=st.integers(1, 4), router=routers)
Rows = list[tuple[int, int, int, int, int | None]]


def trace_of(rows: Rows, patient: bool = False) -> RequestTrace:
    """The prompts of a group share their first blocks; ``patient``: nobody gives up."""
    rows = sorted(rows, key=lambda row: row[0])
    arrival_us, prompts, outputs, groups = (np.array([row[i] for row in rows], np.int64) for i in range(4))
    gives_up = [NEVER_US if row[4] is None or patient else row[0] + row[4] for row in rows]
    count = np.minimum(prompts // BLOCK, SHARED_BLOCKS)
    keys = BlockKeys(groups * SHARED_BLOCKS, count, np.arange(4 * SHARED_BLOCKS, dtype=np.int32), BLOCK)
    priority = groups % 2
    return RequestTrace(arrival_us, prompts, prompts, outputs, np.array(gives_up, np.int64), priority, keys)


def assert_each_instance_is_a_single_run(trace: RequestTrace, result: ClusterResult, engine: EngineConfig) -> None:
    for i, run in enumerate(result.instances):
        chosen = result.instance == i
        single = simulate(trace.part(chosen), engine, LATENCY, LIFECYCLE)
        for name in ("queued_us", "scheduled_us", "first_step", "last_step", "status", "preemptions", "cached_tokens"):
            assert (getattr(run, name) == getattr(single, name)).all(), name
        assert run.steps.tobytes() == single.steps.tobytes()
        assert run.segments.tobytes() == single.segments.tobytes()
        done = result.whole.completed[chosen]
        assert (result.whole.e2e_us[chosen][done] == single.e2e_us[done]).all()
        assert (result.whole.ttft_us[chosen][done] == single.ttft_us[done]).all()


@pytest.mark.slow
@given(request_lists, clusters, engines)
@settings(max_examples=150, deadline=None)
def test_conservation(rows: Rows, cluster: ClusterConfig, engine: EngineConfig) -> None:
    """Each request is served once, by an engine that goes as if it were alone."""
    trace = trace_of(rows)
    result = simulate_cluster(trace, cluster, engine, LATENCY, LIFECYCLE)
    served = sum(len(run.status) for run in result.instances)
    assert served == len(trace)
    assert result.instance.max(initial=0) < cluster.instances
    given_up = sum(int(run.aborted.sum()) for run in result.instances)
    assert result.whole.completed.sum() + given_up == served
    assert (
        sum(int(run.output_tokens[run.completed].sum()) for run in result.instances)
        == trace.output_tokens[result.whole.completed].sum()
    )
    assert_each_instance_is_a_single_run(trace, result, engine)


@pytest.mark.slow
@given(request_lists, clusters, engines, st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_what_comes_later_changes_no_earlier_decision(
    rows: Rows, cluster: ClusterConfig, engine: EngineConfig, keep: int
) -> None:
    trace = trace_of(rows)
    whole = simulate_cluster(trace, cluster, engine, LATENCY, LIFECYCLE)
    part = simulate_cluster(trace.part(slice(keep)), cluster, engine, LATENCY, LIFECYCLE)
    assert part.instance.tolist() == whole.instance[:keep].tolist()


@given(st.integers(0, 2**32), st.integers(2, 4), engines, st.booleans())
@settings(max_examples=40, deadline=None)
def test_loads_are_those_of_the_moment(seed: int, instances: int, engine: EngineConfig, busiest: bool) -> None:
    """No time travel: from the finished runs, a decision is what its moment allows.

    150 requests, one in 25 ms to each instance on average: enough to queue behind small batches, not behind large ones.
    """
    trace = random_trace(np.random.default_rng(seed), 150, 25_000 / instances)
    router: Router = AlwaysBusiest() if busiest else LeastLoaded()
    result = simulate_cluster(trace, ClusterConfig(instances, router), engine, LATENCY)
    for request, seen_us in enumerate(trace.arrival_us.tolist()):
        known = loads(trace, result, request, seen_us)
        assert result.instance[request] == known.index(max(known) if busiest else min(known))


@pytest.mark.slow
@given(request_lists, st.integers(1, 4), engines)
@settings(max_examples=100, deadline=None)
def test_kv_utilisation_is_that_of_the_moment(rows: Rows, instances: int, engine: EngineConfig) -> None:
    trace = trace_of(rows, patient=True)
    result = simulate_cluster(trace, ClusterConfig(instances, Weighted(0, 0, 1)), engine, LATENCY)
    assert engine.num_gpu_blocks is not None
    for request, seen_us in enumerate(trace.arrival_us.tolist()):
        used = [used_blocks(run, engine.num_gpu_blocks - 1, seen_us) for run in result.instances]
        assert result.instance[request] == used.index(min(used))


@given(request_lists, st.integers(1, 3), st.sampled_from([1, 3, 10, 10_000]))
@settings(max_examples=60, deadline=None)
def test_prefix_affinity_is_what_the_router_remembers(rows: Rows, instances: int, memory: int) -> None:
    trace = trace_of(rows)
    engine = EngineConfig(6, 256, 1000, async_scheduling=False, num_gpu_blocks=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_router, "ROUTER_MEMORY_BLOCKS", memory)
        result = simulate_cluster(trace, ClusterConfig(instances, Weighted(1, 0, 0)), engine, LATENCY)
    memories = [RouterMemory(memory) for _ in range(instances)]
    keys = trace.block_keys
    assert keys is not None
    for request, chosen in enumerate(result.instance.tolist()):
        full = int(trace.prompt_tokens[request]) // BLOCK
        prompt = [int(keys.start[request]) + i for i in range(int(keys.count[request]))]
        known = [one.share(prompt) * len(prompt) / max(full, 1) for one in memories]
        assert chosen == known.index(max(known))
        memories[chosen].send(prompt)


@pytest.mark.parametrize("scenario", scenarios(seed=7, requests=300), ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("router", [RoundRobin(), LeastLoaded()], ids=["round-robin", "least-loaded"])
def test_every_feature_of_the_engine_is_that_of_a_single_run(scenario: Scenario, router: Router) -> None:
    """Preemption, priorities, prefix hits, clients that give up: on three instances at three times the rate."""
    arrival_us = scenario.trace.arrival_us // 3
    patience_us = scenario.trace.abort_us - scenario.trace.arrival_us
    abort_us = np.where(scenario.trace.abort_us == NEVER_US, NEVER_US, arrival_us + patience_us)
    trace = replace(scenario.trace, arrival_us=arrival_us, abort_us=abort_us)
    result = simulate_cluster(trace, ClusterConfig(3, router), scenario.engine, LATENCY, LIFECYCLE)
    if scenario.engine.num_gpu_blocks is None:
        assert (result.whole.completed == (trace.abort_us == NEVER_US)).all()
        return
    assert_each_instance_is_a_single_run(trace, result, scenario.engine)
    seen = {
        "preemptions": sum(int(run.preemptions.sum()) for run in result.instances),
        "prefix hits": sum(int(run.cached_tokens.sum()) for run in result.instances),
        "aborts": sum(int(run.aborted.sum()) for run in result.instances),
    }
    assert all(seen[feature] > 0 for feature in scenario.must_show)
