"""Phase linearity and M/M/1: what theory says, and that the checks notice when it does not hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from blis_replay.blis.engine import simulate
from blis_replay_labs.verification import theory
from blis_replay_labs.verification.suite import checks
from blis_replay_labs.verification.theory import (
    LLAMA_8B_TP2,
    SECOND_SET,
    Calibration,
    CoefficientSet,
    Effort,
    Waits,
    fit_line,
)

SMALL = Effort((12, 12, 12, 40), 1_000, 0.6)
BARE = CoefficientSet("alpha = 0", (0.0, 0.0, 0.0), LLAMA_8B_TP2.beta_us)


def passed(rows: list[theory.VerificationRow]) -> list[bool]:
    return [row.passed for row in rows]


# -- phases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("chosen", "slopes_us"), [(LLAMA_8B_TP2, (21.18, 8718.0)), (SECOND_SET, (19.54, 7077.0))])
def test_phases_are_straight_lines(chosen: CoefficientSet, slopes_us: tuple[float, float]) -> None:
    """3.51 + 17.67; trunc(6910.42 + 2.84) + trunc(1805.54); 19.54; trunc(7051.8 + 25.43)."""
    rows = theory.check_phases(chosen)
    assert passed(rows) == [True] * 4
    assert (rows[1].measured, rows[3].measured) == pytest.approx(slopes_us, rel=1e-12)


def test_one_microsecond_at_one_point_is_no_straight_line() -> None:
    x = np.arange(100, 2001, 100, dtype=np.int64)
    y = 21 * x + 10_317
    assert passed(theory.line_rows("TTFT", LLAMA_8B_TP2, fit_line(x, y), 21.0, 0)) == [True, True]
    y[7] += 1
    assert passed(theory.line_rows("TTFT", LLAMA_8B_TP2, fit_line(x, y), 21.0, 0)) == [False, False]


def test_an_engine_with_another_slope_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of a us more for a prompt token."""

    def dearer(trace, engine, latency, lifecycle):  # type: ignore[no-untyped-def]
        return simulate(trace, engine, replace(latency, per_prefill_token_ns=17_680), lifecycle)

    monkeypatch.setattr(theory, "simulate", dearer)
    assert passed(theory.check_phases(LLAMA_8B_TP2)) == [True, False, True, True]


def test_a_slope_above_the_coefficients_fails() -> None:
    """Truncation only takes away."""
    line = theory.Line(0.0, 8719.0, 1.0)
    assert passed(theory.line_rows("decode", LLAMA_8B_TP2, line, 8718.8, 2)) == [True, False]


# -- calibration -----------------------------------------------------------------------------


def test_calibration_by_hand() -> None:
    """Queueing trunc(1601.35 + 3.51), a prefill of 6928, 127 steps of 6913, 128 delays of 1805 us."""
    measured = theory.calibrate(LLAMA_8B_TP2)
    assert measured == Calibration(1604 + 6928 + 127 * 6913 + 128 * 1805, 6928 + 127 * 6913, 6913 + 1805)
    assert passed(theory.calibration_rows(LLAMA_8B_TP2)) == [True] * 4


def test_an_engine_that_bills_a_surplus_step_fails() -> None:
    """The published figure as our own measurement: 8.7 ms more than the coefficients."""
    billed = Calibration(1_126_241, 884_879, 8_718)
    assert passed(theory.calibration_pair(LLAMA_8B_TP2, billed, 1126.2)) == [False, False]


# -- M/M/1 -----------------------------------------------------------------------------------


def test_mm1_wait_by_hand() -> None:
    """rho 0.5 waits as long as it is served; rho 0.9 nine times as long."""
    assert theory.mm1_wait_us(0.5 / 1000, 1000.0) == pytest.approx(1000.0)
    assert theory.mm1_wait_us(0.9 / 1000, 1000.0) == pytest.approx(9000.0)


@pytest.mark.slow
def test_waits_of_the_engine_are_those_of_mm1() -> None:
    rows = theory.check_waits(LLAMA_8B_TP2, SMALL, seed=5)
    assert passed(rows) == [True] * 5
    assert rows[1].expected == pytest.approx(0.3 / 0.7 * 884.9, rel=0.05)


@pytest.fixture(scope="module")
def waits() -> Waits:
    """rho 0.5 with alpha = 0, in twelve replications."""
    return theory.simulate_waits(BARE, 0.5 / 884_879, 884_879, 12, 2_000, [5])


def test_the_wait_row_fails_on_longer_waits_and_on_wide_intervals(waits: Waits) -> None:
    rate = 0.5 / 884_879
    assert theory.wait_row(0.5, waits, rate, SMALL).passed
    longer = replace(waits, wait_us=1.5 * waits.wait_us)
    assert not theory.wait_row(0.5, longer, rate, SMALL).passed
    assert not theory.wait_row(0.5, waits, rate, replace(SMALL, precision=0.001)).passed


