"""Laws against a simulator without a fault, with one fault each, and against ours.

The stand-in is tests/support/toy_simulator.py, started as a command; which law names which fault stands there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import toy_simulator
from command_line import Run
from recordings import make_recording

from blis_replay.base.errors import ReplayError
from blis_replay.blis.releases.release import CoefficientRelease
from blis_replay.ingest.recording import Recording
from blis_replay.replay.command import command_simulator
from blis_replay.replay.mode import parse_mode
from blis_replay.replay.plan import ReplayPlan
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import EmbeddedEngine, Simulated, Simulator
from blis_replay.validate.laws import LAWS, Ruling, laws_answer, rulings

RELEASE = load_release("h100-vllm-0.15.1")


def recording(**engine: Any) -> Recording:
    """48 requests at 45 per second: of a burst of them the first tokens come eleven times as late."""
    rng, count = np.random.default_rng(1), 48
    columns = {
        "arrival_us": np.cumsum(rng.integers(1, 44_000, count)).tolist(),
        "prompt_tokens": rng.integers(20, 300, count).tolist(),
        "output_tokens": rng.integers(5, 60, count).tolist(),
        "ttft_us": [20_000] * count,
        "e2e_us": [900_000] * count,
    }
    return make_recording(columns, engine={"max_num_seqs": 16, **engine})


def ruled(simulator: Simulator, of: Recording | None = None) -> dict[str, Ruling]:
    return {one.law.name: one for one in rulings(simulator, of or recording(), parse_mode("exact"))}


def ruling(simulator: Simulator, law: str) -> Ruling:
    """Of one law; those after it are not tried."""
    return next(one for one in rulings(simulator, recording(), parse_mode("exact")) if one.law.name == law)


def toy(fault: str) -> Simulator:
    return command_simulator(f"cmd:{sys.executable} -IS {toy_simulator.__file__} '{fault}'", RELEASE, 60.0)


def test_our_engine_keeps_every_law() -> None:
    assert {one.verdict for one in ruled(EmbeddedEngine(RELEASE)).values()} == {"holds"}


@pytest.mark.slow
def test_a_simulator_without_a_fault_keeps_every_law() -> None:
    assert {one.verdict for one in ruled(toy("none")).values()} == {"holds"}


@pytest.mark.heavy
@pytest.mark.parametrize("fault", toy_simulator.FAULTS)
def test_the_law_of_a_fault_is_broken(fault: str) -> None:
    assert ruling(toy(fault), toy_simulator.FAULTS[fault]).verdict == "broken"


@pytest.mark.slow
def test_the_three_faults_of_history_are_as_large_as_they_were() -> None:
    """TTFT inflated 28 to 71 times; a replay of the own trace 11 times off; a cache whose hits save nothing."""
    size = {
        law: ruling(toy(fault), law).error or 0.0
        for fault, law in toy_simulator.FAULTS.items()
        if law in ("alone", "own trace", "cache hits") and fault != "no seed"
    }
    assert 28 <= size["alone"] + 1 <= 71
    assert size["own trace"] == pytest.approx(11, rel=0.3)
    assert size["cache hits"] == pytest.approx(1, abs=0.01)


@dataclass(frozen=True)
class Constant:
    """20 ms to the first token, 1 s to the last; fails with longer prompts than it takes."""

    release: CoefficientRelease = RELEASE
    said: tuple[str, ...] = ()
    longest_prompt: int = 10**9
    name: str = "constant"
    reports_steps: bool = False

    def entry_for(self, recording: Recording) -> None:
        return None

    def serve(self, plan: ReplayPlan) -> Simulated:
        n = len(plan.trace)
        if plan.trace.prompt_tokens.max() > self.longest_prompt:
            raise ReplayError("the prompt is too long")
        times = np.full(n, 20_000), np.full(n, 1_000_000)
        return Simulated(np.ones(n, np.bool_), *times, plan.trace.output_tokens, differences=self.said)


def test_a_constant_knows_neither_lengths_nor_limits() -> None:
    """64 and 128 tokens have 63 and 127 gaps: one decode time for both is 63/127 of what the longer one needs."""
    found = ruled(Constant())
    assert {name for name, one in found.items() if one.verdict == "broken"} == {"lengths", "one at a time"}
    assert found["lengths"].error == pytest.approx(1 - 63 / 127)
    assert found["one at a time"].error == 1.0


def test_what_a_simulator_says_it_does_not_model_is_no_fault() -> None:
    said = ruled(Constant(said=("constant does not model: queues",)))["one at a time"]
    assert (said.verdict, said.error) == ("not applicable", 1.0)


def test_laws_of_coefficients_say_nothing_of_a_simulator_that_has_its_own() -> None:
    found = ruled(Constant())
    assert {found[law].verdict for law in ("scale", "shorter steps", "cache hits")} == {"not applicable"}


def test_a_simulator_that_fails_on_a_possible_request_breaks_the_law() -> None:
    """2,048 tokens are tried, of a context of 4,096; the longest recorded prompt has fewer than 300."""
    assert ruled(Constant(longest_prompt=300))["lengths"].verdict == "broken"


def test_a_law_of_first_come_first_served_is_not_one_of_priorities() -> None:
    found = ruled(EmbeddedEngine(RELEASE), recording(scheduling_policy="priority"))
    assert found["order of ids"].verdict == "not applicable"


def test_the_exit_code_is_that_of_a_judgement() -> None:
    found = [*ruled(Constant()).values()]
    of = {kind: [one for one in found if one.verdict == kind] for kind in ("holds", "broken", "not applicable")}
    codes = {kind: laws_answer("constant", recording(), some).exit_code for kind, some in of.items()}
    assert codes == {"holds": 0, "broken": 1, "not applicable": 4}


def test_each_law_says_why_it_holds() -> None:
    assert all(law.claim and law.source for law in LAWS)
    assert len({law.name for law in LAWS}) == len(LAWS)


@pytest.mark.usefixtures("shipped")
def test_validate_tries_laws_on_the_requests_of_an_experiment(run: Run) -> None:
    answer = run("validate", "34b-general", "--laws", "--json")
    assert answer.code == 0
    assert [one["verdict"] for one in answer.json["laws"]] == ["holds"] * len(LAWS)
    assert run("validate", "34b-general", "--laws", "--by-stage").code == 2
