"""``study pairs`` and ``study learning-curve`` as a user calls them."""

from __future__ import annotations

import pytest
from command_line import Run

from blis_replay_labs.studies.pairs import Tried

pytestmark = pytest.mark.slow


def test_each_recording_is_fitted_and_tried_on_the_other(run: Run) -> None:
    document = run("study", "pairs", "tiny-live-a", "tiny-live-a2", "--json").json
    tried = {(row["fitted_on"], row["tried_on"], row["pace"], row["metric"]) for row in document["tried"]}
    both = ("tiny-live-a", "tiny-live-a2")
    assert {row[:2] for row in tried} == {both, both[::-1]}
    assert len(tried) == 2 * 2 * 3
    assert all(row["holds"] == (row["low"] <= 0 <= row["high"]) for row in document["tried"])
    assert sum(row["held"] for row in document["coverage"]) == sum(row["holds"] for row in document["tried"])
    at_95 = [row for row in document["reliability"] if row["level"] == 0.95]
    assert {(row["pace"], m): row[m] for row in at_95 for m in ("e2e", "ttft", "itl")} == {
        (row["pace"], row["metric"]): row["held"] / row["of"] for row in document["coverage"]
    }


@pytest.mark.parametrize(
    ("error", "low", "high", "level"),
    [
        (0.1, 0.0, 0.3, 0.95),  # its printed interval just reaches the server
        (-0.2, -0.4, 0.0, 0.95),
        (0.1, 1.1 / 1.1**2.906 - 1, 1.0, 0.5),  # normal: 1.96 / 0.6745 times as far
        (0.0, -0.1, 0.1, 0.0),
        (0.1, 0.1, 0.1, 1.0),  # no interval, and off
        (-0.5, -1.0, float("inf"), 0.0),  # no bound
    ],
)
def test_the_level_at_which_an_interval_just_reaches_the_server(
    error: float, low: float, high: float, level: float
) -> None:
    """In logarithms, as the printed interval of 95 % is made."""
    assert Tried("a", 1, "b", "modelled", "e2e", error, low, high).level == pytest.approx(level, abs=1e-3)


def test_more_requests_are_fitted_in_turn_and_tried_on_the_rest(run: Run) -> None:
    tried = run("study", "learning-curve", "tiny-live-a", "--on", "tiny-live-a2", "--json").json["tried"]
    assert [row["requests"] for row in tried if (row["pace"], row["metric"]) == ("modelled", "e2e")] == [
        50,
        50,
        100,
        100,
    ]
    assert {row["tried_on"] for row in tried} == {"tiny-live-a", "tiny-live-a2"}


def test_one_recording_of_a_model_is_no_pair(run: Run) -> None:
    assert run("study", "pairs", "tiny-live-a").code == 4


def test_a_fit_that_cannot_be_made_is_named_and_the_others_go_on(run: Run) -> None:
    """Of the first 50 requests of 7b-train there are 3 windows, for 4 coefficients."""
    document = run("study", "learning-curve", "7b-train", "--json").json
    assert [(row["fitted_on"], row["requests"]) for row in document["not_fitted"]] == [("7b-train", 50)]
    assert {row["requests"] for row in document["tried"]} == {100}
