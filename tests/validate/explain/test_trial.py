"""Costs that are fitted through the simulator, without a replay for those of which the engine knows nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blis_replay.blis.engine import Engine, simulate
from blis_replay.blis.trace import NEVER_US
from blis_replay.replay.engine import replayed_engine, with_engine
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.explain import trial
from blis_replay.validate.explain.trial import Trial, misfit, trial_of
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
    found = trial_of(case.recording, ReplayMode(), entry)
    assert found is not None
    return found


def _with_at_once(stated: Trial, requests: int, most: float = np.inf) -> Trial:
    """The same server if it ran so many requests at once."""
    tried = with_engine(stated.recording, {"max_num_seqs": requests}, "tried")
    return stated.on(replayed_engine(tried, ReplayMode()).config, most)


def test_delays_around_the_engine_are_tried_without_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """E2E is later by 70 us a token and 900 us, TTFT by 70 us; all of it by a delay before the queue."""
    runs = _counted(monkeypatch)
    stated = _as_stated()
    recording, entry, target = stated.recording, stated.entry, stated.target

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
    assert len(runs) == 1
    lifecycle = replace(entry.lifecycle, pre_queue_us=entry.lifecycle.pre_queue_us + 2_000)
    replayed = Trial(recording, ReplayMode(), replace(entry, lifecycle=lifecycle), target)
    replayed_us = (replayed.difference_as_is - stated.difference_as_is) * target.scale_us[:, None]
    assert moved_us[0] == pytest.approx(replayed_us[0] + 70.0, abs=1e-5)
    assert moved_us[1] == pytest.approx(replayed_us[1] + 70.0 * tokens, abs=1e-5)
    assert len(runs) == 2
    later_us(PER_STEP=300_000.0)
    assert len(runs) == 3


def test_an_engine_that_is_far_too_slow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time is off by more than twice all latencies; one that is off by less stays to the last bit."""
    stated, most = _as_stated(), 2.0
    slow, wide = _with_at_once(stated, 1), _with_at_once(stated, 11)
    assert misfit(slow.difference_as_is) > most > misfit(wide.difference_as_is) > 0
    advanced_us = []

    class Watched(Engine):
        def advance(self, latency: Any, until_us: int = NEVER_US) -> None:
            advanced_us.append(until_us)
            super().advance(latency, until_us)

    monkeypatch.setattr(trial, "Engine", Watched)
    assert (_with_at_once(stated, 1, most).difference_as_is[:2] == 10.0).all()  # NOT_SIMULATED
    assert max(advanced_us) < NEVER_US
    assert np.array_equal(_with_at_once(stated, 11, most).difference_as_is, wide.difference_as_is, equal_nan=True)
    assert max(advanced_us) == NEVER_US


def test_a_rough_fit_takes_fewer_replays_and_leaves_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tenth of what an exact one leaves, for at most three quarters of its replays."""
    runs = _counted(monkeypatch)
    roughly = _with_at_once(_as_stated(), 11).fit(roughly=True)
    rough_runs = len(runs)
    exactly = _with_at_once(_as_stated(), 11).fit()
    assert exactly.left < exactly.before
    assert roughly.left == pytest.approx(exactly.left, rel=0.1)
    assert rough_runs < 0.75 * (len(runs) - rough_runs)


def test_an_exact_fit_after_a_rough_one_has_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 requests at once in place of 32: the answer of an exact fit alone, for fewer replays than the two apart."""
    stated = _as_stated()
    runs = _counted(monkeypatch)
    alone = _with_at_once(stated, 8).fit()
    exact = len(runs)
    both = _with_at_once(stated, 8)
    both.fit(roughly=True)
    rough = len(runs) - exact
    assert both.fit() == alone
    assert len(runs) - exact < exact + rough
