"""Step time by the roofline: matrix products, attention, memory, and how the phases of a mixed batch combine.

``int_params``: mode, rows of the product table, of the expert table, knots of the prefill curve, batch and context
knots of the decode grid.  ``float_params``: ``HEAD`` numbers, then these tables one after the other (see ``HEAD``).
"""

from __future__ import annotations

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.blis.kernel.state import LONGEST_STEP_US, Batch, compiled, of_kind, separate
from blis_replay.blis.kernel.step_time import batch_at, float_params_at, int_params_at

# -- how a step with prefill and decode tokens takes its time from one with either
WEIGHTED, TOKEN_PROPORTIONAL, ADDITIVE, LARGEST = range(4)

# -- int_params
MODE, PRODUCT_ROWS, EXPERT_ROWS, PREFILL_KNOTS, BATCH_KNOTS, CONTEXT_KNOTS = range(6)

# -- float_params, all us: a step; reading the weights but experts; per KV token read; per token written and passed on;
#    per token sent between GPUs; per pair of tokens attended to, at the peak.  Then: products of 0, 1, 2, ... tokens;
#    reading the experts that 0, 1, 2, ... tokens touch; prefill knots and their MFU; batch knots, context
#    knots, and an MFU for each pair of these
STEP_US, WEIGHTS_US, KV_US, TOKEN_US, TRAFFIC_US, PAIR_US = range(6)
HEAD = 6


@of_kind
def step_us(ints: int, ints_length: int, floats: int, floats_length: int, batch: int, _start_us: int) -> int:
    """The step time as ``step_time.registered`` calls it."""
    return roofline_us(int_params_at(ints, ints_length), float_params_at(floats, floats_length), batch_at(batch))


@compiled
def roofline_us(int_params: Int64s, float_params: Floats, batch: Batch) -> int:
    """Step overhead, traffic, and the time of the phases joined by the mode; rounded half up, at least 1 us."""
    prefill, decode = batch.prefill_tokens, batch.decode_tokens
    if prefill == 0:
        us = phase_us(int_params, float_params, batch, False, True)
    elif decode == 0:
        us = phase_us(int_params, float_params, batch, True, False)
    elif int_params[MODE] == ADDITIVE:
        us = phase_us(int_params, float_params, batch, True, True)
    else:
        prefill_us = phase_us(int_params, float_params, batch, True, False)
        decode_us = phase_us(int_params, float_params, batch, False, True)
        us = joined_us(int_params[MODE], prefill, decode, prefill_us, decode_us)
    us += float_params[STEP_US] + float_params[TRAFFIC_US] * (prefill + decode)
    return int(min(max(us + 0.5, 1.0), LONGEST_STEP_US))


@compiled
def joined_us(mode: int, prefill: int, decode: int, prefill_us: float, decode_us: float) -> float:
    """Time of a mixed step from the times of its phases alone (blis-semantics 3.4)."""
    if mode == LARGEST:
        return max(prefill_us, decode_us)
    share = prefill / (prefill + decode)
    if mode == WEIGHTED:
        if prefill > 4 * decode and prefill > 100:
            share = 0.75
        elif decode > 2 * prefill and decode > 50:
            share = 0.35
    return share * prefill_us + (1 - share) * decode_us


@separate
def phase_us(int_params: Int64s, float_params: Floats, batch: Batch, with_prefill: bool, with_decode: bool) -> float:
    """The longer of compute time and memory time, for one phase or both at once."""
    tokens, kv_tokens, attention_us = 0, 0.0, 0.0
    if with_prefill:
        prefill = batch.prefill_tokens
        tokens += prefill
        attended = batch.attended_tokens / prefill  # by a mean token
        requests = max(batch.prefill_requests, 1)
        kv_tokens += requests * attended
        last = attended + (prefill / requests - 1) / 2  # by the last token of a mean prompt
        attention_us += float_params[PAIR_US] * batch.attended_tokens / prefill_mfu(int_params, float_params, last)
    if with_decode and batch.decode_tokens > 0:
        decode, context = batch.decode_tokens, batch.context_tokens
        tokens += decode
        kv_tokens += context
        attention_us += float_params[PAIR_US] * context / decode_mfu(int_params, float_params, decode, context / decode)
    experts = HEAD + int_params[PRODUCT_ROWS]
    experts_us = float_params[experts + min(tokens, int_params[EXPERT_ROWS] - 1)]
    memory_us = (
        float_params[WEIGHTS_US] + experts_us + float_params[KV_US] * kv_tokens + float_params[TOKEN_US] * tokens
    )
    return max(products_us(int_params, float_params, tokens) + attention_us, memory_us)


@compiled
def products_us(int_params: Int64s, float_params: Floats, tokens: int) -> float:
    """Time of the matrix products for a number of tokens; proportional beyond the table."""
    last = int_params[PRODUCT_ROWS] - 1
    if tokens <= last:
        return float_params[HEAD + tokens]
    return float_params[HEAD + last] * tokens / last


@compiled
def prefill_mfu(int_params: Int64s, float_params: Floats, tokens: float) -> float:
    """Linear between knots, constant beyond."""
    first, knots = HEAD + int_params[PRODUCT_ROWS] + int_params[EXPERT_ROWS], int_params[PREFILL_KNOTS]
    place, share = between(float_params, first, knots, tokens)
    low = first + knots + place
    return float_params[low] if share == 0 else (1 - share) * float_params[low] + share * float_params[low + 1]


@compiled
def decode_mfu(int_params: Int64s, float_params: Floats, requests: float, context: float) -> float:
    """Bilinear between knots, constant beyond."""
    first = HEAD + int_params[PRODUCT_ROWS] + int_params[EXPERT_ROWS] + 2 * int_params[PREFILL_KNOTS]
    rows, columns = int_params[BATCH_KNOTS], int_params[CONTEXT_KNOTS]
    row, down = between(float_params, first, rows, requests)
    column, right = between(float_params, first + rows, columns, context)
    mfu = 0.0
    for i in range(2):
        for j in range(2):
            weight = (down if i else 1 - down) * (right if j else 1 - right)
            if weight > 0:
                mfu += weight * float_params[first + rows + columns + (row + i) * columns + column + j]
    return mfu


@compiled
def between(float_params: Floats, first: int, knots: int, x: float) -> tuple[int, float]:
    """The knot at or below x, counted from ``first``, and the fraction of the way to the next."""
    if x <= float_params[first]:
        return 0, 0.0
    if x >= float_params[first + knots - 1]:
        return knots - 1, 0.0
    low, high = 0, knots - 1
    while high - low > 1:
        middle = (low + high) // 2
        if float_params[first + middle] <= x:
            low = middle
        else:
            high = middle
    return low, (x - float_params[first + low]) / (float_params[first + high] - float_params[first + low])
