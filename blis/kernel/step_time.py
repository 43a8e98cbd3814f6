"""How long a batch takes: every latency kind that is data, from two arrays.

``kind`` selects; ``int_params`` (int64) and ``float_params`` (float64) hold its coefficients.
"""

from __future__ import annotations

import math

import numpy as np

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.functions import ByAddress
from blis_replay.base.tables import call_step_time, record_at, stretch, table_at, table_of
from blis_replay.blis.kernel.state import BATCH, LONGEST_STEP_US, Batch, Record, compiled, entry, separate

KernelModel = tuple[int, Int64s, Floats]

LINEAR, REGIMES, OBSERVED, PHYSICAL, REGISTERED, BENT, ROOFLINE = range(7)

# -- REGISTERED, any kind whose step time is a function of its own, such as one of another distribution: int_params =
#    the function's address, then what it reads.  ``registered`` makes such a model.

# -- LINEAR: int_params = intercept, per prefill, decode and context token, floor, cap (0: none),
#    all ns, and the ns added before the division (500 rounds half up, 0 truncates); ns per 1,000 tokens attended to
#    by prefill; then from how many prefill tokens on each costs how many ns more.

# -- ROOFLINE: int_params as LINEAR; float_params = us to compute a token, and to read what every step reads of weights;
#    four times the share of the shorter of both that shows; us to read all experts; and the logarithm of the share of
#    the experts that one token does not touch.

# -- REGIMES: float_params = overhead_us, per_request_us, from how many prefill tokens on each costs how many us more;
#    then a row a regime:
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
# -- BENT, lines in prefill tokens, decode tokens and kv_sum, by the number of decode tokens: float_params = for each
#    line, ascending, the most decode tokens it is for, intercept (us), and its three coefficients; last, from how
#    many prefill tokens on each costs how many us more.
BENT_SIZE = 5

EQUAL, BELOW, AT_MOST, ABOVE, AT_LEAST = range(5)
REGIME_HEAD = 4
REGIME_SIZE = 5 + FEATURES

# -- OBSERVED: int_params = times (us, ascending), then the cycle (us) from each of them on; float_params = for each
#    of them whether a step began there.

# -- CORRECTED + another kind: int_params = that kind's, then the number of paces, and what to add (ns) to each step,
#    and per prefill, decode and context token; then times (us, ascending) and how many times to take the step time from
#    each of them on (in PACE_UNIT); then times and what to add (us) from each of them on; then that kind's length.
CORRECTED = 100
CORRECTION_HEAD = 5
PACE_UNIT = 1_000_000

# -- FIRST_USE + any of these: int_params = that kind's, then the us that a kernel takes to compile when a batch first
#    needs it, the most tokens that are computed from a captured graph, experts per token, experts, and the bits of the
#    kernels that a new server has; then that kind's length.
FIRST_USE = 1000
KERNEL_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
DIVISOR = 16

# -- PHYSICAL: int_params, all ps = a step, per prefill token, decode token, context token of a decode, token attended
#    to by prefill, and request; the ps added before the division (half a us rounds half up); then the time to read the
#    experts that 0, 1, 2, ... batch tokens touch, the last one for all longer batches.
PHYSICAL_HEAD = 7
PS_PER_US = 1_000_000


# What a function by address is given: the address and length of both arrays, the address of the batch, and start_us.
int_params_at, float_params_at, batch_at = table_at(np.int64), table_at(np.float64), record_at(BATCH)


def registered(function: ByAddress, int_params: Int64s, float_params: Floats) -> KernelModel:
    """A model whose step time is ``function(ints, ints_length, floats, floats_length, batch, start_us)``, in us."""
    return REGISTERED, np.concatenate([[function.address], int_params]), float_params


@entry
def step_duration_us(kind: int, int_params: Int64s, float_params: Floats, batch: Record, start_us: int) -> int:
    """Duration of a batch, a table of one row, for a caller in Python."""
    return batch_duration_us(kind, table_of(int_params), table_of(float_params), batch[0], start_us)


@entry
def step_durations_us(
    kind: int, int_params: Int64s, float_params: Floats, batches: Record, durations_us: Int64s
) -> None:
    """The same of each row of a table, in one call: a call takes ten times as long as a duration."""
    ints, floats = table_of(int_params), table_of(float_params)
    for i in range(len(batches)):
        durations_us[i] = batch_duration_us(kind, ints, floats, batches[i], 0)


