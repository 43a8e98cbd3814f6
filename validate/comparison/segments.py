"""Where the time of a request goes, observed and simulated.

The segments of a request follow each other from the client's send to its last token, so on either
side they sum to its E2E, and their differences to the difference of the E2Es.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.base.errors import NothingToJudgeError
from blis_replay.ingest.recording import Recording
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.observed import CLIENT_ONLY, SPANS, server_stamps
from blis_replay.validate.metrics.observed import Selection, on_both_sides

OF_SERVER = ("send to queue", "queue wait", "prefill", "decode", "delivery")
OF_CLIENT = ("to first token", "to last token")

_SERVER_ARRIVAL = "send to server arrival: the simulator has one delay before the queue; in send to queue"
_OF_SPANS = "server arrival: spans do not tell it, nor a token's way to the client; both are in send to queue"
_NO_STAMPS = (
    "queued, scheduled, first token and finished at the server: not recorded; only the client's two latencies are left"
)
_NO_STEPS = "queued, scheduled and finished: the simulator reports requests only"


@dataclass(frozen=True)
class RequestTimeline:
    """When each request of a recording reached what, on one side: float64[n] us each, nan where that is not known.

    ``stamps``: taken in by the engine's loop, first scheduled, first token, finished; None where the side has none.
    ``lacks``: in words, what it has not, and where that is counted.  ``source``: what the stamps are from.
    """

    sent_us: Floats
    stamps: tuple[Floats, Floats, Floats, Floats] | None
    first_token_at_client_us: Floats
    end_us: Floats
    source: str
    lacks: str

    @property
    def marks(self) -> list[Floats]:
        """The bounds of the five segments, or of the two that the client sees."""
        inside = [self.first_token_at_client_us] if self.stamps is None else list(self.stamps)
        return [self.sent_us, *inside, self.end_us]

    def of_client(self, lacks: str) -> RequestTimeline:
        """The same without the server's stamps."""
        return replace(self, stamps=None, source=CLIENT_ONLY, lacks=lacks if self.stamps is not None else self.lacks)


@dataclass(frozen=True)
class Segment:
    """One part of the way: us of each compared request, float64[m], observed (A) and simulated (B)."""

    name: str
    a_us: Floats
    b_us: Floats

    @property
    def difference_us(self) -> Floats:
        """float64[m]: B less A."""
        return self.b_us - self.a_us


@dataclass(frozen=True)
class Segments:
    """The segments of the requests ``request_index`` (int64[m]), in the order of the way.

    ``merged``: what a side lacks, and where it is counted.  ``source``: what A's stamps are from.
    ``left_out``: compared requests with a missing timestamp.
    """

    source: str
    request_index: Int64s
    segments: tuple[Segment, ...]
    merged: tuple[str, ...]
    left_out: int

    @property
    def whole(self) -> Segment:
        """The sum of all: E2E."""
        a_us = np.sum([s.a_us for s in self.segments], axis=0)
        return Segment("E2E", a_us, np.sum([s.b_us for s in self.segments], axis=0))


def segments_of(run: ReplayRun, selection: Selection | None = None) -> Segments:
    """The segments of a replay (B) beside its recording's (A); ``NothingToJudgeError`` without recorded latencies."""
    recording = run.recording
    chosen = on_both_sides(run) & (selection or Selection()).of(recording.requests)
    if not chosen.any():
        raise NothingToJudgeError(
            f"{recording.alias}: no latencies of single requests were recorded; "
            "choose a recording that `list` calls recorded"
        )
    a, b = timeline_of_recording(recording), timeline_of_run(run)
    known = chosen & ~np.isnan(sum(a.marks) + sum(b.marks))
    if a.stamps is None or b.stamps is None or not known.any():
        lacks = (a if a.stamps is None else b).lacks if a.stamps is None or b.stamps is None else _NO_STAMPS
        a, b = a.of_client(lacks), b.of_client(lacks)
        known = chosen & ~np.isnan(sum(a.marks) + sum(b.marks))
    names = OF_CLIENT if a.stamps is None else OF_SERVER
    a_marks, b_marks = a.marks, b.marks
    parts = tuple(
        Segment(name, (a_marks[i + 1] - a_marks[i])[known], (b_marks[i + 1] - b_marks[i])[known])
        for i, name in enumerate(names)
    )
    merged = tuple(dict.fromkeys([a.lacks, *([b.lacks] if a.stamps is None else [])]))
    left_out = int(chosen.sum() - known.sum())
    return Segments(a.source, np.flatnonzero(known), parts, merged, left_out)


def timeline_of_recording(recording: Recording) -> RequestTimeline:
    """The observed way of each request."""
    requests, stamps = recording.requests, server_stamps(recording)
    sent_us, ttft_us, e2e_us = (
        requests[name].cast(pl.Float64).fill_null(np.nan).to_numpy() for name in ("arrival_us", "ttft_us", "e2e_us")
    )
    known = (stamps.queued_us, stamps.scheduled_us, stamps.first_token_us, stamps.finished_us)
    recorded = bool((~np.isnan(sum(known))).any())
    lacks = (_OF_SPANS if stamps.source == SPANS else _SERVER_ARRIVAL) if recorded else _NO_STAMPS
    return RequestTimeline(
        sent_us=sent_us,
        stamps=known if recorded else None,
        first_token_at_client_us=sent_us + ttft_us,
        end_us=sent_us + e2e_us,
        source=stamps.source,
        lacks=lacks,
    )


def timeline_of_run(run: ReplayRun) -> RequestTimeline:
    """The simulated way of each request; without stamps if the simulator reports requests only."""
    sent_us = run.arrival_us.astype(np.float64)
    engine = run.simulated.engine
    stamps = None
    if engine is not None:
        # As the server stamps it: when its loop takes the request in, just before the next schedule().
        calls_us = engine.steps["scheduled_us"]
        turn = np.minimum(np.searchsorted(calls_us, engine.queued_us), len(calls_us) - 1)
        taken_in_us = np.maximum(calls_us[turn], engine.queued_us).astype(np.float64)
        served = (engine.scheduled_us, engine.first_token_us, engine.finished_us)
        first, second, third = (stamp.astype(np.float64) for stamp in served)
        stamps = (taken_in_us, first, second, third)
    elif run.simulated.scheduled_us is not None:
        # It has no delays outside its engine, or does not separate them.
        stamps = (sent_us, sent_us + run.simulated.scheduled_us, sent_us + run.ttft_us, sent_us + run.e2e_us)
    return RequestTimeline(
        sent_us=sent_us,
        stamps=stamps,
        first_token_at_client_us=sent_us + run.ttft_us,
        end_us=sent_us + run.e2e_us,
        source=run.simulator,
        lacks=_NO_STEPS if stamps is None else _SERVER_ARRIVAL,
    )


def segment_frame(segments: Segments) -> pl.DataFrame:
    """One row per request and segment of a replay: names, and observed, simulated and difference in us."""
    return pl.concat(
        pl.DataFrame(
            {
                "request_index": segments.request_index,
                "segment": [part.name] * len(segments.request_index),
                "observed_us": part.a_us,
                "simulated_us": part.b_us,
                "difference_us": part.difference_us,
            }
        )
        for part in (*segments.segments, segments.whole)
    )
