"""Observed quantities in place of modelled ones, ready for the simulator.

The server's stamps and its step cycles become, request by request: the delay before the queue, how long the
scheduler passed a request over, and how late the client saw a token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from blis_replay.blis.latency.models import ObservedCycles
from blis_replay.compiled.arrays import Floats, Int64s
from blis_replay.ingest.recording import Recording
from blis_replay.replay.errors import ReplayError
from blis_replay.replay.observed.cycles import SPANS, ServerStamps, in_engine, observed_cycles, server_stamps

# A request without a stamp gets the median of the others: of a sample, not of a handful.
_FEWEST_STAMPS = 20
# Decisions are taken over whole: to hold some requests and not the others changes who is first.
_MOST_WITHOUT_DECISION = 0.1
# Multiples of it, less their whole parts, lie evenly between 0 and 1, any run of neighbours too.
_GOLDEN = (5**0.5 - 1) / 2


def observed_pre_queue(recording: Recording, stamps: ServerStamps, cycles: ObservedCycles) -> tuple[Int64s, str]:
    """int64[n] us from send to the waiting queue, and its basis; raises ``ReplayError`` if not recorded.

    A busy server takes a request in, and stamps it as queued, between two steps: it was sent to the engine up to a
    cycle earlier, which the simulator's own loop adds again.  When in the cycle is not recorded; the requests
    are spread over it evenly, half a cycle on average.
    """
    turn_us = _before_its_turn(in_engine(recording, stamps), cycles, stamps.queued_us)
    delay_us = stamps.queued_us - _arrival_us(recording) - turn_us
    merged = ", with the way of the first token to the client" if stamps.source == SPANS else ""
    return _filled(recording, delay_us, "the delay before the queue"), _basis(delay_us, stamps.source) + merged


def observed_hold(recording: Recording, stamps: ServerStamps, cycles: ObservedCycles) -> tuple[Int64s, str]:
    """int64[n] us that the scheduler passed a request over, beyond the first call after it was queued; and its basis.

    ``cycles``: observed ones, for the length of a cycle at the time.  A request that waited k calls was
    passed over for k - 1 cycles; where steps are not recorded, for what its wait exceeds a cycle.
    Raises ``ReplayError`` if queueing and scheduling were not recorded of nearly every request.
    """
    wait_us = stamps.scheduled_us - stamps.queued_us
    ok = (recording.requests["status"] == "ok").to_numpy()
    if np.isnan(wait_us[ok]).mean() > _MOST_WITHOUT_DECISION or not ok.any():
        raise ReplayError(
            f"{recording.alias}: when requests were queued and scheduled is not recorded of nearly all; "
            "record journeys of every request"
        )
    place = np.searchsorted(cycles.from_us, np.nan_to_num(stamps.queued_us), side="right") - 1
    cycle_us = cycles.cycle_us[np.maximum(place, 0)].astype(np.float64)
    by_time = np.maximum(wait_us - cycle_us, 0.0)
    by_steps = np.minimum((stamps.steps_waited - 1) * cycle_us, wait_us)
    held_us = np.where(np.isnan(stamps.steps_waited), by_time, np.where(stamps.steps_waited > 1, by_steps, 0.0))
    return np.maximum(np.nan_to_num(held_us), 0.0).astype(np.int64), _basis(wait_us, stamps.source)


def observed_delivery(recording: Recording, stamps: ServerStamps) -> tuple[Int64s, Int64s, str]:
    """int64[n] us from the engine's first token, and from its last, to the client; and their basis.

    Raises ``ReplayError`` if the engine's stamps were not recorded, or only as durations, which tell nothing of it.
    """
    if stamps.source == SPANS:
        raise ReplayError(
            f"{recording.alias}: {SPANS} do not tell when a token left the engine; record journeys for that"
        )
    latencies = recording.requests.select("ttft_us", "e2e_us").cast(pl.Float64).fill_null(np.nan)
    sent_us = _arrival_us(recording)
    first_us = sent_us + latencies["ttft_us"].to_numpy() - stamps.first_token_us
    last_us = sent_us + latencies["e2e_us"].to_numpy() - stamps.finished_us
    what = "the way of a token to the client"
    return _filled(recording, first_us, what), _filled(recording, last_us, what), _basis(last_us, stamps.source)


def recorded_delays(recording: Recording) -> tuple[dict[str, str], dict[str, str]]:
    """Which delays and decisions the recording can replace: by mode key, the basis; and of the others, why not."""
    stamps = server_stamps(recording)
    ask: dict[str, Callable[[], str]] = {
        "pre_queue": lambda: observed_pre_queue(recording, stamps, observed_cycles(recording)[0])[-1],
        "schedule": lambda: observed_hold(recording, stamps, observed_cycles(recording)[0])[-1],
        "output_processing": lambda: observed_delivery(recording, stamps)[-1],
    }
    able: dict[str, str] = {}
    unable: dict[str, str] = {}
    for key, basis in ask.items():
        try:
            able[key] = basis()
        except ReplayError as error:
            unable[key] = str(error)
    return able, unable


def _before_its_turn(others: tuple[Floats, Floats], cycles: ObservedCycles, queued_us: Floats) -> Floats:
    """float64[n] us: a part of the cycle at the time, where another request was in the engine (``in_engine``)."""
    begin_us, end_us = others
    known = np.nan_to_num(queued_us)
    there = np.searchsorted(begin_us, known, side="left") - np.searchsorted(np.sort(end_us), known, side="right")
    place = np.maximum(np.searchsorted(cycles.from_us, known, side="left") - 1, 0)
    # The same part for all would put every request at one point of the cycle, where a simulator whose
    # cycles begin at other times has it wait always long, or never.
    part = (np.arange(len(known)) + 0.5) * _GOLDEN % 1.0
    return np.where(there > 0, cycles.cycle_us[place] * part, 0.0)


def _arrival_us(recording: Recording) -> Floats:
    return recording.requests["arrival_us"].to_numpy().astype(np.float64)


def _filled(recording: Recording, values_us: Floats, what: str) -> Int64s:
    known = ~np.isnan(values_us)
    if known.sum() < min(_FEWEST_STAMPS, len(values_us)) or not known.any():
        raise ReplayError(
            f"{recording.alias}: {what} is recorded of {int(known.sum()) or 'no'} requests; record journeys"
        )
    return np.rint(np.where(known, values_us, np.median(values_us[known]))).astype(np.int64)


def _basis(values_us: Floats, source: str) -> str:
    known = int((~np.isnan(values_us)).sum())
    rest = "" if known == len(values_us) else ", the median of those for the others"
    return f"recorded: {source} of {known:,} of {len(values_us):,} requests{rest}"
