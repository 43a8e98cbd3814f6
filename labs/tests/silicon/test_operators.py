"""Operator tables: steps by hand, captured sizes, multiples of the parts, the release form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blis_replay.base.errors import ReleaseError
from blis_replay.blis.latency.models import Lifecycle, durations_us
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, format_release, parse_release
from blis_replay_labs.silicon.operators import (
    DecodeAttention,
    OperatorCoefficients,
    OperatorModel,
    PrefillAttention,
    TokenTimes,
)

# Tokens cost 10 us each with prefill, 20 in decode, from 100 of which 10 of all-reduces; attention is 1 us a token and
# 100 attended to (prefill), 1 us a request and 10 tokens of context (decode).
TABLES = OperatorModel(
    TokenTimes((1.0, 101.0), (110.0, 1110.0), (120.0, 2120.0), (10.0, 10.0)),
    PrefillAttention((1.0, 11.0), (100.0, 200.0), ((1.0, 2.0), (11.0, 22.0))),
    DecodeAttention((1.0, 11.0), (10.0, 110.0), ((1.0, 11.0), (11.0, 121.0))),
    source="made by hand",
)
MODEL = TABLES


def decode(model: OperatorModel, requests: int, context: int) -> int:
    return durations_us(model, [{"decode_tokens": requests, "context_tokens": requests * context}])[0]


def test_a_decode_step_is_its_products_and_its_attention() -> None:
    """6 tokens: 120 + 5 * 20; 6 requests at 60 tokens: 6 * 6."""
    assert decode(MODEL, 6, 60) == 220 + 36


def test_a_prefill_step_is_looked_up_by_its_tokens_and_what_they_attend_to() -> None:
    """6 tokens: 110 + 5 * 10; attending to 150 each: half way between 1 and 11 at 100, 2 and 22 at 200."""
    assert durations_us(MODEL, [{"prefill_tokens": 6, "prefill_requests": 1, "attended_tokens": 900}])[0] == 160 + 9


def test_a_mixed_step_computes_all_tokens_at_once() -> None:
    """6 and 5 tokens: 110 + 10 * 10 with prefill; attention of both: 9 and 5 * 6."""
    batch = {"prefill_tokens": 6, "prefill_requests": 1, "attended_tokens": 900}
    assert durations_us(MODEL, [{**batch, "decode_tokens": 5, "context_tokens": 300}])[0] == 210 + 9 + 30


def test_beyond_the_tables_their_last_lines_go_on() -> None:
    """202 tokens cost twice what 101 do (2,120 us); 202 requests at 1,010 tokens: 202 * 101, as within."""
    assert decode(MODEL, 202, 1010) == 4240 + 202 * 101


def test_coefficients_multiply_the_parts_and_the_host_adds_to_them() -> None:
    """6 decodes at 60: products 210 of 220 us, all-reduces 10, attention 36; a step 7 us, a request 2."""
    coefficients = OperatorCoefficients(
        products=2.0, attention=0.5, all_reduce=3.0, per_step_us=7.0, per_request_us=2.0
    )
    assert decode(replace(MODEL, coefficients=coefficients), 6, 60) == 420 + 18 + 30 + 7 + 12


@pytest.mark.parametrize(("requests", "computed"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_a_batch_is_padded_to_the_next_captured_size(requests: int, computed: int) -> None:
    """Of 4 and 8; beyond 8 it is computed as it is.  Attention is not padded."""
    captured = MODEL.with_captured((8, 4))
    assert decode(captured, requests, 60) == 120 + 20 * (computed - 1) + 6 * requests


def release_of(model: OperatorModel) -> CoefficientRelease:
    entry = ModelEntry("org/model", 2, model, Lifecycle())
    return CoefficientRelease("r", "valid", "s", "s", "H100-SXM", "", (entry,), fitted_on=())


def test_a_release_carries_its_tables() -> None:
    """A step takes as long when it is read again, and a table is a line of text."""
    model = replace(MODEL, coefficients=OperatorCoefficients(products=1.25, per_step_us=12.5))
    text = format_release(release_of(model))
    assert "mixed_us: 110 1110" in text
    assert parse_release(text, "r").models[0].latency == model


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("tokens: 1 101", "tokens: 101 1", "products.tokens: is not two numbers above 0 or more, each above the one"),
        ("mixed_us: 110 1110", "mixed_us: '110'", "products.mixed_us: has 1 for 2 tokens; give one for each"),
        ("context_tokens: 10 110", "context_tokens: 10 20 30", "decode_attention.us: has 2 for 3 context_tokens"),
        ("- 1 11", "- 1 a", "decode_attention.us[0]: is '1 a'"),
        ("- 11 121", "- 9e9 1", "decode_attention.us[1]: is '9e9 1'"),
        ("products: 1.0", "products: -1.0", "coefficients.products: is -1.0; write a number from 0 to 1e+06"),
        ("mixed_us: 110 1110", "mixed_us: 110 999999999999", "a step takes more than an hour; check the operator"),
    ],
)
def test_what_is_wrong_with_tables_is_named(old: str, new: str, complaint: str) -> None:
    text = format_release(release_of(MODEL))
    assert old in text, text
    with pytest.raises(ReleaseError) as refused:
        parse_release(text.replace(old, new, 1), "mine.yaml")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
