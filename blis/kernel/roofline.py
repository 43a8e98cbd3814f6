"""How long a batch takes by the roofline: matrix products, attention, memory, and what joins a mixed batch.

``whole``: mode, rows of the product table, of the expert table, knots of the prefill curve, batch and context
knots of the decode grid.  ``real``: ``HEAD`` numbers, then these tables one after the other (see ``HEAD``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.kernel.compiled import compiled
from blis_replay.blis.kernel.state import (
    BATCH_ATTENDED_TOKENS,
    BATCH_CONTEXT_TOKENS,
    BATCH_DECODE_TOKENS,
    BATCH_PREFILL_REQUESTS,
    BATCH_PREFILL_TOKENS,
    LONGEST_STEP_US,
    Int64s,
)

Floats = NDArray[np.float64]

# -- how a step with prefill and decode tokens takes its time from one with either
WEIGHTED, TOKEN_PROPORTIONAL, ADDITIVE, LARGEST = range(4)

# -- whole
MODE, PRODUCT_ROWS, EXPERT_ROWS, PREFILL_KNOTS, BATCH_KNOTS, CONTEXT_KNOTS = range(6)

# -- real, all us: a step; reading the weights but experts; per KV token read; per token written and passed on;
#    per token sent between GPUs; per pair of tokens attended to, at the peak.  Then: products of 0, 1, 2, ... tokens;
#    reading the experts that 0, 1, 2, ... tokens touch; prefill knots and their MFU; batch knots, context
#    knots, and an MFU for each pair of these
STEP_US, WEIGHTS_US, KV_US, TOKEN_US, TRAFFIC_US, PAIR_US = range(6)
HEAD = 6


@compiled
def roofline_us(whole: Int64s, real: Floats, batch: Int64s) -> int:
    """Step overhead, traffic, and the time of the phases joined by the mode; rounded half up, at least 1 us."""
    prefill, decode = batch[BATCH_PREFILL_TOKENS], batch[BATCH_DECODE_TOKENS]
    if prefill == 0:
        us = phase_us(whole, real, batch, False, True)
    elif decode == 0:
        us = phase_us(whole, real, batch, True, False)
    elif whole[MODE] == ADDITIVE:
        us = phase_us(whole, real, batch, True, True)
    else:
        prefill_us = phase_us(whole, real, batch, True, False)
        decode_us = phase_us(whole, real, batch, False, True)
        us = joined_us(whole[MODE], prefill, decode, prefill_us, decode_us)
    us += real[STEP_US] + real[TRAFFIC_US] * (prefill + decode)
    return int(min(max(us + 0.5, 1.0), LONGEST_STEP_US))


@compiled
def joined_us(mode: int, prefill: int, decode: int, prefill_us: float, decode_us: float) -> float:
    """A mixed step from what its phases would take alone (blis-semantics 3.4)."""
    if mode == LARGEST:
        return max(prefill_us, decode_us)
    share = prefill / (prefill + decode)
    if mode == WEIGHTED:
        if prefill > 4 * decode and prefill > 100:
            share = 0.75
        elif decode > 2 * prefill and decode > 50:
            share = 0.35
    return share * prefill_us + (1 - share) * decode_us


@compiled
def phase_us(whole: Int64s, real: Floats, batch: Int64s, with_prefill: bool, with_decode: bool) -> float:
    """The longer of computing and of reading and writing memory, for one phase or both at once."""
    tokens, kv_tokens, attention_us = 0, 0.0, 0.0
    if with_prefill:
        prefill = batch[BATCH_PREFILL_TOKENS]
        tokens += prefill
        attended = batch[BATCH_ATTENDED_TOKENS] / prefill  # by a mean token
        requests = max(batch[BATCH_PREFILL_REQUESTS], 1)
        kv_tokens += requests * attended
        last = attended + (prefill / requests - 1) / 2  # by the last token of a mean prompt
        attention_us += real[PAIR_US] * batch[BATCH_ATTENDED_TOKENS] / prefill_mfu(whole, real, last)
    if with_decode and batch[BATCH_DECODE_TOKENS] > 0:
        decode, context = batch[BATCH_DECODE_TOKENS], batch[BATCH_CONTEXT_TOKENS]
        tokens += decode
        kv_tokens += context
        attention_us += real[PAIR_US] * context / decode_mfu(whole, real, decode, context / decode)
    experts = HEAD + whole[PRODUCT_ROWS]
    experts_us = real[experts + min(tokens, whole[EXPERT_ROWS] - 1)]
    memory_us = real[WEIGHTS_US] + experts_us + real[KV_US] * kv_tokens + real[TOKEN_US] * tokens
    return max(products_us(whole, real, tokens) + attention_us, memory_us)


@compiled
def products_us(whole: Int64s, real: Floats, tokens: int) -> float:
    """Matrix products of so many tokens; beyond the table in proportion."""
    last = whole[PRODUCT_ROWS] - 1
    if tokens <= last:
        return real[HEAD + tokens]
    return real[HEAD + last] * tokens / last


@compiled
def prefill_mfu(whole: Int64s, real: Floats, tokens: float) -> float:
    """Linear between knots, constant beyond."""
    first, knots = HEAD + whole[PRODUCT_ROWS] + whole[EXPERT_ROWS], whole[PREFILL_KNOTS]
    place, share = between(real, first, knots, tokens)
    low = first + knots + place
    return real[low] if share == 0 else (1 - share) * real[low] + share * real[low + 1]


@compiled
def decode_mfu(whole: Int64s, real: Floats, requests: float, context: float) -> float:
    """Bilinear between knots, constant beyond."""
    first = HEAD + whole[PRODUCT_ROWS] + whole[EXPERT_ROWS] + 2 * whole[PREFILL_KNOTS]
    rows, columns = whole[BATCH_KNOTS], whole[CONTEXT_KNOTS]
    row, down = between(real, first, rows, requests)
    column, right = between(real, first + rows, columns, context)
    mfu = 0.0
    for i in range(2):
        for j in range(2):
            weight = (down if i else 1 - down) * (right if j else 1 - right)
            if weight > 0:
                mfu += weight * real[first + rows + columns + (row + i) * columns + column + j]
    return mfu


@compiled
def between(real: Floats, first: int, knots: int, x: float) -> tuple[int, float]:
    """The knot at or below x, counted from ``first``, and how far x is to the next one (0 to 1)."""
    if x <= real[first]:
        return 0, 0.0
    if x >= real[first + knots - 1]:
        return knots - 1, 0.0
    low, high = 0, knots - 1
    while high - low > 1:
        middle = (low + high) // 2
        if real[first + middle] <= x:
            low = middle
        else:
            high = middle
    return low, (x - real[first + low]) / (real[first + high] - real[first + low])
