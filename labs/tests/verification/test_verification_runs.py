"""Conservation, repeatability, causality and limits: each check passes on the engine and fails on a broken one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency.models import BatchFeatures
from blis_replay.blis.result import SimResult
from blis_replay_labs.verification import conservation, suite
from blis_replay_labs.verification.workloads import ENGINE, LATENCY, LIFECYCLE, Scenario, scenarios

CHOSEN = scenarios(seed=5, requests=40)
SCARCE = CHOSEN[2]


def finished(scenario: Scenario) -> SimResult:
    return simulate(scenario.trace, scenario.engine, LATENCY, LIFECYCLE)


@pytest.fixture
def midway() -> Engine:
    """A moment of a run when two run, some wait, some have not arrived and some blocks are free."""
    engine = Engine(SCARCE.trace, replace(ENGINE, max_num_seqs=2), LIFECYCLE)
    at = engine.state.at[0]
    while at.running_depth < 2 or at.waiting_depth < 2:
        assert engine.schedule() is not None
        engine.run(10_000)
    assert at.arrived < 40
    assert at.free_blocks >= 3
    return engine


def changed(result: SimResult, name: str, request: int, value: int) -> SimResult:
    """The result with one request's value of one array changed."""
    array = getattr(result, name).copy()
    array[request] = value
    return replace(result, **{name: array})


def changed_step(result: SimResult, row: int, column: str, value: int) -> SimResult:
    steps = result.steps.copy()
    steps[column][row] = value
    return replace(result, steps=steps)


# -- the engine passes ---------------------------------------------------------------------


def test_the_workloads_show_what_they_are_made_for() -> None:
    """A run without preemptions says nothing of preemption: then the check fails."""
    assert [fault for scenario in CHOSEN for fault in conservation.missing_features(scenario, finished(scenario))] == []
    ample = replace(SCARCE, engine=ENGINE)
    assert conservation.missing_features(ample, finished(ample)) == ["scarce KV: no preemptions in this run"]


@pytest.mark.slow
def test_the_engine_passes_all_checks_of_runs() -> None:
    rows = [
        conservation.check_conservation(CHOSEN),
        conservation.check_liveness(CHOSEN),
        conservation.check_overload(5, 60, async_scheduling=True),
        suite.check_determinism(CHOSEN),
        *suite.check_driving(CHOSEN, 5),
        suite.check_causality(CHOSEN),
        suite.check_admission(CHOSEN),
        *conservation.check_limits(CHOSEN[2:5]),
    ]
    assert [row for row in rows if not row.passed] == []
    assert {row.measured for row in rows} == {0.0}


# -- conservation ----------------------------------------------------------------------------


def lose_a_waiting_request(state: k.State) -> None:
    state.at[0].waiting_depth -= 1


def lose_the_end_of_the_running_list(state: k.State) -> None:
    state.links[state.at[0].running.head].running.next = k.NONE


def close_the_running_list_to_a_ring(state: k.State) -> None:
    state.links[state.at[0].running.tail].running.next = state.at[0].running.head


def complete_a_running_request(state: k.State) -> None:
    state.requests[state.at[0].running.head].status = k.COMPLETED


def queue_a_running_request(state: k.State) -> None:
    state.by_rank[state.heap[0]] = state.at[0].running.head


def overlook_an_arrival(state: k.State) -> None:
    state.facts["queued_us"][state.at[0].arrived] = 0


@pytest.mark.parametrize(
    "tamper",
    [
        lose_a_waiting_request,
        lose_the_end_of_the_running_list,
        close_the_running_list_to_a_ring,
        complete_a_running_request,
        queue_a_running_request,
        overlook_an_arrival,
    ],
)
def test_a_request_lost_in_the_middle_of_a_run_is_noticed(midway: Engine, tamper: Callable[[k.State], None]) -> None:
    assert conservation.population_faults(midway.state) == []
    tamper(midway.state)
    assert conservation.population_faults(midway.state)


def test_a_conservation_row_fails_with_the_first_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conservation, "population_faults", lambda state: ["one lost"])
    row = conservation.check_conservation(CHOSEN[:1])
    assert (row.passed, row.measured) == (False, 201.0)
    assert row.detail.startswith("201 moments and each end; first fault: synchronous at")


def test_lost_requests_and_tokens_are_noticed_at_the_end() -> None:
    plain = CHOSEN[0]
    result = finished(plain)
    assert conservation.outcome_faults(plain.trace, result) == []
    broken = [
        changed(result, "status", 3, k.DECODING),
        changed(result, "output_tokens", 3, int(result.output_tokens[3]) + 1),
        replace(result, segments=result.segments[1:]),
        changed_step(result, 0, "prefill_tokens", 0),
        changed_step(result, 5, "decode_tokens", 99),
    ]
    assert [bool(conservation.outcome_faults(plain.trace, tampered)) for tampered in broken] == [True] * 5