@separate
def batch_duration_us(kind: int, int_params: Int64s, float_params: Floats, batch: Batch, start_us: int) -> int:
    """Duration of the batch in int_params us, at least 1."""
    compiled_us = 0
    if kind >= FIRST_USE:
        first_use = int_params[len(int_params) - 1]
        compiled_us = first_use_us(stretch(int_params, first_use, len(int_params)), batch)
        int_params, kind = stretch(int_params, 0, first_use), kind - FIRST_USE
    own = len(int_params) if kind < CORRECTED else int_params[len(int_params) - 1]
    modelled = modelled_us(kind % CORRECTED, stretch(int_params, 0, own), float_params, batch, start_us)
    corrected = kind >= CORRECTED
    return compiled_us + (plus_observed_us(int_params, batch, start_us, modelled) if corrected else modelled)


@compiled
def plus_observed_us(int_params: Int64s, batch: Batch, start_us: int, modelled: int) -> int:
    """What a model makes of the batch, ``modelled``, and what observed steps exceeded it by; at least 1."""
    own = int_params[len(int_params) - 1]
    line_ns = (
        int_params[own + 1]
        + int_params[own + 2] * batch.prefill_tokens
        + int_params[own + 3] * batch.decode_tokens
        + int_params[own + 4] * batch.context_tokens
    )
    paces, corrections = own + CORRECTION_HEAD, own + CORRECTION_HEAD + 2 * int_params[own]
    pace = at_time(stretch(int_params, paces, corrections), start_us)
    paced = (modelled * pace + PACE_UNIT // 2) // PACE_UNIT
    then_us = at_time(stretch(int_params, corrections, len(int_params) - 1), start_us)
    return max(paced + (line_ns + 500) // 1000 + then_us, 1)


@compiled
def quick_duration_us(kind: int, int_params: Int64s, float_params: Floats, batch: Batch, start_us: int) -> int:
    """``batch_duration_us`` without a call for the commonest kinds."""
    if kind == LINEAR:
        return linear_us(int_params, batch)
    if kind == BENT:
        return bent_us(float_params, batch)
    if kind == ROOFLINE:
        return roofline_us(int_params, float_params, batch)
    if kind == CORRECTED + LINEAR:
        return plus_observed_us(int_params, batch, start_us, linear_us(int_params, batch))
    return batch_duration_us(kind, int_params, float_params, batch, start_us)


@compiled
def modelled_us(kind: int, int_params: Int64s, float_params: Floats, batch: Batch, start_us: int) -> int:
    """What the model of a kind makes of the batch, in int_params us, at least 1."""
    if kind == LINEAR:
        return linear_us(int_params, batch)
    if kind == BENT:
        return bent_us(float_params, batch)
    if kind == ROOFLINE:
        return roofline_us(int_params, float_params, batch)
    if kind == REGIMES:
        return regimes_us(float_params, batch)
    if kind == PHYSICAL:
        return physical_us(int_params, batch)
    if kind == REGISTERED:
        own = stretch(int_params, 1, len(int_params))
        return call_step_time(int_params[0], own, float_params, batch, start_us)
    return observed_us(int_params, float_params, start_us)


@compiled
def first_use_us(first_use: Int64s, batch: Batch) -> int:
    """What compiling takes if no batch before this one needed its kernel, else 0."""
    tokens = batch.prefill_tokens + batch.decode_tokens
    if tokens <= first_use[1]:
        return 0
    kernel = 1 << kernel_of(tokens, first_use[2], first_use[3])
    if (batch.kernels | first_use[4]) & kernel:
        return 0
    batch.kernels |= kernel
    return first_use[0]


@compiled
def kernel_of(tokens: int, per_token: int, of_experts: int) -> int:
    """The number of the kernel for ``tokens``: the nearest of KERNEL_TOKENS, the lower of two, and a variant.

    Triton compiles a kernel anew for an argument that DIVISOR divides: ``per_token`` times the tokens, or that less
    ``of_experts``.
    """
    nearest = 0
    for i in range(1, len(KERNEL_TOKENS)):
        if abs(tokens - KERNEL_TOKENS[i]) < abs(tokens - KERNEL_TOKENS[nearest]):
            nearest = i
    variant = 0
    if (per_token * tokens - of_experts) % DIVISOR == 0:
        variant = 2
    elif per_token * tokens % DIVISOR == 0:
        variant = 1
    return 3 * nearest + variant


@compiled
def linear_us(int_params: Int64s, batch: Batch) -> int:
    """``min(cap, max(floor, b0 + b1*prefill + b2*decode + b3*context + b4*attended + b5*beyond))``, rounded once."""
    return bounded_us(int_params, line_ns(int_params, batch))


@compiled
def line_ns(int_params: Int64s, batch: Batch) -> int:
    """The sum of what the batch costs, ns."""
    total_ns = (
        int_params[0]
        + int_params[1] * batch.prefill_tokens
        + int_params[2] * batch.decode_tokens
        + int_params[3] * batch.context_tokens
    )
    if batch.attended_tokens > 0:
        total_ns += int_params[7] * batch.attended_tokens // 1000
    if batch.prefill_tokens > int_params[8]:
        total_ns += int_params[9] * (batch.prefill_tokens - int_params[8])
    return total_ns


@compiled
def bounded_us(int_params: Int64s, total_ns: int) -> int:
    """Within floor and cap, rounded; at least 1."""
    total_ns = max(total_ns, int_params[4])
    if int_params[5] > 0:
        total_ns = min(total_ns, int_params[5])
    total_ns += int_params[6]
    return total_ns // 1000 if total_ns > 1000 else 1


@compiled
def roofline_us(int_params: Int64s, float_params: Floats, batch: Batch) -> int:
    """The line, the experts that tokens touch, and less by what a prefill hides: ``models.Roofline``, in whole ns."""
    decodes = batch.decode_tokens
    tokens, more_us = batch.prefill_tokens + decodes, 0.0
    if float_params[3] > 0:
        more_us = touched_us(float_params, tokens)
    if batch.prefill_tokens > 0:
        more_us += hidden_us(float_params, decodes) - hidden_us(float_params, tokens)
    return bounded_us(int_params, line_ns(int_params, batch) + math.floor(1000 * more_us + 0.5))


@compiled
def touched_us(float_params: Floats, tokens: int) -> float:
    """us to read the experts that ``tokens`` tokens touch."""
    return -float_params[3] * math.expm1(tokens * float_params[4]) if tokens > 0 else 0.0


@compiled
def hidden_us(float_params: Floats, tokens: int) -> float:
    """us by which reading and computing together take less than one after the other."""
    reading_us, computing_us = float_params[1], float_params[0] * tokens
    if float_params[3] > 0:
        reading_us += touched_us(float_params, tokens)
    both_us = (reading_us - computing_us) ** 2 + float_params[2] * reading_us * computing_us
    return (reading_us + computing_us - math.sqrt(both_us)) / 2


@compiled
def physical_us(int_params: Int64s, batch: Batch) -> int:
    """Costs that are linear in the batch, and the experts that its tokens touch; rounded once."""
    tokens = batch.prefill_tokens + batch.decode_tokens
    total_ps = (
        int_params[0]
        + int_params[1] * batch.prefill_tokens
        + int_params[2] * batch.decode_tokens
        + int_params[3] * batch.context_tokens
        + int_params[4] * batch.attended_tokens
        + int_params[5] * (batch.prefill_requests + batch.decode_tokens)
        + int_params[PHYSICAL_HEAD + min(tokens, len(int_params) - PHYSICAL_HEAD - 1)]
    )
    return max((total_ps + int_params[6]) // PS_PER_US, 1)


@compiled
def bent_us(float_params: Floats, batch: Batch) -> int:
    """As ``regimes_us``, to the last bit, for the commonest regimes."""
    decodes = float(batch.decode_tokens)
    line = 0
    while decodes > float_params[line]:
        line += BENT_SIZE
    us = float_params[line + 1]
    us += float_params[line + 2] * batch.prefill_tokens
    us += float_params[line + 3] * decodes
    us += float_params[line + 4] * max(batch.context_tokens - batch.decode_tokens, 0)
    most = float_params[len(float_params) - 2]
    if batch.prefill_tokens > most:
        us += float_params[len(float_params) - 1] * (batch.prefill_tokens - most)
    return int(min(max(us, 1.0), LONGEST_STEP_US))


@compiled
def regimes_us(float_params: Floats, batch: Batch) -> int:
    """The first regime whose condition holds: see blis-semantics 3.7 (StepML)."""
    features = stretch(float_params, len(float_params) - FEATURES, len(float_params))
    batch_features(batch, features)
    us = 1.0
    for first in range(REGIME_HEAD, len(float_params) - FEATURES, REGIME_SIZE):
        if holds(int(float_params[first]), int(float_params[first + 1]), float_params[first + 2], features):
            us = float_params[first + 4]
            for i in range(FEATURES):
                us += float_params[first + 5 + i] * features[i]
            if features[PREFILL_TOKENS] > float_params[2]:
                us += float_params[3] * (features[PREFILL_TOKENS] - float_params[2])
            if float_params[first + 3] > 0:
                us = math.expm1(us)
            break
    if float_params[0] > 0:
        us = min(max(us, float_params[0]), 3 * float_params[0])
    if float_params[1] > 0:
        us += float_params[1] * (features[PREFILL_REQUESTS] + features[DECODE_REQUESTS])
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
def batch_features(batch: Batch, x: Floats) -> None:
    """Fill float64[FEATURES] for a batch; ``kv`` are the computed tokens of decodes before the step."""
    x[PREFILL_TOKENS] = batch.prefill_tokens
    x[DECODE_TOKENS] = batch.decode_tokens
    x[PREFILL_REQUESTS] = batch.prefill_requests
    x[DECODE_REQUESTS] = batch.decode_tokens
    x[SCHEDULED_TOKENS] = x[PREFILL_TOKENS] + x[DECODE_TOKENS]
    x[KV_SUM] = max(batch.context_tokens - batch.decode_tokens, 0)
    x[KV_MEAN] = x[KV_SUM] / x[DECODE_REQUESTS] if x[DECODE_REQUESTS] > 0 else 0.0
    x[PREFILL_X_DECODE] = x[PREFILL_TOKENS] * x[DECODE_TOKENS]
    x[DECODE_X_KV_MEAN] = x[DECODE_REQUESTS] * x[KV_MEAN]
    x[PREFILL_SQUARED] = x[PREFILL_TOKENS] ** 2


@compiled
def observed_us(int_params: Int64s, float_params: Floats, start_us: int) -> int:
    """The cycle observed at this time; where steps began is known, until the cycle of the nearest observed start ends.

    A step that starts a little early takes the cycle of the start ahead, so a long cycle is never taken twice.  Nor is
    the cycle before an idle time taken by the step that ends it.
    """
    anchor, anchors = last_before(int_params, start_us), len(int_params) // 2
    cycle_us = max(int_params[anchors + anchor], 1)
    if float_params[anchor] == 0 or start_us < int_params[anchor]:
        ahead = anchor + 1
        if ahead < anchors and float_params[ahead] and 2 * start_us > int_params[anchor] + int_params[ahead]:
            return max(int_params[anchors + ahead], 1)
        return cycle_us
    past_us = (start_us - int_params[anchor]) % cycle_us
    to_next_us = cycle_us - past_us
    if 2 * past_us <= cycle_us:
        return to_next_us
    # Cycles are rounded, so the anchor ahead may be half a cycle off the start that is counted from this one.
    return to_next_us + max(at_time(int_params, start_us + to_next_us + cycle_us // 2), 1)


@compiled
def at_time(int_params: Int64s, start_us: int) -> int:
    """The value (second half) of the last time (first half) at or before ``start_us``; the first one before all."""
    return int_params[len(int_params) // 2 + last_before(int_params, start_us)]


@compiled
def last_before(int_params: Int64s, start_us: int) -> int:
    """The place of the last time (first half of ``int_params``) at or before ``start_us``; 0 without one."""
    low, high = 0, len(int_params) // 2 - 1  # the answer is within
    while low < high:
        middle = (low + high + 1) // 2
        if int_params[middle] <= start_us:
            low = middle
        else:
            high = middle - 1
    return low
