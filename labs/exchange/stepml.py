"""Artifacts of StepML, a JSON file with a step model and delays, as releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from blis_replay.base.document import FieldError, Number, Text, read_values
from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel.step_time import FEATURE_NAMES
from blis_replay.blis.latency.models import Lifecycle, Regime, RegimeModel
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.replay.release_file import page_of_text
from blis_replay_labs.exchange.defaults import imported


def release_of_stepml(path: Path, name: str, model: str, tensor_parallelism: int, hardware: str) -> CoefficientRelease:
    """The coefficients of a StepML artifact (a JSON file) as a release for one model.

    An artifact does not name its model or hardware, so the caller does.  Raises ``ReleaseError`` if the file is not an
    artifact, or uses features that our batches do not have.
    """
    try:
        artifact: object = json.loads(page_of_text(path, "coefficients"))
    except (ValueError, RecursionError) as error:
        raise ReleaseError(f"{path}: no valid JSON ({error}); name a StepML artifact") from None
    latency, lifecycle = import_stepml(artifact, str(path))
    return imported(
        path, name, "StepML artifact", hardware, (ModelEntry(model, tensor_parallelism, latency, lifecycle),)
    )


class _ConditionText(Struct, frozen=True):
    feature: Text
    op: Literal["==", "<", "<=", ">", ">="]
    value: Number


class _LineText(Struct, frozen=True):
    model_type: Literal["linear"]
    intercept: Number
    feature_coefficients: dict[str, Number] = {}
    output_transform: Literal["", "expm1"] = ""


class _StepRegimeText(Struct, frozen=True):
    name: Text
    model: _LineText
    condition: _ConditionText | None = None


class _QueueingText(Struct, frozen=True):
    intercept: Number
    feature_coefficients: dict[str, Number] = {}

    def __post_init__(self) -> None:
        if not self.feature_coefficients.keys() <= {"input_len"}:
            raise FieldError("feature_coefficients", "depend on more than input_len", "only that can be imported")


class _ArtifactText(Struct, frozen=True):
    version: Annotated[float, Meta(ge=1, le=1e15)]
    step_time_regimes: tuple[_StepRegimeText, ...] = ()
    step_time: _LineText | None = None
    step_overhead_us: Number = 0.0
    step_overhead_per_req_us: Number = 0.0
    queueing_time: _QueueingText = _QueueingText(0.0)
    output_token_processing_time_us: Number = 0.0
    scheduling_processing_time_us: Number = 0.0
    preemption_processing_time_us: Number = 0.0

    def __post_init__(self) -> None:
        if self.step_time is None and not self.step_time_regimes:
            raise FieldError("step_time", "is missing, and there are no regimes", "add one of them")


def import_stepml(artifact: object, origin: str) -> tuple[RegimeModel, Lifecycle]:
    """Latency model and delays of a StepML artifact (its parsed JSON); ``origin`` names it in errors.

    The first matching regime wins, else ``step_time``.  Raises ``ReleaseError`` for features that our batches do not
    have (``kv_max``, ``kv_std``).
    """
    given = read_values(artifact, _ArtifactText, origin, "", ReleaseError)
    regimes = [_regime(one.name, one.model, one.condition, origin) for one in given.step_time_regimes]
    if given.step_time is not None:
        regimes.append(_regime("step_time", given.step_time, None, origin))
    if regimes[-1].condition is not None:
        regimes.append(Regime("otherwise", 1.0, ()))  # StepML answers 1 us where nothing holds
    lifecycle = Lifecycle(
        pre_queue_us=given.queueing_time.intercept,
        pre_queue_per_prompt_token_us=given.queueing_time.feature_coefficients.get("input_len", 0.0),
        post_token_us=given.output_token_processing_time_us,
        scheduling_us=given.scheduling_processing_time_us,
        preemption_us=given.preemption_processing_time_us,
    )
    overhead_us, per_request_us = given.step_overhead_us, given.step_overhead_per_req_us
    return RegimeModel(tuple(regimes), overhead_us=overhead_us, per_request_us=per_request_us), lifecycle


def _regime(name: str, line: _LineText, condition: _ConditionText | None, origin: str) -> Regime:
    asked = {} if condition is None else {condition.feature: 1.0}
    for feature, value in (line.feature_coefficients | asked).items():
        if feature not in FEATURE_NAMES and (value != 0 or feature in ("kv_max", "kv_std")):
            raise ReleaseError(f"{origin}: the feature {feature} is not kept of a batch; fit without it")
    when = None if condition is None else (condition.feature, condition.op, condition.value)
    coefficients = tuple(line.feature_coefficients.items())
    return Regime(name, line.intercept, coefficients, condition=when, expm1=line.output_transform == "expm1")