def test_a_request_that_hangs_is_no_liveness() -> None:
    hanging = changed(finished(SCARCE), "status", 7, k.WAITING)
    assert conservation.liveness_faults(SCARCE.trace, hanging) == ["request 7 never completed"]


def test_arrivals_that_the_engine_can_follow_are_no_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    """With arrivals a second apart nothing queues: the check must not pass on such a run."""
    real = conservation.random_trace
    monkeypatch.setattr(conservation, "random_trace", lambda rng, n, gap_us: real(rng, n, 1e6))
    row = conservation.check_overload(5, 60, async_scheduling=False)
    assert not row.passed
    assert "no overload" in row.detail


# -- repeatability ---------------------------------------------------------------------------


def test_one_microsecond_in_one_array_is_a_difference() -> None:
    result = finished(SCARCE)
    later = changed(result, "scheduled_us", 9, int(result.scheduled_us[9]) + 1)
    assert suite.differing_fields(result, later) == ["scheduled_us differs"]


def test_a_run_that_depends_on_the_call_is_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([finished(SCARCE), changed(finished(SCARCE), "preemptions", 0, 99)])
    monkeypatch.setattr(suite, "simulate", lambda *arguments: next(results))
    row = suite.check_determinism([SCARCE])
    assert (row.passed, row.measured) == (False, 1.0)


