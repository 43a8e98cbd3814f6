"""Where the time of a request goes, observed and simulated side by side.

The segments of a request follow each other from the client's send to its last token, so on either
side they sum to its E2E, and their differences to the difference of the E2Es.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.server_stamps import CLIENT_ONLY, SPANS, Floats, ServerStamps, server_stamps
from blis_replay.validate.errors import NothingToJudgeError
from blis_replay.validate.observed import observed_requests

SEND_TO_QUEUE, QUEUE_WAIT, PREFILL, DECODE, DELIVERY = (
    *("send to queue", "queue wait", "prefill", "decode"),
    "delivery",
)
SERVER_SEGMENTS = (SEND_TO_QUEUE, QUEUE_WAIT, PREFILL, DECODE, DELIVERY)
TO_FIRST_TOKEN, TO_LAST_TOKEN = "to first token", "to last token"

_SIMULATED_ARRIVAL = "send to server arrival: the simulator has one delay before the queue; in send to queue"
_NO_STAMPS = (
    "queued, scheduled, first token and finished at the server: not recorded; only the client's two latencies are left"
)
_NO_ARRIVAL = "server arrival: spans do not tell it, nor a token's way to the client; both are in send to queue"
_NO_STEPS = "queued, scheduled and finished: the simulator reports requests only"


@dataclass(frozen=True)
class Segment:
    """One part of the way: us of each compared request, float64[m], observed and simulated."""

    name: str
    observed_us: Floats
    simulated_us: Floats

    @property
    def difference_us(self) -> Floats:
        """float64[m]: simulated less observed."""
        return self.simulated_us - self.observed_us


@dataclass(frozen=True)
class Segments:
    """The segments of the requests ``request_index`` (int64[m]), in the order of the way.

    ``merged``: what the recording or the simulator lacks, and where it is counted.
    ``left_out``: successful requests of which a stamp is missing.
    """

    slug: str
    alias: str
    source: str
    request_index: NDArray[np.int64]
    segments: tuple[Segment, ...]
    merged: tuple[str, ...]
    left_out: int

    @property
    def whole(self) -> Segment:
        """The sum of all: E2E."""
        observed_us = np.sum([s.observed_us for s in self.segments], axis=0)
        return Segment("E2E", observed_us, np.sum([s.simulated_us for s in self.segments], axis=0))


def segments_of(run: ReplayRun) -> Segments:
    """The segments of a replay beside its recording's.  Raises ``NothingToJudgeError`` without recorded latencies."""
    recording = run.recording
    recorded = observed_requests(recording) & run.simulated.completed
    if not recorded.any():
        raise NothingToJudgeError(
            f"{recording.alias}: no latencies of single requests were recorded, so there is nothing to lay side by side"
        )
    stamps = server_stamps(recording)
    whole = recorded & ~np.isnan(stamps.queued_us + stamps.scheduled_us + stamps.first_token_us + stamps.finished_us)
    if run.simulated.engine is None or not whole.any():
        merged = (_NO_STEPS if run.simulated.engine is None else _NO_STAMPS,)
        return _of_client(run, recorded, merged)
    merged = (_NO_ARRIVAL if stamps.source == SPANS else _SIMULATED_ARRIVAL,)
    observed, simulated = observed_marks(run, stamps), simulated_marks(run)
    parts = tuple(
        Segment(name, (observed[i + 1] - observed[i])[whole], (simulated[i + 1] - simulated[i])[whole])
        for i, name in enumerate(SERVER_SEGMENTS)
    )
    left_out = int(recorded.sum() - whole.sum())
    return Segments(recording.slug, recording.alias, stamps.source, np.flatnonzero(whole), parts, merged, left_out)


def segment_frame(segments: Segments) -> pl.DataFrame:
    """A row a request and segment: their names, and us observed, simulated and of the difference."""
    return pl.concat(
        pl.DataFrame(
            {
                "request_index": segments.request_index,
                "segment": [part.name] * len(segments.request_index),
                "observed_us": part.observed_us,
                "simulated_us": part.simulated_us,
                "difference_us": part.difference_us,
            }
        )
        for part in (*segments.segments, segments.whole)
    )


def _of_client(run: ReplayRun, recorded: NDArray[np.bool_], merged: tuple[str, ...]) -> Segments:
    requests = run.recording.requests
    ttft_us, e2e_us = (requests[name].to_numpy().astype(np.float64)[recorded] for name in ("ttft_us", "e2e_us"))
    first, last = run.ttft_us[recorded].astype(np.float64), run.e2e_us[recorded].astype(np.float64)
    parts = (Segment(TO_FIRST_TOKEN, ttft_us, first), Segment(TO_LAST_TOKEN, e2e_us - ttft_us, last - first))
    slug, alias = run.recording.slug, run.recording.alias
    return Segments(slug, alias, CLIENT_ONLY, np.flatnonzero(recorded), parts, merged, 0)


def observed_marks(run: ReplayRun, stamps: ServerStamps) -> list[Floats]:
    """Where ``SERVER_SEGMENTS`` begin and the last one ends, float64[n] each, us; nan: not recorded."""
    requests = run.recording.requests
    sent_us = requests["arrival_us"].to_numpy().astype(np.float64)
    end_us = sent_us + requests["e2e_us"].cast(pl.Float64).fill_null(np.nan).to_numpy()
    return [sent_us, stamps.queued_us, stamps.scheduled_us, stamps.first_token_us, stamps.finished_us, end_us]


def simulated_marks(run: ReplayRun) -> list[Floats]:
    """The same of the replay, meaningful where ``simulated.completed``; raises ``ReplayError`` as ``run.result``."""
    result = run.result
    # As the server stamps it: when its loop takes the request in, just before the next schedule().
    calls_us = result.steps["scheduled_us"]
    turn = np.minimum(np.searchsorted(calls_us, result.queued_us), len(calls_us) - 1)
    taken_in_us = np.maximum(calls_us[turn], result.queued_us)
    served = (result.scheduled_us, result.first_token_us, result.finished_us)
    marks = (result.arrival_us, taken_in_us, *served, result.arrival_us + run.e2e_us)
    return [mark.astype(np.float64) for mark in marks]
