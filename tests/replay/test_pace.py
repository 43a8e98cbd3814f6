"""The pace of a server: planted, of one that logged its iterations; and of a real one that recorded its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from logged import ENGINE, LATENCY, logged, served, workload

from blis_replay.base.errors import ReplayError
from blis_replay.blis.latency.models import CorrectedModel, LatencyModel, Lifecycle, durations_us
from blis_replay.blis.releases.fit import CoefficientFit, FitRecord, PartScore, Scatter
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import ITERATION_SCHEMA, STEP_SCHEMA, Recording
from blis_replay.ingest.rows import no_rows, rows_of
from blis_replay.ingest.store import open_for_reading, read_stored
from blis_replay.replay.driver import ReplayRun, replay
from blis_replay.replay.mode import ReplayMode, parse_mode
from blis_replay.replay.pace import at_pace, recorded_pace
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import EmbeddedEngine, entry_of
from blis_replay.replay.warm_up import Stalls
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.comparison.spread import drawn_runs, server_pace
from blis_replay.validate.metrics.observed import Selection

PACED = parse_mode("pace=recorded")


def recorded(requests: int = 200) -> Recording:
    """Without prefix hits, of which a log says nothing."""
    return logged([(at_us, prompt, 0, output) for at_us, prompt, _, output in workload(3, requests)])


def times(model: LatencyModel, by: float) -> LatencyModel:
    costs = [name for name in vars(model) if name.endswith("_ns")]
    return replace(model, **{cost: round(getattr(model, cost) * by) for cost in costs})


def release(recording: Recording, by: float) -> CoefficientRelease:
    """Coefficients whose steps take ``by`` times as long as those of the server."""
    entry = ModelEntry(str(recording.model), 1, latency=times(LATENCY, by), lifecycle=Lifecycle(pre_queue_us=900.0))
    return CoefficientRelease("r", "valid", "", "", "not recorded", None, (entry,), "0" * 64)


@pytest.mark.parametrize("slower", [1.15, 1.0, 0.9])
def test_a_server_of_another_pace_is_said_to_be_slower_by_that(slower: float) -> None:
    """Steps of 5 ms + 100 us a prompt token + 200 us a decode, where the coefficients have that over ``slower``."""
    recording = recorded()
    run = replay(recording, release(recording, 1 / slower))
    pace = server_pace(run, Selection())
    assert pace is not None
    assert pace.error == pytest.approx(slower - 1, abs=0.01)
    remarks = {one.code: one.values for one in compare_replay(run, queues=True).judgement.remarks}
    assert ("pace" in remarks) == (slower != 1)
    # With that factor the replay is that of the server's own coefficients.
    paced, own = replay(recording, release(recording, 1 / slower), PACED), replay(recording, release(recording, 1.0))
    assert paced.e2e_us.mean() / own.e2e_us.mean() == pytest.approx(1, abs=0.02)


def test_without_steps_no_pace_is_known() -> None:
    recording = replace(recorded(), iterations=no_rows(ITERATION_SCHEMA))
    assert server_pace(replay(recording, release(recording, 1.0)), Selection()) is None
    with pytest.raises(ReplayError, match="record"):
        plan_replay(recording, PACED, release(recording, 1.0).models[0])


def test_every_step_takes_that_many_times_as_long() -> None:
    """5,000 + 20 * 100 + 3 * 200 = 7,600 us by 1.15 are 8,740; 7 us that were added at all times stay 7."""
    batch = [{"prefill_tokens": 20, "decode_tokens": 3, "context_tokens": 90}]
    assert durations_us(at_pace(LATENCY, 1.15), batch).tolist() == [8_740]
    corrected = CorrectedModel(LATENCY, (0, 0, 0, 0), np.zeros(1, np.int64), np.array([7]))
    assert durations_us(at_pace(corrected, 1.15), batch).tolist() == [8_747]


@pytest.mark.slow
def test_a_real_server_is_slower_by_what_is_planted(bundled_store: Path) -> None:
    """The shipped coefficients over 1.15, on one of the runs they were fitted on: 1.15 times what it was."""
    with open_for_reading(bundled_store) as store:
        recording = read_stored(store, "tiny-live-a")
    entry = entry_of(load_release("cpu-vllm-0.32.0"), recording)
    assert isinstance(entry.latency, LatencyModel)
    faster = replace(entry, latency=times(entry.latency, 1 / 1.15))
    plan = plan_replay(recording, ReplayMode(), entry)
    paces = [recorded_pace(recording, plan.trace, plan.engine, one) for one in (entry, faster)]
    factors = [pace.factor for pace in paces if pace is not None]
    assert factors[0] == pytest.approx(1, abs=0.04)
    assert factors[1] == pytest.approx(1.15 * factors[0], rel=0.005)


def mean_e2e_us(run: ReplayRun, *experiments: str, scatter: Scatter | None = None) -> np.ndarray:
    """float64[24], of the draws; as if its coefficients were sure, but for 0.01 us, and fitted to these experiments."""
    assert run.entry is not None
    delay = CoefficientFit("pre_queue", 900.0, 900.0, 900.01, "measured", "-")
    scores = tuple(PartScore(name, "fit", 0.0, 1.0, 100, {}) for name in experiments)
    record = FitRecord("line", 1.0, 1.0, "synchronous", "synchronous", "-", (delay,), scores, scatter=scatter)
    entry = replace(run.entry, fit=record)
    fitted = replace(run, entry=entry, release=replace(run.release, models=(entry,)))
    return np.array([one.e2e_us.mean() for one in drawn_runs(fitted)])


@pytest.mark.parametrize(("mode", "by"), [(ReplayMode(), 0.024), (PACED, 0.008)])
def test_a_fit_to_one_load_is_unsure_of_others(mode: ReplayMode, by: float) -> None:
    """Mean steps of another load were off by 2.4 %, at its own pace by 0.8 %.  Two loads show what they miss."""
    run = replay(recorded(), release(recorded(), 1.0), mode)
    assert np.log(mean_e2e_us(run, "one")).std() == pytest.approx(by, rel=0.6)  # longer steps hold more requests
    assert np.log(mean_e2e_us(run, "one", "other")).std() < 1e-5


@pytest.mark.parametrize("mode", [ReplayMode(), PACED])
def test_a_server_that_stood_still_does_so_in_every_draw(mode: ReplayMode) -> None:
    """10 s before the first step, planted; also where each draw has its own pace."""
    run = replay(recorded(), release(recorded(), 1.0), mode)
    plan = replace(run.plan, stalls=Stalls(np.array([0]), np.array([10_000_000])))
    late = replace(run, plan=plan, simulated=EmbeddedEngine(run.release).serve(plan))
    assert late.ttft_us.max() > 10_000_000
    steady = Scatter(10_000.0, (0.0,))
    assert mean_e2e_us(late, "one", "other", scatter=steady) == pytest.approx(late.e2e_us.mean(), rel=0.01)


def test_a_draw_that_serves_in_other_steps_keeps_the_pace_that_was_found() -> None:
    """A prompt of its coefficients takes as long as a hundred steps, so far fewer are served than were logged."""
    run = replay(recorded(), release(recorded(), 1.0), PACED)
    assert run.entry is not None
    other = replace(run.entry, latency=LatencyModel("blackbox", 1_000, 5_000_000, 0, 0))
    with pytest.raises(ReplayError):
        plan_replay(run.recording, PACED, other)
    drawn = replace(run, entry=other, release=replace(run.release, models=(other,)))
    as_it_is = EmbeddedEngine(drawn.release).serve(run.plan)
    assert mean_e2e_us(drawn, "one", "other") == pytest.approx(as_it_is.e2e_us.mean(), rel=0.01)


def test_steps_that_are_not_the_servers_make_no_other_pace() -> None:
    """A server of four slots, whose own coefficients these are: its pace is 1.

    Four requests came 30 ms earlier than it is recorded, and no stamp says when the server was idle.
    """
    narrow = replace(ENGINE, max_num_seqs=4)
    requests = [(at_us + 30_000, prompt, 0, output) for at_us, prompt, _, output in workload(3, 200)]
    result, own = served(requests, narrow), logged(requests, narrow)
    names = {"start_us": "scheduled_us", "prefill_tokens": "prefill_tokens", "decode_tokens": "decode_tokens"}
    steps = {name: result.steps[of] for name, of in names.items()} | {"step_id": np.arange(len(result.steps))}
    nothing = pl.Series([None] * len(result.steps))
    full = pl.DataFrame({name: steps.get(name, nothing) for name in STEP_SCHEMA}, schema=STEP_SCHEMA)
    moved = own.requests.frame().with_columns(arrival_us=pl.col("arrival_us") - 30_000 * (pl.int_range(pl.len()) < 4))
    recording = replace(own, requests=rows_of(moved), iterations=no_rows(ITERATION_SCHEMA), steps=rows_of(full))
    (entry,) = release(recording, 1.0).models
    plan = plan_replay(recording, ReplayMode(), entry)
    pace = recorded_pace(recording, plan.trace, plan.engine, replace(entry, lifecycle=Lifecycle()))
    assert pace is not None
    assert pace.factor == pytest.approx(1, abs=0.01)
