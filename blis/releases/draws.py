"""Coefficients that the recordings of a fit leave possible, for the interval of what they predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from blis_replay.base.arrays import Floats
from blis_replay.blis.latency.models import CorrectedModel, Latency, LatencyModel, Lifecycle, RegimeModel
from blis_replay.blis.releases.fit import CoefficientFit, FitRecord, Scatter

# Bounds of 95 % lie this many standard deviations from the middle of a normal distribution.
OF_95_PERCENT = 1.96
# Doublings by which a run is taken to differ from others: halves, quarters and eighths, as one pair says little.
_SLOWEST = 3
# Doublings from a run to the time between two runs, minutes to hours.  Each adds as much as the slowest within a run
# (1/f noise): on shared machines equal loads differ by 7 to 21 % in pace, and the halves of a run by 3 to 8 %.
_TO_ANOTHER_RUN = 6
# Another run of a machine is by that much noisier or quieter, one standard deviation of the logarithm: the scatter of
# six recordings of one server on a shared machine (vLLM 0.32, tiny-live-a to e).
_NOISIER = 0.2
_ABOVE = "per_decode_token_above_"


def draws(
    latency: Latency, lifecycle: Lifecycle, record: FitRecord, n: int, seed: int
) -> list[tuple[Latency, Lifecycle]]:
    """``n`` draws of the coefficients of a fitted model, and of the form where several fit.

    Fitted coefficients are drawn together by their correlation, measured ones by themselves.  What is held at a prior
    stays: its bounds are not known.
    """
    unsure = [fit for fit in record.coefficients if fit.high_us > fit.low_us]
    random = np.random.default_rng(seed)
    z = random.standard_normal((n, len(unsure))) @ np.linalg.cholesky(correlation(record, unsure)).T
    below, above = (
        np.array([max(side, 0.0) for side in sides]) / OF_95_PERCENT
        for sides in ([f.value_us - f.low_us for f in unsure], [f.high_us - f.value_us for f in unsure])
    )
    by_us = np.where(z < 0, z * below, z * above)
    forms = [(latency, lifecycle), *((other.latency, other.lifecycle) for other in record.other_forms)]
    others = [other.weight for other in record.other_forms]
    drawn = []
    for form, row in zip(random.choice(len(forms), n, p=[1 - sum(others), *others]), by_us.tolist(), strict=True):
        by = {fit.name: us for fit, us in zip(unsure, row, strict=True)}
        drawn.append((moved(forms[form][0], by), _delayed(forms[form][1], by)))
    return drawn


def scattered(latency: Latency, scatter: Scatter, until_us: int, seed: tuple[int, ...], known: bool) -> Latency:
    """A model whose steps take now longer and now shorter until a time of the run, as the recorded ones did.

    ``known``: the mean over the run is that of the model.  Else it differs from it as runs hours apart would, by what
    the recording says of its halves, quarters and eighths.  With one ``seed`` every run is slow at the same times.
    """
    of_run = max(until_us / scatter.step_us, 2.0)
    of_another = np.random.default_rng(seed).standard_normal(2)
    noisier = float(np.exp(_NOISIER * of_another[1]))
    levels = [noisier * by for level, by in enumerate(scatter.by_doubling) if 2 << level <= of_run]
    shares = np.zeros(1 << len(levels))
    for level, by in enumerate(levels):
        half = by * np.random.default_rng([*seed, level]).standard_normal(len(shares) >> level + 1)
        shares += np.repeat(np.column_stack([half, -half]).ravel(), 1 << level)
    times = np.exp(shares) / np.exp(shares).mean()
    if not known:
        slowest = np.array(scatter.by_doubling[-_SLOWEST:])
        times *= np.exp(np.sqrt(_TO_ANOTHER_RUN * np.mean(slowest**2)) * of_another[0])
    times = np.tile(times, int(np.ceil(of_run / len(times))) + 1)
    from_us = np.rint(scatter.step_us * np.concatenate([[0.0], np.cumsum(times[:-1])])).astype(np.int64)
    return replace(CorrectedModel.of(latency), varying=(from_us, times))


def correlation(record: FitRecord, unsure: list[CoefficientFit]) -> Floats:
    """float64[unsure, unsure], positive definite: what the record has of fitted ones, none for the others."""
    matrix = np.eye(len(unsure))
    places = [i for i, fit in enumerate(unsure) if fit.status == "fitted"]
    if sum(map(len, record.correlation)) != len(places) * (len(places) - 1) // 2:
        return matrix  # of an older release
    for place, row in zip(places[1:], record.correlation, strict=True):
        for other, value in zip(places, row, strict=False):
            matrix[place, other] = matrix[other, place] = value
    # Rounded, a correlation of nearly 1 may be beyond what any three coefficients can have.
    values, vectors = np.linalg.eigh(matrix)
    matrix = vectors @ np.diag(np.maximum(values, 1e-6)) @ vectors.T
    scale = np.sqrt(np.diag(matrix))
    return np.asarray(matrix / scale / scale[:, None], np.float64)


def _delayed(lifecycle: Lifecycle, by_us: Mapping[str, float]) -> Lifecycle:
    """The delays with what ``by_us`` has of them added; none below 0."""
    fields: dict[str, Any] = {f"{name}_us": us for name, us in by_us.items() if hasattr(lifecycle, f"{name}_us")}
    return replace(lifecycle, **{name: max(getattr(lifecycle, name) + us, 0.0) for name, us in fields.items()})


def moved(latency: Latency, by_us: Mapping[str, float]) -> Latency:
    """A model with what ``by_us`` has of its coefficients added; none below 0.  Itself where it has none of them."""
    if isinstance(latency, LatencyModel):
        fields: dict[str, Any] = {f"{name}_ns": us for name, us in by_us.items() if hasattr(latency, f"{name}_ns")}
        moved = {name: max(getattr(latency, name) + round(1000 * us), 0) for name, us in fields.items()}
        return replace(latency, **moved)
    return _moved_bends(latency, by_us) if isinstance(latency, RegimeModel) else latency


def _moved_bends(latency: RegimeModel, by_us: Mapping[str, float]) -> RegimeModel:
    """Lines that meet at some numbers of decodes, moved so that they meet there still."""
    regimes, more_us, low, slope_us = [], by_us.get("intercept", 0.0), 0.0, by_us.get("per_decode_token", 0.0)
    context_us = by_us.get("per_context_token", 0.0)
    added = {"prefill_tokens": by_us.get("per_prefill_token", 0.0), "kv_sum": context_us}
    for regime in latency.regimes:
        above_us = by_us.get(f"{_ABOVE}{low:g}", slope_us)
        more_us, slope_us = more_us + low * (slope_us - above_us), above_us
        of_decodes = {"decode_tokens": slope_us + context_us}
        coefficients = {name: max(us + (added | of_decodes).get(name, 0.0), 0.0) for name, us in regime.coefficients}
        intercept_us = regime.intercept_us + more_us
        regimes.append(replace(regime, intercept_us=intercept_us, coefficients=tuple(coefficients.items())))
        low = regime.condition[2] if regime.condition is not None else low
    return replace(latency, regimes=tuple(regimes))
