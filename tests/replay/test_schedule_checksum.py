"""The schedule as a checksum: the engine's steps for the recorded queue against the recorded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import ENGINE, LATENCY, Request, logged, served, workload
from steplog import with_step_log

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import ReplayError
from blis_replay.blis.engine import Engine
from blis_replay.blis.kernel import loop
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import NEVER_US, BlockKeys, EngineConfig, KvCacheGroup, RequestTrace, release_arguments
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.recording import LIFECYCLE_SCHEMA, STEP_SCHEMA, Recording
from blis_replay.ingest.rows import no_rows, rows_of
from blis_replay.ingest.scratch import Scratch
from blis_replay.ingest.steps.placed import place
from blis_replay.replay.engine import replayed_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.schedule.checksum import ScheduleCheck, check_schedule
from blis_replay.replay.schedule.recorded import (
    COUNTS,
    LOG,
    NEVER,
    QUEUED_SCHEMA,
    RECORDS,
    RecordedSchedule,
    recorded_schedule,
)


def recorded(seed: int = 1, engine: EngineConfig = ENGINE, **kwargs: Any) -> Recording:
    """The recording of a workload, its iterations placed."""
    made = logged(workload(seed, **kwargs), engine)
    return replace(made, iterations=place(made, Scratch()).iterations)


def checked(recording: Recording, engine: EngineConfig = ENGINE) -> ScheduleCheck:
    return check_schedule(recorded_schedule(recording), engine)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), asynchronous=st.booleans(), sequences=st.sampled_from([3, 8, 32]))
def test_a_log_of_the_engine_itself_is_equal_in_every_step(seed: int, asynchronous: bool, sequences: int) -> None:
    engine = replace(ENGINE, async_scheduling=asynchronous, max_num_seqs=sequences, max_num_batched_tokens=400)
    check = checked(recorded(seed, engine, requests=40), engine)
    assert (check.divergence, check.kv_divergence) == (None, None)
    assert check.equal == check.steps == len(check.schedule.step)
    assert check.whole
    assert check.schedule.source == LOG


@pytest.mark.parametrize(
    "change",
    [{"max_num_seqs": 3}, {"max_num_batched_tokens": 300}, {"long_prefill_token_threshold": 200}],
    ids=lambda change: next(iter(change)),
)
def test_the_first_step_with_other_counts_is_located(change: dict[str, int]) -> None:
    """The log is of ENGINE; the replay is of one with another argument."""
    recording = recorded()
    check = checked(recording, replace(ENGINE, **change))  # type: ignore[arg-type]
    assert check.divergence is not None
    row, schedule = check.divergence.row, check.schedule
    assert check.equal == row
    assert check.simulated is not None
    same = [(schedule.counts[name][:row] == check.simulated.counts[name][:row]).all() for name in schedule.counts]
    assert all(same)
    assert check.divergence.expected != check.divergence.seen
    truth_us = int(served(workload(1)).steps["scheduled_us"][row])
    assert check.divergence.start_us is not None
    assert abs(check.divergence.start_us - truth_us) < 20_000
    begun = served(workload(1)).scheduled_step
    about = {f"request {i}" for i in np.flatnonzero(np.abs(begun - row) <= 1)}
    assert about & set(check.divergence.requests)


def test_with_other_blocks_only_the_usage_differs() -> None:
    """500 blocks in place of 1,000, and no request that would need more: twice the usage in every step."""
    check = checked(recorded(), replace(ENGINE, num_gpu_blocks=500))
    assert check.divergence is None
    assert check.kv_divergence is not None
    assert check.kv_divergence.row == 0
    twice = check.kv_divergence.expected["kv_usage"] / check.kv_divergence.seen["kv_usage"]
    assert twice == pytest.approx(2, abs=0.2)


@pytest.mark.slow
def test_asynchronous_scheduling_shows_in_when_blocks_are_free_again() -> None:
    """With room for all requests the counts are the same; only blocks are held a step longer."""
    check = checked(recorded(), replace(ENGINE, async_scheduling=True))
    assert check.divergence is None
    assert check.kv_divergence is not None


def test_steps_of_requests_that_no_file_has_are_passed_over_at_the_beginning() -> None:
    """The first four requests come alone, so that the engine is empty before the fifth."""
    early = [(i * 1_000_000, 50, 0, 3) for i in range(4)]
    later = [(t + 4_000_000, *rest) for t, *rest in workload(2, 20)]
    made = logged([*early, *later])  # type: ignore[list-item]
    known = made.requests.frame().filter(pl.col("request_index") >= 4)
    check = checked(replace(made, requests=rows_of(known)))
    assert check.schedule.begin == 12, "four times three steps"
    assert check.whole
    assert check.not_compared == 12


def test_the_first_step_that_requests_do_not_explain_is_compared_with_the_next_ones() -> None:
    recording = recorded()
    frame = recording.requests.frame()
    longer = frame.with_columns(pl.col("output_tokens") + 40 * (pl.col("request_index") == 7).cast(pl.Int64))
    check = checked(replace(recording, requests=rows_of(longer)))
    last = int(served(workload(1)).last_step[7])
    assert check.divergence is not None
    assert check.divergence.row == last + 1
    assert check.divergence.expected["decode_requests"] == check.divergence.seen["decode_requests"] + 1
    assert "fewer requests in decode than have tokens to come" in check.schedule.why
    assert not check.whole


def test_a_waiting_request_is_in_the_queue_from_the_step_on_that_could_see_it() -> None:
    """Ten requests at once, three at a time: by the spans all wait from the first steps on, and the engine agrees."""
    engine = replace(ENGINE, max_num_seqs=3)
    requests = [(i * 100, 50 + i, 0, 20) for i in range(10)]
    made = logged(requests, engine)
    made = replace(made, iterations=place(made, Scratch()).iterations)
    schedule = recorded_schedule(made)
    assert schedule.requests["eligible"].to_list() == [0] + [1] * 9, "the others come while the first step runs"
    assert check_schedule(schedule, engine).whole
    wider = check_schedule(schedule, replace(engine, max_num_seqs=5)).divergence
    assert wider is not None
    assert wider.row == 1, "the second step could have admitted four of them"


def test_a_queue_shows_without_spans_where_it_is_long() -> None:
    """Ten times the usual way to the engine, and 50 ms: here the last of ten requests waits seven times 20 steps."""
    engine = replace(ENGINE, max_num_seqs=3)
    made = logged([(i * 100, 50 + i, 0, 20) for i in range(10)], engine)
    blind = made.requests.frame().with_columns(
        pl.lit(None, pl.Int64).alias(f"{x}_us") for x in ("queue", "prefill", "decode")
    )
    made = replace(made, requests=rows_of(blind))
    made = replace(made, iterations=place(made, Scratch()).iterations)
    assert checked(made, engine).whole
    assert checked(made, replace(engine, max_num_seqs=5)).divergence is not None


def test_what_a_recording_without_every_step_lacks_is_said() -> None:
    with pytest.raises(ReplayError, match="start vLLM with --enable-logging-iteration-details"):
        recorded_schedule(replace(recorded(), iterations=no_rows(recorded().iterations.schema)))
    cut = recorded().iterations.where("iteration > 4")
    with pytest.raises(ReplayError, match="the log begins with iteration 5"):
        recorded_schedule(replace(recorded(), iterations=cut))


def test_steps_behind_an_iteration_that_is_missing_are_not_compared() -> None:
    recording = recorded()
    check = checked(replace(recording, iterations=recording.iterations.where("iteration <> 30")))
    assert (check.steps, check.equal, check.whole) == (30, 30, True)


PRESSED = replace(ENGINE, num_gpu_blocks=80, max_num_seqs=16)


SCARCE = [(t, p, 0, o) for t, p, _held, o in workload(5, 60, rate_per_s=40.0, prompts=(20, 200))]


def stepwise(
    asynchronous: bool, requests: Sequence[Request] = SCARCE, engine: EngineConfig = PRESSED
) -> tuple[Recording, EngineConfig]:
    """Every step of an engine, as a recorder inside of it would have written them; by default its blocks are scarce."""
    engine = replace(engine, async_scheduling=asynchronous)
    requests = [(t, p, 0, o) for t, p, _held, o in requests]
    result = served(requests, engine)
    steps = result.steps
    columns = {
        "step_id": np.arange(1, len(steps) + 1),
        "start_us": steps["scheduled_us"],
        **as_recorded(requests, engine, result),
        "kv_blocks_total": np.full(len(steps), (engine.num_gpu_blocks or 0) - 1),
        "kv_blocks_free": steps["free_blocks"],
    }
    nothing = pl.Series([None] * len(steps))
    frame = pl.DataFrame({n: pl.Series(columns.get(n, nothing)).cast(kind) for n, kind in STEP_SCHEMA.items()})
    rows = [
        dict.fromkeys(LIFECYCLE_SCHEMA)
        | {
            "journey": i,
            "request_index": i,
            "queued_us": int(result.queued_us[i]),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "cached_prompt_tokens": 0,
            "status": "ok",
        }
        for i, (_t, prompt, _held, output) in enumerate(requests)
    ]
    lifecycles = pl.DataFrame(rows, schema=LIFECYCLE_SCHEMA, orient="row")
    made = replace(logged(requests), steps=rows_of(frame), lifecycles=rows_of(lifecycles))
    return made, engine


def as_recorded(requests: Sequence[Request], engine: EngineConfig, result: SimResult) -> dict[str, Int64s]:
    """A recorder's counts: in prefill until the first token was processed, which asynchronously is a step longer."""
    tokens = np.zeros((len(result.steps), 4), np.int64)
    steps, lengths = result.steps, [p for _t, p, _held, _o in requests]
    tokens[:, 1] = steps["prefill_tokens"]
    given = Engine(trace_of(requests), engine)
    for row in range(len(steps)):
        batch = None
        while batch is None or batch.prefill_tokens + batch.decode_tokens == 0:
            batch = given.schedule()
            assert batch is not None
            state = given.state
            step = int(state.at["step"][0])
            chosen = (state.requests["chunk_step"] == step) & (state.requests["chunk"] > 1)
            again = chosen & (state.requests["known"] > np.array(lengths)) & (state.outcomes["preemptions"] > 0)
            count, again_tokens = int(again.sum()), int(state.requests["chunk"][again].sum())
            empty = batch.prefill_tokens + batch.decode_tokens == 0
            if not empty:
                start = max(int(state.at["now_us"][0]), int(state.at["device_free_us"][0]))
                given.run(int(steps["end_us"][row]) - start)
            else:
                given.run(1)
        late = (result.first_step == row - 1) & (result.last_step > row - 1) if engine.async_scheduling else np.zeros(1)
        moved = int(late.sum())
        tokens[row] = (
            batch.prefill_requests - count + moved,
            batch.prefill_tokens - again_tokens + moved,
            batch.decode_tokens + count - moved,
            batch.decode_tokens + again_tokens - moved,
        )
    return dict(zip(COUNTS, tokens.T, strict=True))


