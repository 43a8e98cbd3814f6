"""What each request was doing when: a lane of segments on either side, as recorded and as replayed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from blis_replay.blis.trace import Int64s
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.server_stamps import Floats
from blis_replay.validate.attribution.segments import OF_CLIENT, OF_SERVER, way_of_recording, way_of_run

OBSERVED, SIMULATED = "observed", "simulated"
SIDES = (OBSERVED, SIMULATED)

# One row a segment of a request, by side, request and time; a segment that took no time has none.
LANE_SCHEMA: dict[str, type[pl.DataType]] = {
    "side": pl.String,
    "request_index": pl.Int64,
    "segment": pl.String,  # as `blis-replay segments` has it, `preempted`, or the status of a request that failed
    "start_us": pl.Int64,
    "end_us": pl.Int64,
    "prompt_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "cached_prompt_tokens": pl.Int64,
}
_SPAN = ("request_index", "segment", "start_us", "end_us")


def observed_lanes(run: ReplayRun) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """``LANE_SCHEMA`` of the recording, and in words what of it was not recorded.

    A request without stamps of the server has the two segments that its client saw, one that failed a single
    one, called like its status.  Preemptions are not told apart (``preemptions``).
    """
    requests, way = run.recording.requests, way_of_recording(run.recording)
    ok = (requests["status"] == "ok").to_numpy()
    sent_us, end_us = way.sent_us, way.end_us
    marks = np.column_stack(way.marks) if way.stamps else np.full((len(ok), len(OF_SERVER) + 1), np.nan)
    client_marks = np.column_stack([sent_us, way.first_token_at_client_us, end_us])
    by_server = ok & ~np.isnan(marks).any(axis=1)
    by_client = ok & ~by_server & ~np.isnan(client_marks).any(axis=1)
    failed = ~ok & ~np.isnan(end_us)
    whole = _spans(np.column_stack([sent_us, end_us]), failed, ("failed",)).join(
        requests.select("request_index", "status"), on="request_index", how="left", maintain_order="left"
    )
    spans = [
        _spans(marks, by_server, OF_SERVER),
        _spans(client_marks, by_client, OF_CLIENT),
        whole.with_columns(pl.col("status").alias("segment")).select(_SPAN),
    ]
    known = requests.select("request_index", "prompt_tokens", "output_tokens", "cached_prompt_tokens")
    absent = _absent(len(ok), int(by_server.sum()), int((by_server | by_client | failed).sum()))
    return _lanes(OBSERVED, pl.concat(spans), known), absent


def simulated_lanes(run: ReplayRun) -> pl.DataFrame:
    """``LANE_SCHEMA`` of the replay; requests that were given up end when their client gave up."""
    result, trace = run.result, run.plan.trace
    marks = np.column_stack(way_of_run(run).marks)
    for column, reached_us in ((2, result.scheduled_us), (3, result.first_token_us), (4, result.finished_us)):
        marks[reached_us < 0, column] = np.nan
    given_up = result.aborted
    marks[given_up, 4], marks[given_up, 5] = np.nan, trace.abort_us[given_up]
    marks[given_up] = np.where(marks[given_up] > marks[given_up, 5:], np.nan, marks[given_up])
    known = pl.DataFrame(
        {
            "request_index": np.arange(len(trace)),
            "prompt_tokens": trace.prompt_tokens,
            "output_tokens": result.output_tokens,
            "cached_prompt_tokens": np.maximum(result.cached_tokens, trace.prompt_tokens - trace.prefill_tokens),
        }
    )
    return _lanes(SIMULATED, _spans(marks, result.completed | given_up, OF_SERVER), known)


def _lanes(side: str, spans: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    rows = spans.join(known, on="request_index", how="left").with_columns(pl.lit(side).alias("side"))
    return rows.select(pl.col(name).cast(kind) for name, kind in LANE_SCHEMA.items()).sort("request_index", "start_us")


def _spans(marks: Floats, chosen: NDArray[np.bool_], names: Sequence[str]) -> pl.DataFrame:
    """``_SPAN`` of the chosen requests: segment i from mark i to the next one that is known; marks never run backwards.

    ``marks``: float64[n, segments + 1] us, nan: not reached or not known.
    """
    request: Int64s = np.flatnonzero(chosen)
    start_us = np.fmax.accumulate(marks[request], axis=1)
    start_us[np.isnan(marks[request])] = np.nan
    end_us = np.fmin.accumulate(start_us[:, ::-1], axis=1)[:, ::-1][:, 1:]
    start_us = start_us[:, :-1]
    row, segment = np.nonzero(end_us > start_us)
    columns = {
        "request_index": request[row],
        "segment": pl.Series([names[i] for i in segment.tolist()], dtype=pl.String),
        "start_us": np.rint(start_us[row, segment]).astype(np.int64),
        "end_us": np.rint(end_us[row, segment]).astype(np.int64),
    }
    return pl.DataFrame(columns).select(_SPAN)


def _absent(requests: int, by_server: int, with_lane: int) -> tuple[str, ...]:
    absent = []
    if with_lane < requests:
        absent.append(
            "observed lanes" + (f" of {requests - with_lane:,} of {requests:,} requests" if with_lane else "")
        )
    if with_lane and not by_server:
        absent.append("observed queue wait and prefill of requests (no stamps of the server)")
    return tuple(absent)