def test_control_variates_move_the_interval_not_the_mean(waits: Waits) -> None:
    """A replication served 1 % longer waits longer by rho (2 - rho) / (1 - rho)^2 = 3 times that: no surprise."""
    rate = 0.5 / 884_879
    before = theory.wait_interval(waits, rate)
    shift_us = 0.01 * 884_879 * np.array([1.0, -1.0] * 6)
    rho = rate * float(waits.server_us.mean())
    moved = replace(
        waits,
        server_us=waits.server_us + shift_us,
        wait_us=waits.wait_us + rho * (2 - rho) / (1 - rho) ** 2 * shift_us,
    )
    after = theory.wait_interval(moved, rate)
    assert (after.mean, after.half) == (pytest.approx(before.mean), pytest.approx(before.half))


@pytest.mark.slow
def test_an_engine_with_two_servers_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "_SINGLE", replace(theory._SINGLE, max_num_seqs=2))
    rows = theory.check_waits(LLAMA_8B_TP2, SMALL, seed=5)
    assert passed(rows) == [False] * 5


def test_a_start_one_microsecond_late_breaks_the_recursion() -> None:
    trace = theory._trace(np.array([0.0, 10.0, 5e6]), np.array([2, 3, 4]))
    result = simulate(trace, theory._SINGLE, BARE.latency)
    assert theory.late_starts(result) == 0
    late_us = result.scheduled_us + np.array([0, 0, 1])
    assert theory.late_starts(replace(result, scheduled_us=late_us)) == 1


# -- delays outside the server -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "shortfalls"),
    [(1.0, (42.4, 48.1, 57.8, 78.2)), (0.1, (94.2, 95.6, 97.2, 99.0)), (0.01, (99.9, 99.9, 99.9, 99.9))],
)
def test_delays_that_do_not_block_make_the_wait_fall_short(scale: float, shortfalls: tuple[float, ...]) -> None:
    """By hand for beta x 1, rho 0.3: M/M/1 of 884.9 ms at 0.3 / 1117.5 waits 275.7, of 1117.5 ms 478.9: 42.4 % less."""
    rows = theory.check_shortfalls(LLAMA_8B_TP2, scale, replace(SMALL, precision=0.3), seed=5)
    assert passed(rows) == [True] * 4
    assert [row.expected for row in rows] == pytest.approx(shortfalls, abs=1.5 if scale == 1 else 0.2)


def test_the_surplus_step_of_the_published_calibration_gives_the_published_effect() -> None:
    """43, 49, 59, 79 % are what rates and M/M/1 from 1,126.2 ms give; our own 1,117.5 ms give up to a point less."""
    calibration = theory.calibrate(LLAMA_8B_TP2)
    published = [theory._with_surplus_step(rho, calibration) for rho in theory.RHOS]
    assert published == pytest.approx(theory.SHORTFALLS, abs=0.006)


def test_the_shortfall_row_fails_if_delays_block_the_server() -> None:
    """Then the wait is that of M/M/1 with the whole E2E, and nothing falls short."""
    calibration = theory.calibrate(LLAMA_8B_TP2)
    rate, effort = 0.5 / calibration.e2e_us, replace(SMALL, precision=0.02)
    around = np.array([0.99, 1.01] * 6)
    mean_wait_us = theory.mm1_wait_us(rate, calibration.server_us)
    sound = Waits(
        wait_us=mean_wait_us * around,
        server_us=np.full(12, float(calibration.server_us)),
        e2e_less_wait_us=np.full(12, float(calibration.e2e_us)),
        gap_us=np.full(12, 1 / rate),
        late_starts=0,
    )
    blocked = replace(sound, wait_us=theory.mm1_wait_us(rate, calibration.e2e_us) * around)

    def row_passes(waits: Waits, effort: Effort = effort) -> bool:
        return theory.shortfall_row(1, 1.0, waits, rate, calibration, effort).passed

    assert row_passes(sound)
    assert not row_passes(blocked)
    assert not row_passes(replace(sound, late_starts=1))
    assert not row_passes(sound, replace(effort, precision=0.001))


@pytest.mark.slow
def test_a_shortfall_far_from_the_published_one_fails() -> None:
    """Without alpha nothing falls short: 0 % is measured and expected, and the row still fails."""
    rows = theory.check_shortfalls(BARE, 1.0, replace(SMALL, precision=0.6), seed=5)
    assert [row.expected for row in rows] == pytest.approx([0.0] * 4, abs=1e-9)
    assert passed(rows) == [False] * 4


def test_the_quick_suite_names_every_check_once() -> None:
    names = [name for name, _ in checks(1, quick=True)]
    assert len(names) == len(set(names)) == 13
