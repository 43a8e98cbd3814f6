"""``study pairs`` and ``study learning-curve`` as a user calls them."""

from __future__ import annotations

import pytest
from command_line import Run

pytestmark = pytest.mark.slow


def test_each_recording_is_fitted_and_tried_on_the_other(run: Run) -> None:
    document = run("study", "pairs", "tiny-live-a", "tiny-live-a2", "--json").json
    tried = {(row["fitted_on"], row["tried_on"], row["pace"], row["metric"]) for row in document["tried"]}
    both = ("tiny-live-a", "tiny-live-a2")
    assert {row[:2] for row in tried} == {both, both[::-1]}
    assert len(tried) == 2 * 2 * 3
    assert all(row["holds"] == (row["low"] <= 0 <= row["high"]) for row in document["tried"])
    assert sum(row["held"] for row in document["coverage"]) == sum(row["holds"] for row in document["tried"])


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
