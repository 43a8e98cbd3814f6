"""Who is let in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blis_replay.blis.cluster.config import TokenBucket
from blis_replay.blis.trace import RequestTrace


def admitted(trace: RequestTrace, bucket: TokenBucket | None) -> NDArray[np.bool_]:
    """bool[n]: the requests that are let in; all of them without a bucket.

    At each arrival the bucket first refills by the time since the one before (blis-semantics, section 4), in float64
    as BLIS does; one that cannot pay is refused and leaves it as it is.
    """
    n = len(trace)
    if bucket is None:
        return np.ones(n, np.bool_)
    costs = trace.prompt_tokens.tolist() if bucket.cost == "prompt_tokens" else [1] * n
    level, before_us, let_in = bucket.capacity_tokens, 0, []
    for arrival_us, cost in zip(trace.arrival_us.tolist(), costs, strict=True):
        level = min(bucket.capacity_tokens, level + (arrival_us - before_us) * bucket.refill_tokens_per_s / 1e6)
        before_us = arrival_us
        let_in.append(cost <= level)
        if let_in[-1]:
            level -= cost
    return np.array(let_in, np.bool_)
