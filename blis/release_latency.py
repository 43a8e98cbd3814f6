"""Latency models in a release's YAML, both ways."""

from __future__ import annotations

import re
from typing import Literal

from blis_replay.blis.architecture import format_architecture, parse_architecture
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.gpu import format_gpu, parse_gpu
from blis_replay.blis.kernel.step_time import FEATURE_NAMES
from blis_replay.blis.latency import (
    CorrectedModel,
    Latency,
    LatencyModel,
    ObservedCycles,
    Regime,
    RegimeModel,
)
from blis_replay.blis.physical import COEFFICIENT_NAMES, PhysicalCoefficients, PhysicalModel
from blis_replay.blis.release_fields import NS, NS_PER_TOKEN, Fields
from blis_replay.blis.release_roofline import format_roofline, parse_roofline
from blis_replay.blis.release_trees import format_trees, parse_trees
from blis_replay.blis.roofline import RooflineModel
from blis_replay.blis.trees import TreesModel

_Kind = Literal["blackbox", "floor", "regimes", "physical", "roofline", "trees"]
_KINDS: tuple[_Kind, ...] = ("blackbox", "floor", "regimes", "physical", "roofline", "trees")
_ROUNDINGS: tuple[Literal["round_half_up", "truncate"], ...] = ("round_half_up", "truncate")
_UNITS: tuple[Literal["us", "log1p us"], ...] = ("us", "log1p us")

_LINEAR_FIELDS = {
    "intercept": NS,
    "per_prefill_token": NS_PER_TOKEN,
    "per_decode_token": NS_PER_TOKEN,
    "per_context_token": NS_PER_TOKEN,
    "floor": NS,
    "cap": NS,
}
_REQUIRED = {"blackbox": ("intercept", "per_prefill_token", "per_decode_token"), "floor": ("floor",)}


def parse_latency(fields: Fields, tensor_parallelism: int) -> Latency:
    """The latency model of a release entry.  Raises ``ReleaseError`` naming the field."""
    kind = fields.choice("kind", _KINDS)
    if kind == "physical":
        return _parse_physical(fields, tensor_parallelism)
    if kind == "roofline":
        return parse_roofline(fields, tensor_parallelism)
    if kind == "trees":
        return parse_trees(fields)
    if kind == "regimes":
        return _parse_regimes(fields)
    ns = {
        name: fields.quantity(name, units, optional=name not in _REQUIRED[kind])
        for name, units in _LINEAR_FIELDS.items()
    }
    rounding = fields.choice("rounding", _ROUNDINGS)
    fields.refuse_unknown()
    return LatencyModel(
        kind=kind,
        intercept_ns=ns["intercept"],
        per_prefill_token_ns=ns["per_prefill_token"],
        per_decode_token_ns=ns["per_decode_token"],
        per_context_token_ns=ns["per_context_token"],
        floor_ns=ns["floor"],
        rounding=rounding,
        cap_ns=ns["cap"],
    )


def format_latency(model: Latency) -> dict[str, object]:
    """The fields that ``parse_latency`` reads.  Observed cycles belong to a recording, not to a release."""
    if isinstance(model, ObservedCycles | CorrectedModel):
        raise ReleaseError("observed cycles are of one recording; a release needs a fitted model")
    if isinstance(model, PhysicalModel):
        return _format_physical(model)
    if isinstance(model, RooflineModel):
        return format_roofline(model)
    if isinstance(model, TreesModel):
        return format_trees(model)
    if isinstance(model, RegimeModel):
        return {
            "kind": "regimes",
            "overhead": f"{model.overhead_us:.17g} us",
            "per_request": f"{model.per_request_us:.17g} us",
            "regimes": [_format_regime(regime) for regime in model.regimes],
        }
    fields: dict[str, object] = {
        "kind": model.kind,
        "intercept": f"{model.intercept_ns / 1000:.10g} us",
        "per_prefill_token": f"{model.per_prefill_token_ns / 1000:.10g} us/token",
        "per_decode_token": f"{model.per_decode_token_ns / 1000:.10g} us/token",
        "per_context_token": f"{model.per_context_token_ns / 1000:.10g} us/token",
        "floor": f"{model.floor_ns / 1000:.10g} us",
        "rounding": model.rounding,
    }
    if model.cap_ns:
        fields["cap"] = f"{model.cap_ns / 1000:.10g} us"
    return fields


