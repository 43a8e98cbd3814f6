"""When requests were preempted and went on: in the journeys of a recording, and in a replay."""

from __future__ import annotations

import numpy as np
import polars as pl

from blis_replay.blis.engine import Engine
from blis_replay.blis.kernel import state as k
from blis_replay.blis.trace import Int64s
from blis_replay.ingest.admissions import admissions_of
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.scheduling_mode import is_asynchronous
from blis_replay.replay.driver import ReplayRun
from blis_replay.validate.timeline.lanes import LANE_SCHEMA

PREEMPTED, PREFILL = "preempted", "prefill"

# One row a preemption; null: it did not come to that, or it was not recorded.
PREEMPTION_SCHEMA: dict[str, type[pl.DataType]] = {
    "request_index": pl.Int64,
    "preempted_us": pl.Int64,
    "resumed_us": pl.Int64,
    "token_us": pl.Int64,  # its next token, with which the prefill that computes the KV cache again ends
}


def observed_preemptions(recording: Recording, step_starts: pl.DataFrame) -> pl.DataFrame:
    """``PREEMPTION_SCHEMA`` of the journeys; ``step_starts``: ``TIMELINE_SCHEMA``, of all steps.

    The token is stamped by nobody: it is there when the loop goes on after its step.
    """
    parts = recording.journey_events.frames(["journey", "event", "time_us", "step_id"])
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
    owners = recording.lifecycles.whole(["journey", "request_index"]).drop_nulls()
    return (
        preempted.join(owners, on="journey")
        .join(ends, on=["journey", "start_step"], how="left")
        .join(starts, on="prefill_end_step", how="left")
        .select(PREEMPTION_SCHEMA.keys())
        .sort("request_index", "preempted_us")
    )


def simulated_preemptions(run: ReplayRun) -> pl.DataFrame:
    """``PREEMPTION_SCHEMA`` of the replay.

    A run does not keep which request was preempted in which step, so it is made once more, from one step with
    preemptions or readmissions to the next.
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
        engine.advance(run.plan.cycles or entry.latency, now_us + 1)
        status, count = engine.state.request[:, k.STATUS], engine.state.request[:, k.PREEMPTIONS].astype(np.int64)
        for place in [place for place in out if status[place] != k.WAITING]:
            request = int(engine.order[place])
            rows.append((request, out.pop(place), now_us, _next_token_us(run, request, now_us)))
        out |= dict.fromkeys(np.flatnonzero(count > seen).tolist(), now_us)
        seen = count
    rows += [(int(engine.order[place]), since_us, None, None) for place, since_us in out.items()]
    return pl.DataFrame(rows, schema=PREEMPTION_SCHEMA, orient="row").sort("request_index", "preempted_us")


def with_preemptions(lanes: pl.DataFrame, preemptions: pl.DataFrame) -> pl.DataFrame:
    """Lanes of one side (``LANE_SCHEMA``) in which preempted requests are so, and prefill again afterwards."""
    if preemptions.is_empty() or lanes.is_empty():
        return lanes
    touched = pl.col("request_index").is_in(preemptions["request_index"].unique().implode())
    holes = {key[0]: part for key, part in preemptions.partition_by("request_index", as_dict=True).items()}
    rows: list[dict[str, object]] = []
    for lane in lanes.filter(touched).partition_by("request_index", maintain_order=True):
        rows += _overlaid(lane.rows(named=True), holes[lane["request_index"][0]])
    changed = pl.DataFrame(rows, schema=LANE_SCHEMA)
    return pl.concat([lanes.filter(~touched), changed]).sort("request_index", "start_us")


def _next_token_us(run: ReplayRun, request: int, resumed_us: int) -> int | None:
    """The first token after a readmission, with which a run of steps that all gave one begins."""
    segments = run.result.segments
    begin_us = run.result.step_end_us[segments[segments[:, 0] == request, 1]]
    after_us = begin_us[begin_us > resumed_us]
    return int(after_us.min()) if len(after_us) else None


def _overlaid(lane: list[dict[str, object]], preemptions: pl.DataFrame) -> list[dict[str, object]]:
    """The segments of a request with holes cut into them, and what fills those."""
    template, lane_end_us = lane[0], max(_us(row["end_us"]) for row in lane)
    over: list[tuple[str, int, int]] = []
    rows = preemptions.sort("preempted_us").rows()
    # Without a token it was computing until it was preempted again, or to its end.
    next_us = [row[1] for row in rows[1:]] + [lane_end_us]
    for (_, since_us, resumed_us, token_us), again_us in zip(rows, next_us, strict=True):
        back_us = min(lane_end_us if resumed_us is None else resumed_us, lane_end_us)
        done_us = min(again_us if token_us is None else token_us, lane_end_us)
        over += [(PREEMPTED, since_us, back_us), (PREFILL, back_us, done_us)]
    for _, low_us, high_us in over:
        lane = [piece for row in lane for piece in _without(row, low_us, high_us)]
    filled = [{**template, "segment": name, "start_us": low, "end_us": high} for name, low, high in over if high > low]
    return sorted([*lane, *filled], key=lambda row: _us(row["start_us"]))


def _without(row: dict[str, object], low_us: int, high_us: int) -> list[dict[str, object]]:
    """The parts of a segment outside ``low_us`` to ``high_us``."""
    start_us, end_us = _us(row["start_us"]), _us(row["end_us"])
    if end_us <= low_us or start_us >= high_us:
        return [row]
    parts = ((start_us, min(end_us, low_us)), (max(start_us, high_us), end_us))
    return [{**row, "start_us": low, "end_us": high} for low, high in parts if high > low]


def _us(value: object) -> int:
    return value if isinstance(value, int) else 0
