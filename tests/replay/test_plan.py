"""From recording and mode to what the simulator is given: each substitution, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from load_levels import level
from recordings import make_recording

from blis_replay.base.errors import ReplayError
from blis_replay.blis.closed_loop import ClosedLoop
from blis_replay.blis.latency.models import CorrectedModel, FirstUse, FirstUseModel, LatencyModel, Lifecycle
from blis_replay.blis.releases.fit import FitRecord
from blis_replay.blis.releases.release import ModelEntry
from blis_replay.blis.trace import NEVER_US
from blis_replay.ingest.recording import UNKNOWN, Recording, Setting, SharedPrefix, Stage
from blis_replay.replay.mode import ReplayMode, parse_mode
from blis_replay.replay.plan import ReplayPlan, plan_replay
from blis_replay.replay.warm_up import Stalls

COLUMNS = {
    "arrival_us": [0, 10, 20],
    "prompt_tokens": [100, 100, 100],
    "output_tokens": [8, 8, 8],
    "output_tokens_reported": [6, 0, 7],
}


def test_exact_replay_takes_what_was_recorded() -> None:
    plan = plan_replay(make_recording(COLUMNS), ReplayMode())
    assert plan.trace.arrival_us.tolist() == [0, 10, 20]
    assert plan.trace.output_tokens.tolist() == [8, 8, 8]
    assert plan.basis["output tokens"] == "server usage"


def test_re_tokenised_lengths_are_at_least_one() -> None:
    """An empty reply counts 0 tokens when it is tokenised again."""
    plan = plan_replay(make_recording(COLUMNS), ReplayMode(lengths="re-tokenised"))
    assert plan.trace.output_tokens.tolist() == [6, 1, 7]


def test_failures_give_up_after_their_recorded_duration() -> None:
    """Request 1 failed 300 us after its send at 10."""
    recording = make_recording(COLUMNS | {"status": ["ok", "timeout", "ok"], "e2e_us": [5, 300, 5]})
    assert plan_replay(recording, ReplayMode()).trace.abort_us.tolist() == [NEVER_US, 310, NEVER_US]


def test_flat_arrivals_have_the_mean_rate_of_the_planned_run() -> None:
    """3000 requests over stages of 1 s and 2 s: a mean gap of 1000 us within 5 standard errors."""
    count = 3000
    columns = {"arrival_us": range(count), "prompt_tokens": [10] * count, "output_tokens": [1] * count}
    recording = make_recording(columns, stages=(Stage(0, 1000, 1_000_000), Stage(1, 1000, 2_000_000)))
    arrivals = plan_replay(recording, ReplayMode(arrivals="flat")).trace.arrival_us
    assert arrivals[-1] / count == pytest.approx(1000, rel=5 / count**0.5)
    assert arrivals.tolist() == plan_replay(recording, ReplayMode(arrivals="flat")).trace.arrival_us.tolist()


@pytest.mark.parametrize(
    ("scheduling", "expected"), [("recorded", True), ("synchronous", False), ("asynchronous", True)]
)
def test_scheduling_can_be_forced(scheduling: str, expected: bool) -> None:
    recording = make_recording(COLUMNS, engine={"async_scheduling": True})
    mode = parse_mode(f"scheduling={scheduling}")
    assert plan_replay(recording, mode).engine.async_scheduling is expected


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        (COLUMNS | {"output_tokens": [8, None, 8]}, "the output length is unknown for 1 of 3 requests;"),
        ({"arrival_us": []}, "no requests to replay"),
    ],
)
def test_what_cannot_be_replayed_is_refused(columns: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ReplayError, match=complaint):
        plan_replay(make_recording(columns), ReplayMode())


def test_modes_have_one_name_each() -> None:
    assert parse_mode("exact") == ReplayMode()
    assert parse_mode("exact").name == "exact"
    assert parse_mode("arrivals=flat,scheduling=synchronous,arrivals=recorded").name == "scheduling=synchronous"
    assert parse_mode("spec").name == "arrivals=profile,lengths=profile,prefix=profile"
    assert parse_mode("spec,arrivals=recorded,scheduling=synchronous") == ReplayMode(
        lengths="profile", prefix="profile", scheduling="synchronous"
    )
    assert parse_mode("blis-spec").name == "arrivals=blis-spec,lengths=blis-spec,prefix=blis-spec"


def test_a_request_that_was_given_up_goes_on_as_long_as_it_was_asked_to() -> None:
    """One asked for 20 tokens; of the other nothing is known, so it takes the longest length there is, 8."""
    columns = COLUMNS | {
        "status": ["error", "ok", "error"],
        "output_tokens": [None, 8, None],
        "max_tokens": [20, None, None],
        "e2e_us": [500, 900, 700],
    }
    plan = plan_replay(make_recording(columns), ReplayMode())
    assert plan.trace.output_tokens.tolist() == [20, 8, 8]
    assert (plan.trace.abort_us < 2**40).tolist() == [True, False, True]
    assert plan.basis["output tokens"].endswith("; of 2 given up: what they asked for, else the longest")


# Mixture of experts whose kernels take half a second each.
KERNELS = FirstUse(compile_us=500_000, experts=8, experts_per_token=2)
MODEL = LatencyModel("blackbox", 10_000_000, 0, 0)


def entry(**fields: Any) -> ModelEntry:
    return ModelEntry("some/Model", 1, MODEL, Lifecycle(), **fields)


def exact(columns: dict[str, Any], **engine: int | bool) -> ReplayPlan:
    return plan_replay(make_recording(columns, engine=engine), ReplayMode())


def summary(sent: int, stages: tuple[Stage, ...] = (Stage(0, 10.0, 1_000_000),), **said: float) -> Recording:
    """A summary of so many requests of 200 prompt tokens, sent at a rate; ``said``: what else it says."""
    of_lengths = {"burstiness": ("burstiness", "asked"), "spread": ("lengths", "spread")}
    made = level(4, 200, 60, {})
    kept = made.aggregates.filter(~pl.col("metric").is_in(["concurrency", "requests"]))
    rows = [("requests", "sent", float(sent)), *((*of_lengths[name], value) for name, value in said.items())]
    more = pl.DataFrame([(-1, *row) for row in rows], schema=kept.schema, orient="row")
    return replace(made, stages=stages, aggregates=pl.concat([kept, more]))


class TestArrivals:
    def test_a_rate_brings_them_closer_together(self) -> None:
        """4 times as fast: 0, 10 and 21 us become 0, 2.5 and 5.25 us, rounded half to even."""
        columns = COLUMNS | {"arrival_us": [0, 10, 21]}
        plan = plan_replay(make_recording(columns), ReplayMode(rate=4))
        assert plan.trace.arrival_us.tolist() == [0, 2, 5]
        assert plan.basis["arrivals"] == "as recorded, 4 times as fast"

    def test_in_a_closed_loop_nobody_gives_up(self) -> None:
        recording = make_recording(COLUMNS | {"status": ["ok", "timeout", "ok"], "e2e_us": [5, 300, 5]})
        plan = plan_replay(recording, ReplayMode(loop=ClosedLoop(2)))
        assert plan.mode.loop == ClosedLoop(2)
        assert plan.trace.abort_us.tolist() == [NEVER_US] * 3
        assert plan.basis["arrivals"] == "a closed loop of 2 clients, none of which gives up"

    def test_a_summary_is_replayed_by_its_clients(self) -> None:
        """4 clients with 10 requests each; lengths are drawn within 10 % of the mean."""
        plan = plan_replay(level(4, 200, 60, {}), ReplayMode())
        assert plan.mode.loop == ClosedLoop(4)
        assert len(plan.trace) == plan.recording.requests.height == 40
        assert np.abs(plan.trace.prompt_tokens - 200).max() <= 20
        assert np.abs(plan.trace.output_tokens - 60).max() <= 6
        assert plan.basis["requests"].startswith("made of a summary")

    @pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (100.0, 0.1)])
    def test_a_summary_says_how_regular_its_sends_were(self, burstiness: float, variation: float) -> None:
        """Gaps of a gamma distribution of shape k vary by 1 / sqrt(k) of their mean (vllm/benchmarks/serve.py)."""
        made = summary(stages=(Stage(0, 10.0, 400_000_000),), burstiness=burstiness, sent=4000)
        gaps_us = np.diff(plan_replay(made, ReplayMode()).trace.arrival_us)
        assert gaps_us.std() / gaps_us.mean() == pytest.approx(variation, rel=0.1)
        assert gaps_us.mean() == pytest.approx(100_000, rel=0.01)

    @pytest.mark.parametrize(("spread", "shortest"), [(1.0, 0.0), (0.0, 1.0)])
    def test_a_summary_says_how_lengths_were_drawn(self, spread: float, shortest: float) -> None:
        """SGLang's `--random-range-ratio` 0 draws from 1 to N, twice the mean; 1 makes all alike."""
        trace = plan_replay(summary(spread=spread, sent=4000), ReplayMode()).trace
        assert trace.prompt_tokens.min() == pytest.approx(200 * shortest, abs=2)
        assert trace.prompt_tokens.max() == pytest.approx(200 * (2 - shortest), abs=2)

    def test_turns_of_a_client_need_prompts_that_are_known(self) -> None:
        mode = ReplayMode(loop=ClosedLoop(1), sessions="prompts")
        with pytest.raises(ReplayError, match="identities of its prompts are not known; leave out sessions=prompts"):
            plan_replay(make_recording(COLUMNS), mode)


