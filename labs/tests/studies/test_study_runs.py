"""Runs of studies: what is measured, and published figures that come out again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from blis_replay.blis.trace import EngineConfig
from blis_replay_labs.cluster.config import ClusterConfig, LeastLoaded
from blis_replay_labs.cluster.simulate import ClusterResult, simulate_cluster
from blis_replay_labs.studies.cluster import MEASURES, counted, jain_index, measures
from blis_replay_labs.studies.read import load_study
from blis_replay_labs.studies.study import StudyResult, run_studies
from blis_replay_labs.verification.workloads import LATENCY, LIFECYCLE, random_trace

TRACE = random_trace(np.random.default_rng(3), 300, 4_000.0)
ENGINE = EngineConfig(8, 128, 512, async_scheduling=False, num_gpu_blocks=60)


@pytest.fixture(scope="module")
def result() -> ClusterResult:
    """300 requests on three instances, some of them preempted."""
    return simulate_cluster(TRACE, ClusterConfig(3, LeastLoaded()), ENGINE, LATENCY, LIFECYCLE)


def one(name: str, configurations: list[str], systems: tuple[str, ...] = ("B",)) -> StudyResult:
    """A study that ships, with some of its configurations only, and its first seed."""
    study = load_study(name)
    chosen = {chosen: study.configurations[chosen] for chosen in configurations}
    small = replace(study, configurations=chosen, checks=(), evidence=(), systems=systems, seeds=(42,))
    return run_studies([small], executor="serial")[0]


def test_jain_index() -> None:
    """(1 + 2 + 3)^2 / (3 (1 + 4 + 9)) = 36 / 42; everything with one of four is 1 / 4."""
    assert jain_index([1, 2, 3]) == pytest.approx(36 / 42)
    assert jain_index([7, 7]) == 1.0
    assert jain_index([0, 0, 5, 0]) == 0.25


def test_measures_are_those_that_are_promised(result: ClusterResult) -> None:
    found = measures(TRACE, result, 0.5)
    assert set(found) == set(MEASURES)
    assert found["completed"] == found["admitted"] == 300
    assert found["ttft_mean_ms"] == pytest.approx(result.ttft_us.mean() / 1000)
    assert found["decode_mean_ms"] == pytest.approx(found["e2e_mean_ms"] - found["ttft_mean_ms"])
    assert found["preemptions_per_request"] > 0


@pytest.mark.parametrize("at_us", [0, 1, 100_000, 654_321, 1_000_000, 2_500_000, 10**9])
def test_the_count_at_a_moment_is_that_of_the_requests(result: ClusterResult, at_us: int) -> None:
    """Depths of the step tables against stamps of the requests: nobody is lost between the two."""
    found = counted(result, at_us)
    queued = sum(int((run.queued_us <= at_us).sum()) for run in result.instances)
    finished = sum(int((run.finished_us <= at_us).sum()) for run in result.instances)
    assert found == {
        "counted_completed": finished,
        "counted_in_system": queued - finished,
        "counted_lost": 0.0,
    }


def test_a_request_that_vanishes_is_counted_as_lost(result: ClusterResult) -> None:
    """An instance that has a request more in its queue times than in its depths."""
    run = result.instances[0]
    queued_us = np.append(run.queued_us, 0)
    more = replace(run, queued_us=queued_us, status=np.append(run.status, 0), last_step=np.append(run.last_step, -1))
    broken = replace(result, instances=(more, *result.instances[1:]))
    assert counted(broken, 1_000_000)["counted_lost"] == 1.0


def test_the_published_control_of_shared_prefixes_comes_out_again() -> None:
    """Published: 21.73, 22.24, 22.74 ms at 0, 256, 512.

    By hand for B: 4,680 + trunc(7,051.8 + 19.54 x 512) = 21,736 us for 512 tokens; with a prefix of 512 on top the
    first of ten requests computes 1,024, which is 19.54 x 512 / 10 = 1,000 us more in the mean.
    """
    names = [f"alone, prefix {prefix}" for prefix in (0, 256, 512)]
    (system,) = one("shared-prefix", names).systems
    found = [system.measured[name]["ttft_mean_ms"][0] for name in names]
    assert found == pytest.approx([21.736, 22.2362, 22.7364], abs=1e-4)
    assert found == pytest.approx([21.73, 22.24, 22.74], abs=0.01)


def test_a_prefix_that_is_the_prompt_leaves_one_block_to_compute() -> None:
    """31 of 32 blocks hit: 4,680 + trunc(7,051.8 + 19.54 x 16) = 12,044 us for all but the first of 1,000."""
    (system,) = one("shared-prefix", ["alone, within 512"]).systems
    assert system.measured["alone, within 512"]["ttft_mean_ms"][0] == pytest.approx((999 * 12.044 + 21.736) / 1000)


def test_the_published_slowdown_of_the_busiest_instance() -> None:
    """Published for B: 6.4 to 6.5 times; the arrivals are other draws of the same law."""
    (system,) = one("always-busiest", ["balanced", "busiest"]).systems
    ttft = {name: values["ttft_mean_ms"][0] for name, values in system.measured.items()}
    assert ttft["busiest"] / ttft["balanced"] == pytest.approx(6.45, rel=0.05)
    assert system.measured["busiest"]["jain_index"][0] == 0.25


def test_the_token_bucket_admits_about_29_of_200() -> None:
    """10,000 tokens and 0.4 s of 1,000/s pay for about 29 of the shorter prompts (published: 29)."""
    (system,) = one("conservation", ["round-robin fcfs, bucket"]).systems
    assert system.measured["round-robin fcfs, bucket"]["admitted"][0] == pytest.approx(29, abs=6)


@pytest.mark.slow
def test_a_single_queue_is_as_busy_as_its_steps() -> None:
    """A at load 0.5: 1,117.5 ms alone, 884.9 of them steps: utilisation 0.5 x 0.792 = 0.396."""
    (system,) = one("step-quantum", ["beta x 1, load 0.5"], ("A",)).systems
    found = {name: values[0] for name, values in system.measured["beta x 1, load 0.5"].items()}
    assert found["step_total_ms"] / found["zero_load_e2e_ms"] == pytest.approx(884.9 / 1117.5, abs=0.0005)
    assert found["effective_utilization"] == pytest.approx(0.396, rel=0.03)
    assert found["late_starts"] == 0


@pytest.mark.slow
def test_executors_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blis_replay.replay.executors.POOL_START_S", -1.0)  # a pool, however short the jobs
    study = replace(load_study("sjf"), systems=("A",), seeds=(1, 2, 3, 4))
    one_way, other = (run_studies([study], executor=executor, workers=2)[0] for executor in ("serial", "local"))
    for name, by_measure in one_way.systems[0].measured.items():
        for measure, values in by_measure.items():
            assert values.tobytes() == other.systems[0].measured[name][measure].tobytes()
