"""The driver: a recording is planned, simulated and checked; and what a run says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pytest
from blis_runs import release_of, small_recording

from blis_replay.base.errors import ReleaseError, ReplayError
from blis_replay.blis.closed_loop import ClosedLoop
from blis_replay.blis.latency.models import FirstUse, LatencyModel, Lifecycle
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import Recording, Setting
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import ReplayMode, parse_mode
from blis_replay.replay.plan import ReplayPlan
from blis_replay.replay.simulator import EmbeddedEngine, Simulated

# Steps of 10 ms, whatever they hold, and no delays.
RELEASE = release_of(LatencyModel("blackbox", 10_000_000, 0, 0), Lifecycle())
KERNELS = FirstUse(compile_us=500_000, experts=8, experts_per_token=2)


@dataclass
class StandIn:
    """A program of its own that answers every request after 20 and 60 ms, and notes the plans that it was given."""

    completed: tuple[bool, ...] = (True, True, True)
    entry: ModelEntry | None = None
    plans: list[ReplayPlan] = field(default_factory=list)
    release: CoefficientRelease = RELEASE
    name: str = "stand-in"
    reports_steps: bool = False

    def entry_for(self, recording: Recording) -> ModelEntry | None:
        return self.entry

    def serve(self, plan: ReplayPlan) -> Simulated:
        self.plans.append(plan)
        ones = np.ones(len(plan.trace), np.int64)
        return Simulated(np.array(self.completed), 20_000 * ones, 60_000 * ones, 5 * ones)


def two_requests() -> Recording:
    """The second is sent while the first step runs, 5 ms after the first request; the client counted three tokens."""
    recording = small_recording(2)
    columns = recording.requests.frame().with_columns(
        arrival_us=pl.Series([0, 5_000]), output_tokens_reported=pl.lit(3, pl.Int64)
    )
    return replace(recording, requests=rows_of(columns))


@pytest.mark.parametrize(
    ("mode", "ttft_us", "e2e_us"),
    [
        # A prefill and four decodes of 10 ms; the second request is in the steps from 10 ms on.
        ("scheduling=synchronous", [10_000, 15_000], [50_000, 55_000]),
        # Two steps are scheduled before it comes: it is in those from 20 ms on.
        ("scheduling=asynchronous", [10_000, 25_000], [50_000, 65_000]),
        ("scheduling=synchronous,lengths=re-tokenised", [10_000, 15_000], [30_000, 35_000]),
        # One at a time: its prefill waits for the fifth step to end.
        ("scheduling=synchronous,max_num_seqs=1", [10_000, 55_000], [50_000, 95_000]),
    ],
)
def test_requests_take_their_steps(mode: str, ttft_us: list[int], e2e_us: list[int]) -> None:
    run = replay(two_requests(), RELEASE, parse_mode(mode))
    assert (run.ttft_us.tolist(), run.e2e_us.tolist()) == (ttft_us, e2e_us)
    assert run.result.completed.all()
    assert run.simulated.asynchronous is run.plan.engine.async_scheduling


def test_a_client_that_waits_sends_its_requests_one_after_the_other() -> None:
    """So each takes 50 ms, whenever it was recorded."""
    run = replay(two_requests(), RELEASE, replace(parse_mode("scheduling=synchronous"), loop=ClosedLoop(1)))
    assert (run.ttft_us.tolist(), run.e2e_us.tolist()) == ([10_000] * 2, [50_000] * 2)


def test_observed_ways_to_the_client_take_the_place_of_the_delays_behind_the_engine() -> None:
    """First tokens 3 ms after the engine, last ones 11 ms: 8 ms more over the four gaps, so 2 ms each."""
    run = replay(small_recording(), release_of(RELEASE.models[0].latency, Lifecycle(post_token_us=700.0)))
    first_us, last_us = np.full(3, 3_000), np.full(3, 11_000)
    plan = replace(run.plan, delivery_us=(first_us, last_us))
    simulated = EmbeddedEngine(run.release).serve(plan)
    assert simulated.engine is not None
    in_engine_us = simulated.engine.first_token_us - simulated.engine.arrival_us
    assert (simulated.ttft_us - in_engine_us).tolist() == [3_000] * 3
    gap_us, count = replace(run, plan=plan, simulated=simulated).pooled_gaps(np.ones(3, np.bool_))
    assert (gap_us.tolist(), count.tolist()) == ([12_000], [12])


def test_a_request_that_the_recording_completed_must_be_completed() -> None:
    stand_in = StandIn(completed=(True, False, True))
    with pytest.raises(ReplayError, match="did not complete 1 requests that the recording completed"):
        replay(small_recording(), RELEASE, simulator=stand_in)
    columns = small_recording().requests.frame().with_columns(pl.Series("status", ["ok", "timeout", "ok"]))
    run = replay(replace(small_recording(), requests=rows_of(columns)), RELEASE, simulator=stand_in)
    assert run.simulated.completed.tolist() == [True, False, True]


def test_a_program_of_its_own_has_no_kernels_of_our_coefficients() -> None:
    entry = replace(RELEASE.models[0], first_use=KERNELS)
    stand_in = StandIn(entry=entry)
    run = replay(small_recording(), RELEASE, simulator=stand_in)
    assert run.entry is entry
    assert run.plan.first_use is None
    assert "warm-up" not in run.basis
    with pytest.raises(ReplayError, match="the simulator stand-in reports no steps; use --simulator embedded"):
        run.result  # noqa: B018
    ours = replay(small_recording(), replace(RELEASE, models=(entry,)))
    assert ours.plan.first_use is KERNELS


def test_recorded_stalls_are_looked_for_beside_a_first_replay() -> None:
    """Three requests are too few to show any, and the second plan says so."""
    stand_in = StandIn()
    run = replay(small_recording(), RELEASE, ReplayMode(warm_up="recorded"), stand_in)
    assert ["warm-up" in plan.basis for plan in stand_in.plans] == [False, True]
    assert run.basis["warm-up"] == "none is seen in the first tokens"


def test_what_the_recorded_engine_used_and_nobody_simulates_is_named() -> None:
    recording = small_recording()
    recording = replace(recording, engine=recording.engine | {"enable_lora": Setting(True, "recorded")})
    run = replay(recording, RELEASE)
    assert run.not_simulated == ("enable_lora True; in the replay no request has an adapter",)


def test_sizes_of_captured_graphs_need_times_of_padded_batches() -> None:
    with pytest.raises(ReplayError, match="ours has no times of padded batches"):
        replay(small_recording(), RELEASE, parse_mode("cudagraph_capture_sizes=1 2 4"))


def test_coefficients_of_another_model_or_of_no_use_are_refused() -> None:
    with pytest.raises(ReleaseError, match="has no coefficients for some/Model"):
        replay(small_recording(), release_of(model="another/Model"))
    with pytest.raises(ReleaseError, match="invalid"):
        replay(small_recording(), replace(RELEASE, status="invalid"))


def four_clients(step_ms: float, requests: int = 120) -> Recording:
    """What four clients saw, each of which sends again when it is answered; 5 tokens to a request, two places."""
    recording = small_recording(requests, max_num_seqs=2)
    entry = replace(RELEASE.models[0], latency=LatencyModel("blackbox", int(step_ms * 1e6), 0, 0))
    served = replay(recording, replace(RELEASE, models=(entry,)), ReplayMode(loop=ClosedLoop(4)))
    seen = {"arrival_us": served.arrival_us, "ttft_us": served.ttft_us, "e2e_us": served.e2e_us}
    frame = recording.requests.frame().with_columns(**{name: pl.Series(us) for name, us in seen.items()})
    return replace(recording, requests=rows_of(frame.sort("arrival_us")))


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.2])
def test_arrivals_of_clients_that_wait_for_answers_come_from_the_simulated_answers(slower: float) -> None:
    """All work is in steps, so E2E and the time of the last arrival are off as the steps are, and no queue builds."""
    run = replay(four_clients(10 / slower), RELEASE)
    assert "wait for the answers" in run.basis["arrivals"]
    recorded = run.recording.requests.frame(["arrival_us", "e2e_us"])
    assert run.e2e_us.mean() / recorded["e2e_us"].mean() == pytest.approx(slower, rel=0.01)
    assert run.arrival_us.max() / recorded["arrival_us"].max() == pytest.approx(slower, rel=0.01)


def test_a_program_of_its_own_gets_such_arrivals_as_recorded() -> None:
    simulator = StandIn(completed=(True,) * 120)
    run = replay(four_clients(10), RELEASE, simulator=simulator)
    assert simulator.plans[0].answered is None
    assert run.arrival_us.tolist() == run.recording.requests["arrival_us"].to_list()
