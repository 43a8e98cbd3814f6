"""What each request was doing when: a lane of segments on either side, and the preemptions that interrupt it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.blis.engine import Engine
from blis_replay.blis.kernel import state as k
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.admissions import admissions_of
from blis_replay.ingest.steps.records import is_asynchronous
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.comparison.segments import OF_CLIENT, OF_SERVER, timeline_of_recording, timeline_of_run

OBSERVED, SIMULATED = "observed", "simulated"
SIDES = (OBSERVED, SIMULATED)

# One row per segment of a request, by side, request and time; a segment that took no time has none.
LANE_SCHEMA: dict[str, type[pl.DataType]] = {
    "side": pl.String,
    "request_index": pl.Int64,
    "segment": pl.String,  # as in the segments of a request, `preempted`, or the status of a failed request
    "start_us": pl.Int64,
    "end_us": pl.Int64,
    "prompt_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "cached_prompt_tokens": pl.Int64,
}
_SPAN = ("request_index", "segment", "start_us", "end_us")


def observed_lanes(run: ReplayRun) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """``LANE_SCHEMA`` of the recording, and what was not recorded, in words.

    A request without stamps of the server has the two segments that its client saw, one that failed a single
    one, called like its status.  Preemptions are added by ``with_preemptions``.
    """
    requests, known_times = run.recording.requests, timeline_of_recording(run.recording)
    ok = (requests["status"] == "ok").to_numpy()
    sent_us, end_us = known_times.sent_us, known_times.end_us
    marks = np.column_stack(known_times.marks) if known_times.stamps else np.full((len(ok), len(OF_SERVER) + 1), np.nan)
    client_marks = np.column_stack([sent_us, known_times.first_token_at_client_us, end_us])
    by_server = ok & ~np.isnan(marks).any(axis=1)
    by_client = ok & ~by_server & ~np.isnan(client_marks).any(axis=1)
    failed = ~ok & ~np.isnan(end_us)
    failed_spans = _spans(np.column_stack([sent_us, end_us]), failed, ("failed",)).join(
        requests.select("request_index", "status"), on="request_index", how="left", maintain_order="left"
    )
    spans = [
        _spans(marks, by_server, OF_SERVER),
        _spans(client_marks, by_client, OF_CLIENT),
        failed_spans.with_columns(pl.col("status").alias("segment")).select(_SPAN),
    ]
    known = requests.select("request_index", "prompt_tokens", "output_tokens", "cached_prompt_tokens")
    absent = _absent(len(ok), int(by_server.sum()), int((by_server | by_client | failed).sum()))
    return _lanes(OBSERVED, pl.concat(spans), known), absent


def simulated_lanes(run: ReplayRun) -> pl.DataFrame:
    """``LANE_SCHEMA`` of the replay; requests that were given up end when their client gave up."""
    result, trace = run.result, run.plan.trace
    marks = np.column_stack(timeline_of_run(run).marks)
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


def _spans(marks: Floats, chosen: Bools, names: Sequence[str]) -> pl.DataFrame:
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


PREEMPTED, PREFILL = "preempted", "prefill"

# One row per preemption; null: it did not happen, or was not recorded.
PREEMPTION_SCHEMA: dict[str, type[pl.DataType]] = {
    "request_index": pl.Int64,
    "preempted_us": pl.Int64,
    "resumed_us": pl.Int64,
    "token_us": pl.Int64,  # its next token, with which the prefill that computes the KV cache again ends
}


def observed_preemptions(recording: Recording, step_starts: pl.DataFrame) -> pl.DataFrame:
    """``PREEMPTION_SCHEMA`` of the journeys; ``step_starts``: ``TIMELINE_SCHEMA``, of all steps.

    Nothing stamps the token: it counts as there when the engine's loop continues after its step.
    """
    parts = recording.journey_events.batches(["journey", "event", "time_us", "step_id"])
    turns = ("journey.PREEMPTED", "journey.SCHEDULED")
    events = pl.concat(part.filter(pl.col("event").is_in(turns)) for part in parts)
    events = events.sort("journey", "time_us", pl.col("event").cast(pl.Enum(turns)))
    resumed = pl.col("event").shift(-1).over("journey") == turns[1]
    follows = {name: pl.when(resumed).then(pl.col(name).shift(-1).over("journey")) for name in ("time_us", "step_id")}
    preempted = events.select(
        "journey",
        "event",
        pl.col("time_us").alias("preempted_us"),
        follows["time_us"].alias("resumed_us"),
        follows["step_id"].alias("start_step"),
    ).filter(pl.col("event") == turns[0])
    if preempted.is_empty():
        return pl.DataFrame(schema=PREEMPTION_SCHEMA)
    later = 2 if is_asynchronous(recording) else 1
    ends = admissions_of(recording).frame.select("journey", "start_step", pl.col("prefill_end_step") + later)
    starts = step_starts.select(pl.col("step_id").alias("prefill_end_step"), pl.col("start_us").alias("token_us"))
    owners = recording.lifecycles.frame(["journey", "request_index"]).drop_nulls()
    return (
        preempted.join(owners, on="journey")
        .join(ends, on=["journey", "start_step"], how="left")
        .join(starts, on="prefill_end_step", how="left")
        # A step without a record lies somewhere between its neighbours.
        .with_columns(pl.col("token_us").clip(pl.col("resumed_us")))
        .select(PREEMPTION_SCHEMA.keys())
        .sort("request_index", "preempted_us")
    )


def simulated_preemptions(run: ReplayRun) -> pl.DataFrame:
    """``PREEMPTION_SCHEMA`` of the replay.

    A run does not keep which request was preempted in which step, so the engine runs once more, from one step
    with preemptions or readmissions to the next.
    """
    result, entry = run.result, run.entry
    if not result.preemptions.any() or entry is None:
        return pl.DataFrame(schema=PREEMPTION_SCHEMA)
    engine = Engine(run.plan.trace, run.plan.engine, entry.lifecycle)
    seen: Int64s = np.zeros(len(run.plan.trace), np.int64)
    out: dict[int, int] = {}
    rows: list[tuple[int, int, int | None, int | None]] = []
    columns = (result.steps[name].tolist() for name in ("scheduled_us", "preempted", "admitted"))
    for now_us, preempted, admitted in zip(*columns, strict=True):
        if not preempted and not (out and admitted):
            continue
        engine.advance(run.plan.latency(entry.latency), now_us + 1)
        status, count = engine.state.requests["status"], engine.state.outcomes["preemptions"].astype(np.int64)
        for place in [place for place in out if status[place] != k.WAITING]:
            request = int(engine.order[place])
            rows.append((request, out.pop(place), now_us, _next_token_us(run, request, now_us)))
        out |= dict.fromkeys(np.flatnonzero(count > seen).tolist(), now_us)
        seen = count
    rows += [(int(engine.order[place]), since_us, None, None) for place, since_us in out.items()]
    return pl.DataFrame(rows, schema=PREEMPTION_SCHEMA, orient="row").sort("request_index", "preempted_us")


def with_preemptions(lanes: pl.DataFrame, preemptions: pl.DataFrame) -> pl.DataFrame:
    """Lanes of one side (``LANE_SCHEMA``) with a ``preempted`` segment per preemption and a prefill after it."""
    if preemptions.is_empty() or lanes.is_empty():
        return lanes
    touched = pl.col("request_index").is_in(preemptions["request_index"].unique().implode())
    holes = {key[0]: part for key, part in preemptions.partition_by("request_index", as_dict=True).items()}
    rows: list[dict[str, Any]] = []
    for lane in lanes.filter(touched).partition_by("request_index", maintain_order=True):
        rows += _overlaid(lane.rows(named=True), holes[lane["request_index"][0]])
    changed = pl.DataFrame(rows, schema=LANE_SCHEMA)
    return pl.concat([lanes.filter(~touched), changed]).sort("request_index", "start_us")


def _next_token_us(run: ReplayRun, request: int, resumed_us: int) -> int | None:
    """The first token after a readmission: the begin of the next run of steps that each gave one."""
    segments = run.result.segments
    begin_us = run.result.step_end_us[segments[segments[:, 0] == request, 1]]
    after_us = begin_us[begin_us > resumed_us]
    return int(after_us.min()) if len(after_us) else None


def _overlaid(lane: list[dict[str, Any]], preemptions: pl.DataFrame) -> list[dict[str, Any]]:
    """The segments of a request, interrupted by its preemptions and repeated prefills."""
    template, lane_end_us = lane[0], max(row["end_us"] for row in lane)
    over: list[tuple[str, int, int]] = []
    rows = preemptions.sort("preempted_us").rows()
    # Without a token it was computing until it was preempted again, or to its end.
    next_us = [row[1] for row in rows[1:]] + [lane_end_us]
    for (_, since_us, resumed_us, token_us), again_us in zip(rows, next_us, strict=True):
        back_us = min(lane_end_us if resumed_us is None else resumed_us, lane_end_us)
        done_us = min(again_us if token_us is None else token_us, lane_end_us)
        over += [(PREEMPTED, since_us, back_us), (PREFILL, back_us, done_us)]
    for _, low_us, high_us in over:
        lane = [part for row in lane for part in _without(row, low_us, high_us)]
    filled = [{**template, "segment": name, "start_us": low, "end_us": high} for name, low, high in over if high > low]
    return sorted([*lane, *filled], key=lambda row: row["start_us"])


def _without(row: dict[str, Any], low_us: int, high_us: int) -> list[dict[str, Any]]:
    """The parts of a segment outside ``low_us`` to ``high_us``."""
    start_us, end_us = row["start_us"], row["end_us"]
    if end_us <= low_us or start_us >= high_us:
        return [row]
    parts = ((start_us, min(end_us, low_us)), (max(start_us, high_us), end_us))
    return [{**row, "start_us": low, "end_us": high} for low, high in parts if high > low]
