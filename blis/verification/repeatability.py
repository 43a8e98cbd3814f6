"""Equal input gives byte-equal output, however the run is driven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from blis_replay.blis.engine import simulate
from blis_replay.blis.result import SimResult
from blis_replay.blis.verification.row import VerificationRow, row_of_faults
from blis_replay.blis.verification.workloads import LATENCY, LIFECYCLE, Scenario, SlowLatency


def differing_fields(a: SimResult, b: SimResult) -> list[str]:
    """Names of the arrays and counts of two results that are not byte for byte the same."""
    different = []
    for name in (field.name for field in fields(SimResult) if field.name != "lifecycle"):
        left, right = np.asarray(getattr(a, name)), np.asarray(getattr(b, name))
        if (left.shape, left.dtype, left.tobytes()) != (right.shape, right.dtype, right.tobytes()):
            different.append(f"{name} differs")
    return different


def check_determinism(chosen: Sequence[Scenario]) -> VerificationRow:
    """Two whole runs of each workload are byte-identical."""
    faults: list[str] = []
    for scenario in chosen:
        first = simulate(scenario.trace, scenario.engine, LATENCY, LIFECYCLE)
        second = simulate(scenario.trace, scenario.engine, LATENCY, LIFECYCLE)
        faults += [f"{scenario.name}: {text}" for text in differing_fields(first, second)]
    return row_of_faults("determinism", f"{len(chosen)} workloads", faults, "two runs of each, byte for byte")


def check_driving(chosen: Sequence[Scenario], seed: int) -> list[VerificationRow]:
    """A step at a time with a Python latency model, and in random pieces of time, against the whole run."""
    stepped: list[str] = []
    pieces: list[str] = []
    rng = np.random.default_rng([seed, 3])
    steps = 0
    for scenario in chosen:
        whole = simulate(scenario.trace, scenario.engine, LATENCY, LIFECYCLE)
        steps += len(whole.steps)
        stepped += [f"{scenario.name}: {text}" for text in differing_fields(whole, _a_step_at_a_time(scenario))]
        pauses_us = np.sort(rng.integers(0, int(whole.step_end_us[-1]) + 1, 100))
        pieces += [f"{scenario.name}: {text}" for text in differing_fields(whole, _in_pieces(scenario, pauses_us))]
    configuration = f"{len(chosen)} workloads"
    return [
        row_of_faults("step at a time = whole run", configuration, stepped, f"{steps:,} steps, byte for byte"),
        row_of_faults("paused and resumed = whole run", configuration, pieces, "100 pauses in each, byte for byte"),
    ]


def _a_step_at_a_time(scenario: Scenario) -> SimResult:
    engine, latency = scenario.start(), SlowLatency()
    while (batch := engine.schedule()) is not None:
        engine.run(max(int(latency.step_time(batch)), 1))
    return engine.result()


def _in_pieces(scenario: Scenario, pauses_us: np.ndarray[tuple[int], np.dtype[np.int64]]) -> SimResult:
    engine = scenario.start()
    for until_us in pauses_us.tolist():
        engine.advance(LATENCY, until_us)
    engine.advance(LATENCY)
    return engine.result()
