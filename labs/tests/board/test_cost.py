"""What costs another simulator most: one that gives its answers only, with one thing wrong in it.

It is the engine here, run with another input than it was given, so the truth is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from blis_replay.blis.engine import simulate
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.blis.trace import EngineConfig
from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.replay.driver import replay
from blis_replay.replay.plan import ReplayPlan
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import Simulated, entry_of
from blis_replay.validate.experiment import DEFAULT_RELEASE
from blis_replay.validate.explain import trial
from blis_replay_labs.board.cost import STEP_TIME, cost_of
from blis_replay_labs.board.leaderboard import Cost
from blis_replay_labs.planted.faults import Case, Fault, planted_case

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Foreign:
    """Another simulator, as far as anybody sees: it says when each request was answered and scheduled, and no more."""

    release: CoefficientRelease
    engine: Callable[[EngineConfig], EngineConfig] = lambda engine: engine
    slower: float = 1.0
    output_tokens: list[int] | None = None
    lacks: tuple[str, ...] = ()
    name: str = "foreign"
    reports_steps: bool = False

    def entry_for(self, recording: Recording) -> None:
        """It has coefficients of its own."""

    def serve(self, plan: ReplayPlan) -> Simulated:
        entry = entry_of(self.release, plan.recording)
        latency = replace(entry.latency, intercept_ns=round(self.slower * entry.latency.intercept_ns))
        trace = plan.trace
        if self.output_tokens:
            trace = replace(trace, output_tokens=np.array(self.output_tokens))
        result = simulate(trace, self.engine(plan.engine), latency, entry.lifecycle)
        return Simulated(
            completed=result.completed,
            ttft_us=result.ttft_us,
            e2e_us=result.e2e_us,
            output_tokens=plan.trace.output_tokens,
            scheduled_us=result.scheduled_us - result.arrival_us,
            differences=tuple(f"foreign 1 does not model: {what}" for what in self.lacks),
        )


def cost(case: Case, **wrong: Any) -> Cost:
    return cost_of(replay(case.recording, case.release, simulator=Foreign(case.release, **wrong)), case.release)


def uncached(engine: EngineConfig) -> EngineConfig:
    return replace(engine, enable_prefix_caching=False)


def planted(load: str = "two levels") -> Case:
    """A server of which nothing is told wrong, recorded by its client alone."""
    return planted_case(Fault("none", (), "client", load))


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit to fewer requests is quicker."""
    monkeypatch.setattr(trial, "MAX_REQUESTS", 250)


@pytest.mark.parametrize(
    ("wrong", "load", "blamed"),
    [
        ({"engine": lambda engine: replace(engine, num_gpu_blocks=420)}, "long prompts", "KV blocks"),
        (
            {"engine": lambda engine: replace(engine, async_scheduling=not engine.async_scheduling)},
            *("bursts", "scheduling mode"),
        ),
        ({"engine": uncached}, "long prompts", "prefix cache"),
        ({"slower": 1.3}, "two levels", STEP_TIME),
        ({}, "two levels", None),
        # It has the prefix cache, whatever it says, and its answers show it.
        ({"lacks": ("prefix caching",)}, "long prompts", None),
    ],
    ids=["KV blocks", "scheduling", "prefix cache", "step time", "nothing", "nothing, and says so"],
)
def test_what_is_wrong_in_a_foreign_simulator_is_found(wrong: dict[str, Any], load: str, blamed: str | None) -> None:
    found = cost(planted(load), **wrong)
    assert (found.imitated, found.largest) == (True, blamed), (found.shares, found.evidence)


def test_what_a_simulator_says_that_it_lacks_is_a_component_of_its_own() -> None:
    """Two are wrong, and one is said: steps of 1.3 times the length, and prompts that are computed whole."""
    said = ("prefix caching: every prompt is computed whole",)
    found = cost(planted("long prompts"), engine=uncached, slower=1.3, lacks=said)
    assert found.imitated
    assert found.evidence["prefix cache"] == "it says that it does not model this"
    assert found.largest == STEP_TIME
    # Few prompts here share a prefix: without the cache alone this load takes 1 % longer.
    assert 0.005 < found.shares["prefix cache"][0] < 0.03 < found.shares[STEP_TIME][0]


def test_other_lengths_in_a_foreign_simulator_are_found() -> None:
    """It decodes what re-tokenising counts, which the recording has too: four fifths of what the server decoded."""
    case = planted()
    requests = case.recording.requests.frame()
    shorter = [max(round(n * (0.6 + 0.05 * (i % 9))), 1) for i, n in enumerate(requests["output_tokens"])]
    case = replace(case, recording=_with_reported(case, shorter))
    found = cost(case, output_tokens=shorter)
    assert found.largest == "output lengths", (found.shares, found.evidence)


def _with_reported(case: Case, lengths: list[int]) -> Recording:
    frame = case.recording.requests.frame().with_columns(output_tokens_reported=pl.Series(lengths, dtype=pl.Int64))
    return replace(case.recording, requests=rows_of(frame))


def test_a_simulator_with_the_kernels_of_a_new_server_is_imitated() -> None:
    """The engine here beside itself, with Mixtral's experts: stalls of 0.9 s that no step time has."""
    release = load_release(DEFAULT_RELEASE)
    found = cost_of(replay(bundled_recording(bundled_aliases()["mixtral-roleplay"]), release), release)
    assert (found.imitated, found.largest) == (True, None), (found.shares, found.evidence)
    assert found.left < 0.001
