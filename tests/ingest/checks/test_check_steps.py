"""Step cycle, requests in flight and prefix cache, from step records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import polars as pl
import pytest
from builders import aggregates, in_database, recording, requests, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import PLANTED, planted_recording

from blis_replay.ingest.checks.evidence import Window, stage_windows, step_intervals, steps_in
from blis_replay.ingest.checks.ledger import IN_FLIGHT, entries
from blis_replay.ingest.checks.prefix_cache import uncached_prompt_tokens
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.checks.step_times import cycle_us
from blis_replay.ingest.recording import Finding, Recording, Stage
from blis_replay.ingest.rows import rows_of
from blis_replay_labs.planted.faults import to_depth


def findings_of(made: Recording, check: str) -> list[Finding]:
    return [finding for finding in run_checks(made)[0] if finding.check == check]


SECOND = 1_000_000


def steady(rate_per_s: float, e2e_us: int, seconds: int = 120) -> pl.DataFrame:
    """Evenly spaced requests for one stage, 11 tokens each."""
    count = int(rate_per_s * seconds)
    arrivals = [round(i * SECOND / rate_per_s) for i in range(count)]
    return requests(count, arrival_us=arrivals, e2e_us=e2e_us, prompt_tokens=600)


def steady_run(e2e_us: int, starts: Iterable[int] = range(0, 120 * SECOND, 20_000), **of_steps: Any) -> Recording:
    """120 s of 4 requests/s, and steps that start every 20 ms."""
    made = steps(starts, **of_steps)
    return recording(stages=(Stage(0, 4.0, 120 * SECOND),), requests=steady(4, e2e_us), steps=made)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(1, 5000), min_size=2, max_size=300), st.integers(1, 50_000))
def test_the_cycle_does_not_depend_on_which_steps_were_sampled(ids: set[int], cycle: int) -> None:
    sampled = sorted(ids)
    assert cycle_us(step_intervals(rows_of(steps([i * cycle for i in sampled], sampled)))) == pytest.approx(cycle)


def test_the_cycle_skips_a_restart_of_the_server() -> None:
    # Step numbers begin again after 10 s of silence: that pair says nothing.
    records = steps([0, 20_000, 10_000_000, 10_020_000], [100, 101, 1, 2])
    assert cycle_us(step_intervals(rows_of(records))) == 20_000


def test_a_duration_far_below_the_cycle_is_corrected() -> None:
    """One step each 20 ms, 0.3 ms of it inside schedule(); the client sees (250 - 50) / 10 = 20 ms."""
    made = steady_run(250_000)
    (finding,) = findings_of(made, "step_cycle")
    assert (finding.severity, finding.metric) == ("corrected", "step_time")
    assert finding.measured["cycle_us"] == finding.measured["client_gap_us"] == 20_000
    assert finding.measured["duration_us"] == 300


def test_a_duration_that_is_the_cycle_is_only_noted() -> None:
    made = steady_run(250_000, duration_us=20_000)
    (finding,) = findings_of(made, "step_cycle")
    assert finding.severity == "note"


def in_flight_of(made: Recording) -> tuple[float, float, list[str]]:
    """Requests in flight by the client and by its step records, and what the ledger objects to."""
    client, of_steps = (entry.value for entry in entries(made) if entry.quantity == IN_FLIGHT)
    return (
        client,
        of_steps,
        [f.message for f in findings_of(made, "ledger") if f.severity == "unusable" and IN_FLIGHT in f.message],
    )


@pytest.mark.parametrize(("e2e_us", "running", "waiting"), [(250_000, 1, 0), (500_000, 1, 1)])
def test_the_engine_has_what_the_client_has_in_flight(e2e_us: int, running: int, waiting: int) -> None:
    """4 requests/s that stay 0.25 s: one is running on average; that stay 0.5 s: of two one waits."""
    client, of_steps, objections = in_flight_of(steady_run(e2e_us, running_depth=running, waiting_depth=waiting))
    assert client == pytest.approx(running + waiting, abs=0.005)
    assert of_steps == running + waiting
    assert objections == []


def test_steps_of_another_run_have_other_requests_in_flight() -> None:
    (objection,) = in_flight_of(steady_run(250_000, running_depth=2))[2]
    assert "requests in flight: 2.0 against 1.0" in objection


def test_steps_are_compared_when_they_began() -> None:
    """Every 250 ms a request that stays 625 ms: 2 or 3 in flight, 2.5 on average; the recorded steps all see 3."""
    made = steady_run(625_000, starts=range(10_000, 120 * SECOND, 250_000), running_depth=3)
    client, of_steps, objections = in_flight_of(made)
    assert client == pytest.approx(of_steps, abs=0.02)
    assert objections == []


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_a_pause_is_no_part_of_the_last_step_before_it(share: float) -> None:
    """0.3 requests/s of 1.3 s each: 0.4 in flight, while each recorded step has at least 1."""
    load = replace(PLANTED, stages=(Stage(0, 0.3, 300_000_000),), step_sample_rate=share)
    client, of_steps, objections = in_flight_of(to_depth(planted_recording(1, load).recording, "steps"))
    assert of_steps / client == pytest.approx(1, abs=0.02)
    assert objections == []


def test_windows_leave_out_the_ramp_of_each_stage_and_follow_its_real_start() -> None:
    """Stages of 600 s: 20 to 590 s; a stage that begins 30 s late is measured from 10 s after its first send."""
    made = recording(
        stages=(Stage(0, 8.0, 600 * SECOND), Stage(1, 20.0, 600 * SECOND)),
        requests=requests(4, stage=[0, 0, 1, 1], arrival_us=[0, 599 * SECOND, 630 * SECOND, 1229 * SECOND]),
    )
    assert [(w.stage, w.start_us // SECOND, w.end_us // SECOND) for w in stage_windows(made)] == [
        (0, 20, 590),
        (1, 640, 1190),
    ]


def test_uncached_prompt_tokens_are_scaled_by_the_sampling_rate() -> None:
    """Every tenth of steps 1..991 sampled, 12 prefill tokens in each: 100 x 12 / (100 / 991) over 100 requests."""
    ids = list(range(1, 1001, 10))
    made = recording(requests=requests(100), steps=steps([i * 20_000 for i in ids], ids, prefill_tokens=12))
    assert uncached_prompt_tokens(made) == pytest.approx(100 * 12 * (991 / 100) / 100)


def test_the_hit_rate_follows_from_computed_and_sent_prompt_tokens() -> None:
    """100 requests of 600 tokens; 1,000 consecutive steps with 1.2 prefill tokens each are 12 a request: 98 % hits."""
    made = recording(
        requests=requests(100, prompt_tokens=600),
        steps=steps(range(0, 20_000_000, 20_000), prefill_tokens=[0, 3, 0, 3, 0] * 200),
    )
    (finding,) = findings_of(made, "prefix_cache")
    assert finding.measured["uncached_tokens_per_request"] == pytest.approx(12)
    assert finding.measured["hit_rate"] == pytest.approx(0.98)
    assert "prefills 50 times too much" in finding.message


def test_cached_tokens_of_the_server_are_used_first() -> None:
    made = recording(requests=requests(2, prompt_tokens=100, cached_prompt_tokens=[80, 40]), prefix_hit_rate=0.9)
    (finding,) = findings_of(made, "prefix_cache")
    assert finding.measured["hit_rate"] == pytest.approx(0.6)


def test_an_aggregate_hit_rate_is_named_as_such() -> None:
    (finding,) = findings_of(recording(prefix_hit_rate=0.25), "prefix_cache")
    assert "25.0 % is an aggregate; which requests hit is not identified" in finding.message


@pytest.mark.parametrize(("us_per_token", "both"), [(2.8, True), (100.0, False)])
def test_a_warm_cache_and_a_fast_prefill_look_alike(us_per_token: float, both: bool) -> None:
    """Prompts of 100 to 4,060 tokens at steps of 20 ms: 2.8 us per token is computed by nothing, or cached."""
    prompts = [100 + 40 * i for i in range(100)]
    ttft = [50_000 + round(us_per_token * n) for n in prompts]
    made = requests(100, prompt_tokens=prompts, output_tokens=21, ttft_us=ttft, e2e_us=[t + 400_000 for t in ttft])
    (finding,) = findings_of(recording(requests=made), "prefix_cache")
    assert finding.is_checked is both
    if both:
        assert finding.measured["us_per_prompt_token"] == pytest.approx(2.8, rel=0.01)


def test_prompts_that_hardly_differ_tell_nothing_of_a_cache() -> None:
    """Prompts of 98 to 102 tokens, TTFT of 50 ms +- 10 that knows nothing of them: a slope of 0 +- 700 us."""
    made = requests(
        100,
        prompt_tokens=[98 + i % 5 for i in range(100)],
        output_tokens=21,
        ttft_us=[40_000 + 5_000 * (i // 5 % 5) for i in range(100)],
        e2e_us=[440_000 + 5_000 * (i // 5 % 5) for i in range(100)],
    )
    (finding,) = findings_of(recording(requests=made), "prefix_cache")
    assert not finding.is_checked


@pytest.mark.slow
def test_without_steps_nothing_is_claimed() -> None:
    made = recording(aggregates=aggregates())
    for check in ("step_clock", "step_cycle", "prefix_cache"):
        (finding,) = findings_of(made, check)
        assert finding.message.startswith("not checked: ")


@pytest.mark.slow
@given(st.lists(st.tuples(st.none() | st.integers(0, 12), st.none() | st.integers(0, 40)), max_size=30))
def test_intervals_lie_between_steps_of_a_window_in_order_of_time(records: list[tuple[int | None, int | None]]) -> None:
    """Against the rule written out: steps of which some began at 10 to 29 us, in any order, wherever they are."""
    columns = {"step_id": [step for step, _ in records], "start_us": [start for _, start in records]}
    frame = steps([0] * len(records)).with_columns(pl.Series(name, of, pl.Int64) for name, of in columns.items())
    inside = sorted((start, step) for step, start in records if step is not None and start in range(10, 30))
    expected = [
        (step, start, after[0] - start, after[1] - step)
        for (start, step), after in pairwise(inside)
        if after[0] > start and after[1] > step
    ]
    for rows in (rows_of(frame), in_database(frame, 3)):
        found = step_intervals(steps_in(recording(steps=rows), Window(-1, 10, 30, None)))
        assert found.frame(["step_id", "start_us", "elapsed_us", "elapsed_steps"]).rows() == expected