def trace_of(requests: Sequence[Request]) -> RequestTrace:
    arrival, prompt, held, output = (np.array(column, np.int64) for column in zip(*requests, strict=True))
    return RequestTrace(arrival, prompt, prompt - held, output, np.full(len(arrival), NEVER_US))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preemptions_are_gone_through_step_by_step(asynchronous: bool) -> None:
    recording, engine = stepwise(asynchronous)
    schedule = recorded_schedule(recording)
    check = check_schedule(schedule, engine)
    assert schedule.source == RECORDS
    assert (check.divergence, check.kv_divergence) == (None, None)
    assert check.kv_equal == check.steps
    assert check.simulated is not None
    assert check.simulated.preempted.sum() > 5


def test_a_row_at_a_time_or_all_at_once_is_the_same() -> None:
    """Synchronous steps of one row begin in their own rows by themselves; nobody is preempted here."""
    schedule = recorded_schedule(recorded())
    requests = schedule.requests
    trace = RequestTrace(
        requests["eligible"].to_numpy(),
        requests["prompt_tokens"].to_numpy(),
        requests["computed_tokens"].to_numpy(),
        requests["output_tokens"].to_numpy(),
        np.full(requests.height, NEVER_US),
    )
    table = Engine(trace, ENGINE).serve_rows(0, len(schedule.step))
    at_once = check_schedule(schedule, ENGINE).simulated
    assert at_once is not None
    for place_, name in enumerate(schedule.counts):
        assert (table[:, place_] == at_once.counts[name]).all()


