"""The engine on random schedules of the real scheduler, driven in every way there is."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenario import Scenario, first_difference, read_scenario

from blis_replay.blis.engine import Engine

SCENARIOS = sorted(path.parent for path in (Path(__file__).parent / "scenarios").glob("*/config.json"))


@pytest.mark.parametrize("directory", SCENARIOS, ids=lambda path: path.name)
def test_equal_to_the_real_scheduler(directory: Path) -> None:
    """KV pressure, preemption, priorities with ties, thresholds, chunking off, reuse over turns; both modes."""
    assert first_difference(read_scenario(directory)) is None


@pytest.mark.slow
@given(st.sampled_from(SCENARIOS), st.lists(st.integers(0, 4_000_000), max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_run_can_be_stopped_and_resumed_anywhere(directory: Path, stops_us: list[int]) -> None:
    """Advanced to any times, copied there and resumed: the same run; the copy left behind is not touched."""
    scenario = read_scenario(directory)
    engine = Engine(scenario.trace, scenario.engine)
    for stop_us in sorted(stops_us):
        engine.advance(scenario.latency, stop_us)
        left_behind, engine = engine, copy.deepcopy(engine)
        before = left_behind.state.at.copy()
        engine.advance(scenario.latency, stop_us + 1000)
        assert np.array_equal(left_behind.state.at, before)
    engine.advance(scenario.latency)
    assert first_difference(scenario, engine.result()) is None


def test_no_step_is_scheduled_at_or_after_the_time_given() -> None:
    scenario: Scenario = read_scenario(SCENARIOS[0])
    engine = Engine(scenario.trace, scenario.engine)
    engine.advance(scenario.latency, 500_000)
    scheduled_us = engine.result().steps["scheduled_us"]
    assert len(scheduled_us) > 10
    assert scheduled_us.max() < 500_000


@pytest.mark.heavy
def test_the_kernel_runs_without_compilation() -> None:
    """For debugging: with NUMBA_DISABLE_JIT the same source runs as plain Python, and is as exact."""
    code = (
        "import sys; from pathlib import Path; from scenario import *\n"
        "print([first_difference(read_scenario(Path(name))) for name in sys.argv[1:]])"
    )
    few = [str(path) for path in SCENARIOS[:4]]
    ended = subprocess.run(
        [sys.executable, "-c", code, *few],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "scripts")},
        check=False,
    )
    assert ended.stdout.strip() == "[None, None, None, None]", ended.stderr
