"""How long a batch takes: every latency kind that is data, from two arrays.

``kind`` selects; ``whole`` (int64) and ``real`` (float64) hold its coefficients.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.kernel.compiled import compiled, entry
from blis_replay.blis.kernel.roofline import roofline_us
from blis_replay.blis.kernel.state import (
    BATCH_ATTENDED_TOKENS,
    BATCH_CONTEXT_TOKENS,
    BATCH_DECODE_TOKENS,
    BATCH_PREFILL_REQUESTS,
    BATCH_PREFILL_TOKENS,
    LONGEST_STEP_US,
    Int64s,
)
from blis_replay.blis.kernel.trees import trees_us

Floats = NDArray[np.float64]
KernelModel = tuple[int, Int64s, Floats]

LINEAR, REGIMES, OBSERVED, PHYSICAL, ROOFLINE, TREES = range(6)

# -- ROOFLINE, TREES: see kernel.roofline and kernel.trees.

# -- LINEAR: whole = intercept, per prefill, decode and context token, floor, cap (0: none),
#    all ns, and the ns added before the division (500 rounds half up, 0 truncates).

# -- REGIMES: real = overhead_us, per_request_us, then a row a regime:
#    condition feature (-1: always), operator, value, expm1 (0/1), intercept, coefficients;
#    then FEATURES places for the features of the batch.
PREFILL_TOKENS, DECODE_TOKENS, PREFILL_REQUESTS, DECODE_REQUESTS, SCHEDULED_TOKENS, KV_SUM, KV_MEAN = range(7)
PREFILL_X_DECODE, DECODE_X_KV_MEAN, PREFILL_SQUARED = range(7, 10)
FEATURES = 10
FEATURE_NAMES = (
    "prefill_tokens",
    "decode_tokens",
    "num_prefill_reqs",
    "num_decode_reqs",
    "scheduled_tokens",
    "kv_sum",
    "kv_mean",
    "prefill_x_decode",
    "decode_x_kv_mean",
    "prefill_sq",
)
EQUAL, BELOW, AT_MOST, ABOVE, AT_LEAST = range(5)
REGIME_HEAD = 2
REGIME_SIZE = 5 + FEATURES

# -- OBSERVED: whole = times (us, ascending), then the cycle (us) from each of them on; real = for each of them
#    whether a step began there.

# -- CORRECTED + another kind: whole = that kind's, then what to add (ns) to each step, and per prefill, decode and
#    context token; then times (us, ascending) and what to add (us) from each of them on; then that kind's length.
CORRECTED = 100
CORRECTION_LINE = 4

# -- PHYSICAL: whole, all ps = a step, per prefill token, decode token, context token of a decode, token attended to
#    by prefill, and request; the ps added before the division (half a us rounds half up); then the time to read the
#    experts that 0, 1, 2, ... batch tokens touch, the last one for all longer batches.
PHYSICAL_HEAD = 7
PS_PER_US = 1_000_000


@entry
def step_duration_us(kind: int, whole: Int64s, real: Floats, batch: Int64s, start_us: int) -> int:
    """Duration of a batch for a caller in Python."""
    return batch_duration_us(kind, whole, real, batch, start_us)


@compiled
def batch_duration_us(kind: int, whole: Int64s, real: Floats, batch: Int64s, start_us: int) -> int:
    """Duration of the batch in whole us, at least 1."""
    if kind < CORRECTED:
        return modelled_us(kind, whole, real, batch, start_us)
    own = whole[-1]
    modelled = modelled_us(kind - CORRECTED, whole[:own], real, batch, start_us)
    line_ns = (
        whole[own]
        + whole[own + 1] * batch[BATCH_PREFILL_TOKENS]
        + whole[own + 2] * batch[BATCH_DECODE_TOKENS]
        + whole[own + 3] * batch[BATCH_CONTEXT_TOKENS]
    )
    then_us = at_time(whole[own + CORRECTION_LINE : -1], start_us)
    return max(modelled + (line_ns + 500) // 1000 + then_us, 1)


@compiled
def modelled_us(kind: int, whole: Int64s, real: Floats, batch: Int64s, start_us: int) -> int:
    """What the model of a kind makes of the batch, in whole us, at least 1."""
    if kind == LINEAR:
        return linear_us(whole, batch)
    if kind == REGIMES:
        return regimes_us(real, batch)
    if kind == PHYSICAL:
        return physical_us(whole, batch)
    if kind == ROOFLINE:
        return roofline_us(whole, real, batch)
    if kind == TREES:
        features = real[-FEATURES:]
        batch_features(batch, features)
        return trees_us(whole, real, features)
    return observed_us(whole, real, start_us)


@compiled
def linear_us(whole: Int64s, batch: Int64s) -> int:
    """``min(cap, max(floor, b0 + b1*prefill + b2*decode + b3*context))``, rounded once."""
    total_ns = (
        whole[0]
        + whole[1] * batch[BATCH_PREFILL_TOKENS]
        + whole[2] * batch[BATCH_DECODE_TOKENS]
        + whole[3] * batch[BATCH_CONTEXT_TOKENS]
    )
    total_ns = max(total_ns, whole[4])
    if whole[5] > 0:
        total_ns = min(total_ns, whole[5])
    return max((total_ns + whole[6]) // 1000, 1)


@compiled
def physical_us(whole: Int64s, batch: Int64s) -> int:
    """Costs that are linear in the batch, and the experts that its tokens touch; rounded once."""
    tokens = batch[BATCH_PREFILL_TOKENS] + batch[BATCH_DECODE_TOKENS]
    total_ps = (
        whole[0]
        + whole[1] * batch[BATCH_PREFILL_TOKENS]
        + whole[2] * batch[BATCH_DECODE_TOKENS]
        + whole[3] * batch[BATCH_CONTEXT_TOKENS]
        + whole[4] * batch[BATCH_ATTENDED_TOKENS]
        + whole[5] * (batch[BATCH_PREFILL_REQUESTS] + batch[BATCH_DECODE_TOKENS])
        + whole[PHYSICAL_HEAD + min(tokens, len(whole) - PHYSICAL_HEAD - 1)]
    )
    return max((total_ps + whole[6]) // PS_PER_US, 1)


@compiled
def regimes_us(real: Floats, batch: Int64s) -> int:
    """The first regime whose condition holds: see blis-semantics 3.7 (StepML)."""
    features = real[-FEATURES:]
    batch_features(batch, features)
    us = 1.0
    for first in range(REGIME_HEAD, len(real) - FEATURES, REGIME_SIZE):
        if holds(int(real[first]), int(real[first + 1]), real[first + 2], features):
            us = real[first + 4]
            for i in range(FEATURES):
                us += real[first + 5 + i] * features[i]
            if real[first + 3] > 0:
                us = math.expm1(us)
            break
    if real[0] > 0:
        us = min(max(us, real[0]), 3 * real[0])
    if real[1] > 0:
        us += real[1] * (features[PREFILL_REQUESTS] + features[DECODE_REQUESTS])
    return int(min(max(us, 1.0), LONGEST_STEP_US))


@compiled
def holds(feature: int, operator: int, value: float, features: Floats) -> bool:
    """Whether a regime's condition holds for a batch."""
    if feature < 0:
        return True
    x = features[feature]
    if operator == EQUAL:
        return x == value
    if operator == BELOW:
        return x < value
    if operator == AT_MOST:
        return x <= value
    if operator == ABOVE:
        return x > value
    return x >= value


