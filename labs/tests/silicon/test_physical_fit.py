"""Shared coefficients on made rows and made recordings whose physics is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from msgspec import structs

from blis_replay.base.errors import ValidateError
from blis_replay.blis.latency.datasheets import Architecture, bundled_architectures, gpu_named
from blis_replay.blis.latency.models import durations_us
from blis_replay.blis.latency.physical import COEFFICIENT_NAMES, PhysicalCoefficients, PhysicalModel
from blis_replay.blis.releases.release import FittedOn
from blis_replay.validate.fit.linear import Prior
from blis_replay_labs.silicon.physical_fit import (
    PRIORS,
    PhysicalRows,
    batch_times_us,
    deviations,
    fit_physical,
    known_architecture,
)

H100 = gpu_named("H100-SXM-80GB")
PLANTED = PhysicalCoefficients(1.1, 1.2, 1.4, 0.3, 2.0, 55.0, 8.0, 30.0, 250.0, 20.0)
# Nothing is believed of a coefficient.
NO_PRIORS = {name: Prior(prior.value, 1e6, "none") for name, prior in PRIORS.items()}


def made_rows(
    name: str,
    architecture: Architecture,
    gpus: int,
    seed: int,
    planted: PhysicalCoefficients = PLANTED,
    noise: float = 0.0,
) -> PhysicalRows:
    """200 batches of up to 500 prefill tokens, 128 decodes and contexts of 100 to 1,000 tokens, and their times."""
    random = np.random.default_rng(seed)
    prefill = random.integers(0, 500, 200) * (random.random(200) < 0.3)
    decode = random.integers(1, 128, 200)
    context = decode * random.integers(100, 1000, 200)
    batch = np.column_stack([np.ones(200), prefill, decode, context, prefill * 300, decode + (prefill > 0)]).astype(
        float
    )
    times_us = batch_times_us(architecture, H100, gpus, batch)
    cycle_us = times_us @ planted.as_array() * (1 + noise * random.standard_normal(200))
    return PhysicalRows(name, FittedOn(f"{name}-{gpus}", "hash", "steps"), times_us, cycle_us)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("name", bundled_architectures())
def test_times_of_batches_are_those_of_the_model(name: str, gpus: int) -> None:
    """A prefill of 300 tokens, 17 decodes; within the rounding to whole us (experts touched by 317 tokens included)."""
    architecture = bundled_architectures()[name]
    batch = {"prefill_tokens": 300, "prefill_requests": 1, "decode_tokens": 17, "context_tokens": 9_000}
    model = PhysicalModel(architecture, H100, PLANTED, gpus)
    row = np.array([[1.0, 300, 17, 9_000, 40_000, 18]])
    us = batch_times_us(architecture, H100, gpus, row)[0] @ PLANTED.as_array()
    assert durations_us(model, [batch | {"attended_tokens": 40_000}])[0] == pytest.approx(us, abs=0.51)


def of_all_models(gpus: Sequence[int] = (1, 2, 4, 8)) -> list[PhysicalRows]:
    pairs = product(bundled_architectures().items(), gpus)
    return [made_rows(name, architecture, n, i) for i, ((name, architecture), n) in enumerate(pairs)]


def test_planted_coefficients_are_recovered() -> None:
    """Four models on 1, 2, 4 and 8 GPUs tell all ten apart, without priors."""
    fit = fit_physical(of_all_models(), NO_PRIORS)
    for name in COEFFICIENT_NAMES:
        assert getattr(fit.coefficients, name) == pytest.approx(getattr(PLANTED, name), rel=0.01, abs=0.01), name
        assert fit.identified[name]
    assert max(fit.mape_percent.values()) < 0.01


def test_what_the_recordings_cannot_tell_keeps_its_prior_and_is_marked() -> None:
    """On one GPU nothing is exchanged: 7 us a round and traffic at the datasheet's bandwidth stay as believed."""
    fit = fit_physical(of_all_models(gpus=(1,)))
    assert not fit.identified["per_exchange_us"]
    assert not fit.identified["traffic"]
    assert (fit.coefficients.per_exchange_us, fit.coefficients.traffic) == (7.0, 1.0)
    assert fit.spread["per_exchange_us"] == pytest.approx(PRIORS["per_exchange_us"].spread)


