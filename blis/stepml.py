"""Importing step-time artifacts of the StepML studies (blis-semantics 3.7)."""

from __future__ import annotations

from collections.abc import Mapping

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel.step_time import FEATURE_NAMES
from blis_replay.blis.latency import Lifecycle, Regime, RegimeModel
from blis_replay.blis.release_fields import Fields


def import_stepml(artifact: object, origin: str) -> tuple[RegimeModel, Lifecycle]:
    """Latency model and delays of a StepML artifact (its parsed JSON); ``origin`` names it in errors.

    First matching regime wins, else ``step_time``; features that the artifact knows and a
    batch summary does not hold (``kv_max``, ``kv_std``) are refused.  Raises ``ReleaseError``.
    """
    top = Fields(artifact, origin, "")
    if top.number("version") < 1:
        top.refuse("version", "is below 1", "use an artifact of version 1 or later")
    regimes = [_regime(fields) for fields in top.list("step_time_regimes", optional=True)]
    if top.values.get("step_time") is not None:
        regimes.append(_linear("step_time", top.mapping("step_time"), None))
    if not regimes:
        top.refuse("step_time", "is missing, and there are no regimes", "add one of them")
    if regimes[-1].condition is not None:
        regimes.append(Regime("otherwise", 1.0, ()))  # StepML answers 1 us where nothing holds
    model = RegimeModel(
        tuple(regimes),
        overhead_us=_optional(top, "step_overhead_us"),
        per_request_us=_optional(top, "step_overhead_per_req_us"),
    )
    return model, _lifecycle(top)


def _regime(fields: Fields) -> Regime:
    condition = None
    if fields.values.get("condition") is not None:
        given = fields.mapping("condition")
        condition = (given.text("feature"), given.choice("op", ("==", "<", "<=", ">", ">=")), given.number("value"))
        _refuse_unknown_features(given, {condition[0]: 0.0})
    return _linear(fields.text("name"), fields.mapping("model"), condition)


def _linear(name: str, fields: Fields, condition: tuple[str, str, float] | None) -> Regime:
    if fields.text("model_type") != "linear":
        fields.refuse("model_type", "is not linear", "only linear models can be imported")
    coefficients = fields.mapping("feature_coefficients", optional=True).numbers()
    _refuse_unknown_features(fields, coefficients)
    transform = fields.values.get("output_transform", "")
    if transform not in ("", "expm1", None):
        fields.refuse("output_transform", f"is {transform!r}", "only '' and 'expm1' can be imported")
    return Regime(name, fields.number("intercept"), tuple(coefficients.items()), condition, expm1=transform == "expm1")


def _lifecycle(top: Fields) -> Lifecycle:
    queueing = {"intercept": 0.0, "input_len": 0.0}
    if top.values.get("queueing_time") is not None:
        fields = top.mapping("queueing_time")
        queueing["intercept"] = fields.number("intercept")
        queueing |= fields.mapping("feature_coefficients", optional=True).numbers()
    if set(queueing) != {"intercept", "input_len"}:
        top.refuse("queueing_time", "depends on more than input_len", "only intercept and input_len can be imported")
    return Lifecycle(
        pre_queue_us=queueing["intercept"],
        pre_queue_per_prompt_token_us=queueing["input_len"],
        post_token_us=_optional(top, "output_token_processing_time_us"),
        scheduling_us=_optional(top, "scheduling_processing_time_us"),
        preemption_us=_optional(top, "preemption_processing_time_us"),
    )


def _optional(fields: Fields, name: str) -> float:
    return fields.number(name) if fields.values.get(name) is not None else 0.0


def _refuse_unknown_features(fields: Fields, coefficients: Mapping[str, float]) -> None:
    for name, value in coefficients.items():
        if name not in FEATURE_NAMES and (value != 0 or name in ("kv_max", "kv_std")):
            raise ReleaseError(f"{fields.origin}: the feature {name} is not kept of a batch; fit without it")