@compiled
def batch_features(batch: Int64s, x: Floats) -> None:
    """Fill float64[FEATURES] for a batch; ``kv`` are the computed tokens of decodes before the step."""
    x[PREFILL_TOKENS] = batch[BATCH_PREFILL_TOKENS]
    x[DECODE_TOKENS] = batch[BATCH_DECODE_TOKENS]
    x[PREFILL_REQUESTS] = batch[BATCH_PREFILL_REQUESTS]
    x[DECODE_REQUESTS] = batch[BATCH_DECODE_TOKENS]
    x[SCHEDULED_TOKENS] = x[PREFILL_TOKENS] + x[DECODE_TOKENS]
    x[KV_SUM] = batch[BATCH_CONTEXT_TOKENS] - batch[BATCH_DECODE_TOKENS]
    x[KV_MEAN] = x[KV_SUM] / x[DECODE_REQUESTS] if x[DECODE_REQUESTS] > 0 else 0.0
    x[PREFILL_X_DECODE] = x[PREFILL_TOKENS] * x[DECODE_TOKENS]
    x[DECODE_X_KV_MEAN] = x[DECODE_REQUESTS] * x[KV_MEAN]
    x[PREFILL_SQUARED] = x[PREFILL_TOKENS] ** 2


@compiled
def observed_us(whole: Int64s, real: Floats, start_us: int) -> int:
    """The cycle observed at this time; where steps began is known, up to the observed start that is nearest to it."""
    anchor = last_before(whole, start_us)
    cycle_us = max(whole[len(whole) // 2 + anchor], 1)
    if real[anchor] == 0 or start_us < whole[anchor]:
        return cycle_us
    past_us = (start_us - whole[anchor]) % cycle_us
    to_next_us = cycle_us - past_us
    return to_next_us if 2 * past_us <= cycle_us else to_next_us + cycle_us


@compiled
def at_time(whole: Int64s, start_us: int) -> int:
    """The value (second half) of the last time (first half) at or before ``start_us``; the first one before all."""
    return whole[len(whole) // 2 + last_before(whole, start_us)]


@compiled
def last_before(whole: Int64s, start_us: int) -> int:
    """The place of the last time (first half of ``whole``) at or before ``start_us``, 0 if there is none."""
    low, high = 0, len(whole) // 2 - 1  # the answer is within
    while low < high:
        middle = (low + high + 1) // 2
        if whole[middle] <= start_us:
            low = middle
        else:
            high = middle - 1
    return low
