"""Conservation, repeatability, causality and limits: each check passes on the engine and fails on a broken one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.kernel import state as k
from blis_replay.blis.latency import BatchFeatures
from blis_replay.blis.result import SimResult
from blis_replay.blis.verification import conservation, limits, repeatability, timestamps
from blis_replay.blis.verification.workloads import ENGINE, LATENCY, LIFECYCLE, Scenario, scenarios

CHOSEN = scenarios(seed=5, requests=40)
SCARCE = CHOSEN[2]


def finished(scenario: Scenario) -> SimResult:
    return simulate(scenario.trace, scenario.engine, LATENCY, LIFECYCLE)


@pytest.fixture
def midway() -> Engine:
    """A moment of a run when two run, some wait, some have not arrived and some blocks are free."""
    engine = Engine(SCARCE.trace, replace(ENGINE, max_num_seqs=2), LIFECYCLE)
    at = engine.state.at
    while at[k.RUNNING_DEPTH] < 2 or at[k.WAITING_DEPTH] < 2:
        assert engine.schedule() is not None
        engine.run(10_000)
    assert at[k.ARRIVED] < 40
    assert at[k.FREE_BLOCKS] >= 3
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


def test_the_engine_passes_all_checks_of_runs() -> None:
    rows = [
        conservation.check_conservation(CHOSEN),
        conservation.check_liveness(CHOSEN),
        conservation.check_overload(5, 60, async_scheduling=True),
        repeatability.check_determinism(CHOSEN),
        *repeatability.check_driving(CHOSEN, 5),
        timestamps.check_causality(CHOSEN),
        timestamps.check_admission(CHOSEN),
        *limits.check_limits(CHOSEN[2:5]),
    ]
    assert [row for row in rows if not row.passed] == []
    assert {row.measured for row in rows} == {0.0}


# -- conservation ----------------------------------------------------------------------------


def lose_a_waiting_request(state: k.State) -> None:
    state.at[k.WAITING_DEPTH] -= 1


def lose_the_end_of_the_running_list(state: k.State) -> None:
    state.link[state.at[k.RUN_HEAD], k.RUN_NEXT] = k.NONE


def close_the_running_list_to_a_ring(state: k.State) -> None:
    state.link[state.at[k.RUN_TAIL], k.RUN_NEXT] = state.at[k.RUN_HEAD]


def complete_a_running_request(state: k.State) -> None:
    state.request[state.at[k.RUN_HEAD], k.STATUS] = k.COMPLETED


def queue_a_running_request(state: k.State) -> None:
    state.by_rank[state.heap[0]] = state.at[k.RUN_HEAD]


def overlook_an_arrival(state: k.State) -> None:
    state.queued_us[state.at[k.ARRIVED]] = 0


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
    assert repeatability.differing_fields(result, later) == ["scheduled_us differs"]


def test_a_run_that_depends_on_the_call_is_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([finished(SCARCE), changed(finished(SCARCE), "preemptions", 0, 99)])
    monkeypatch.setattr(repeatability, "simulate", lambda *arguments: next(results))
    row = repeatability.check_determinism([SCARCE])
    assert (row.passed, row.measured) == (False, 1.0)


def test_step_times_a_little_off_are_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ns a token are a us for 100 tokens of prompt, and move everything after them."""
    slower = replace(LATENCY, per_prefill_token_ns=LATENCY.per_prefill_token_ns + 10)
    real = repeatability.SlowLatency
    monkeypatch.setattr(repeatability, "SlowLatency", lambda: real(slower))
    stepped, pieces = repeatability.check_driving([SCARCE], 5)
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
    assert timestamps.causality_faults(result) == []
    faults = timestamps.causality_faults(changed(result, name, 12, value))
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
    faults = timestamps.causality_faults(changed_step(finished(SCARCE), 30, column, value))
    assert [fault for fault in faults if "step 30" in fault and complaint in fault]


def test_an_engine_without_room_admits_late() -> None:
    """With one sequence at a time requests wait: the check of prompt admission sees it."""
    one = replace(CHOSEN[0], engine=replace(ENGINE, max_num_seqs=1))
    assert len(timestamps.late_admissions(finished(one))) > 10


# -- limits ----------------------------------------------------------------------------------


def test_a_batch_beyond_a_limit_is_noticed() -> None:
    """The limits are 128 tokens and 8 sequences."""
    full = BatchFeatures(
        prefill_tokens=121, prefill_requests=1, decode_tokens=7, context_tokens=0, running=8, waiting=0, start_us=0
    )
    assert limits.batch_faults(ENGINE, full) == []
    assert limits.batch_faults(ENGINE, replace(full, prefill_tokens=122)) == ["129 tokens in a batch of at most 128"]
    assert limits.batch_faults(ENGINE, replace(full, running=9)) == ["9 requests run, at most 8 may"]
    assert limits.batch_faults(ENGINE, replace(full, prefill_tokens=1, prefill_requests=2, decode_tokens=1))


@pytest.fixture
def sharing() -> Engine:
    """A server with a prefix cache in the midst of its work: cached blocks held, and others free."""
    engine = CHOSEN[4].start()
    state = engine.state
    while len(cached_and_free(state)) < 2 or state.at[k.RUNNING_DEPTH] < 2 or not entered(state).all():
        assert engine.schedule() is not None
        engine.run(10_000)
    return engine


