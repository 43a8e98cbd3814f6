"""The coefficients on top of operator times: planted ones come back, and a release of them is made from a recording."""

from __future__ import annotations

import numpy as np
import pytest
from blis_runs import release_of, small_recording
from load_levels import measured, table

from blis_replay.base.errors import ValidateError
from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.replay.driver import replay
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.fit.calibrate import Options
from blis_replay_labs.silicon.operator_fit import OperatorRows, calibrate_operators, fit_coefficients
from blis_replay_labs.silicon.operators import (
    DecodeAttention,
    OperatorCoefficients,
    OperatorModel,
    PrefillAttention,
    TokenTimes,
    batch_times_us,
)

# 10 ms and 50 us a token, of which 1 ms are all-reduces; attention 0.1 us a token of context.
TABLES = OperatorModel(
    TokenTimes((1.0, 1001.0), (10_000.0, 60_000.0), (10_000.0, 60_000.0), (1_000.0, 1_000.0)),
    PrefillAttention((1.0, 2.0), (1.0, 2.0), ((1.0, 1.0), (1.0, 1.0))),
    DecodeAttention((1.0, 101.0), (1.0, 10_001.0), ((0.1, 1_000.1), (10.1, 101_010.1))),
)


def test_a_mean_batch_costs_what_its_parts_do() -> None:
    """3 prefill and 18 decode tokens at 1,001: 21 tokens are 11 ms with all-reduces; 18 * 1,001 * 0.1 us."""
    row = batch_times_us(TABLES, np.array([3.0]), np.array([18.0]), np.array([1_001.0]))[0]
    assert row == pytest.approx([10_000, 18 * 100.1, 1_000, 1, 18])


def test_steps_that_prefill_are_told_from_the_others() -> None:
    """A quarter of the steps has 2,000 prefill tokens each, 500 in the mean, and costs twice the tables' slope.

    18 decodes alone take 10.85 ms, 1 ms of it all-reduces.  With 2,000 tokens it is the table's end, 110 ms, and of
    the prefills' attention, at 1,000 tokens seen on average, 7 us; 18 * 1,001 * 0.1 us are the decodes'.
    """
    mixed = TokenTimes((1.0, 1001.0), (10_000.0, 110_000.0), (10_000.0, 60_000.0), (1_000.0, 1_000.0))
    attention = PrefillAttention((1.0, 2_000.0), (1.0, 1_000.0), ((7.0, 7.0), (7.0, 7.0)))
    model = OperatorModel(mixed, attention, TABLES.decode)
    means = np.array([500.0]), np.array([18.0]), np.array([1_001.0])
    row = batch_times_us(model, *means, np.array([0.25]), 2_000.0)[0]
    products_us = 0.75 * (10_850 - 1_000) + 0.25 * (110_000 - 1_000)
    assert row == pytest.approx([products_us, 18 * 100.1 + 0.25 * 7, 1_000, 1, 18])


def test_planted_multiples_come_back() -> None:
    """Products 4 % slower than measured, attention half as dear: contexts from 100 to 5,000 at 1 to 100 decodes."""
    random = np.random.default_rng(1)
    decodes, contexts = random.uniform(1, 100, 400), random.uniform(100, 5_000, 400)
    times = batch_times_us(TABLES, np.zeros(400), decodes, contexts)
    cycles = times @ np.array([1.04, 0.5, 1.0, 0.0, 0.0])
    found, spread = fit_coefficients([OperatorRows(times, cycles, "steps")])
    assert found.attention == pytest.approx(0.5, abs=0.02)
    predicted = times @ np.array([getattr(found, name) for name in OperatorCoefficients.__struct_fields__])
    assert np.abs(predicted / cycles - 1).max() < 0.01
    assert spread[1] < 0.1


def test_only_operator_times_can_be_fitted_on_top_of() -> None:
    recording = small_recording()
    release = release_of(LatencyModel("blackbox", 1_000_000, 1, 1))
    with pytest.raises(ValidateError, match="has no operator times; make some with"):
        calibrate_operators([recording], "mine", release, Options(release), "test")


def test_a_recording_makes_a_release() -> None:
    """Lone requests of 10 ms per token, as the tables say: the mean ITL of the replay is theirs."""
    recording, release = small_recording(40), release_of(TABLES, Lifecycle())  # type: ignore[arg-type]
    made, (fit,) = calibrate_operators([recording], "mine", release, Options(release, split=(1.0, 1.0)), "test")
    assert fit.record.scores[0].errors["itl"] == pytest.approx(0, abs=0.02)
    assert [c.name for c in fit.record.coefficients][-1] == "pre_queue"
    assert made.fitted_on[0].data == "latencies"
    assert fit.record.steps is not None and fit.record.steps.decodes == (1, 1)


@pytest.mark.slow
def test_operator_times_are_scaled_to_levels() -> None:
    """Tables are 5 % and more off a level that was not fitted to; scaled to other levels they are within 5 %.

    Multiples of products and a time per step say nearly the same, so only what they predict is held.
    """
    products = TokenTimes((1.0, 20_001.0), (8_333.0, 841_666.0), (8_333.0, 841_666.0), (0.0, 0.0))
    nothing = PrefillAttention((1.0, 2.0), (1.0, 2.0), ((0.0, 0.0), (0.0, 0.0)))
    decode = DecodeAttention((1.0, 101.0), (1.0, 10_001.0), ((0.06, 600.06), (6.06, 60_606.06)))
    release = release_of(OperatorModel(products, nothing, decode), Lifecycle())
    made, (fit,) = calibrate_operators(table(), "fit", release, Options(release), "test")
    assert fit.agreement["cycle"] < 3  # the prefills of tables cost 42, of the server 45 us a token
    before, after = (
        compare_replay(replay(measured(6, 1_000, 100), one)).metrics["e2e"]["mean"].error or 0.0
        for one in (release, made)
    )
    assert abs(after) < 0.05 < abs(before)
    assert made.fitted_on[0].requests_hash is None