class TestPrompts:
    def test_cached_tokens_are_those_that_the_server_counted(self) -> None:
        """At least one token is computed, of a prompt that was cached as a whole too."""
        plan = exact(COLUMNS | {"cached_prompt_tokens": [0, 64, 100]})
        assert plan.trace.prefill_tokens.tolist() == [100, 36, 1]
        assert plan.basis["prefix cache"] == "cached prompt tokens as the server reported"

    def test_without_a_prefix_cache_prompts_are_computed_whole(self) -> None:
        plan = plan_replay(make_recording(COLUMNS | {"cached_prompt_tokens": [0, 64, 100]}), ReplayMode(prefix="none"))
        assert plan.trace.prefill_tokens.tolist() == [100] * 3
        assert plan.basis["prefix cache"] == "whole prompts"
        plan = exact(COLUMNS | {"cached_prompt_tokens": [0, 64, 100]}, enable_prefix_caching=False)
        assert plan.trace.prefill_tokens.tolist() == [100] * 3
        assert plan.basis["prefix cache"] == "whole prompts: the engine caches no prefixes"

    def test_prompts_that_take_turns_have_identities(self) -> None:
        """Two groups of one prompt: 32 of 100 tokens are shared in a group, so 2 blocks; the third request repeats."""
        shared = SharedPrefix(2, 1, 32, 68, 8)
        plan = plan_replay(make_recording(COLUMNS, shared_prefix=shared), ReplayMode())
        keys = plan.trace.block_keys
        assert keys is not None
        rows = [keys.keys[start : start + count].tolist() for start, count in zip(keys.start, keys.count, strict=True)]
        assert [len(row) for row in rows] == [6, 6, 6]
        assert rows[0] == rows[2]
        assert not set(rows[0]) & set(rows[1])

    def test_lost_prompt_lengths_are_the_median_and_none_at_all_is_refused(self) -> None:
        plan = exact(COLUMNS | {"prompt_tokens": [100, None, 200]})
        assert plan.trace.prompt_tokens.tolist() == [100, 150, 200]
        with pytest.raises(ReplayError, match="no request has a prompt length"):
            exact(COLUMNS | {"prompt_tokens": [None] * 3})


