"""The first seconds of a server: its kernels are compiled or tuned on the first batches, which no step time knows.

The first prefills of a mixture of experts take a second each, those of a dense model on four GPUs the first one.
It shows as first tokens that come much later than in the replay, and from some request on no more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.blis.latency.models import CorrectedModel, FirstUse, Latency, ObservedCycles
from blis_replay.ingest.recording import Recording
from blis_replay.replay.mode import ReplayMode

GROUP = 10  # requests in order of arrival whose medians are compared
MIN_REQUESTS = 200  # in a run of fewer, p99 is not that of a warm-up
# A group is late by at least this many times the lateness that 90 % of the run's requests are within ...
MIN_TIMES_USUAL = 3.0
MIN_TIMES_REPLAYED = 1.0  # ... and by this many times the replayed TTFT
# Groups on time that end a warm-up.  One does not: a server may be done with one batch size and not with the next.
GROUPS_ON_TIME = 2
MIN_STALL = 2.0  # usual TTFTs without any first token: a shorter gap may be a few prefills in turn


@dataclass(frozen=True)
class Stalls:
    """Steps that took longer: int64[n] each, us of the run from which the next step is one, and by how much.

    ``lead_us``: a simulated step may begin by this much earlier than the recorded one.
    """

    at_us: Int64s
    longer_us: Int64s
    lead_us: int = 0

    def __str__(self) -> str:
        """In words."""
        until_s = (self.at_us + self.longer_us).max() / 1e6
        return f"{len(self.at_us)} stalls, {self.longer_us.sum() / 1e6:.1f} s together, until second {until_s:.1f}"

    def on(self, latency: Latency) -> Latency:
        """A model with them in place of corrections over time; observed cycles have them already."""
        if isinstance(latency, ObservedCycles):
            return latency
        # A step that begins within a stall is the stalled one, so the next one begins after it.
        at_us = self.at_us - self.lead_us
        from_us = np.column_stack([at_us, at_us + self.longer_us]).ravel()
        longer_us = np.column_stack([self.longer_us, np.zeros_like(self.longer_us)]).ravel()
        nothing = np.zeros(1, np.int64)
        before = np.minimum(from_us[:1] - 1, nothing)
        times, values = np.concatenate([before, from_us]), np.concatenate([nothing, longer_us])
        return replace(CorrectedModel.of(latency), from_us=times, correction_us=values)


@dataclass(frozen=True)
class Seen:
    """The requests (bool[n]) of a warm-up, and the stalls that they waited for."""

    requests: Bools
    stalls: Stalls


def seen_warm_up(recording: Recording, compared: Bools, simulated_ttft_us: Int64s) -> Seen | None:
    """The warm-up that a recording shows beside its replay; ``compared``: bool[n], the requests with both latencies.

    None where it shows none, or has too few requests.
    """
    if compared.sum() < MIN_REQUESTS:
        return None
    ttft_us = recording.requests["ttft_us"].to_numpy()[compared].astype(np.float64)
    count = _slow(ttft_us, simulated_ttft_us[compared].astype(np.float64)) * GROUP
    if not count or len(ttft_us) - count < MIN_REQUESTS:
        return None
    arrival_us = recording.requests["arrival_us"].to_numpy()[compared].astype(np.float64)
    usual_us = float(np.median(ttft_us[count:]))
    begin_us, longer_us = token_waits(arrival_us[:count], ttft_us[:count], usual_us)
    # A step stalls where requests wait and none gets a first token for much longer than usual.
    stalled = longer_us > MIN_STALL * usual_us
    if not stalled.any():
        return None
    requests = np.zeros(len(compared), np.bool_)
    requests[np.flatnonzero(compared)[:count]] = True
    return Seen(requests, Stalls(begin_us[stalled].astype(np.int64), longer_us[stalled].astype(np.int64)))


# us without a first token while a request waits, from the first request of a run on: longer than any prefill.
MIN_COLD_US = 1_000_000.0
MIN_TIMES_FASTEST = 10.0  # ... and this many times the TTFT that a tenth of the requests is within
_FEWEST_COLD = 20  # requests: the fastest tenth shows the TTFT without a queue


def cold_start(requests: pl.DataFrame) -> Stalls | None:
    """The steps with which a server begins that make its first requests wait, by latencies alone; None without any.

    ``requests``: ``arrival_us`` and ``ttft_us``.  The first request of a run waits for nothing but its own prefill, so
    no replay is needed to tell: the first stall begins with it, and the next ones with the first token before.
    """
    arrival_us, ttft_us = requests.select("arrival_us", "ttft_us").drop_nulls().to_numpy().astype(np.float64).T
    if len(ttft_us) < _FEWEST_COLD:
        return None
    usual_us = float(np.quantile(ttft_us, 0.1))
    begin_us, longer_us = token_waits(arrival_us, ttft_us, usual_us)
    begun_long = longer_us > max(MIN_COLD_US, MIN_TIMES_FASTEST * usual_us)
    count = int(np.argmin(begun_long)) if not begun_long.all() else len(begun_long)
    return Stalls(begin_us[:count].astype(np.int64), longer_us[:count].astype(np.int64)) if count else None


def recorded_stalls(
    recording: Recording, mode: ReplayMode, completed: Bools, simulated_ttft_us: Int64s
) -> tuple[Stalls | None, str]:
    """The stalls that a recording shows beside a replay without them, and that in words."""
    if mode.arrivals != "recorded" or mode.rate != 1 or mode.loop is not None:
        return None, "not replayed, as the arrivals are not the recorded ones"
    known = (recording.requests["status"] == "ok") & recording.requests["ttft_us"].is_not_null()
    seen = seen_warm_up(recording, known.to_numpy() & completed, simulated_ttft_us)
    if seen is None:
        cold = cold_start(recording.requests.frame(["arrival_us", "ttft_us"]).filter(known))
        if cold is None:
            return None, "none is seen in the first tokens"
        return cold, f"{cold}, for which the first requests of the run wait"
    return seen.stalls, f"{seen.stalls}, as the first tokens of the first {int(seen.requests.sum())} requests show them"


def waits_for_kernels(recording: Recording, first_use: FirstUse, captured_tokens: int) -> tuple[bool, str]:
    """Whether the server waits for kernels that it compiles when it first needs them; and why, in words.

    ``captured_tokens``: most tokens of a batch that a captured graph computes, which needs no other kernel.  A new
    server waits for the first prompt above that: only the TTFT of that request is looked at.
    """
    each = f"{first_use.compile_us / 1e6:.2f} s for each kernel that a batch is the first to need"
    first = (
        recording.requests.select("status", "prompt_tokens", "ttft_us")
        .filter((pl.col("status") == "ok") & (pl.col("prompt_tokens") > captured_tokens))
        .head(1)
    )
    ttft_us = first["ttft_us"].item() if first.height else None
    if ttft_us is None:
        return True, f"{each}; that the server was new is assumed"
    waited = f"the first prompt has its first token after {ttft_us / 1e6:.2f} s"
    if ttft_us < first_use.compile_us / 2:
        return False, f"none, as the server had compiled its kernels: {waited}"
    return True, f"{each}, as the server was new: {waited}"


def _slow(observed_us: Floats, simulated_us: Floats) -> int:
    """Number of groups in a warm-up: up to the last late one before ``GROUPS_ON_TIME`` on time in a row."""
    late_us = observed_us - simulated_us
    usual_us = float(np.quantile(np.abs(late_us), 0.9))
    last = 0
    for group in range(len(late_us) // GROUP):
        if group - last >= GROUPS_ON_TIME + bool(last):
            break
        of = slice(group * GROUP, (group + 1) * GROUP)
        replayed_us = float(np.median(simulated_us[of]))
        if float(np.median(late_us[of])) > max(MIN_TIMES_USUAL * usual_us, MIN_TIMES_REPLAYED * replayed_us):
            last = group + 1
    return last


def token_waits(arrival_us: Floats, late_us: Floats, usual_us: float) -> tuple[Floats, Floats]:
    """float64[n] each, in order of tokens: since when one was due, and how much longer than usual it took.

    ``late_us``: from its arrival to a token of a request.  A token is due with the token before it, or with the first
    request that waits.
    """
    token_us = arrival_us + late_us
    order = np.argsort(token_us, kind="stable")
    since_us = np.minimum.accumulate(arrival_us[order][::-1])[::-1]
    before_us = np.concatenate([since_us[:1], token_us[order][:-1]])
    begin_us = np.maximum(since_us, before_us)
    return begin_us, token_us[order] - begin_us - usual_us