def _parse_physical(fields: Fields, tensor_parallelism: int) -> PhysicalModel:
    model = PhysicalModel(
        architecture=parse_architecture(fields.mapping("architecture")),
        gpu=parse_gpu(fields.mapping("gpu")),
        tensor_parallelism=tensor_parallelism,
        coefficients=_parse_coefficients(fields.mapping("coefficients")),
    )
    fields.refuse_unknown()
    try:
        model.for_kernel()
    except ReleaseError as error:
        raise ReleaseError(f"{fields.origin}, field {fields.path.rstrip('.')}: {error}") from None
    return model


def _parse_coefficients(fields: Fields) -> PhysicalCoefficients:
    values = {}
    for name in COEFFICIENT_NAMES:
        key = name.removesuffix("_us")
        values[name] = fields.number(key) if key == name else fields.quantity(key, NS) / 1000
        if values[name] < 0:
            fields.refuse(key, "is negative", "fit it again")
    fields.refuse_unknown()
    if not any(values.values()):
        fields.refuse(COEFFICIENT_NAMES[0], "and all others are 0", "fit them again")
    return PhysicalCoefficients(**values)


def _format_physical(model: PhysicalModel) -> dict[str, object]:
    values = vars(model.coefficients)
    return {
        "kind": "physical",
        "architecture": format_architecture(model.architecture),
        "gpu": format_gpu(model.gpu),
        "coefficients": {
            name.removesuffix("_us"): f"{value:.10g} us" if name.endswith("_us") else value
            for name, value in values.items()
        },
    }


def _parse_regimes(fields: Fields) -> RegimeModel:
    overhead_us = fields.quantity("overhead", NS, optional=True) / 1000
    per_request_us = fields.quantity("per_request", NS, optional=True) / 1000
    regimes = tuple(_parse_regime(regime) for regime in fields.list("regimes"))
    fields.refuse_unknown()
    if not regimes or regimes[-1].condition is not None:
        fields.refuse("regimes", "do not cover every batch", "end with a regime that is used `always`")
    return RegimeModel(regimes, overhead_us, per_request_us)


def _parse_regime(fields: Fields) -> Regime:
    coefficients = fields.mapping("coefficients", optional=True)
    for name in coefficients.values:
        if name not in FEATURE_NAMES:
            coefficients.refuse(name, "is no feature of a batch", f"use {', '.join(FEATURE_NAMES)}")
    regime = Regime(
        name=fields.text("name"),
        intercept_us=fields.number("intercept"),
        coefficients=tuple(coefficients.numbers().items()),
        condition=_parse_condition(fields),
        expm1=fields.choice("unit", _UNITS) == "log1p us",
    )
    fields.refuse_unknown()
    return regime


def _parse_condition(fields: Fields) -> tuple[str, str, float] | None:
    text = fields.text("when")
    if text == "always":
        return None
    match = re.fullmatch(r"(\w+) (==|<=|>=|<|>) (-?[0-9]+(?:\.[0-9]+)?)", text)
    if not match or match[1] not in FEATURE_NAMES:
        fields.refuse("when", "is no condition", "write `always` or e.g. `prefill_tokens < 256`")
    return match[1], match[2], float(match[3])


def _format_regime(regime: Regime) -> dict[str, object]:
    when = "always"
    if regime.condition is not None:
        feature, operator, value = regime.condition
        when = f"{feature} {operator} {value:g}"
    return {
        "name": regime.name,
        "when": when,
        "unit": "log1p us" if regime.expm1 else "us",
        "intercept": regime.intercept_us,
        "coefficients": dict(regime.coefficients),
    }
