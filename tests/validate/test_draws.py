"""Experiments whose requests are reconstructed: a verdict only where all reconstructions agree."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, isfinite
from pathlib import Path

import pytest

from blis_replay.fixtures.bundled import RECONSTRUCTIONS, bundled_recording, redrawn
from blis_replay.fixtures.catalogue import bundled_aliases
from blis_replay.ingest.recording import RECORDED
from blis_replay.ingest.store import Store, read_stored
from blis_replay.replay.driver import replay
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import EmbeddedEngine
from blis_replay.validate.comparison.compare import compare_replay, with_draws
from blis_replay.validate.comparison.comparison import Comparison, draws_remarks
from blis_replay.validate.comparison.pages import comparison_answer
from blis_replay.validate.comparison.spread import prediction_interval
from blis_replay.validate.comparison.verdict_text import first_screen
from blis_replay.validate.experiment import DEFAULT_RELEASE
from blis_replay.validate.judgement import held
from blis_replay.validate.metrics.uncertainty import Estimate
from blis_replay.validate.text.answer import Answer
from blis_replay.validate.text.messages import words

CELL = ("ttft", "mean")


@pytest.mark.parametrize(
    ("low", "high", "unsure", "state"),
    [
        (-0.1, 0.1, 0.0, "within"),
        (-0.2, -0.16, 0.0, "beyond"),
        (-0.2, 0.2, 0.0, "undecided"),
        (-0.34, 0.06, 0.0, "undecided"),
        (-inf, inf, 0.0, "undecided"),
        (-0.156, -0.156, 0.07, "undecided"),  # -21.5 to -9.7 %
        (-0.10, -0.10, 0.04, "within"),  # -13.6 to -6.4 %
        (0.14, 0.14, 0.02, "undecided"),  # +11.7 to +16.3 %
        (-0.35, -0.35, 0.10, "beyond"),  # -41.5 to -28.5 %
        (0.40, 0.40, 0.40, "undecided"),  # -16 to +96 %
    ],
)
def test_the_whole_interval_lies_on_one_side_of_the_limit_or_nothing_is_decided(
    low: float, high: float, unsure: float, state: str
) -> None:
    """15 % pass; steps beyond the fit widen it to (1 + low) (1 - unsure) - 1 and (1 + high) (1 + unsure) - 1."""
    estimate = Estimate((low + high) / 2 if isfinite(low) else 0.0, low, high, 8).beyond(unsure)
    assert held(CELL, 0.15, (1.0, 1.0 + estimate.error), estimate, name="TTFT").state == state


def test_no_error_is_below_minus_100_percent() -> None:
    """No simulated time is below 0; the p99 of a few reconstructions had -185 to +207 %."""
    estimate = Estimate(0.11, -1.85, 2.07, 8)
    assert held(CELL, 0.30, (1.0, 1.11), estimate, name="TTFT p99").interval == (-1.0, 2.07)


def test_what_was_published_is_the_same_in_every_reconstruction() -> None:
    recording = bundled_recording(bundled_aliases()["34b-codegen"])
    first, second = (redrawn(recording, seed) for seed in RECONSTRUCTIONS[:2])
    assert first is not None and second is not None
    assert first.requests.frame().equals(recording.requests.frame())
    one, other = first.requests.frame(), second.requests.frame()
    assert one.group_by("stage").len().sort("stage").equals(other.group_by("stage").len().sort("stage"))
    assert sorted(one["prompt_tokens"]) == sorted(other["prompt_tokens"])
    assert not one["arrival_us"].equals(other["arrival_us"])


def test_recorded_requests_are_not_drawn() -> None:
    assert redrawn(replace(bundled_recording(bundled_aliases()["34b-codegen"]), ground_truth=RECORDED), 1) is None


def drawn(alias: str) -> Comparison:
    recording, simulator = bundled_recording(bundled_aliases()[alias]), EmbeddedEngine(load_release(DEFAULT_RELEASE))
    return with_draws(compare_replay(replay(recording, simulator.release)), simulator)


@pytest.mark.slow
def test_a_mean_ttft_that_hangs_on_the_draw_is_not_decided() -> None:
    """70b-general stands at its limit of sequences: TTFT is -33 to -11 % by which arrivals were drawn, +-15 pass.

    Its recorded requests are met to 2 % (tests/validate/test_real_accuracy.py); E2E and ITL hardly move.
    """
    comparison = drawn("70b-general")
    assert comparison.draws is not None and comparison.draws.count == 20
    low, middle, high = comparison.draws.range_of(CELL)
    assert (low, middle, high) == pytest.approx((-0.326, -0.294, -0.112), abs=0.01)
    judgement = comparison.judgement
    assert ([q.key for q in judgement.in_state("undecided")], comparison.verdict) == (["ttft"], "UNDECIDED")
    assert [need.code for need in judgement.decides] == ["needs_arrivals"]
    assert comparison_answer(comparison).exit_code == 3
    assert "TTFT -29.4 % (-32.6 % to -11.2 %)" in words(draws_remarks(comparison)[0])


@pytest.mark.slow
def test_a_tail_that_hangs_on_the_draw_is_open() -> None:
    """p99 of TTFT of mixtral-general is -70 to +12 % by which arrivals were drawn, +-30 is the limit for tails.

    The longest 1 % are 168 requests: 39 to 91 wait for kernels, and the rest for rare bursts of arrivals.  Of the
    recorded arrivals it is -9.1 %.  That of 7b-codegen is within limits in all of them.
    """
    comparison = drawn("mixtral-general")
    assert comparison.draws is not None
    assert comparison.draws.range_of(("ttft", "p99")) == pytest.approx((-0.699, -0.324, 0.122), abs=0.01)
    assert [q.metric for q in comparison.judgement.tails_that_are("undecided")] == ["ttft"]
    assert comparison.judgement.tails_that_are("beyond") == ()
    assert "TAIL" not in str(Answer(first_screen(comparison), {}))
    assert not drawn("7b-codegen").judgement.tails_that_are("undecided")


@pytest.mark.slow
def test_away_from_the_limit_all_reconstructions_say_the_same() -> None:
    comparison = drawn("34b-codegen")
    assert comparison.verdict == "FITS"
    assert comparison.draws is not None
    low, _, high = comparison.draws.range_of(CELL)
    assert high - low < 0.02


@pytest.mark.heavy
def test_the_interval_holds_the_error_on_recorded_requests(real_store: Store, data_pack: Path) -> None:
    """Twelve of the runs were recorded.  Three lost more than 0.1 % of their requests: of these nothing is sure.

    The range of the draws held 8 of 12 errors of each metric.
    """
    held = dict.fromkeys(("e2e", "ttft", "itl"), 0)
    release, h100 = load_release(DEFAULT_RELEASE), {folder.name for folder in (data_pack / "h100").iterdir()}
    for alias, slug in bundled_aliases().items():
        if slug not in h100:
            continue  # known by its aggregates only
        estimates = drawn(alias).estimates
        recorded = compare_replay(replay(read_stored(real_store, slug), release))
        for metric in held:
            error, estimate = recorded.metrics[metric]["mean"].error, estimates.get((metric, "mean"))
            assert error is not None
            held[metric] += estimate is None or estimate.low <= error <= estimate.high
    assert all(count >= 11 for count in held.values()), held


def test_a_prediction_is_as_wide_as_its_draws() -> None:
    """Draws e^0.1 above and below: times the least that a side has, t(24) = 2.0639 times 0.1 * 1.4826 / 2, or 1.5.

    Then 10 % beyond the fit.  Where six of 24 draws overload the server a hundredfold, the lower end stays near.
    """
    drawn = [100 * exp(0.1), 100 * exp(-0.1)] * 12
    half = max(2.0639 * 0.1 * 1.4826 / 2, 1.5 * 0.1)
    assert prediction_interval(100.0, drawn, 0.1, 0.0) == pytest.approx((90 * exp(-half), 110 * exp(half)), 1e-4)
    overloaded = prediction_interval(100.0, [*drawn[:18], *[1e4] * 6], 0.0, 0.0)
    assert overloaded == pytest.approx((100 * exp(-half), 100 * exp(2.0639 * 2.30422)), 1e-3)
    assert prediction_interval(100.0, [], 0.1, 0.05) is None
