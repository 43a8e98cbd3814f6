"""What a workload spec costs where the simulator is right, and where the published workload-spec errors come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import parse_mode
from blis_replay.replay.plan import plan_replay
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.experiment import DEFAULT_RELEASE


def error_of_the_mean(mode: str, metric: str) -> float:
    """Signed relative error of 34b-general with our own release, requests reconstructed."""
    recording = bundled_recording(bundled_aliases()["34b-general"])
    run = replay(recording, load_release(DEFAULT_RELEASE), parse_mode(mode))
    error = compare_replay(run).metrics[metric]["mean"].error
    assert error is not None
    return error


def test_one_declared_component_alone_costs_little() -> None:
    """Equal gaps for Poisson ones and 9 x 5 prompts for 10 x 10 do not matter to the means."""
    assert abs(error_of_the_mean("arrivals=profile", "e2e")) < 0.01
    assert abs(error_of_the_mean("prefix=profile", "e2e")) < 0.01


def test_longer_prompts_load_the_engine_with_their_context_even_if_the_cache_has_them() -> None:
    """A decode costs 18.4 us + 0.029 us for each of 1932 + 124 tokens, 78 us.  At 20 requests/s of 248 tokens a cycle c
    serves 4.96 c decodes (c in ms): 13.6 / (1 - 4.96 * 0.078) = 22 ms and 110 decodes; at 8/s 16.1 ms.  Weighed by
    requests (4,800 and 12,000) that is 25 % more than the true gap of 16.36 ms; bursts reach 128, and a queue grows."""
    assert 0.25 < error_of_the_mean("lengths=profile", "itl") < 0.50
    assert error_of_the_mean("lengths=profile", "ttft") > 5


def test_growing_conversations_overload_a_server_that_never_saw_them() -> None:
    """Every turn adds a question and an answer, 695 tokens that no cache holds: 13,900 a second at 20 requests/s."""
    assert error_of_the_mean("lengths=profile,prefix=profile", "e2e") > 5
    assert error_of_the_mean("spec", "ttft") > 300


# Published round 2 (regime ensemble, workload spec): mean simulated ITL and TTFT, ms.  Their steps hardly depend on
# the batch, so a step that always takes that ITL stands for their latency model.
PUBLISHED = {
    "70b-hf-codegen": (8.203, 12.38),
    "mixtral-codegen": (9.124, 13.83),
    "34b-codegen": (14.544, 13_913.0),
    "70b-general": (8.029, 13_050.0),
    "mixtral-general": (9.124, 30_721.0),
    "34b-general": (14.652, 119_189.0),
}


def ttft_ms(alias: str, *, multi_turn: bool) -> float:
    recording = bundled_recording(bundled_aliases()[alias])
    assert recording.load_profile is not None
    recording = replace(recording, load_profile=replace(recording.load_profile, multi_turn=multi_turn))
    plan = plan_replay(recording, parse_mode("blis-spec,scheduling=synchronous"))
    step_ns = round(PUBLISHED[alias][0] * 1e6)
    return float(simulate(plan.trace, plan.engine, LatencyModel("blackbox", step_ns, 0, 0)).ttft_us.mean()) / 1000


@pytest.mark.parametrize("alias", PUBLISHED)
def test_published_errors_of_workload_specs_come_from_five_turns_an_arrival(alias: str) -> None:
    """With five requests for each arrival 5 x rate x 248 steps are served at once: more than the 128 sequences that
    the server takes (70/s x 248 x 8.0 ms = 139 for 70b-general, 254 for 34b-general), or less (76 for 70b-hf-codegen).
    The queue that grows, or does not, is the published TTFT."""
    published_ms = PUBLISHED[alias][1]
    ours_ms = ttft_ms(alias, multi_turn=True)
    # 34b-codegen stands at 134 of 128 sequences, where the draw of the arrivals decides.
    queueing = 3.0 if alias == "34b-codegen" else 1.45
    within = queueing if published_ms > 1_000 else 1.02
    assert 1 / within < ours_ms / published_ms < within
    assert ttft_ms(alias, multi_turn=False) == pytest.approx(1.5 * PUBLISHED[alias][0], rel=0.01)
