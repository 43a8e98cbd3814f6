"""Hypothesis on a server that stood still: a cold start or a stall, in which no step of the model takes as long.

It is read off the recorded steps, or off what the client got.  Two replays, without and with it, show which requests it
delays.  The longest run of requests without a delayed one can be explained without it.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor

import numpy as np

from blis_replay.base.arrays import Bools, Int64s
from blis_replay.base.errors import ReplayError, TraceError, counted
from blis_replay.ingest.checks.stationarity import STALL_US
from blis_replay.replay.observed import observed_cycles, stalled_us
from blis_replay.replay.warm_up import Stalls, token_waits
from blis_replay.validate.explain.hypothesis import Hypothesis, Replayed
from blis_replay.validate.explain.rule import explains
from blis_replay.validate.explain.trial import Trial, misfit, trial_of
from blis_replay.validate.metrics.observed import Selection, observed_requests

COLD_START, STANDSTILL = "cold start", "standstill"
MIN_DELAY = 0.5  # a stall delays a request if its E2E grows by this share of the median
MIN_WAITING = 3  # requests that wait for a stall which only the client saw
MIN_WINDOW = 0.2  # a shorter share of the run is not advised as a window
MIN_REQUESTS = 50  # nor one with fewer requests


def standstill(replayed: Replayed) -> Hypothesis | None:
    """The server stood still where the recording shows it; None where that delays no request that is compared."""
    mode, recording = replayed.mode, replayed.recording
    if mode.warm_up == "recorded" or mode.step_time == "recorded" or mode.arrivals != "recorded" or mode.rate != 1:
        return None
    by_client = recording.steps.is_empty()
    try:
        stalls = _seen_by_client(replayed) if by_client else _recorded(replayed)
        if stalls is None:
            return None
        without, having = (one.run().e2e_us for one in (replayed, replace(replayed, stalls=stalls)))
    except (ReplayError, TraceError):
        return None
    delayed = having - without > MIN_DELAY * np.median(without)
    if not (delayed & Selection(window=replayed.window).of(recording.requests)).any():
        return None
    arrival_us = recording.requests["arrival_us"].to_numpy()
    cold = bool(delayed[0]) or stalls.at_us[0] <= arrival_us[0] + STALL_US
    when = "at its start" if cold else f"from second {stalls.at_us[0] / 1e6:.1f} on"
    several = "" if len(stalls.at_us) == 1 else f" in {len(stalls.at_us)} steps"
    requests = counted(int(delayed.sum()), "request")
    why = f"the server stood still for {stalls.longer_us.sum() / 1e6:.1f} s{several} {when}, which delays {requests}"
    # Without stamps of the server a client's clock that is set forward looks alike, if nothing was sent meanwhile.
    sent = np.searchsorted(arrival_us, [stalls.at_us + 1, stalls.at_us + stalls.longer_us])
    like_a_clock = by_client and recording.lifecycles.is_empty() and bool((sent[0] == sent[1]).all())
    window = _window(arrival_us, delayed)
    return Hypothesis(
        COLD_START if cold else STANDSTILL,
        why,
        "leave these requests out" if window else "record a run in which the server does not stand still",
        "not recorded; no open request got a token in that time" if by_client else "recorded: times of steps",
        command=replayed.within(window) if window else "",
        stalls=stalls,
        also=("client clock",) if like_a_clock else (),
        recorded=not by_client,
    )


def _recorded(replayed: Replayed) -> Stalls | None:
    """Steps in which the server stood still (``stalled_us``)."""
    cycles = observed_cycles(replayed.recording)[0]
    longer_us = stalled_us(replayed.recording, cycles)
    first_us = int(replayed.recording.requests["arrival_us"][0])
    long = (longer_us > 0) & (cycles.from_us + longer_us > first_us)  # an earlier one is of another client
    nearest_us = int(np.median(cycles.cycle_us)) // 2  # of the simulated steps the nearest one is the recorded one
    return Stalls(cycles.from_us[long], longer_us[long], nearest_us) if long.any() else None


def _seen_by_client(replayed: Replayed) -> Stalls | None:
    """Times in which requests were open and none got its first token or ended, if requests are right with them."""
    trial = trial_of(replayed)
    chosen = observed_requests(replayed.recording)
    if trial is None or not trial.has_first_tokens or not chosen.any():
        return None
    requests = replayed.recording.requests.frame(["arrival_us", "ttft_us", "e2e_us"]).filter(chosen)
    sent_us, ttft_us, e2e_us = (requests[name].to_numpy().astype(np.float64) for name in requests.columns)
    first_and_last = np.tile(sent_us, 2), np.concatenate([ttft_us, e2e_us])
    begin_us, longer_us = (us.astype(np.int64) for us in token_waits(*first_and_last, float(np.median(ttft_us))))
    begin_us, longer_us = begin_us[longer_us > STALL_US], longer_us[longer_us > STALL_US]
    # Requests that are open meanwhile, bool[gaps, requests]: of one alone it may be the decode that is slow.
    waits = (sent_us < (begin_us + longer_us)[:, None]) & (sent_us + e2e_us > begin_us[:, None])
    still = waits.sum(axis=1) >= MIN_WAITING
    if not still.any():
        return None
    stalls = Stalls(begin_us[still], longer_us[still])
    having = Trial(replace(replayed, stalls=stalls), trial.target)
    # All other requests scatter with it as without.
    waited = np.flatnonzero(np.any(waits[still], axis=0)[: trial.difference_as_is.shape[1]])
    before, left = (misfit(one.difference_as_is[:, waited]) for one in (trial, having))
    return stalls if explains(before, left) else None


def _window(arrival_us: Int64s, delayed: Bools) -> str:
    """The longest part of the run without a delayed request, as ``FROM:TO``; empty if it is short."""
    edges = np.flatnonzero(np.diff(np.concatenate([[True], delayed, [True]]).astype(np.int8)))
    begins, ends = edges[::2], edges[1::2]  # requests begins..ends-1 are not delayed
    if not len(begins):
        return ""
    best = int((ends - begins).argmax())
    first, last = int(begins[best]), int(ends[best]) - 1
    whole_us = float(arrival_us[-1])
    low = ceil(100 * arrival_us[first] / whole_us) / 100
    high = floor(100 * arrival_us[last] / whole_us) / 100
    if last - first + 1 < MIN_REQUESTS or high - low < MIN_WINDOW:
        return ""
    return f"{low:g}:{high:g}"