def test_what_is_computed_again_counts_as_a_decode_in_a_log() -> None:
    """Two requests of 40 and 40 tokens in 6 blocks of 16: the second is preempted when both need a fourth.

    Both are admitted in row 0 with three blocks each, and have 48 tokens with KV after row 8.  In row 9 the first
    takes a block of the second, which has 9 output tokens then; it is admitted again when the first has left after
    row 19, and computes 40 + 9 = 49 tokens in row 20.
    """
    two = np.array([0, 0]), np.array([40, 40]), np.array([40, 40]), np.array([20, 20]), np.array([NEVER_US] * 2)
    engine = EngineConfig(4, 100, 100, False, 16, num_gpu_blocks=7, enable_prefix_caching=False)
    table = Engine(RequestTrace(*two), engine).serve_rows(0, 31)
    assert table[9, loop.ROW_PREEMPTED] == 1
    assert table[20, :4].tolist() == [0, 0, 1, 49]


@pytest.mark.parametrize(("name", "steps"), [("A", 6094), ("C", 1381)])
def test_vllm_0_32_is_equal_in_every_step_by_its_log_and_spans(
    data_pack: Path, tmp_path: Path, name: str, steps: int
) -> None:
    """Engine arguments from the log, the queue from the spans; the usage of all steps fits, too."""
    with read_recording(data_pack / "live-vllm-0.32" / name) as recording:
        check = checked(recording, replayed_engine(recording, ReplayMode()).config)
    assert (check.equal, check.steps, check.divergence, check.kv_divergence) == (steps, steps, None, None)
    assert check.kv_equal + check.kv_open == steps
    assert check.whole


