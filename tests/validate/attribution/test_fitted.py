"""Costs that are fitted through the simulator, without a replay for those of which the engine knows nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blis_replay.blis.engine import simulate
from blis_replay.fixtures.faults import Fault, planted_case
from blis_replay.replay.mode import ReplayMode
from blis_replay.validate.attribution import fitted
from blis_replay.validate.attribution.fitted import Through, target_of

# Places of what is fitted: ns a step, then delays (us) before the queue, per token and per request after it, and of the
# stamp of the first token alone.
PER_STEP, PRE_QUEUE, PER_TOKEN, PER_REQUEST, STAMP = 0, 4, 5, 6, 7


def test_delays_after_a_token_are_tried_without_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come on top of what the engine did: E2E is later by 70 us a token and 900 us, TTFT by 70 us."""
    runs = []

    def counted(*arguments: Any) -> Any:
        runs.append(arguments)
        return simulate(*arguments)

    monkeypatch.setattr(fitted, "simulate", counted)
    case = planted_case(Fault("", ()))
    recording, target = case.recording, target_of(case.recording)
    assert target is not None
    entry = case.release.entry_for(recording.model, recording.tensor_parallelism, recording.alias)
    assert entry is not None
    through = Through(recording, ReplayMode(), entry, target)

    def later_us(**costs: float) -> Any:
        at = np.zeros(8)
        for name, value in costs.items():
            at[globals()[name]] = value
        return (through.difference(at) - through.as_it_is) * target.scale_us[:, None]

    moved_us = later_us(PER_TOKEN=70.0, PER_REQUEST=900.0)
    assert len(runs) == 1  # of the coefficients as they are
    tokens = recording.requests["output_tokens"].to_numpy()[: len(target.chosen)][target.chosen]
    assert moved_us[0] == pytest.approx(np.full(len(tokens), 70.0), abs=1e-6)  # of floats of some 10^6
    assert moved_us[1] == pytest.approx(70.0 * tokens + 900.0, abs=1e-5)
    moved_us = later_us(STAMP=5_000.0)
    assert len(runs) == 1
    assert moved_us[0] == pytest.approx(np.full(len(tokens), 5_000.0), abs=1e-5)
    assert moved_us[1] == pytest.approx(np.zeros(len(tokens)), abs=1e-5)  # the last token is in time
    later_us(PRE_QUEUE=2_000.0)
    later_us(PRE_QUEUE=2_000.0, PER_TOKEN=70.0)
    assert len(runs) == 2
    later_us(PER_STEP=300_000.0)
    assert len(runs) == 3