def test_step_times_a_little_off_are_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ns a token are a us for 100 tokens of prompt, and move everything after them."""
    slower = replace(LATENCY, per_prefill_token_ns=LATENCY.per_prefill_token_ns + 10)
    real = suite.SlowLatency
    monkeypatch.setattr(suite, "SlowLatency", lambda: real(slower))
    stepped, pieces = suite.check_driving([SCARCE], 5)
    assert (stepped.passed, pieces.passed) == (False, True)


# -- causality -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("queued_us", 0, "queued before it arrived"),
        ("scheduled_us", 1, "scheduled before it queued"),
        ("scheduled_us", -1, "first token without being scheduled"),
        ("scheduled_us", 10**12, "first token not after it was scheduled"),
        ("last_step", 0, "finished before its first token"),
        ("first_step", -1, "completed without a first token"),
        ("output_tokens", -(10**6), "latency to the client below"),
        ("scheduled_step", 0, "scheduled at another time than its step"),
        ("output_tokens", 1000, "its token times do not ascend"),
    ],
)
def test_each_timestamp_out_of_order_is_named(name: str, value: int, complaint: str) -> None:
    result = finished(SCARCE)
    assert suite.causality_faults(result) == []
    faults = suite.causality_faults(changed(result, name, 12, value))
    assert [fault for fault in faults if "request 12" in fault and complaint in fault]


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [
        ("end_us", 0, "ends before it begins"),
        ("start_us", 0, "begins before it is scheduled"),
        ("start_us", 1, "overlaps the step before it"),
        ("scheduled_us", 0, "scheduled before the step before it"),
    ],
)
def test_each_step_out_of_order_is_named(column: str, value: int, complaint: str) -> None:
    faults = suite.causality_faults(changed_step(finished(SCARCE), 30, column, value))
    assert [fault for fault in faults if "step 30" in fault and complaint in fault]


def test_an_engine_without_room_admits_late() -> None:
    """With one sequence at a time requests wait: the check of prompt admission sees it."""
    one = replace(CHOSEN[0], engine=replace(ENGINE, max_num_seqs=1))
    assert len(suite.late_admissions(finished(one))) > 10


# -- limits ----------------------------------------------------------------------------------


def test_a_batch_beyond_a_limit_is_noticed() -> None:
    """The limits are 128 tokens and 8 sequences."""
    full = BatchFeatures(
        prefill_tokens=121, prefill_requests=1, decode_tokens=7, context_tokens=0, running=8, waiting=0, start_us=0
    )
    assert conservation.batch_faults(ENGINE, full) == []
    assert conservation.batch_faults(ENGINE, replace(full, prefill_tokens=122)) == [
        "129 tokens in a batch of at most 128"
    ]
    assert conservation.batch_faults(ENGINE, replace(full, running=9)) == ["9 requests run, at most 8 may"]
    assert conservation.batch_faults(ENGINE, replace(full, prefill_tokens=1, prefill_requests=2, decode_tokens=1))


@pytest.fixture
def sharing() -> Engine:
    """A server with a prefix cache in the midst of its work: cached blocks held, and others free."""
    engine = CHOSEN[4].start()
    state = engine.state
    while len(cached_and_free(state)) < 2 or state.at[0].running_depth < 2 or not entered(state).all():
        assert engine.schedule() is not None
        engine.run(10_000)
    return engine


def entered(state: k.State) -> NDArray[np.bool_]:
    """Whether the first and the last running request hold cached blocks."""
    if state.at[0].running_depth == 0:
        return np.zeros(1, np.bool_)
    return state.requests["extents_held"][[state.at[0].running.head, state.at[0].running.tail]] > 0


def cached_and_free(state: k.State) -> list[int]:
    """Cached extents that nobody holds."""
    return [extent for extent in conservation.free_queue(state)[0] if state.extents[extent].depth != k.UNKEYED]


def held_extent(state: k.State) -> int:
    return int(state.table[state.requests[state.at[0].running.tail].table_row, 0])


def list_an_extent_of_another(state: k.State) -> None:
    rows = state.requests["table_row"][[state.at[0].running.head, state.at[0].running.tail]]
    last = state.requests[state.at[0].running.tail].extents_held - 1
    state.table[rows[0], :2] = state.table[rows[1], 2 * last : 2 * last + 2]


def forget_a_holder(state: k.State) -> None:
    state.extents[held_extent(state)].ref_count -= 1


def hold_what_is_free(state: k.State) -> None:
    state.extents[cached_and_free(state)[0]].ref_count = 1


def lose_the_end_of_the_free_queue(state: k.State) -> None:
    state.at[0].free_queue.tail = state.extents[state.at[0].free_queue.tail].queue.previous


def link_to_what_is_not_an_extent(state: k.State) -> None:
    state.extents[state.at[0].free_queue.head].queue.next = state.at[0].extents_used


def link_one_way_only(state: k.State) -> None:
    state.extents[state.at[0].free_queue.tail].queue.previous = k.NONE


def queue_an_extent_without_blocks(state: k.State) -> None:
    state.extents[state.at[0].free_queue.head].blocks = 0


def lengthen_a_free_extent(state: k.State) -> None:
    state.extents[state.at[0].free_queue.head].blocks += 1


def lose_contents_of_a_neighbour(state: k.State) -> None:
    queue = conservation.free_queue(state)[0]
    state.extents["depth"][queue[:2]] = k.UNKEYED


def count_a_free_block_too_many(state: k.State) -> None:
    state.at[0].free_blocks += 1


def lose_a_block_of_a_decode(state: k.State) -> None:
    decoding = int(np.argmax(state.requests["status"] == k.DECODING))
    state.requests[decoding].step_offset += int(state.config[0].block_size)


def hold_too_few_for_a_prefill(state: k.State) -> None:
    running = conservation.running_requests(state)
    request = state.requests[running[0]]
    request.status, request.blocks_held, request.computed = k.PREFILLING, 1, 1000


@pytest.mark.parametrize(
    "tamper",
    [
        list_an_extent_of_another,
        forget_a_holder,
        hold_what_is_free,
        lose_the_end_of_the_free_queue,
        link_to_what_is_not_an_extent,
        link_one_way_only,
        queue_an_extent_without_blocks,
        lengthen_a_free_extent,
        lose_contents_of_a_neighbour,
        count_a_free_block_too_many,
        lose_a_block_of_a_decode,
        hold_too_few_for_a_prefill,
    ],
)
def test_wrong_block_accounts_are_noticed(sharing: Engine, tamper: Callable[[k.State], None]) -> None:
    assert conservation.block_faults(sharing.state) == []
    tamper(sharing.state)
    assert conservation.block_faults(sharing.state)


def test_a_waiting_request_that_holds_blocks_is_noticed(midway: Engine) -> None:
    state = midway.state
    assert conservation.block_faults(state) == []
    state.requests["blocks_held"][state.by_rank[state.heap[0]]] = 1
    assert conservation.block_faults(state)


def test_a_cached_block_that_nobody_finds_is_noticed() -> None:
    engine = CHOSEN[4].start()
    engine.advance(LATENCY, int(CHOSEN[4].trace.arrival_us[20]))
    assert conservation.block_faults(engine.state) == []
    state = engine.state
    key = int(np.argmax(state.extent_of_key != k.NONE))
    extent = int(state.extent_of_key[key])
    state.extent_of_key[key] = k.NONE
    assert conservation.block_faults(state) == [f"block 0 of extent {extent} is not found under its key"]
    state.extent_of_key[key] = extent
    unused = int(np.argmax(state.extent_of_key == k.NONE))
    state.extent_of_key[unused] = extent
    assert conservation.block_faults(state) == [f"under key {unused} something is found that is not cached"]


def test_rows_of_limits_fail_with_their_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conservation, "batch_faults", lambda engine, batch: ["too many"])
    monkeypatch.setattr(conservation, "block_faults", lambda state, scheduled=False: ["block lost"])
    assert [row.passed for row in conservation.check_limits(CHOSEN[:1])] == [False, False]
