"""Latency models as a release writes them, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict, astuple

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel.step_time import FEATURE_NAMES
from blis_replay.blis.latency.datasheets import Architecture, Gpu
from blis_replay.blis.latency.models import (
    CorrectedModel,
    Latency,
    LatencyModel,
    ObservedCycles,
    PrefillBeyond,
    Regime,
    RegimeModel,
    Tree,
    TreesModel,
)
from blis_replay.blis.latency.operators import (
    DecodeAttention,
    OperatorCoefficients,
    OperatorModel,
    OperatorTables,
    PrefillAttention,
    TokenTimes,
)
from blis_replay.blis.latency.physical import PhysicalCoefficients, PhysicalModel
from blis_replay.blis.latency.roofline import Efficiency, Mixed, RooflineModel
from blis_replay.strict.document import FieldError, NonNegativeTime, Number, Text, Time, TimePerToken, document_of

Rounding = Literal["round_half_up", "truncate"]


class _PrefillBeyondText(Struct, frozen=True, kw_only=True):
    tokens: Annotated[int, Meta(ge=0, le=1_000_000_000)]
    more_per_token: TimePerToken

    def beyond(self) -> PrefillBeyond:
        return PrefillBeyond(self.tokens, round(1000 * self.more_per_token))


class _BlackboxText(Struct, frozen=True, kw_only=True, tag_field="kind", tag="blackbox"):
    intercept: Time
    per_prefill_token: TimePerToken
    per_decode_token: TimePerToken
    per_context_token: TimePerToken = 0.0
    per_1000_attended: Time | None = None
    floor: Time = 0.0
    rounding: Rounding
    cap: Time | None = None
    prefill_beyond: _PrefillBeyondText | None = None


class _FloorText(Struct, frozen=True, kw_only=True, tag_field="kind", tag="floor"):
    intercept: Time = 0.0
    per_prefill_token: TimePerToken = 0.0
    per_decode_token: TimePerToken = 0.0
    per_context_token: TimePerToken = 0.0
    per_1000_attended: Time | None = None
    floor: Time
    rounding: Rounding
    cap: Time | None = None
    prefill_beyond: _PrefillBeyondText | None = None


class _RegimeText(Struct, frozen=True, kw_only=True):
    name: Text
    when: Text
    unit: Literal["us", "log1p us"]
    intercept: Number
    coefficients: dict[str, Number] = {}

    def __post_init__(self) -> None:
        _refuse_unknown_features("coefficients", list(self.coefficients))
        self.condition()

    def condition(self) -> tuple[str, str, float] | None:
        match = re.fullmatch(r"(\w+) (==|<=|>=|<|>) (-?[0-9]+(?:\.[0-9]+)?)", self.when)
        if self.when != "always" and (not match or match[1] not in FEATURE_NAMES):
            raise FieldError("when", "is not a condition", "write `always` or e.g. `prefill_tokens < 256`")
        return (match[1], match[2], float(match[3])) if match else None


class _RegimesText(Struct, frozen=True, tag_field="kind", tag="regimes"):
    overhead: Time = 0.0
    per_request: Time = 0.0
    prefill_beyond: _PrefillBeyondText | None = None
    regimes: tuple[_RegimeText, ...] = ()

    def __post_init__(self) -> None:
        if not self.regimes or self.regimes[-1].when != "always":
            raise FieldError("regimes", "do not cover every batch", "end with a regime that is used `always`")


class _PhysicalText(Struct, frozen=True, tag_field="kind", tag="physical"):
    architecture: Architecture
    gpu: Gpu
    coefficients: PhysicalCoefficients

    def __post_init__(self) -> None:
        if not any(astuple(self.coefficients)):
            raise FieldError("coefficients", "are all 0", "fit them again")


class _RooflineText(Struct, frozen=True, tag_field="kind", tag="roofline"):
    mixed: Mixed
    bandwidth_efficiency: Annotated[float, Meta(gt=0, le=1)]
    per_layer: NonNegativeTime
    architecture: Architecture
    gpu: Gpu
    efficiency: Efficiency | None = None


class _TreesText(Struct, frozen=True, tag_field="kind", tag="trees"):
    unit: Literal["log us"]
    features: Annotated[tuple[str, ...], Meta(min_length=1)]
    trees: tuple[Tree, ...]

    def __post_init__(self) -> None:
        _refuse_unknown_features("features", self.features)


# Numbers of a table, not negative, with blanks between them: a line of YAML and not one for each.
_Numbers = Annotated[str, Meta(pattern=r"^[0-9]{1,12}(\.[0-9]{1,6})?( [0-9]{1,12}(\.[0-9]{1,6})?)*$")]


class _TokenTimesText(Struct, frozen=True):
    tokens: _Numbers
    mixed_us: _Numbers
    decode_us: _Numbers
    all_reduce_us: _Numbers

    def table(self) -> TokenTimes:
        return TokenTimes(*map(_numbers, astuple(self)))


class _PrefillAttentionText(Struct, frozen=True):
    tokens: _Numbers
    attended_tokens: _Numbers
    us: tuple[_Numbers, ...]

    def table(self) -> PrefillAttention:
        return PrefillAttention(_numbers(self.tokens), _numbers(self.attended_tokens), tuple(map(_numbers, self.us)))


class _DecodeAttentionText(Struct, frozen=True):
    requests: _Numbers
    context_tokens: _Numbers
    us: tuple[_Numbers, ...]

    def table(self) -> DecodeAttention:
        return DecodeAttention(_numbers(self.requests), _numbers(self.context_tokens), tuple(map(_numbers, self.us)))


class _OperatorsText(Struct, frozen=True, tag_field="kind", tag="operators"):
    source: Text
    coefficients: OperatorCoefficients
    products: _TokenTimesText
    prefill_attention: _PrefillAttentionText
    decode_attention: _DecodeAttentionText

    def __post_init__(self) -> None:
        for name in ("products", "prefill_attention", "decode_attention"):
            try:
                getattr(self, name).table()
            except FieldError as problem:
                raise FieldError(f"{name}.{problem.field}", problem.problem, problem.remedy) from None

    def model(self) -> OperatorModel:
        parts = self.products.table(), self.prefill_attention.table(), self.decode_attention.table()
        return OperatorModel(OperatorTables(*parts, self.source), self.coefficients)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(" ")))


def _numbers_text(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:.1f}".removesuffix(".0") for number in numbers)


def _operators_text(model: OperatorModel) -> _OperatorsText:
    products, prefill, decode = model.tables.products, model.tables.prefill, model.tables.decode
    return _OperatorsText(
        model.tables.source or "not stated",
        model.coefficients,
        _TokenTimesText(
            *map(_numbers_text, (products.tokens, products.mixed_us, products.decode_us, products.all_reduce_us))
        ),
        _PrefillAttentionText(
            _numbers_text(prefill.tokens), _numbers_text(prefill.attended_tokens), tuple(map(_numbers_text, prefill.us))
        ),
        _DecodeAttentionText(
            _numbers_text(decode.requests), _numbers_text(decode.context_tokens), tuple(map(_numbers_text, decode.us))
        ),
    )


LatencyText = _BlackboxText | _FloorText | _RegimesText | _PhysicalText | _RooflineText | _TreesText | _OperatorsText


def _refuse_unknown_features(field: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in FEATURE_NAMES:
            raise FieldError(field, f"names {name!r}, not a feature of a batch", f"use {', '.join(FEATURE_NAMES)}")


def read_latency(text: LatencyText, tensor_parallelism: int) -> Latency:
    """The latency model of a release entry.  Raises ``ReleaseError`` for one that no step can be run with."""
    model = _model(text, tensor_parallelism)
    model.for_kernel()
    return model


def _model(text: LatencyText, tensor_parallelism: int) -> Latency:
    if isinstance(text, _PhysicalText):
        return PhysicalModel(text.architecture, text.gpu, tensor_parallelism, text.coefficients)
    if isinstance(text, _RooflineText):
        return RooflineModel(
            text.architecture,
            text.gpu,
            tensor_parallelism,
            text.mixed,
            text.efficiency,
            text.bandwidth_efficiency,
            text.per_layer,
        )
    if isinstance(text, _OperatorsText):
        return text.model()
    if isinstance(text, _TreesText):
        return TreesModel(text.features, text.trees)
    if isinstance(text, _RegimesText):
        regimes = (
            Regime(r.name, r.intercept, tuple(r.coefficients.items()), r.condition(), expm1=r.unit == "log1p us")
            for r in text.regimes
        )
        return RegimeModel(tuple(regimes), text.overhead, text.per_request, _read_beyond(text))
    times = {name: us for name, us in asdict(text).items() if name not in ("rounding", "prefill_beyond")}
    ns = {f"{name}_ns": round(1000 * (us or 0)) for name, us in times.items()}
    kind: Literal["blackbox", "floor"] = "blackbox" if isinstance(text, _BlackboxText) else "floor"
    return LatencyModel(kind=kind, rounding=text.rounding, **ns, prefill_beyond=_read_beyond(text))


def _read_beyond(text: _BlackboxText | _FloorText | _RegimesText) -> PrefillBeyond:
    return PrefillBeyond() if text.prefill_beyond is None else text.prefill_beyond.beyond()


def _beyond_text(model: LatencyModel | RegimeModel) -> _PrefillBeyondText | None:
    given = model.prefill_beyond
    if not given.more_per_token_ns:
        return None
    return _PrefillBeyondText(tokens=given.tokens, more_per_token=given.more_per_token_ns / 1000)


def format_latency(model: Latency) -> dict[str, object]:
    """The fields that a release has of a model.  Observed cycles belong to a recording, not to a release."""
    document: dict[str, object] = document_of(latency_text(model))
    return document


def latency_text(model: Latency) -> LatencyText:
    """A model as it is written.  Raises ``ReleaseError`` for observed cycles."""
    if isinstance(model, ObservedCycles | CorrectedModel):
        raise ReleaseError("observed cycles are of one recording; a release needs a fitted model")
    if isinstance(model, PhysicalModel):
        return _PhysicalText(model.architecture, model.gpu, model.coefficients)
    if isinstance(model, RooflineModel):
        return _RooflineText(
            model.mixed, model.bandwidth_efficiency, model.per_layer_us, model.architecture, model.gpu, model.efficiency
        )
    if isinstance(model, OperatorModel):
        return _operators_text(model)
    if isinstance(model, TreesModel):
        return _TreesText("log us", model.features, model.trees)
    if isinstance(model, RegimeModel):
        regimes = tuple(map(_regime_text, model.regimes))
        return _RegimesText(model.overhead_us, model.per_request_us, _beyond_text(model), regimes)
    return (_BlackboxText if model.kind == "blackbox" else _FloorText)(
        intercept=model.intercept_ns / 1000,
        per_prefill_token=model.per_prefill_token_ns / 1000,
        per_decode_token=model.per_decode_token_ns / 1000,
        per_context_token=model.per_context_token_ns / 1000,
        per_1000_attended=model.per_1000_attended_ns / 1000 or None,
        floor=model.floor_ns / 1000,
        rounding=model.rounding,
        cap=model.cap_ns / 1000 or None,
        prefill_beyond=_beyond_text(model),
    )


def _regime_text(regime: Regime) -> _RegimeText:
    feature, operator, value = regime.condition or ("", "", 0.0)
    return _RegimeText(
        name=regime.name,
        when=f"{feature} {operator} {value:g}" if feature else "always",
        unit="log1p us" if regime.expm1 else "us",
        intercept=regime.intercept_us,
        coefficients=dict(regime.coefficients),
    )
