"""The pace of a server: planted, of one that logged its iterations; and of a real one that recorded its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from logged import LATENCY, logged, workload

from blis_replay.base.errors import ReplayError
from blis_replay.blis.latency.models import CorrectedModel, LatencyModel, Lifecycle, durations_us
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.ingest.recording import ITERATION_SCHEMA, Recording
from blis_replay.ingest.rows import no_rows
from blis_replay.ingest.store import open_for_reading, read_stored
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import ReplayMode, parse_mode
from blis_replay.replay.pace import at_pace, recorded_pace
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import entry_of
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.comparison.spread import server_pace
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