def test_a_dense_model_says_nothing_of_experts() -> None:
    dense = [part for part in of_all_models() if "Mixtral" not in part.model]
    fit = fit_physical(dense)
    assert not fit.identified["per_moe_layer_us"]
    assert fit.coefficients.per_moe_layer_us == PRIORS["per_moe_layer_us"].value == 26


def test_no_coefficient_is_negative() -> None:
    """Cycles that get shorter with every request: the cost of a request stops at 0."""
    parts = [replace(p, cycle_us=20_000 - 50 * p.times_us[:, -1]) for p in of_all_models(gpus=(2,))]
    fit = fit_physical(parts, NO_PRIORS)
    assert min(structs.asdict(fit.coefficients).values()) == 0
    assert fit.coefficients.per_request_us == 0


def test_stalls_do_not_bend_the_fit() -> None:
    """Every fortieth cycle takes a second: what is fitted to the others stays within 3 %."""
    parts = of_all_models()
    stalled = []
    for part in parts:
        cycle_us = part.cycle_us.copy()
        cycle_us[::40] = 1e6
        stalled.append(replace(part, cycle_us=cycle_us))
    fit = fit_physical(stalled)
    clean = fit_physical(parts)
    simulated = [part.times_us @ fit.coefficients.as_array() for part in parts]
    expected = [part.times_us @ clean.coefficients.as_array() for part in parts]
    assert np.abs(np.concatenate(simulated) / np.concatenate(expected) - 1).max() < 0.03


def test_a_model_with_many_rows_weighs_as_much_as_one_with_few() -> None:
    """7B recorded eight times, and scaled up by a tenth: the fit stands where one recording of it puts it."""
    architectures = bundled_architectures()
    slower = structs.replace(PLANTED, per_layer_us=70.0)
    few = [
        made_rows("a", architectures["meta-llama/Llama-2-7b-hf"], 1, 1, slower),
        made_rows("b", architectures["meta-llama/Llama-2-70b-hf"], 4, 2),
    ]
    many = [few[0]] * 8 + [few[1]]
    once, often = fit_physical(few).coefficients, fit_physical(many).coefficients
    assert often.as_array() == pytest.approx(once.as_array(), rel=1e-3, abs=1e-3)


def test_equal_input_gives_equal_output() -> None:
    assert fit_physical(of_all_models()).coefficients == fit_physical(of_all_models()).coefficients


def test_nothing_to_fit_and_an_unknown_model_are_refused() -> None:
    with pytest.raises(ValidateError, match="no step records or per-request latencies"):
        fit_physical([])
    with pytest.raises(ValidateError, match=r"architecture of org/new is not known; .* --config org/new=config\.json"):
        known_architecture(bundled_architectures(), "org/new")


def test_the_case_of_a_model_name_does_not_matter() -> None:
    name = "meta-llama/Llama-2-7b-hf"
    assert known_architecture(bundled_architectures(), name.upper()) == bundled_architectures()[name]


def test_what_no_row_tells_is_as_unsure_as_before_however_large_the_others_are() -> None:
    """Rows of 10^17, as of a request of 2^60 tokens: the sum of their squares is singular in doubles."""
    system = np.array([[1e17, 1e17, 0.0]] * 3)
    # Of the first two only the sum is known: either one is off by 0.5 / sqrt(2).
    known = [0.5 / 2**0.5, 0.5 / 2**0.5, 7.0]
    assert deviations(system, np.array([0.5, 0.5, 7.0])).tolist() == pytest.approx(known)


def test_deviations_are_those_of_the_normal_equations() -> None:
    """Four rows of 2, and a deviation of 1 before: 1 / sqrt(1 + 4 * 2^2)."""
    assert deviations(np.full((4, 1), 2.0), np.ones(1)).tolist() == pytest.approx([1 / 17**0.5])
