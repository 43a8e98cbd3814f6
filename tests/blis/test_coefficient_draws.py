"""Draws of the coefficients of a release: their spread, how they go together, and the form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from blis_replay.blis.latency.models import LatencyModel, Lifecycle, Regime, RegimeModel, durations_us
from blis_replay.blis.releases.fit import CoefficientFit, FitRecord, OtherForm
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release, parse_release

LINE = LatencyModel("blackbox", 10_000_000, 40_000, 20_000)


def fitted(name: str, value_us: float, half_us: float) -> CoefficientFit:
    return CoefficientFit(name, value_us, value_us - half_us, value_us + half_us, "fitted", "-")


# Half an interval of 95 % is 1.96 standard deviations: 500 us of the step, 2 us of a prefill token.
COEFFICIENTS = (
    fitted("intercept", 10_000.0, 980.0),
    fitted("per_prefill_token", 40.0, 3.92),
    replace(fitted("pre_queue", 5_000.0, 98.0), status="measured"),
    CoefficientFit("per_decode_token", 20.0, 20.0, 20.0, "prior", "-"),
)


def entry(**of_record: object) -> ModelEntry:
    told = ("synchronous", "synchronous", "-")
    record = FitRecord("line", 0.6, 0.8, *told, COEFFICIENTS, (), **of_record)  # type: ignore[arg-type]
    return ModelEntry("m", 1, latency=LINE, lifecycle=Lifecycle(5_000.0), fit=record)


def drawn(of: ModelEntry) -> np.ndarray:
    """float64[draws, 4]: intercept, prefill and decode token, and pre-queue delay, us."""
    found = [(one.latency, one.lifecycle.pre_queue_us) for one in of.draws(4_000, seed=1)]
    return (
        np.array(
            [(m.intercept_ns, m.per_prefill_token_ns, m.per_decode_token_ns, 1000 * us) for m, us in found]  # type: ignore[attr-defined]
        )
        / 1000.0
    )


def test_coefficients_spread_as_their_bounds_say_and_a_prior_stays() -> None:
    values = drawn(entry(correlation=((-0.8,),)))
    assert values.mean(axis=0) == pytest.approx([10_000, 40, 20, 5_000], rel=0.005)
    assert values.std(axis=0) == pytest.approx([500, 2, 0, 50], rel=0.05, abs=1e-6)
    assert np.corrcoef(values[:, 0], values[:, 1])[0, 1] == pytest.approx(-0.8, abs=0.03)
    assert abs(np.corrcoef(values[:, 0], values[:, 3])[0, 1]) < 0.05


def test_without_a_record_and_of_an_older_release() -> None:
    plain = replace(entry(), fit=None)
    assert plain.draws(2, seed=1) == [plain, plain]
    assert abs(np.corrcoef(drawn(entry())[:, :2].T)[0, 1]) < 0.05


def test_another_form_is_drawn_as_often_as_it_is_believed() -> None:
    other = OtherForm("other", 0.25, replace(LINE, intercept_ns=90_000_000), Lifecycle(5_000.0))
    assert (drawn(entry(other_forms=(other,)))[:, 0] > 50_000).mean() == pytest.approx(0.25, abs=0.03)


def test_a_release_keeps_the_correlation_and_the_other_forms() -> None:
    other = OtherForm("other", 0.25, LINE, Lifecycle(5_000.0))
    kept = entry(correlation=((-0.8,),), other_forms=(other,))
    release = CoefficientRelease("r", "valid", "s", "s", "H100", models=(kept,))
    assert parse_release(format_release(release), "r").models[0].fit == kept.fit


def test_lines_that_meet_at_a_bend_still_do() -> None:
    """By one us at the most, as durations are whole."""
    below = Regime("b", 10_000.0, (("decode_tokens", 50.0),), condition=("decode_tokens", "<=", 32.0))
    bends = RegimeModel((below, Regime("a", 11_280.0, (("decode_tokens", 10.0),))))
    slopes = (fitted("per_decode_token", 50.0, 10.0), fitted("per_decode_token_above_32", 10.0, 5.0))
    record = replace(entry().fit, coefficients=(COEFFICIENTS[0], *slopes))  # type: ignore[type-var]
    for one in replace(entry(), latency=bends, fit=record).draws(50, seed=2):
        at = durations_us(one.latency, [{"decode_tokens": n} for n in (32, 33, 34)])
        assert at[1] - at[0] == pytest.approx(at[2] - at[1], abs=1.01)