@pytest.mark.parametrize(("name", "steps"), [("A", 6094), ("C", 1381)])
def test_vllm_0_32_is_equal_in_every_step_by_its_step_log(
    data_pack: Path, tmp_path: Path, name: str, steps: int
) -> None:
    """The recorded step times and arrivals in the engine; the queue that the spans gave is the same."""
    folder = data_pack / "live-vllm-0.32" / name
    with read_recording(folder) as recording:
        of_spans = recorded_schedule(recording).requests["eligible"].to_list()
        truth = with_step_log(recording, folder)
        check = checked(truth, replayed_engine(truth, ReplayMode()).config)
    assert (check.equal, check.steps, check.divergence, check.kv_divergence) == (steps, steps, None, None)
    assert check.schedule.requests["eligible"].to_list() == of_spans


@pytest.mark.parametrize(("name", "warm_up"), [("A", 31), ("C", 23)])
def test_vllm_0_32_is_equal_by_its_log_and_the_client_alone(
    data_pack: Path, tmp_path: Path, name: str, warm_up: int
) -> None:
    """Without spans nobody recorded the three warm-up requests; their steps are passed over."""
    for file in ("bench.json.gz", "vllm.log.gz"):
        (tmp_path / file).symlink_to(data_pack / "live-vllm-0.32" / name / file)
    with read_recording(tmp_path) as recording:
        check = checked(recording, replayed_engine(recording, ReplayMode()).config)
    assert check.whole
    assert check.schedule.begin == check.not_compared == warm_up


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_shared_prefix_is_shared_in_every_group(kind: Literal["window", "chunk"]) -> None:
    """Four equal prompts of 512 in blocks of 16, the later ones while the first runs: 496 tokens of each are found.

    Only their number is recorded, so the engine gives each blocks of its own: 31, and of five windows of 100 tokens the
    six or seven that they still attend to.
    """
    groups = (*[KvCacheGroup(kind, 100)] * 5, KvCacheGroup("full"))
    engine = replace(
        ENGINE, kv_cache_groups=groups, num_gpu_blocks=2_001, **release_arguments({"vllm_version": "0.32.0"})
    )
    sent, prompts, outputs = np.array([0, 3, 4, 5]), np.full(4, 512), np.full(4, 40)
    keys = BlockKeys(np.zeros(4, np.int64), np.full(4, 32), np.arange(32, dtype=np.int32), 16)
    running = Engine(RequestTrace(sent, prompts, prompts, outputs, np.full(4, NEVER_US), block_keys=keys), engine)
    table, steps = running.serve_rows(0, 60), running.result().steps
    rows = len(steps)
    hits = running.result().cached_tokens
    assert hits.tolist() == [0, 496, 496, 496]
    requests = {"request_index": np.arange(4), "prompt_tokens": prompts, "output_tokens": outputs}
    requests |= {
        "computed_tokens": prompts - hits,
        "shared_hit": 0 * hits,
        "eligible": sent,
        "aborted": np.full(4, NEVER),
    }
    queue = (
        pl.DataFrame(requests)
        .with_columns(request_id=pl.lit(""))
        .select(pl.col(n).cast(k) for n, k in QUEUED_SCHEMA.items())
    )
    counts = {name: table[:rows, place] for place, name in enumerate(COUNTS)}
    usage = 1 - steps["free_blocks"] / 2_000
    recorded = RecordedSchedule(
        np.arange(rows), np.arange(rows), counts, usage, 1e-6, False, queue, 0, rows, "", {"steps": RECORDS}
    )
    check = check_schedule(recorded, engine)
    assert (check.equal, check.kv_divergence) == (rows, None)
    assert 0 < check.kv_open < rows
    lower = replace(recorded, kv_usage=usage - 0.01)  # 20 blocks fewer than all can share
    assert check_schedule(lower, engine).kv_divergence is not None


def test_latency_of_the_made_logs_is_that_of_the_engine() -> None:
    """5 ms per step, and 0.1 ms per prompt token: a lone prompt of 100 takes 15 ms."""
    result = served([(0, 100, 0, 2)])
    assert LATENCY.intercept_ns == 5_000_000
    assert int(result.steps["end_us"][0]) == 15_000
