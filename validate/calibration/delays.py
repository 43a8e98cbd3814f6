"""Delays around the engine that a recording has stamps of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.ingest.recording import Recording
from blis_replay.validate.bootstrap import SEED, interval, resampled
from blis_replay.validate.calibration.cycle_rows import Floats


@dataclass(frozen=True)
class MeasuredDelay:
    """The median of a delay over requests with stamps, its bounds of 95 %, and in words what it is."""

    value_us: float
    low_us: float
    high_us: float
    source: str


def measured_delays(recordings: Sequence[Recording], seed: int = SEED) -> dict[str, MeasuredDelay]:
    """``pre_queue`` and ``post_request`` where stamps show them.

    Pre-queue: arrival to queued in journeys less the wait for the engine's turn, else TTFT less queue and
    prefill time of the server.  Post-request: last token in the engine to answer sent, in journeys.
    """
    journeys = pl.concat([recording.lifecycles.whole() for recording in recordings])
    requests = pl.concat([recording.requests for recording in recordings])
    served = journeys.filter(pl.col("status") == "ok")
    sources = {
        "pre_queue": [
            (
                np.concatenate([_pre_queue_us(recording) for recording in recordings]),
                "arrival to queued of {} journeys, less half a step cycle where others were in the engine",
            ),
            (
                _numbers(requests, pl.col("ttft_us") - pl.col("queue_us") - pl.col("prefill_us")),
                "TTFT - queue - prefill over {} server-side requests",
            ),
        ],
        "post_request": [
            (_numbers(served, pl.col("departed_us") - pl.col("finished_us")), "finished to departed of {} journeys")
        ],
    }
    found = {}
    for name, choices in sources.items():
        for delays_us, words in choices:
            if len(delays_us):
                found[name] = _median(delays_us, words.format(f"{len(delays_us):,}"), seed)
                break
    return found


def _pre_queue_us(recording: Recording) -> Floats:
    """float64[journeys with two tokens or more]: us from arrival until the engine could have taken it in.

    A busy engine takes requests in, and stamps them as queued, between two steps: half a cycle after they reached
    it on average, which the simulator's own loop adds again.  The cycle is the mean gap of the request's own tokens.
    """
    stamps = ("arrived_us", "queued_us", "first_token_us", "finished_us")
    journeys = recording.lifecycles.whole().filter((pl.col("status") == "ok") & (pl.col("output_tokens") > 1))
    stamped = journeys.drop_nulls(stamps)
    arrived, queued, first, finished = (stamped[name].to_numpy() for name in stamps)
    cycle_us = (finished - first) / (stamped["output_tokens"].to_numpy() - 1)
    begun_us, e2e_us = recording.requests.select("arrival_us", "e2e_us").drop_nulls().to_numpy().T
    served = [np.searchsorted(np.sort(at_us), queued, side="right") for at_us in (begun_us, begun_us + e2e_us)]
    others = served[0] - served[1] > 1
    return np.asarray(queued - arrived - np.where(others, cycle_us / 2, 0.0), np.float64)


def _numbers(frame: pl.DataFrame, delay: pl.Expr) -> Floats:
    return frame.select(delay.alias("delay")).drop_nulls()["delay"].to_numpy().astype(np.float64)


def _median(delays_us: Floats, what: str, seed: int) -> MeasuredDelay:
    draws = np.array([np.median(delays_us[draw]) for draw in resampled(len(delays_us), seed=seed)])
    return MeasuredDelay(max(float(np.median(delays_us)), 0.0), *interval(draws), source=f"median of {what}")
