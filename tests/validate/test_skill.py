"""How near single requests are: CRPS by its definition, and skills of predictions whose errors are planted."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from command_line import Run

from blis_replay.ingest.store import open_for_reading, read_stored
from blis_replay.validate.metrics.latency import LatencySamples
from blis_replay.validate.metrics.skill import crps_us, line_through, skills

# A server that is a line: 5 ms, 20 us a prompt token, 2 ms a gap.
PROMPT, OUTPUT = np.array([100, 400, 200, 300]), np.array([11, 21, 41, 31])


def samples(ttft_us: np.ndarray, e2e_us: np.ndarray) -> LatencySamples:
    return LatencySamples(ttft_us.astype(np.int64), e2e_us.astype(np.int64), OUTPUT)


STRAIGHT = samples(5_000 + 20 * PROMPT, 5_000 + 20 * PROMPT + 2_000 * (OUTPUT - 1))
# Requests that no line knows: 1 ms early and late in turn, in a way that does not move the line.
OFF_US = np.array([1_000, 1_000, -1_000, -1_000])
SEEN = samples(STRAIGHT.ttft_us + OFF_US, STRAIGHT.e2e_us + OFF_US)


def test_crps_is_that_of_its_definition() -> None:
    """Gneiting and Raftery 2007, equation 20, over all pairs of predictions."""
    random = np.random.default_rng(7)
    seen, drawn = random.exponential(100, 5), random.exponential(100, (6, 5))
    expected = [
        np.mean([abs(x - o) for x in of]) - np.mean([abs(x - y) for x, y in product(of, of)]) / 2
        for o, of in zip(seen, drawn.T, strict=True)
    ]
    assert crps_us(seen, drawn) == pytest.approx(np.mean(expected))


def test_crps_of_one_prediction_is_its_absolute_error() -> None:
    assert crps_us(np.array([10.0, 20.0]), np.array([[13.0, 19.0]])) == pytest.approx(2.0)


def test_an_honest_spread_scores_better_than_a_sure_miss() -> None:
    """Around 0, of a truth that is 1 or -1: 0.5 for the two values, 1 for their middle."""
    seen = np.array([1.0, -1.0])
    assert crps_us(seen, np.array([[1.0, 1.0], [-1.0, -1.0]])) == pytest.approx(0.5)
    assert crps_us(seen, np.array([[0.0, 0.0]])) == pytest.approx(1.0)


def test_the_line_of_a_server_that_is_one() -> None:
    found = line_through(
        PROMPT.astype(float), OUTPUT - 1.0, STRAIGHT.ttft_us.astype(float), STRAIGHT.e2e_us.astype(float), np.ones(4)
    )
    assert (found.first_us, found.prompt_us, found.gap_us) == pytest.approx((5_000, 20, 2_000))


@pytest.mark.parametrize(
    ("share", "skill"), [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0), (2.0, -1.0)], ids=["right", "half", "the line", "worse"]
)
def test_skill_is_the_share_of_the_error_of_the_line_that_is_gone(share: float, skill: float) -> None:
    """Each request is off by that share of what the line is off by: 1 ms of a TTFT of 10 ms."""
    answered = samples(SEEN.ttft_us - share * OFF_US, SEEN.e2e_us - share * OFF_US)
    found = skills(PROMPT, SEEN, [answered])
    assert found["ttft"].beside_line == pytest.approx(skill)
    assert found["e2e"].beside_line == pytest.approx(skill)
    assert found["ttft"].share == pytest.approx(share * 0.1)
    assert found["ttft"].beside_repeats is None


@pytest.mark.slow
def test_gate_and_validate_say_how_near_requests_are_beside_a_repeat(run: Run, tmp_path: Path) -> None:
    """Two recordings of one load: the repeat's difference as their rows have it, request by request."""
    assert run("calibrate", "tiny-live-b", "--out", "tb.yaml").code == 0
    judged = ("tiny-live-a", "--repeat", "tiny-live-a2", "--json")
    (gated,) = run("gate", "tb.yaml", *judged).json["experiments"]
    (validated,) = run("validate", *judged, "--coefficients", "tb.yaml").json["experiments"]
    assert gated["skill"] == validated["skill"]
    with open_for_reading(tmp_path / ".blis-replay" / "store.duckdb") as store:
        both = [read_stored(store, validated["slug"].replace("-a", name)) for name in ("-a", "-a2")]
    for metric in ("e2e", "ttft"):
        one, other = (recording.requests[f"{metric}_us"].to_numpy() for recording in both)
        skill = validated["skill"][metric]
        assert skill["crps"] / skill["beside_repeats"] == pytest.approx(abs(one - other).mean() / one.mean())
