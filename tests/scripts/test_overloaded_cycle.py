"""The costs of a run with a queue: those planted are found."""

from __future__ import annotations

import numpy as np
import pytest
from overloaded_cycle import Served, cycles_at_the_end, fitted, seat_taken_ms

from blis_replay.blis.engine import simulate
from blis_replay.blis.latency.models import LatencyModel
from blis_replay.blis.trace import NEVER_US, EngineConfig, RequestTrace

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


SEATS, CYCLE_MS, PROMPT_MS = 16, 20.0, 50.0


def overloaded(prefill_tokens: int) -> Served:
    """200 requests, ten a second, on 16 seats: 100 steps of 20 ms, a prompt of 1,000 tokens costs 50 ms."""
    n = 200
    prompts, outputs = np.full(n, 1_000), np.full(n, 101)
    trace = RequestTrace(
        np.arange(n) * 100_000, prompts, np.full(n, prefill_tokens), outputs, np.full(n, NEVER_US, np.int64)
    )
    latency = LatencyModel("blackbox", int(CYCLE_MS * 1e6), int(PROMPT_MS * 1e3), 0)
    run = simulate(trace, EngineConfig(SEATS, 2_048, 4_096, async_scheduling=True), latency)
    times = (run.arrival_us, run.arrival_us + run.ttft_us, run.arrival_us + run.e2e_us)
    arrival, first, last = (us / 1e6 for us in times)
    return Served(arrival, first, last, prompts.astype(float), outputs - 1.0, np.arange(n, dtype=float))


@pytest.mark.parametrize(("prefill_tokens", "more_ms"), [(1, 0.0), (1_000, PROMPT_MS)])
def test_a_free_seat_is_taken_two_cycles_later_and_a_prefill(prefill_tokens: int, more_ms: float) -> None:
    """Planted: prompts that are cached, and such that are prefilled whole; the schedule is asynchronous."""
    taken_ms = seat_taken_ms(overloaded(prefill_tokens), SEATS)
    assert np.median(taken_ms) == pytest.approx(2 * CYCLE_MS + more_ms, abs=1)


def test_the_cycle_at_the_end_is_found_from_who_began_when() -> None:
    """The planted cycle is 20 ms whatever runs; the last 16 requests finish as they began, one after the other."""
    n = 40
    first = np.arange(n) * 0.3
    served = Served(first, first, first + 4.0, np.full(n, 1_000.0), np.full(n, 100.0), np.arange(float(n)))
    faster = np.where(served.last > first.max(), first.max() + 0.5 * (served.last - first.max()), served.last)
    rows = cycles_at_the_end(Served(first, first, faster, served.prompt, served.steps, served.place), CYCLE_MS)
    assert [cycle for _since, _running, cycle in rows] == pytest.approx([CYCLE_MS / 2] * len(rows))
    assert rows
