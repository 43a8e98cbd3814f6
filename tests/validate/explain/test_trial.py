"""Costs that are fitted through the simulator, without a replay for delays after the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.replay.engine import with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.schedule.recorded import RecordedSchedule
from blis_replay.validate.explain import trial
from blis_replay.validate.explain.hypothesis import Hypothesis, Replayed
from blis_replay.validate.explain.inputs import argument_hypothesis
from blis_replay.validate.explain.search import best_input
from blis_replay.validate.explain.trial import Trial, trial_of
from blis_replay_labs.planted.faults import Fault, planted_case

# Places of what is fitted: ns a step, then delays (us) before the queue, per token and per request after it, and of the
# stamp of the first token alone.
PER_STEP, PRE_QUEUE, PER_TOKEN, PER_REQUEST, STAMP = 0, 4, 5, 6, 7


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the simulator is called with from now on."""
    runs = []

    def counted(*arguments: Any) -> Any:
        runs.append(arguments)
        return simulate(*arguments)

    monkeypatch.setattr(trial, "simulate", counted)
    return runs


def _as_stated() -> Trial:
    """A synthetic server, and a simulator that is right about it."""
    case = planted_case(Fault("", ()))
    entry = case.release.entry_for(case.recording.model, case.recording.tensor_parallelism, case.recording.alias)
    assert entry is not None
    found = trial_of(Replayed(case.recording, ReplayMode(), entry, case.release))
    assert found is not None
    return found


def test_delays_after_the_engine_are_tried_without_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """E2E is later by 70 us per token and 900 us, TTFT by 70 us.  A delay before the queue is replayed."""
    runs = _counted(monkeypatch)
    stated = _as_stated()
    recording, entry, target = stated.replayed.recording, stated.replayed.entry, stated.target

    def later_us(**costs: float) -> Any:
        at = np.zeros(8)
        for name, value in costs.items():
            at[globals()[name]] = value
        return (stated.difference(at) - stated.difference_as_is) * target.scale_us[:, None]

    moved_us = later_us(PER_TOKEN=70.0, PER_REQUEST=900.0)
    assert len(runs) == 1  # of the coefficients as they are
    tokens = recording.requests["output_tokens"].to_numpy()[: len(target.chosen)][target.chosen]
    assert moved_us[0] == pytest.approx(np.full(len(tokens), 70.0), abs=1e-6)  # of floats of some 10^6
    assert moved_us[1] == pytest.approx(70.0 * tokens + 900.0, abs=1e-5)
    moved_us = later_us(STAMP=5_000.0)
    assert len(runs) == 1
    assert moved_us[0] == pytest.approx(np.full(len(tokens), 5_000.0), abs=1e-5)
    assert moved_us[1] == pytest.approx(np.zeros(len(tokens)), abs=1e-5)  # the last token is in time
    moved_us = later_us(PRE_QUEUE=2_000.0, PER_TOKEN=70.0)
    lifecycle = replace(entry.lifecycle, pre_queue_us=entry.lifecycle.pre_queue_us + 2_000)
    replayed = Trial(replace(stated.replayed, entry=replace(entry, lifecycle=lifecycle)), target)
    replayed_us = (replayed.difference_as_is - stated.difference_as_is) * target.scale_us[:, None]
    assert moved_us[0] == pytest.approx(replayed_us[0] + 70.0, abs=1e-5)
    assert moved_us[1] == pytest.approx(replayed_us[1] + 70.0 * tokens, abs=1e-5)
    assert len(runs) == 3
    later_us(PER_STEP=300_000.0)
    assert len(runs) == 4


@pytest.mark.parametrize("change", ["lifecycle", "latency", "block_size"])
def test_every_change_of_a_hypothesis_is_tried(change: str) -> None:
    """The simulator is wrong in one thing, and the one hypothesis says what the server had: nothing is left."""
    stated = _as_stated()
    recording, entry = stated.replayed.recording, stated.replayed.entry
    if change == "block_size":
        true = int(recording.engine["block_size"].value)
        recording = with_engine(recording, {"block_size": 8 * true}, "planted")
        right = argument_hypothesis("block_size", true, 8 * true)
    elif change == "latency":
        right = Hypothesis(change, "", "", latency=entry.latency)
        assert isinstance(entry.latency, LatencyModel)
        entry = replace(entry, latency=replace(entry.latency, intercept_ns=2 * entry.latency.intercept_ns))
    else:
        right = Hypothesis(change, "", "", lifecycle={"pre_queue_us": entry.lifecycle.pre_queue_us})
        entry = replace(entry, lifecycle=replace(entry.lifecycle, pre_queue_us=80_000.0))
    wrong = Trial(replace(stated.replayed, recording=recording, entry=entry), stated.target)
    found = best_input(wrong, [[right]])
    assert found is not None
    assert replace(found.hypothesis, basis="") == right
    assert found.left == pytest.approx(0, abs=1e-4)


def test_a_change_that_no_trial_can_make_is_refused() -> None:
    stated = _as_stated()
    entry = stated.replayed.entry
    slower = replace(entry, lifecycle=replace(entry.lifecycle, pre_queue_us=80_000.0))
    wrong = Trial(replace(stated.replayed, entry=slower), stated.target)
    other = Hypothesis("schedule", "", "", schedule=RecordedSchedule.__new__(RecordedSchedule))
    with pytest.raises(ValueError, match="schedule"):
        best_input(wrong, [[other]])
