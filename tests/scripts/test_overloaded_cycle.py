"""The costs of a run with a queue: those planted are found."""

from __future__ import annotations

import numpy as np
import pytest
from overloaded_cycle import Served, fitted

BASE_MS = 10.0 + 0.05 * np.arange(257)
CONTEXT_US, PREFILL_MS = 0.04, 60.0


def planted() -> Served:
    """40 requests, one each 0.25 s, of 1,000 tokens and 500 steps: at a context of 710 the cycle is the base's.

    Each costs 60 ms when it begins.  Time goes on in steps of 5 ms.
    """
    first, done = np.arange(40) * 0.25, np.zeros(40)
    last, now = np.zeros(40), 0.0
    while not last.all():
        on = (first <= now) & (last == 0)
        beyond = (1_000 + done[on] - 710).sum()
        cycle_ms = BASE_MS[on.sum()] + CONTEXT_US * beyond / 1e3
        lost_ms = PREFILL_MS if (now % 0.25 < 0.06) and now < 10 else 0.0
        done[on] += 0.0 if lost_ms else 5.0 / cycle_ms
        now += 0.005
        last[on & (done >= 500)] = now
    return Served(first, first, last, np.full(40, 1_000.0), np.full(40, 500.0), np.arange(40.0))


def test_planted_costs_are_found_and_one_left_out_is_seen() -> None:
    served = planted()
    found, left = fitted(served, BASE_MS, (0, 60), ("context", "first_prefill"))
    assert found == pytest.approx([CONTEXT_US, PREFILL_MS], rel=0.1)  # half seconds are coarse
    assert left < 1
    _, without = fitted(served, BASE_MS, (0, 60), ("context",))
    assert without > 2 * left
