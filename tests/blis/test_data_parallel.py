"""Data parallelism: whom vLLM's balancer chooses, and ranks by themselves and in lockstep, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import ENGINE, make_trace

from blis_replay.base.errors import TraceError
from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.latency.models import BatchFeatures, LatencyModel
from blis_replay.blis.parallel.ranks import simulate_ranks
from blis_replay.blis.trace import EngineConfig, release_arguments

# Every step takes 10 ms, whatever is in it; and 10 us a prefill token, nothing else.
TEN_MS = LatencyModel("blackbox", 10_000_000, 0, 0)
PREFILL = LatencyModel("blackbox", 0, 10_000, 0)


def server(release: str, fronts: int | None = 1, *, experts: bool = False, ranks: int = 2) -> EngineConfig:
    return replace(
        ENGINE,
        data_parallel_size=ranks,
        api_server_count=fronts,
        mixture_of_experts=experts,
        **release_arguments({"vllm_version": release}),
    )


def chosen(arrival_us: list[int], engine: EngineConfig, outputs: int = 1) -> list[int]:
    trace = make_trace(arrival_us, [4] * len(arrival_us), [outputs] * len(arrival_us))
    return simulate_ranks(trace, engine, TEN_MS)[1].tolist()


def test_front_ends_count_what_they_sent_until_zeros_are_published_after_five_seconds() -> None:
    """0.15, dense: nobody reports.  The fourth would go to rank 1 (2 sent to rank 0), but for the publication."""
    assert chosen([0, 1, 2, 4_000_000], server("0.15.1")) == [0, 1, 0, 1]
    assert chosen([0, 1, 2, 6_000_000], server("0.15.1")) == [0, 1, 0, 0]


def test_each_front_end_has_counts_of_its_own() -> None:
    """As many front ends as ranks: the second begins with rank 1, and both go to the other rank next."""
    assert chosen([0, 1, 2, 3], server("0.15.1", fronts=None)) == [0, 1, 1, 0]


def test_of_ranks_alike_the_next_in_turn_is_chosen_from_0_25_on() -> None:
    """Zeros at 5 s.  By then the turn is at rank 1 (one request was sent)."""
    assert chosen([0, 6_000_000], server("0.24.0")) == [0, 0]
    assert chosen([0, 6_000_000], server("0.25.1")) == [0, 1]


def test_requests_in_flight_count_from_0_27_on() -> None:
    """At 160 ms the first request still runs on rank 0, and 100 ms after the first message that was published."""
    first_is_long = make_trace([0, 1, 160_000], [4, 4, 4], [50, 1, 1])
    assert simulate_ranks(first_is_long, server("0.32.0"), TEN_MS)[1].tolist() == [0, 1, 1]


def test_ranks_by_themselves_go_as_engines_with_their_requests() -> None:
    rng = np.random.default_rng(0)
    trace = make_trace(np.sort(rng.integers(0, 10**6, 80)).tolist(), rng.integers(1, 30, 80), rng.integers(1, 20, 80))
    engine = server("0.32.0", ranks=3)
    result, rank = simulate_ranks(trace, engine, TEN_MS)
    for i in range(3):
        alone = simulate(trace.part(rank == i), replace(engine, data_parallel_size=1), TEN_MS)
        assert result.ttft_us[rank == i].tolist() == alone.ttft_us.tolist()
        assert result.e2e_us[rank == i].tolist() == alone.e2e_us.tolist()
    gaps, counts = result.inter_token_gaps(result.completed)
    assert counts.sum() == (result.output_tokens - 1).sum()
    assert gaps[counts > 0].min() >= 10_000


def test_ranks_with_experts_take_steps_as_long_as_the_longest() -> None:
    """8 prompt tokens, 80 us, beside one token, 10 us; up to 0.13 dense models did so too."""
    trace = make_trace([0, 0], [8, 1], [1, 1])
    assert simulate(trace, server("0.15.1", experts=True), PREFILL).ttft_us.tolist() == [80, 80]
    assert simulate(trace, server("0.15.1"), PREFILL).ttft_us.tolist() == [80, 10]
    assert simulate(trace, server("0.12.0"), PREFILL).ttft_us.tolist() == [80, 80]


def test_idle_ranks_in_lockstep_step_on_until_the_32nd() -> None:
    """Steps of 10 ms up to 320 ms.  Who comes at 15 ms waits for the one that runs, who comes at 331 ms does not."""
    engine = replace(server("0.15.1", experts=True), async_scheduling=False)
    trace = make_trace([0, 15_000, 331_000], [4, 4, 4], [1, 1, 1])
    assert simulate(trace, engine, TEN_MS).ttft_us.tolist() == [10_000, 15_000, 10_000]


def test_what_takes_ranks_one_at_a_time_refuses_several() -> None:
    def step_time_us(_: BatchFeatures) -> int:
        return 1

    class Model:
        step_time = staticmethod(step_time_us)

    trace = make_trace([0], [4], [1])
    with pytest.raises(TraceError, match="latency model that is data"):
        simulate(trace, server("0.15.1"), Model())
    with pytest.raises(TraceError, match="several ranks are not driven step by step"):
        Engine(trace, server("0.15.1"))
