"""Step time from tables of operator times: matrix products and all-reduces by tokens, attention by context.

``int_params``: rows of the two tables by tokens, then the knots of the attention tables (``PREFILL_KNOTS`` ...).
``float_params``: ``HEAD`` numbers, then these tables one after the other, all us.
"""

from __future__ import annotations

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.blis.kernel.state import LONGEST_STEP_US, Batch, compiled, of_kind
from blis_replay.blis.kernel.step_time import batch_at, float_params_at, int_params_at

# -- int_params
TOKEN_ROWS, PREFILL_KNOTS, ATTENDED_KNOTS, DECODE_KNOTS, CONTEXT_KNOTS = range(5)

# -- float_params: a step, and a request in it.  Then all but attention for 0, 1, 2, ... tokens, of a step with prefill
#    and of one without; prefill knots (tokens), attended knots (per token) and a time for each pair of these; decode
#    knots (requests), context knots (tokens of a mean request) and a time for each pair of these
STEP_US, REQUEST_US = range(2)
HEAD = 2


@of_kind
def step_us(ints: int, ints_length: int, floats: int, floats_length: int, batch: int, _start_us: int) -> int:
    """The step time as ``step_time.registered`` calls it."""
    return operators_us(int_params_at(ints, ints_length), float_params_at(floats, floats_length), batch_at(batch))


@compiled
def operators_us(int_params: Int64s, float_params: Floats, batch: Batch) -> int:
    """Sum of the operators of a batch, the step and its requests: us, rounded half up, at least 1."""
    prefill, decode, rows = batch.prefill_tokens, batch.decode_tokens, int_params[TOKEN_ROWS]
    us = float_params[STEP_US] + float_params[REQUEST_US] * (batch.prefill_requests + decode)
    prefill_table = HEAD + 2 * rows
    if prefill == 0:
        us += by_tokens(float_params, HEAD + rows, rows, decode)
    else:
        us += by_tokens(float_params, HEAD, rows, prefill + decode)
        attended = batch.attended_tokens / prefill  # by a mean token
        knots, columns = int_params[PREFILL_KNOTS], int_params[ATTENDED_KNOTS]
        us += by_pair(float_params, prefill_table, knots, columns, prefill, attended)
    if decode > 0:
        size = int_params[PREFILL_KNOTS] + int_params[ATTENDED_KNOTS]
        decode_table = prefill_table + size + int_params[PREFILL_KNOTS] * int_params[ATTENDED_KNOTS]
        knots, columns = int_params[DECODE_KNOTS], int_params[CONTEXT_KNOTS]
        us += by_pair(float_params, decode_table, knots, columns, decode, batch.context_tokens / decode)
    return int(min(max(us + 0.5, 1.0), LONGEST_STEP_US))


@compiled
def by_tokens(float_params: Floats, first: int, rows: int, tokens: int) -> float:
    """Look up a table with one row per token count; proportional beyond its end."""
    if tokens < rows:
        return float_params[first + tokens]
    return float_params[first + rows - 1] * tokens / (rows - 1)


@compiled
def by_pair(float_params: Floats, first: int, rows: int, columns: int, x: float, y: float) -> float:
    """Bilinear between knots, constant below them, linear extrapolation above."""
    row, down = bracket(float_params, first, rows, x)
    column, right = bracket(float_params, first + rows, columns, y)
    at = first + rows + columns + row * columns + column
    upper = float_params[at] + right * (float_params[at + 1] - float_params[at])
    below = at + columns
    lower = float_params[below] + right * (float_params[below + 1] - float_params[below])
    return max(upper + down * (lower - upper), 0.0)


@compiled
def bracket(float_params: Floats, first: int, knots: int, x: float) -> tuple[int, float]:
    """The knot before ``x`` (at most the last but one), and the fraction of the way to the next; 0 before all knots."""
    low = 0
    for i in range(1, knots - 1):  # all of them: no branch to guess wrong
        low += float_params[first + i] <= x
    from_x = float_params[first + low]
    return low, max((x - from_x) / (float_params[first + low + 1] - from_x), 0.0)
