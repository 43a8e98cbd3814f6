"""Importing StepML artifacts, and regime models in releases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel import step_time
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency.models import Lifecycle, PrefillBeyond, Regime, RegimeModel
from blis_replay.blis.releases.release import ModelEntry, bundled_releases, format_release, parse_release
from blis_replay_labs.exchange.stepml import import_stepml

ARTIFACT: dict[str, Any] = {
    "version": 1,
    "step_time_regimes": [
        {
            "name": "decode_only",
            "condition": {"feature": "prefill_tokens", "op": "==", "value": 0},
            "model": {"model_type": "linear", "intercept": 100.0, "feature_coefficients": {"num_decode_reqs": 5.0}},
        },
        {
            "name": "mixed",
            "condition": None,
            "model": {
                "model_type": "linear",
                "intercept": 7.0,
                "feature_coefficients": {"kv_sum": 0.0},
                "output_transform": "expm1",
            },
        },
    ],
    "step_overhead_us": 400.0,
    "step_overhead_per_req_us": 2.0,
    "queueing_time": {"model_type": "linear", "intercept": 50.0, "feature_coefficients": {"input_len": 0.5}},
    "output_token_processing_time_us": 11.0,
    "scheduling_processing_time_us": 12.0,
    "preemption_processing_time_us": 13.0,
}


def duration_us(model: RegimeModel, prefill: int, decode: int) -> int:
    batch = np.zeros(1, k.BATCH)
    batch["prefill_tokens"], batch["decode_tokens"] = prefill, decode
    batch["context_tokens"] = decode  # each attends to itself alone
    batch["prefill_requests"] = prefill > 0
    return int(step_duration_us(*model.for_kernel(), batch, 0))


def test_an_artifact_by_hand() -> None:
    """Decode only: 100 + 5*10, lifted to 400, + 2*10.  Mixed: expm1(7) = 1095.6 within 400..1200, + 2*11."""
    model, lifecycle = import_stepml(ARTIFACT, "artifact")
    assert duration_us(model, 0, 10) == 420
    assert duration_us(model, 5, 10) == 1117
    assert lifecycle == Lifecycle(50.0, 0.5, 11.0, 0.0, 12.0, 13.0)


FEW = ("decode_tokens", "<=", 64.0)
BENT = RegimeModel(
    (
        Regime("few", 13_610.7, (("prefill_tokens", 41.6), ("decode_tokens", 17.9), ("kv_sum", 0.029)), condition=FEW),
        Regime("many", 13_453.3, (("decode_tokens", 20.4), ("prefill_tokens", 41.6), ("kv_sum", 0.029))),
    )
)


@pytest.mark.parametrize(("prefill", "decode", "us"), [(0, 64, 14_756), (0, 65, 14_779), (100, 10, 17_949)])
def test_lines_bent_at_64_decodes_by_hand(prefill: int, decode: int, us: int) -> None:
    """13,610.7 + 17.9*64; 13,453.3 + 20.4*65; 13,610.7 + 41.6*100 + 17.9*10, truncated."""
    assert duration_us(BENT, prefill, decode) == us


def test_lines_bent_at_1043_prefill_tokens_by_hand() -> None:
    """13,610.7 + 41.6*1,043 = 56,999.5 us, and 57 of 1,100 tokens beyond it at 41.6 + 15.3 us: 3,243.3 more."""
    beyond = replace(BENT, prefill_beyond=PrefillBeyond(1_043, 15_300))
    assert [duration_us(beyond, tokens, 0) for tokens in (1_043, 1_100)] == [56_999, 60_242]


@given(st.integers(0, 2_048), st.integers(0, 130), st.integers(0, 400_000), st.integers(0, 20_000))
def test_bent_lines_are_regimes_to_the_last_bit(prefill: int, decode: int, context: int, more_ns: int) -> None:
    """A third condition that never holds has the same lines read as regimes in general."""
    never = Regime("never", 1.0, (), condition=("prefill_tokens", "<", -1.0))
    bent = replace(BENT, prefill_beyond=PrefillBeyond(1_043, more_ns))
    general = replace(bent, regimes=(never, *bent.regimes))
    assert bent.for_kernel()[0] == step_time.BENT != general.for_kernel()[0]
    batch = np.zeros(1, k.BATCH)
    batch["prefill_tokens"], batch["decode_tokens"], batch["context_tokens"] = prefill, decode, decode + context
    assert step_duration_us(*bent.for_kernel(), batch, 0) == step_duration_us(*general.for_kernel(), batch, 0)


def test_a_regime_model_survives_a_release() -> None:
    """Written as YAML and read again, it is the same model."""
    model, lifecycle = import_stepml(ARTIFACT, "artifact")
    model = replace(model, prefill_beyond=PrefillBeyond(1_043, 15_301))
    entry = ModelEntry("some/Model", 1, model, lifecycle)
    release = replace(parse_release(bundled_releases()["stepml-direct"], "x"), models=(entry,))
    assert parse_release(format_release(release), "x").models == (entry,)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 0}, "field version: is 0; write a number from 1"),
        ({"step_time_regimes": [], "step_time": None}, "field step_time: is missing"),
        ({"step_time_regimes": "no"}, "field step_time_regimes: is 'no'; write a list"),
        ({"step_overhead_us": "much"}, "field step_overhead_us: is 'much'; write a number"),
        ({"step_time": {"model_type": "tree", "intercept": 1}}, "field step_time.model_type: is 'tree'; write linear"),
        (
            {"step_time": {"model_type": "linear", "intercept": 1, "feature_coefficients": {"kv_max": 1.0}}},
            "the feature kv_max is not kept of a batch",
        ),
        (
            {"step_time": {"model_type": "linear", "intercept": 1, "output_transform": "log"}},
            "field step_time.output_transform: is 'log'",
        ),
    ],
)
def test_what_cannot_be_imported_is_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ReleaseError) as refused:
        import_stepml(ARTIFACT | change, "artifact.json")
    assert complaint in str(refused.value)
    assert str(refused.value).startswith("artifact.json")


@pytest.mark.parametrize("artifact", [None, [], "text", 3])
def test_what_is_no_artifact_is_refused(artifact: object) -> None:
    with pytest.raises(ReleaseError, match="write key: value pairs"):
        import_stepml(artifact, "artifact.json")
