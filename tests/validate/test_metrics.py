"""Metric definitions against hand calculations and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.validate.metrics import latency as metrics


def samples(ttft: list[int], e2e: list[int], output: list[int]) -> metrics.LatencySamples:
    return metrics.LatencySamples(np.array(ttft), np.array(e2e), np.array(output))


def test_itl_mean_is_token_weighted_and_tpot_is_not() -> None:
    """Gaps: 90 us over 1 gap and 200 us over 10: ITL 290/11, TPOT mean (90 + 20)/2."""
    both = samples([10, 100], [100, 300], [2, 11])
    assert both.itl_mean_us == pytest.approx(290 / 11)
    assert metrics.statistics(both.tpot_us)["mean"] == 55


def test_a_request_of_one_token_has_no_gap() -> None:
    """Its E2E - TTFT (here client overhead) belongs to no gap."""
    one = samples([10, 10], [15, 110], [1, 11])
    assert one.itl_mean_us == 10
    assert np.isnan(one.tpot_us).tolist() == [True, False]
    assert samples([10], [15], [1]).itl_mean_us is None


def test_quantiles_interpolate_linearly() -> None:
    """Of 1..101, rank q*100 is 1 + 100 q."""
    assert metrics.statistics(np.arange(1, 102)) == {"mean": 51, "p50": 51, "p90": 91, "p99": 100}


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 6)), min_size=1).filter(lambda p: any(c for _, c in p)))
def test_pooled_quantiles_equal_those_of_the_repeated_sample(pairs: list[tuple[int, int]]) -> None:
    values, counts = np.array([v for v, _ in pairs]), np.array([c for _, c in pairs])
    repeated = np.repeat(values, counts)
    pooled = metrics.pooled_quantiles(values, counts)
    assert pooled == pytest.approx(
        {"p50": np.quantile(repeated, 0.5), "p90": np.quantile(repeated, 0.9), "p99": np.quantile(repeated, 0.99)}
    )


def test_errors_are_signed_fractions_of_the_observed_value() -> None:
    assert metrics.relative_error(200.0, 150.0) == -0.25
    assert metrics.relative_error(None, 150.0) is None
    assert metrics.relative_error(0.0, 150.0) is None


def test_pairs() -> None:
    """|110/100 - 1| = 0.1 and |150/200 - 1| = 0.25: MAPE 0.175; a line has r = 1."""
    assert metrics.paired_mape(np.array([100, 200]), np.array([110, 150])) == pytest.approx(0.175)
    assert metrics.correlation(np.array([1, 2, 3]), np.array([10, 20, 30])) == pytest.approx(1)
    assert metrics.correlation(np.array([1, 1, 1]), np.array([10, 20, 30])) is None
