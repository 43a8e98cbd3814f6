"""Coefficients from tables of load levels: planted ones lie within their bounds, and what cannot be told is refused."""

from __future__ import annotations

import pytest
from load_levels import TRUE, level, measured, table

from blis_replay.base.errors import ValidateError
from blis_replay.replay.driver import replay
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.fit.calibrate import Options, calibrate
from blis_replay.validate.fit.evidence import load_level
from blis_replay.validate.fit.model_fit import DEFAULT_PRIOR


def test_a_level_has_a_mean_batch_by_littles_law() -> None:
    """8 clients, answered after 2.01 s: 3.98 requests/s; 100 gaps of 20 ms: 7.96 decode, at 1,000 + 101 / 2 tokens."""
    found = load_level(level(8, 1_000, 101, {"ttft": 10_000, "e2e": 2_010_000}), "recorded")
    output = found.output_tokens  # lengths are drawn within 10 % of the mean
    cycle_us = 2_000_000 / (output - 1)
    assert output == pytest.approx(101, rel=0.02)
    assert found.cycle_us == pytest.approx(cycle_us)
    one, prefill, decodes, context = found.batch.tolist()
    assert (one, decodes) == (1.0, pytest.approx(8 * 2_000_000 / 2_010_000))
    assert prefill == pytest.approx(8 / 2_010_000 * cycle_us * found.prompt_tokens)
    assert context == pytest.approx(decodes * (found.prompt_tokens + output / 2))


@pytest.mark.heavy
def test_planted_coefficients_lie_within_the_bounds_of_a_table() -> None:
    """Nine levels of three lengths, 5 requests a client, tell all costs of a step; the delay is known within 3 ms."""
    rows = table(each=5.0)
    made, (fit,) = calibrate(rows, "fit", Options(load_release(DEFAULT_PRIOR)))
    assert not fit.missed
    found = {c.name: c for c in fit.record.coefficients}
    assert found["intercept"].value_us == pytest.approx(TRUE["intercept"], rel=0.05)
    for name, true_us in TRUE.items():
        if found[name].status == "fitted":
            assert found[name].low_us <= true_us <= found[name].high_us, name
    assert found["per_prefill_token"].value_us == pytest.approx(TRUE["per_prefill_token"], rel=0.1)
    assert found["pre_queue"].value_us == pytest.approx(7_000, abs=3_000)
    # A level that was not fitted to is predicted, and known as held out.
    other = compare_replay(replay(measured(6, 1_000, 100), made))
    assert other.use == "held out"
    assert abs(other.metrics["e2e"]["mean"].error or 0.0) < 0.03
    assert compare_replay(replay(rows[0], made)).use == "fitted on this run"


def test_a_summary_with_tpot_and_without_e2e_is_a_level() -> None:
    """As `vllm bench serve` writes it by default: 50 ms and 10 ms for each further token."""
    found = load_level(level(4, 500, 101, {"ttft": 50_000, "tpot_reported": 10_000}), "recorded")
    assert found.cycle_us == 10_000
    assert found.numbers["e2e"]["mean"] == pytest.approx(50_000 + 10_000 * (found.output_tokens - 1))


def test_too_few_levels_are_refused() -> None:
    with pytest.raises(ValidateError, match="and 2 load levels cannot determine 4 coefficients; add some"):
        calibrate([measured(1, 200, 20), measured(8, 200, 20)], "fit", Options(load_release(DEFAULT_PRIOR)))


def test_a_level_without_a_mean_ttft_is_refused() -> None:
    levels = [level(clients, 100, 50, {"e2e": 1e6}) for clients in (1, 2, 4, 8)]
    with pytest.raises(ValidateError, match="c1-100: its summary has no mean TTFT, so delays cannot be told from"):
        calibrate(levels, "fit", Options(load_release(DEFAULT_PRIOR)))


def test_step_records_are_asked_for_in_vain() -> None:
    with pytest.raises(ValidateError, match="c1-200: no steps to fit"):
        calibrate([measured(1, 200, 20)], "fit", Options(load_release(DEFAULT_PRIOR), "steps"))