class TestEngine:
    def test_arguments_of_the_mode_stand_in_place_of_the_recorded(self) -> None:
        plan = plan_replay(make_recording(COLUMNS), parse_mode("max_num_seqs=7"))
        assert plan.engine.max_num_seqs == 7
        assert plan.arguments["max_num_seqs"] == Setting(7, "replay")
        assert plan.arguments["block_size"] == Setting(16, "recorded")
        assert plan.recording.engine["max_num_seqs"] == Setting(128, "recorded")

    def test_an_unknown_model_length_is_that_of_the_longest_request(self) -> None:
        recording = without(make_recording(COLUMNS | {"output_tokens": [8, 9, 8]}), "max_model_len")
        plan = plan_replay(recording, ReplayMode())
        assert plan.engine.max_model_len == 109
        assert plan.basis["max_model_len"].startswith("not recorded; 109, of the longest request")

    @pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "block_size", "async_scheduling"])
    def test_another_unknown_argument_is_refused_by_name(self, name: str) -> None:
        with pytest.raises(ReplayError, match=f"{name} is not known; write `{name}: VALUE`"):
            plan_replay(without(make_recording(COLUMNS), name), ReplayMode())

    def test_a_policy_that_the_engine_does_not_have_is_refused(self) -> None:
        recording = make_recording(COLUMNS)
        engine = recording.engine | {"scheduling_policy": Setting("shortest", "recorded")}
        with pytest.raises(ReplayError, match="scheduling_policy is 'shortest'; the engine knows fcfs and priority"):
            plan_replay(replace(recording, engine=engine), ReplayMode())

    @pytest.mark.parametrize(
        ("source", "mode", "fitted", "expected"),
        [
            # Where the recording does not say, as the coefficients were fitted.
            (UNKNOWN, "exact", "asynchronous", True),
            (UNKNOWN, "exact", "synchronous", False),
            # What was recorded or forced wins.
            ("recorded", "exact", "asynchronous", False),
            (UNKNOWN, "scheduling=synchronous", "asynchronous", False),
        ],
    )
    def test_scheduling_that_was_not_recorded_is_that_of_the_fit(
        self, source: str, mode: str, fitted: Any, expected: bool
    ) -> None:
        recording = make_recording(COLUMNS)
        recording = replace(recording, engine=recording.engine | {"async_scheduling": Setting(False, source)})
        plan = plan_replay(
            recording, parse_mode(mode), entry(fit=FitRecord("linear", 1.0, 1.0, fitted, fitted, "", (), ()))
        )
        assert plan.engine.async_scheduling is expected
        told = plan.basis.get("scheduling")
        assert told == (
            f"{fitted}, as the coefficients were fitted; the recording does not say"
            if source == UNKNOWN and mode == "exact"
            else None
        )


