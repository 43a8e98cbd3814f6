"""A release entry as BLIS's blackbox model has it: three alphas and three betas (blis-semantics 3.1)."""

from __future__ import annotations

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.releases.release import ModelEntry

Coefficients = tuple[float, float, float]


def blackbox_coefficients(entry: ModelEntry, context_tokens: float = 0.0) -> tuple[Coefficients, Coefficients]:
    """Alpha (delays) and beta (step time) of an entry: us, us per token, us per token each.

    BLIS truncates its sums to whole us, so a model that rounds half up gets half a us more: the same
    step times.  ``context_tokens``: KV tokens of a mean decode, for which the cost of its context is
    put into that of the decode.  Raises ``ReleaseError`` for what three betas cannot say.
    """
    model, delays = entry.latency, entry.lifecycle
    if not isinstance(model, LatencyModel) or model.floor_ns or model.cap_ns:
        raise ReleaseError(f"{entry.model} tp {entry.tensor_parallelism} has no line for its step time")
    if model.per_context_token_ns and not context_tokens:
        raise ReleaseError(
            f"{entry.model} tp {entry.tensor_parallelism} has a cost per context token (--context-tokens puts it into "
            "that of a decode)"
        )
    if model.per_1000_attended_ns:
        raise ReleaseError(
            f"{entry.model} tp {entry.tensor_parallelism} has a cost per token that prefill attends to, which BLIS's "
            "blackbox model has not; export a release that is a line in prefill, decode and context tokens"
        )
    half_us = 0.5 if model.rounding == "round_half_up" else 0.0
    per_decode_ns = model.per_decode_token_ns + model.per_context_token_ns * context_tokens
    return (
        (delays.pre_queue_us, delays.pre_queue_per_prompt_token_us, delays.post_token_us),
        (model.intercept_ns / 1000 + half_us, model.per_prefill_token_ns / 1000, per_decode_ns / 1000),
    )


def beyond_blackbox(entry: ModelEntry) -> tuple[str, ...]:
    """Delays of an entry that BLIS does not have, by name; its blackbox model is without them."""
    delays = entry.lifecycle
    values = {
        "first_token_per_decode": delays.first_token_per_decode_us,
        "post_request": delays.post_request_us,
        "scheduling": delays.scheduling_us,
        "preemption": delays.preemption_us,
    }
    return tuple(name for name, value in values.items() if value)
