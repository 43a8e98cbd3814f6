"""What a step costs in a run with a queue beyond what a release says: context, first prefills, requests that wait.

    python scripts/overloaded_cycle.py STORE 34b-reasoning 0 60      # of requests with a first token in these seconds
    python scripts/overloaded_cycle.py STORE 34b-reasoning 1425 1490
    python scripts/overloaded_cycle.py STORE 34b-reasoning 128       # how a request gets one of 128 seats, and the end

Each request decodes a known number of tokens between its first and its last: an equation for the cycle meanwhile.  The
cycle is that of the release for as many decodes at a mean context of 710 tokens (what it was fitted on), and a sum of
costs on top.  Least squares over all these equations; nothing of it is used by a release.

Stamps of one client lie on the steps of the engine, so they also time single steps.  A request that waits is scheduled
when another has finished: its first token comes two cycles later if scheduling is asynchronous, and a prefill later.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from blis_replay.blis.latency.operators import durations_us
from blis_replay.compiled.arrays import Bools, Floats
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store.file import open_store
from blis_replay.ingest.store.recordings import read_stored
from blis_replay.replay.release_file import load_release
from blis_replay.replay.simulator import entry_of
from blis_replay.validate.experiment import DEFAULT_RELEASE, find_experiment

_BIN_S = 0.5
_FITTED_CONTEXT = 710.0
# Prompts come in turns of 100; who waits fewer than 3 at a time may be in a step of their own.
_PROMPTS, _QUEUE = 100, 3
# Who waits so long waits for a seat.  At the end: so many seconds together, with so many requests at least.
_WAITED_S, _END_S, _FEWEST = 5.0, 2.0, 4
# The cycle before the end is that of the requests that finished in so many seconds before it.
_BEFORE_S = 10.0
# Costs: us a context token, ms a first prefill of a prompt, ms a later one, ms a step while requests wait.
COSTS = ("context", "first_prefill", "later_prefill", "waiting")
_TRIED = (("context",), *(("context", other) for other in COSTS[1:]))


@dataclass(frozen=True)
class Served:
    """Requests that succeeded, in order of arrival: times in s since the first, tokens; ``place``: their row."""

    arrival: Floats
    first: Floats
    last: Floats
    prompt: Floats
    steps: Floats
    place: Floats


@dataclass(frozen=True)
class Bins:
    """Half seconds: decodes and their context tokens, ms of ``base`` cycle, prefills that begin, whether some wait."""

    start: Floats
    decodes: Floats
    context: Floats
    base_ms: Floats
    first_prefills: Floats
    later_prefills: Floats
    waiting: Bools

    def steps(self, cost: dict[str, float]) -> Floats:
        """How many steps each bin has at these costs."""
        beyond = self.context - _FITTED_CONTEXT * self.decodes
        cycle = self.base_ms + cost.get("context", 0) * beyond / 1e3 + cost.get("waiting", 0) * self.waiting
        prefill = (
            cost.get("first_prefill", 0) * self.first_prefills + cost.get("later_prefill", 0) * self.later_prefills
        )
        return np.maximum(_BIN_S * 1e3 - prefill, 1) / cycle


def served_of(recording: Recording) -> Served:
    """The requests of a recording."""
    names = ["arrival_us", "ttft_us", "e2e_us", "output_tokens", "prompt_tokens"]
    known = recording.requests.frame(["status", *names]).with_row_index().filter(status="ok").drop_nulls(names)
    arrival, ttft, e2e, tokens, prompt = (known[name].to_numpy().astype(np.float64) for name in names)
    place = known["index"].to_numpy().astype(np.float64)
    return Served(arrival / 1e6, (arrival + ttft) / 1e6, (arrival + e2e) / 1e6, prompt, tokens - 1, place)


def bins_of(served: Served, base_ms: Floats, begin: float, end: float) -> Bins:
    """The half seconds of ``begin`` to ``end``; ``base_ms``: by number of decodes."""
    start = np.arange(begin, end, _BIN_S)
    middle = start + _BIN_S / 2
    decodes, context, waiting = np.zeros(len(start)), np.zeros(len(start)), np.zeros(len(start))
    for arrival, first, last, prompt, steps, _place in zip(*vars(served).values(), strict=True):
        on = (middle >= first) & (middle < last)
        decodes[on] += 1
        context[on] += prompt + steps * (middle[on] - first) / (last - first)
        waiting[(middle >= arrival) & (middle < first)] += 1
    edges, new = np.append(start, end), served.place < _PROMPTS
    prefills = [np.histogram(served.first[which], edges)[0].astype(np.float64) for which in (new, ~new)]
    most = len(base_ms) - 1
    base = base_ms[np.clip(decodes.astype(int), 1, most)]
    return Bins(start, decodes, context, base, prefills[0], prefills[1], waiting >= _QUEUE)


def fitted(served: Served, base_ms: Floats, window: tuple[float, float], costs: Sequence[str]) -> tuple[Floats, float]:
    """The costs that explain the requests with a first token in a window best, and what is left (% of steps, rms)."""
    chosen = (served.first >= window[0]) & (served.first < window[1])
    bins = bins_of(served, base_ms, window[0], served.last[chosen].max() + _BIN_S)
    first, last = served.first[chosen, None], served.last[chosen, None]
    share = np.clip(np.minimum(last, bins.start + _BIN_S) - np.maximum(first, bins.start), 0, None) / _BIN_S

    def missed(values: Floats) -> Floats:
        return share @ bins.steps(dict(zip(costs, values, strict=True))) / served.steps[chosen] - 1

    fit = least_squares(missed, [0.03 if cost == "context" else 1.0 for cost in costs])
    return fit.x, 100 * float(np.sqrt(np.mean(missed(fit.x) ** 2)))


def seat_taken_ms(served: Served, seats: int) -> Floats:
    """Of requests that waited: ms from the finish that left them a seat to their first token.

    With ``seats`` running, the request with the n-th first token follows the (n - seats)-th finish.
    """
    order, finish = np.argsort(served.first), np.sort(served.last)
    waited = (served.first - served.arrival)[order][seats:] > _WAITED_S
    return 1e3 * (served.first[order][seats:] - finish[: len(order) - seats])[waited]


def cycles_at_the_end(served: Served, cycle_ms: float) -> list[tuple[float, int, float]]:
    """While nobody enters any more, by two seconds: since the last first token (s), how many run, cycle (ms).

    Two requests of equal length that began m cycles apart finish m cycles apart; ``cycle_ms``: when they began.
    """
    begun, rows = served.first.max(), []
    for start in np.arange(begun, served.last.max(), _END_S):
        of = (served.last >= start) & (served.last < start + _END_S)
        if of.sum() < _FEWEST or np.ptp(served.first[of]) == 0:
            continue
        cycles = served.first[of] * 1e3 / cycle_ms
        middle = start + _END_S / 2
        running = int(((served.first <= middle) & (served.last > middle)).sum())
        rows.append((float(middle - begun), running, float(np.polyfit(cycles, served.last[of] * 1e3, 1)[0])))
    return rows


def print_seats(served: Served, seats: int) -> None:
    """Print how long a free seat is empty, and the cycle when the queue is at its end."""
    taken = seat_taken_ms(served, seats)
    gap_ms = 1e3 * (served.last - served.first) / served.steps
    waited = gap_ms[served.first - served.arrival > _WAITED_S]
    quantiles = np.percentile(taken, [10, 25, 50, 75])
    print(f"a seat is taken after {quantiles.round(1)} ms (p10, p25, p50, p75); cycle {np.median(waited):.1f} ms")
    begun = served.first.max()
    before = (served.last < begun) & (served.last > begun - _BEFORE_S)
    for since, running, cycle in cycles_at_the_end(served, float(np.median(gap_ms[before]))):
        print(f"{since:5.1f} s after the last first token: {running:3} running, cycle {cycle:.1f} ms")


def main(store: str, name: str, begin: str, end: str = "") -> None:
    """Print the costs, each alone and together; or how seats are taken."""
    with open_store(Path(store), read_only=True) as opened:
        recording = read_stored(opened, find_experiment(opened, name))
    latency = entry_of(load_release(DEFAULT_RELEASE), recording).latency
    batches = [{"decode_tokens": n, "context_tokens": int(n * _FITTED_CONTEXT)} for n in range(1, 257)]
    us = durations_us(latency, batches)
    base_ms = np.concatenate([us[:1], us]) / 1e3
    served = served_of(recording)
    if not end:
        print_seats(served, int(begin))
        return
    window = float(begin), float(end)
    new = ((served.first >= window[0]) & (served.first < window[1]) & (served.place < _PROMPTS)).any()
    for costs in (tried for tried in _TRIED if new or "first_prefill" not in tried):
        values, left = fitted(served, base_ms, window, costs)
        named = ", ".join(f"{cost} {value:.3g}" for cost, value in zip(costs, values, strict=True))
        print(f"{named}: {left:.1f} % of steps are left")


if __name__ == "__main__":
    main(*sys.argv[1:])