def entered(state: k.State) -> NDArray[np.bool_]:
    """Whether the first and the last running request hold cached blocks."""
    if state.at[k.RUNNING_DEPTH] == 0:
        return np.zeros(1, np.bool_)
    return state.request[[state.at[k.RUN_HEAD], state.at[k.RUN_TAIL]], k.PIECES_HELD] > 0


def cached_and_free(state: k.State) -> list[int]:
    """Cached pieces that nobody holds."""
    return [piece for piece in limits.free_queue(state)[0] if state.piece[piece, k.DEPTH] != k.ALIKE]


def held_piece(state: k.State) -> int:
    return int(state.table[state.request[state.at[k.RUN_TAIL], k.TABLE_ROW], 0])


def list_a_piece_of_another(state: k.State) -> None:
    rows = state.request[[state.at[k.RUN_HEAD], state.at[k.RUN_TAIL]], k.TABLE_ROW]
    last = state.request[state.at[k.RUN_TAIL], k.PIECES_HELD] - 1
    state.table[rows[0], :2] = state.table[rows[1], 2 * last : 2 * last + 2]


def forget_a_holder(state: k.State) -> None:
    state.piece[held_piece(state), k.HOLDERS] -= 1


def hold_what_is_free(state: k.State) -> None:
    state.piece[cached_and_free(state)[0], k.HOLDERS] = 1


def lose_the_end_of_the_free_queue(state: k.State) -> None:
    state.at[k.QUEUE_TAIL] = state.piece[state.at[k.QUEUE_TAIL], k.QUEUE_BEFORE]


def link_to_what_is_no_piece(state: k.State) -> None:
    state.piece[state.at[k.QUEUE_HEAD], k.QUEUE_AFTER] = state.at[k.PIECES_USED]


def link_one_way_only(state: k.State) -> None:
    state.piece[state.at[k.QUEUE_TAIL], k.QUEUE_BEFORE] = k.NONE


def queue_a_piece_without_blocks(state: k.State) -> None:
    state.piece[state.at[k.QUEUE_HEAD], k.PIECE_BLOCKS] = 0


def lengthen_a_free_piece(state: k.State) -> None:
    state.piece[state.at[k.QUEUE_HEAD], k.PIECE_BLOCKS] += 1


def lose_contents_of_a_neighbour(state: k.State) -> None:
    queue = limits.free_queue(state)[0]
    state.piece[queue[:2], k.DEPTH] = k.ALIKE


def count_a_free_block_too_many(state: k.State) -> None:
    state.at[k.FREE_BLOCKS] += 1


def lose_a_block_of_a_decode(state: k.State) -> None:
    decoding = int(np.argmax(state.request[:, k.STATUS] == k.DECODING))
    state.request[decoding, k.BASE] += int(state.config[k.BLOCK_SIZE])


def hold_too_few_for_a_prefill(state: k.State) -> None:
    running = limits.running_requests(state)
    state.request[running[0], [k.STATUS, k.BLOCKS_HELD, k.COMPUTED]] = k.PREFILLING, 1, 1000


@pytest.mark.parametrize(
    "tamper",
    [
        list_a_piece_of_another,
        forget_a_holder,
        hold_what_is_free,
        lose_the_end_of_the_free_queue,
        link_to_what_is_no_piece,
        link_one_way_only,
        queue_a_piece_without_blocks,
        lengthen_a_free_piece,
        lose_contents_of_a_neighbour,
        count_a_free_block_too_many,
        lose_a_block_of_a_decode,
        hold_too_few_for_a_prefill,
    ],
)
def test_wrong_block_accounts_are_noticed(sharing: Engine, tamper: Callable[[k.State], None]) -> None:
    assert limits.block_faults(sharing.state) == []
    tamper(sharing.state)
    assert limits.block_faults(sharing.state)


def test_a_waiting_request_that_holds_blocks_is_noticed(midway: Engine) -> None:
    state = midway.state
    assert limits.block_faults(state) == []
    state.request[state.by_rank[state.heap[0]], k.BLOCKS_HELD] = 1
    assert limits.block_faults(state)


def test_a_cached_block_that_nobody_finds_is_noticed() -> None:
    engine = CHOSEN[4].start()
    engine.advance(LATENCY, int(CHOSEN[4].trace.arrival_us[20]))
    assert limits.block_faults(engine.state) == []
    state = engine.state
    key = int(np.argmax(state.found != k.NONE))
    piece = int(state.found[key])
    state.found[key] = k.NONE
    assert limits.block_faults(state) == [f"block 0 of piece {piece} is not found under its key"]
    state.found[key] = piece
    unused = int(np.argmax(state.found == k.NONE))
    state.found[unused] = piece
    assert limits.block_faults(state) == [f"under key {unused} something is found that is not cached"]


def test_rows_of_limits_fail_with_their_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "batch_faults", lambda engine, batch: ["too many"])
    monkeypatch.setattr(limits, "block_faults", lambda state, scheduled=False: ["block lost"])
    assert [row.passed for row in limits.check_limits(CHOSEN[:1])] == [False, False]