class TestNewServer:
    @pytest.mark.parametrize(
        ("engine", "captured_tokens"),
        [
            # vLLM's usual number: twice max_num_seqs, at most 512.
            ({"max_num_seqs": 32}, 64),
            ({"max_num_seqs": 400}, 512),
            ({"cudagraph_capture_sizes": "1 2 4 8..32/8"}, 32),
            ({"cudagraph_capture_sizes": "none"}, 0),
            ({"enforce_eager": True}, 0),
        ],
    )
    def test_it_has_kernels_up_to_the_largest_captured_graph(
        self, engine: dict[str, Any], captured_tokens: int
    ) -> None:
        plan = plan_replay(make_recording(COLUMNS, engine=engine), ReplayMode(), entry(first_use=KERNELS))
        assert plan.captured_tokens == captured_tokens
        assert plan.latency(MODEL) == KERNELS.on(MODEL, captured_tokens, 2048)

    @pytest.mark.parametrize(
        ("ttft_ms", "waits", "words"),
        [
            (600, True, "0.50 s for each kernel that a batch is the first to need, as the server was new: "),
            (249, False, "none, as the server had compiled its kernels: "),
        ],
    )
    def test_it_waits_where_its_first_long_prompt_did(self, ttft_ms: int, waits: bool, words: str) -> None:
        """Half of the time of one kernel, 250 ms, decides; prompts of up to 64 tokens need none."""
        columns = COLUMNS | {"prompt_tokens": [64, 100, 100], "ttft_us": [5_000, ttft_ms * 1_000, 9_000_000]}
        recording = make_recording(columns, engine={"max_num_seqs": 32})
        plan = plan_replay(recording, ReplayMode(), entry(first_use=KERNELS))
        assert plan.basis["warm-up"] == f"{words}the first prompt has its first token after {ttft_ms / 1000:.2f} s"
        assert isinstance(plan.latency(MODEL), FirstUseModel) is waits

    def test_nothing_is_assumed_of_it_if_the_mode_says_so_or_the_coefficients_know_nothing(self) -> None:
        for mode, of in ((ReplayMode(warm_up="none"), entry(first_use=KERNELS)), (ReplayMode(), entry())):
            plan = plan_replay(make_recording(COLUMNS), mode, of)
            assert plan.latency(MODEL) is MODEL
            assert "warm-up" not in plan.basis

    def test_recorded_stalls_come_before_kernels_and_are_not_replayed_at_other_arrivals(self) -> None:
        plan = plan_replay(make_recording(COLUMNS), ReplayMode(warm_up="recorded", rate=2), entry(first_use=KERNELS))
        plan = plan.with_recorded_stalls(np.ones(3, np.bool_), np.zeros(3, np.int64))
        assert plan.basis["warm-up"] == "not replayed, as the arrivals are not the recorded ones"
        assert not plan.teacher_forced
        stalled = replace(plan, stalls=Stalls(np.array([0]), np.array([700])), first_use=KERNELS)
        assert stalled.teacher_forced
        assert isinstance(stalled.latency(MODEL), CorrectedModel)


