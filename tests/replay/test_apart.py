"""A server that prefills and one that decodes, replayed as one: by hand, and with one cause planted at a time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from blis_runs import release_of
from recordings import make_recording

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import UnreplayableError
from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.blis.releases.fit import FitRecord, range_of
from blis_replay.blis.releases.release import FittedOn
from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import Offloading, RequestTrace
from blis_replay.ingest.ingest import ingest_recording
from blis_replay.ingest.recording import LIFECYCLE_SCHEMA, STEP_SCHEMA, Clock, Finding, Recording, SourceFile
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.store import open_store
from blis_replay.replay.apart import ApartEngine
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.engine import replayed_engine, with_engine
from blis_replay.replay.mode import ReplayMode, parse_mode
from blis_replay.replay.schedule.checksum import check_schedule
from blis_replay.replay.schedule.recorded import recorded_schedule
from blis_replay.replay.transfers import given_costs
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.held_out import use_of_run
from blis_replay.validate.comparison.pages import provenance_of
from blis_replay.validate.comparison.validated import judged_replay
from blis_replay.validate.history import Commit, entries_of
from blis_replay.validate.text.messages import words

TEN_MS = LatencyModel("blackbox", 10_000_000, 0, 0)
COSTS = "hand_over_us=5000 load_us=2000 load_block_us=1000"
NIXL = {"vllm_version": "0.32.0", "kv_transfer_config": "kv_connector=NixlConnector kv_role=kv_both"}


def side(name: str, zero_us: int, columns: dict[str, Any], stamps: dict[str, Int64s], **engine: Any) -> Recording:
    """A recording of one server: its requests, and its stamps of them."""
    count = len(columns["prompt_tokens"])
    ids = [f"cmpl-r{i}-0" for i in range(count)]
    journeys = {"journey": range(count), "request_index": range(count), "api_request_id": ids, **stamps}
    lifecycles = pl.DataFrame(
        {
            column: pl.Series(list(journeys.get(column, [None] * count)), dtype=kind)
            for column, kind in LIFECYCLE_SCHEMA.items()
        }
    )
    recording = replace(
        make_recording(columns),
        alias=name,
        slug=name,
        lifecycles=rows_of(lifecycles),
        clocks=(Clock("server", "epoch", zero_us),),
    )
    return with_engine(recording, NIXL | engine, "recorded")


def stamps_of(result: SimResult, later_us: int) -> dict[str, Int64s]:
    names = ("queued_us", "scheduled_us", "first_token_us", "finished_us")
    return {"arrived_us": result.queued_us + later_us} | {name: getattr(result, name) + later_us for name in names}


def recorded_pair(
    trace: RequestTrace,
    *,
    hand_over_us: int = 5_000,
    load_us: int = 2_000,
    of_producer: LatencyModel = TEN_MS,
    of_consumer: LatencyModel = TEN_MS,
) -> tuple[Recording, Recording]:
    """Recordings of a consumer and a producer with room for all, each simulated by itself, on clocks of their own."""
    one = np.ones(len(trace), np.int64)
    engine = replayed_engine(
        side("some", 0, {"prompt_tokens": trace.prompt_tokens, "output_tokens": one}, {}), ReplayMode()
    ).config
    first = simulate(replace(trace, output_tokens=one), engine, of_producer)
    then = simulate(
        replace(
            trace, pre_queue_us=first.finished_us + hand_over_us - trace.arrival_us, external_tokens=trace.prompt_tokens
        ),
        replace(engine, offloading=Offloading(0, load_us, 1_000, 0, 0)),
        of_consumer,
    )
    client = {"prompt_tokens": trace.prompt_tokens, "output_tokens": trace.output_tokens}
    client |= {"arrival_us": trace.arrival_us, "ttft_us": then.ttft_us, "e2e_us": then.e2e_us}
    own = {"prompt_tokens": trace.prompt_tokens, "output_tokens": one, "arrival_us": trace.arrival_us + 1_000_000}
    own |= {"ttft_us": first.ttft_us, "e2e_us": first.e2e_us}
    decode = side("decode", 50_000_000, client, stamps_of(then, 0))
    return decode, side("prefill", 49_000_000, own, stamps_of(first, 1_000_000))


def some_load() -> RequestTrace:
    """60 requests of 40 to 400 prompt tokens, one each 60 ms in the mean (seed 47)."""
    rng = np.random.default_rng(47)
    prompts, outputs = rng.integers(40, 400, 60), rng.integers(2, 12, 60)
    arrival_us = np.cumsum(rng.integers(0, 120_000, 60))
    arrival_us -= arrival_us[0]
    return RequestTrace(arrival_us, prompts, prompts, outputs, np.full(60, 2**62))


def replayed(pair: tuple[Recording, Recording], costs: str = COSTS, mode: str = "exact") -> ReplayRun:
    decode, prefill = pair
    release = release_of(TEN_MS, Lifecycle())
    return replay(decode, release, parse_mode(mode), ApartEngine(release, prefill=prefill, costs=costs))


def judged(folder: Path, run: ReplayRun) -> Comparison:
    """The replay compared with the recording of the consumer, which is stored for it."""
    with open_store(folder / "store.duckdb") as store:
        ingest_recording(store, run.recording)
        return judged_replay(store, run, None)


def most_off(run: ReplayRun) -> tuple[str, float]:
    """The part whose mean is off most, and by how many us."""
    apart = run.plan.apart
    assert apart is not None
    off = {name: float((us - apart.observed_us[name]).mean()) for name, us in apart.parts_us(run.result).items()}
    name = max(off, key=lambda part: abs(off[part]))
    return name, off[name]


def test_a_pair_is_replayed_as_it_ran() -> None:
    """What was simulated one server after the other, as nobody waits for memory: each request gets its latencies.

    Only a producer that holds blocks looks for requests each millisecond, and the one that was simulated held none.
    """
    run = replayed(recorded_pair(some_load()))
    requests = run.recording.requests
    assert np.abs(run.ttft_us - requests["ttft_us"].to_numpy()).mean() < 1_000
    assert np.abs(run.e2e_us - requests["e2e_us"].to_numpy()).mean() < 1_000
    assert abs(most_off(run)[1]) < 1_000
    assert run.not_simulated == ()


def test_costs_that_are_not_given_are_fitted() -> None:
    """The hand-over is its median.  The engine looks each millisecond, so a load is known to within one."""
    run = replayed(recorded_pair(some_load(), hand_over_us=7_000), costs="load_block_us=1000")
    apart = run.plan.apart
    assert apart is not None
    assert apart.costs.hand_over_us == 7_000
    assert abs(apart.costs.load_us - 2_000) <= 1_000
    assert apart.fitted == ("hand_over_us", "load_us")


def test_a_load_per_block_is_fitted_beside_a_load_that_is_given() -> None:
    """1 ms each, as planted: the mean prompt of the longer half has some 11 blocks more; stamps are by whole steps.

    Where all prompts have as many blocks, nothing tells it, and it is 0 without a fit.
    """
    apart = replayed(recorded_pair(some_load()), costs="hand_over_us=5000 load_us=2000").plan.apart
    assert apart is not None
    assert apart.costs.load_us == 2_000
    assert abs(apart.costs.load_block_us - 1_000) <= 100
    assert apart.fitted == ("load_block_us",)
    load, like = some_load(), np.full(60, 100)
    same = replayed(recorded_pair(replace(load, prompt_tokens=like, prefill_tokens=like)), "hand_over_us=1 load_us=2")
    assert same.plan.apart is not None
    assert (same.plan.apart.costs.load_block_us, same.plan.apart.fitted) == (0, ())


@pytest.mark.parametrize(
    ("side_of", "stamp", "costs", "why"),
    [
        (1, "finished_us", "", "no request has finished_us in prefill; give hand_over_us with --transfer"),
        (0, "queued_us", "", "no request has queued_us in decode; give hand_over_us with --transfer"),
        (0, "queued_us", "hand_over_us=1", "no request has queued_us in decode; give load_us and load_block_us"),
        (0, "scheduled_us", "", "no request has scheduled_us in decode; give load_us and load_block_us"),
        (0, "first_token_us", COSTS, "no request has first_token_us in decode; put the client's result beside"),
        (1, "arrived_us", COSTS, "no request has arrived_us in prefill; put the client's result beside"),
        (0, "ttft_us", COSTS, "no request has ttft_us in decode; put the client's result beside"),
    ],
)
def test_a_stamp_that_nothing_can_be_fitted_without_is_named(side_of: int, stamp: str, costs: str, why: str) -> None:
    pair = list(recorded_pair(some_load()))
    table = "requests" if stamp == "ttft_us" else "lifecycles"
    frame = getattr(pair[side_of], table).frame()
    lacking = frame.with_columns(pl.lit(None, frame.schema[stamp]).alias(stamp))
    pair[side_of] = replace(pair[side_of], **{table: rows_of(lacking)})
    with pytest.raises(UnreplayableError, match=why):
        replayed((pair[0], pair[1]), costs)


@pytest.mark.parametrize("mode", ["exact", "pre_queue=recorded"])
@pytest.mark.parametrize("ahead_us", [20_000, 200_000])
def test_clocks_that_disagree_are_refused_whatever_costs_are_given(ahead_us: int, mode: str) -> None:
    """The hand-over of 5 ms is seen to take -15 ms or -195 ms."""
    decode, prefill = recorded_pair(some_load())
    early = replace(prefill, clocks=(Clock("server", "epoch", 49_000_000 + ahead_us),))
    with pytest.raises(UnreplayableError, match="by its clock requests came before prefill had prefilled them"):
        replayed((decode, early), mode=mode)


def test_recordings_that_are_swapped_are_refused() -> None:
    decode, prefill = recorded_pair(some_load())
    with pytest.raises(UnreplayableError, match="name the server that prefilled with --prefill"):
        replayed((prefill, decode))


def test_a_request_that_came_before_it_was_sent_is_refused() -> None:
    """One stamp of its server is 1.8 s early; the median hand-over is as it was."""
    decode, prefill = recorded_pair(some_load())
    early = pl.when(pl.col("request_index") == 30).then(0).otherwise(pl.col("queued_us")).alias("queued_us")
    wrong = replace(decode, lifecycles=rows_of(decode.lifecycles.frame().with_columns(early)))
    with pytest.raises(UnreplayableError, match="decode: requests came to it before their clients sent them"):
        replayed((wrong, prefill), mode="pre_queue=recorded")


@pytest.mark.parametrize(
    ("planted", "part", "least_us"),
    [
        ({"hand_over_us": 25_000}, "hand_over", 20_000),
        ({"load_us": 22_000}, "load", 15_000),
        ({"of_producer": LatencyModel("blackbox", 25_000_000, 0, 0)}, "prefill", 10_000),
        ({"of_consumer": LatencyModel("blackbox", 25_000_000, 0, 0)}, "load", 10_000),
    ],
)
def test_the_part_that_was_planted_is_named(planted: dict[str, Any], part: str, least_us: int) -> None:
    """The recorded servers hand over, load, prefill or decode 15 or 20 ms slower than the replay is told.

    Behind longer steps a request waits longer until its load begins, and until its end is seen: up to three steps.
    """
    name, off_us = most_off(replayed(recorded_pair(some_load(), **planted)))
    assert name == part
    assert off_us <= -least_us


def test_the_verdict_says_what_the_ttft_consists_of(tmp_path: Path) -> None:
    """A hand-over of 25 ms where 5 are given; parts add up to the TTFT, and the first gap is one step of 10 ms."""
    pair = recorded_pair(some_load(), hand_over_us=25_000)
    run = replayed(pair)
    comparison = judged(tmp_path, run)
    parts, ttft = comparison.parts, comparison.metrics["ttft"]["mean"]
    inside = {name: sides for name, sides in parts.items() if name != "first_gap"}
    assert sum(seen for seen, _ in inside.values() if seen is not None) == pytest.approx(ttft.a_us)
    assert sum(simulated for _, simulated in inside.values() if simulated is not None) == pytest.approx(ttft.b_us)
    assert parts["hand_over"] == (25_000, 5_000)
    assert parts["first_gap"] == (None, 10_000)
    said = next(words(one) for one in comparison.judgement.remarks if one.code == "parts")
    assert "hand-over 25.00 ms (5.00 ms)" in said
    assert "most off: hand-over by -20.00 ms; then first gap - (10.00 ms)" in said
    assert comparison.use == "fitted on no recording"
    assert use_of_run(replayed(pair, costs="load_us=2000 load_block_us=1000")) == "fitted on part of this run"


@pytest.mark.parametrize(
    ("engine", "of_recording", "why"),
    [
        ({"enable_lora": True}, {}, "not simulated: prefill: enable_lora True; in the replay"),
        ({"pipeline_parallel_size": 2}, {}, "not simulated: prefill: pipeline_parallel_size 2; in the replay"),
        ({"kv_cache_groups": "2"}, {}, "not simulated: prefill: kv_cache_groups 2; in the replay"),
        ({}, {"findings": (Finding("ledger", "unusable", "", "half is lost"),)}, "prefill: ledger: half is lost"),
        ({}, {"files": (SourceFile("a", "aiperf", 1, "0", 60, 5),)}, "prefill: 5 of 65 request records were rejected"),
    ],
)
def test_what_the_producer_cannot_carry_is_not_judged(
    tmp_path: Path, engine: dict[str, Any], of_recording: dict[str, Any], why: str
) -> None:
    """As of a consumer; the same pair without that passes."""
    decode, prefill = recorded_pair(some_load())
    change = replace(with_engine(prefill, engine, "recorded"), **of_recording)
    comparison = judged(tmp_path, replayed((decode, change)))
    assert comparison.verdict == "NOT JUDGED"
    assert [words(one)[: len(why)] for one in comparison.lost] == [why]
    assert judged(tmp_path, replayed((decode, prefill))).lost == ()


def test_a_release_that_was_fitted_on_the_producer_is_not_held_out() -> None:
    """Fitted on another recording it is held out; on the consumer it was fitted on this run."""
    run = replayed(recorded_pair(some_load()))

    def use(name: str) -> str:
        return use_of_run(replace(run, release=replace(run.release, fitted_on=(FittedOn(name, "h", "steps"),))))

    assert [use(name) for name in ("other", "prefill", "decode")] == [
        "held out",
        "fitted on part of this run",
        "fitted on this run",
    ]


def test_steps_of_the_producer_beyond_the_fit_count() -> None:
    """The fit saw the consumer's steps, which compute one token of a prompt; those of the producer compute 40 at least.

    They take 10 us for each of these, which no measurement backs.  Fitted on the producer's, too, hardly any is beyond.
    """
    pair, latency = recorded_pair(some_load()), LatencyModel("blackbox", 10_000_000, 10_000, 0)

    def fitted(*steps: np.ndarray) -> ReplayRun:
        record = FitRecord("line", 0.6, 0.8, "synchronous", "synchronous", "e", (), (), range_of(steps))
        release = release_of(latency, Lifecycle())
        release = replace(release, models=(replace(release.models[0], fit=record),))
        return replay(pair[0], release, simulator=ApartEngine(release, prefill=pair[1], costs=COSTS))

    run = replayed(pair)
    assert run.plan.apart is not None
    beyond = fitted(run.result.steps).outside
    assert beyond is not None
    assert str(beyond).startswith("prefill: 100 % of steps lie outside")
    assert beyond.unsure > 0
    also = fitted(run.result.steps, run.plan.apart.producer.steps).outside
    assert also is None or not also.matters


def test_parts_are_of_requests_that_have_all_of_them(tmp_path: Path) -> None:
    """30 requests lack a stamp of the producer and 10 others one of the consumer; parts of the other 20 add up."""
    decode, prefill = recorded_pair(some_load(), hand_over_us=25_000)
    index = pl.col("request_index")
    columns = prefill.lifecycles.frame().with_columns(finished_us=pl.when(index >= 30).then("finished_us"))
    of_decode = decode.lifecycles.frame().with_columns(scheduled_us=pl.when(index < 50).then("scheduled_us"))
    less = replace(decode, lifecycles=rows_of(of_decode)), replace(prefill, lifecycles=rows_of(columns))
    run = replayed(less)
    parts = [sides for name, sides in judged(tmp_path, run).parts.items() if name != "first_gap"]
    assert sum(seen for seen, _ in parts if seen is not None) == pytest.approx(
        decode.requests["ttft_us"].to_numpy()[30:50].mean()
    )
    assert sum(ours for _, ours in parts if ours is not None) == pytest.approx(run.ttft_us[30:50].mean())


def test_a_line_of_the_history_names_the_producer_and_the_costs_that_were_given(tmp_path: Path) -> None:
    """Costs that are fitted change with the simulator, so they are in no name; a mode other than exact comes first."""
    decode, prefill = recorded_pair(some_load())
    commit = Commit("c", datetime(2026, 11, 29, tzinfo=UTC))

    def named(costs: str, mode: str = "exact") -> set[str]:
        judgement = judged(tmp_path, replayed((decode, prefill), costs, mode)).judgement
        return {entry.replay for entry in entries_of(judgement, commit, "PASS")}

    assert named(COSTS) == {f"prefill=prefill {COSTS}"}
    assert named("load_us=2000") == {"prefill=prefill load_us=2000"}
    alone = {"pre_queue=recorded prefill=prefill load_us=2000 load_block_us=1000"}
    assert named("load_us=2000 load_block_us=1000", "pre_queue=recorded") == alone
    run = replayed((decode, replace(prefill, content_hash="of prefill")))
    assert provenance_of(run)["prefill_hash"] == "of prefill"


def with_steps(recording: Recording, result: SimResult, outputs: Int64s) -> Recording:
    """The recording of a server that recorded every step; ``outputs``: int64[n], tokens."""
    names = ("prefill_requests", "prefill_tokens", "decode_tokens")
    columns = {name: result.steps[name].astype(np.int64) for name in names}
    columns |= {"step_id": np.arange(len(result.steps)), "start_us": result.steps["scheduled_us"]}
    columns["decode_requests"] = columns["decode_tokens"]
    steps = pl.DataFrame({name: columns[name] for name in STEP_SCHEMA if name in columns})
    lacks = [pl.lit(None, kind).alias(name) for name, kind in STEP_SCHEMA.items() if name not in columns]
    journeys = recording.lifecycles.frame().with_columns(
        scheduled_step=pl.Series(result.scheduled_step),
        prompt_tokens=recording.requests["prompt_tokens"],
        output_tokens=pl.Series(outputs),
        cached_prompt_tokens=pl.Series(result.cached_tokens),
        status=pl.lit("ok"),
    )
    return replace(
        recording,
        steps=rows_of(steps.with_columns(lacks).select(*STEP_SCHEMA)),
        lifecycles=rows_of(journeys.select(*LIFECYCLE_SCHEMA)),
    )


def test_the_schedule_of_a_consumer_is_compared_from_the_end_of_its_loads() -> None:
    """When they end is not recorded, so a request counts as there from its admission on; by its queue it is not."""
    trace = some_load()
    decode, prefill = recorded_pair(trace)
    run = replayed((decode, prefill))
    recorded = with_steps(decode, run.result, trace.output_tokens)
    check = check_schedule(recorded_schedule(recorded), run.plan.engine)
    assert check.equal == check.steps == len(run.result.steps)
    lonely = replace(recorded, engine={n: s for n, s in recorded.engine.items() if n != "kv_transfer_config"})
    stamped = lonely.lifecycles.frame().with_columns(queued_us=pl.Series(run.result.queued_us))
    by_queue = recorded_schedule(replace(lonely, lifecycles=rows_of(stamped)))
    assert check_schedule(by_queue, run.plan.engine).divergence is not None


def test_the_producer_waits_for_blocks_until_the_consumer_has_loaded_them() -> None:
    """Two prompts of 49 tokens at once, and four blocks at the producer.

    The first one is prefilled at 10 ms, is queued at 15 ms, and loaded with 2 + 4 * 1 ms at 21 ms.  The producer, which
    looks each millisecond, sees that at 21 ms, has the blocks at 22 ms and the second token at 32 ms.  That one is
    queued at 37 ms and loaded at 43 ms; the consumer, which sees it then, computes it from 44 to 54 ms.
    """
    prompts = np.array([49, 49])
    trace = RequestTrace(np.zeros(2, np.int64), prompts, prompts, np.ones(2, np.int64), np.full(2, 2**62))
    decode, prefill = recorded_pair(trace)
    run = replayed((decode, with_engine(prefill, {"num_gpu_blocks": 5}, "recorded")))
    apart = run.plan.apart
    assert apart is not None
    assert apart.producer.finished_us.tolist() == [10_000, 32_000]
    assert run.ttft_us.tolist() == [32_000, 54_000]
    assert {name: us.tolist() for name, us in apart.parts_us(run.result).items()} == {
        "client": [0, 0],
        "queue": [0, 22_000],
        "prefill": [10_000, 10_000],
        "hand_over": [5_000, 5_000],
        "load": [7_000, 7_000],
        "first_step": [10_000, 10_000],
    }


@pytest.mark.parametrize("blocks", [28, None])
def test_a_producer_never_holds_more_blocks_than_it_has(blocks: int | None) -> None:
    """Each request holds its blocks from its prefill to 3 ms behind its hand-over at least, which is its shortest load.

    27 blocks, one of 28 being reserved, are two more than the longest prompt takes; with room for all, more are held.
    """
    decode, prefill = recorded_pair(replace(some_load(), arrival_us=np.arange(60) * 1_000))
    run = replayed((decode, with_engine(prefill, {"num_gpu_blocks": blocks}, "recorded")))
    apart = run.plan.apart
    assert apart is not None
    begin_us, end_us = apart.producer.scheduled_us[apart.row], run.result.queued_us + 3_000
    held = -(-run.plan.trace.prompt_tokens // 16)
    most = max(int(held[(begin_us <= at_us) & (at_us < end_us)].sum()) for at_us in begin_us)
    assert (most <= 27) == (blocks is not None)
    assert apart.turns <= 62


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"vllm_version": "0.30.0"}, "vLLM 0.30.0 was not compared"),
        ({"kv_transfer_config": "kv_connector=LMCacheConnectorV1"}, "LMCacheConnectorV1; simulated are NixlConnector"),
        ({"kv_transfer_config": None}, "no kv_transfer_config; simulated are"),
        ({"kv_offloading_size": 8.0}, "not simulated with an offload to CPU memory"),
        ({"enable_prefix_caching": False}, "not simulated with enable_prefix_caching off"),
    ],
)
def test_what_was_not_compared_is_refused(change: dict[str, Any], why: str) -> None:
    decode, prefill = recorded_pair(some_load())
    for pair in (
        (with_engine(decode, change, "recorded"), prefill),
        (decode, with_engine(prefill, change, "recorded")),
    ):
        with pytest.raises(UnreplayableError, match=why):
            replayed(pair)


def test_the_consumer_is_judged_by_itself_with_the_arrivals_that_it_had() -> None:
    """Whatever a hand-over costs: what came 25 ms after its prefill is there then.  So none is fitted."""
    pair = recorded_pair(some_load(), hand_over_us=25_000)
    observed_us = pair[0].requests["ttft_us"].to_numpy()
    alone = replayed(pair, "load_us=2000 load_block_us=1000", "pre_queue=recorded")
    assert np.abs(alone.ttft_us - observed_us).max() < 1_000
    assert use_of_run(alone) == "fitted on no recording"
    assert alone.basis["prefill"].endswith(" turns; load_us=2000 load_block_us=1000")
    assert np.abs(replayed(pair).ttft_us - observed_us).mean() > 15_000


def test_a_request_that_failed_before_it_was_prefilled_is_left_out() -> None:
    """The others get the latencies that they had with it, as it computes nothing."""
    decode, prefill = recorded_pair(some_load())
    columns = decode.requests.frame().with_columns(
        status=pl.when(pl.col("request_index") == 59).then(pl.lit("error")).otherwise("status")
    )
    failed = replace(decode, requests=rows_of(columns))
    less = replace(prefill, lifecycles=rows_of(prefill.lifecycles.frame().head(59)))
    run, whole = replayed((failed, less)), replayed((decode, prefill))
    assert run.simulated.completed.tolist() == [True] * 59 + [False]
    assert run.ttft_us[:59].tolist() == whole.ttft_us[:59].tolist()


def test_recordings_that_are_no_pair_are_refused() -> None:
    decode, prefill = recorded_pair(some_load())
    other = replace(prefill, lifecycles=rows_of(prefill.lifecycles.frame().head(50)))
    with pytest.raises(UnreplayableError, match="10 of 60 requests have no request of their id in prefill"):
        replayed((decode, other))
    with pytest.raises(UnreplayableError, match="no time of day"):
        replayed((replace(decode, clocks=()), prefill))
    with pytest.raises(UnreplayableError, match="leave out schedule"):
        replayed((decode, prefill), mode="schedule=recorded")
    with pytest.raises(UnreplayableError, match="speed=3 is not a cost of a transfer"):
        given_costs("speed=3")
    with pytest.raises(UnreplayableError, match="load_us is given 2 times"):
        given_costs("load_us=3 load_us=4")
