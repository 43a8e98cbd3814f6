"""What calibration assumes of a coefficient that the recordings do not determine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.models import LatencyModel, RegimeModel
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry
from blis_replay.compiled.arrays import Floats
from blis_replay.ingest.recording import Recording
from blis_replay.replay.simulator import entry_of, model_of
from blis_replay.validate.calibration.step_errors import (
    CONTEXT,
    DECODE,
    FIRST_TOKEN,
    INTERCEPT,
    PRE_QUEUE,
    PREFILL,
    StepForm,
)
from blis_replay.validate.errors import ValidateError

DEFAULT_PRIOR = "h100-datasheet"

# One constant that its publisher fitted over the journeys of all 16 H100 experiments.
PUBLISHED_PRE_QUEUE_US = 9_300.0
PUBLISHED_PRE_QUEUE_SOURCE = (
    "published constant (alpha 0 of the trained roofline, fitted to journeys of 16 H100 experiments, mean absolute "
    "error 4.6 ms)"
)


@dataclass(frozen=True)
class Prior:
    """A line's vector (us, float64[6]) and in words where it comes from; 0 where nothing is known."""

    vector: Floats
    source: str
    pre_queue_source: str = PUBLISHED_PRE_QUEUE_SOURCE


def prior_for(release: CoefficientRelease, recording: Recording) -> Prior:
    """The prior of a recording's model: the release's entry, else the published pre-queue delay and nothing more.

    Raises ``ValidateError`` for an entry that is neither a line nor bends of one.
    """
    try:
        entry = entry_of(release, recording)
    except ReleaseError:
        vector = np.zeros(len(StepForm().names))
        vector[PRE_QUEUE] = PUBLISHED_PRE_QUEUE_US
        return Prior(vector, f"{release.name} has no {model_of(recording)}")
    pre_queue_source = (entry.sources or {}).get("pre_queue", PUBLISHED_PRE_QUEUE_SOURCE)
    return Prior(_vector(entry, release.name), f"release {release.name}", pre_queue_source)


def _vector(entry: ModelEntry, name: str) -> Floats:
    vector = np.zeros(len(StepForm().names))
    vector[PRE_QUEUE] = entry.lifecycle.pre_queue_us
    vector[FIRST_TOKEN] = entry.lifecycle.first_token_per_decode_us
    latency = entry.latency
    if isinstance(latency, LatencyModel) and latency.kind == "blackbox":
        vector[INTERCEPT], vector[PREFILL] = latency.intercept_ns / 1000, latency.per_prefill_token_ns / 1000
        vector[CONTEXT], vector[DECODE] = latency.per_context_token_ns / 1000, latency.per_decode_token_ns / 1000
        return vector
    if isinstance(latency, RegimeModel) and not any(regime.expm1 for regime in latency.regimes):
        first = latency.regimes[0]
        by_name = dict(first.coefficients)
        vector[INTERCEPT], vector[PREFILL] = first.intercept_us, by_name.get("prefill_tokens", 0.0)
        vector[CONTEXT] = by_name.get("kv_sum", 0.0)
        vector[DECODE] = by_name.get("decode_tokens", 0.0) - vector[CONTEXT]
        return np.maximum(vector, 0)
    raise ValidateError(f"release {name}: {entry.model} is no line, so it gives no prior; choose another with --prior")