# Requests 1 s apart whose spans say: 20 ms on the way, 80 ms queued, 20 ms prefill, then 4 gaps of 50 ms.
_SPANS_US = {"ttft_us": 120_000, "e2e_us": 320_000, "queue_us": 80_000, "prefill_us": 20_000, "decode_us": 200_000}
TRACED = {name: [value] * 24 for name, value in ({"prompt_tokens": 100, "output_tokens": 5} | _SPANS_US).items()}
TRACED["arrival_us"] = [1_000_000 * i for i in range(24)]


class TestObserved:
    def test_delays_before_the_queue_and_decisions_are_those_of_the_spans(self) -> None:
        """A request that is alone waits for no cycle; of its 80 ms in the queue a call of the scheduler explains 50."""
        plan = plan_replay(
            make_recording(TRACED), parse_mode("pre_queue=recorded,schedule=recorded"), entry(first_use=KERNELS)
        )
        assert plan.trace.pre_queue_us is not None
        assert plan.trace.held_us is not None
        assert set(plan.trace.pre_queue_us.tolist()) == {20_000}
        assert set(plan.trace.held_us.tolist()) == {30_000}
        assert plan.cycles is None
        assert plan.first_use is KERNELS
        assert {"delay before the queue", "schedule"} <= plan.basis.keys()

    def test_step_times_are_the_observed_cycles(self) -> None:
        """Four gaps in 200 ms; with them the server's kernels are observed too."""
        plan = plan_replay(make_recording(TRACED), parse_mode("step_time=recorded"), entry(first_use=KERNELS))
        assert plan.cycles is not None
        assert set(plan.cycles.cycle_us.tolist()) == {50_000}
        assert plan.latency(MODEL) is plan.cycles
        assert plan.first_use is None
        assert plan.trace.pre_queue_us is None

    @pytest.mark.parametrize(
        ("recorded", "mode", "complaint"),
        [
            ({}, "step_time", "step cycles were not recorded, and no request has latencies"),
            ({}, "pre_queue", "step cycles were not recorded"),
            ({}, "output_processing", "the way of a token to the client was not recorded for any request"),
            (TRACED, "output_processing", "do not tell when a token left the engine; record journeys"),
            (
                {name: TRACED[name] for name in TRACED if name not in ("queue_us", "prefill_us", "decode_us")},
                *("schedule", "too few requests have a record of when they were queued and scheduled"),
            ),
        ],
    )
    def test_what_was_not_recorded_is_refused_by_name(
        self, recorded: dict[str, list[int]], mode: str, complaint: str
    ) -> None:
        with pytest.raises(ReplayError, match=complaint):
            plan_replay(make_recording(recorded or COLUMNS), parse_mode(f"{mode}=recorded"))


def test_a_plan_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        exact(COLUMNS).stalls = None  # type: ignore[misc]


def without(recording: Recording, name: str) -> Recording:
    return replace(recording, engine={other: value for other, value in recording.engine.items() if other != name})
