"""The engine's steps and its counters on either side.

A step is drawn while its batch runs.  A recording has the calls of ``schedule()`` only.  When a batch finishes, the
engine calls ``schedule()`` for the next step (asynchronous: for the one after next).  So each batch is drawn between
those two calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from blis_replay.base.arrays import Int64s
from blis_replay.base.errors import ReconstructionError
from blis_replay.blis.trace import NEVER_US
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.rows import shaped
from blis_replay.ingest.steps.admissions import admissions_of, decodes_of, open_at
from blis_replay.ingest.steps.records import is_asynchronous, one_a_step
from blis_replay.ingest.steps.timeline import timeline_of
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.observed import in_engine, placed_anchors, server_stamps
from blis_replay.validate.timeline.lanes import OBSERVED, SIMULATED

# One row per step, while its batch runs.  Null: not recorded.
STEP_SPAN_SCHEMA: dict[str, type[pl.DataType]] = {
    "side": pl.String,
    "step": pl.Int64,  # as recorded, or the place in the run from 1 on
    "start_us": pl.Int64,
    "end_us": pl.Int64,
    "scheduled_us": pl.Int64,  # its schedule()
    "source": pl.String,  # of scheduled_us: simulated, LOGGED or one of ingest.steps.timeline.SOURCES
    "batch": pl.String,  # where the composition is from: simulated | recorded
    "prefill_requests": pl.Int64,
    "prefill_tokens": pl.Int64,
    "decode_requests": pl.Int64,
    "decode_tokens": pl.Int64,
    "decode_context_tokens": pl.Int64,
    "running": pl.Int64,  # after schedule()
    "waiting": pl.Int64,
}
# One row per value of a counter, which holds until the next one.
COUNTER_SCHEMA: dict[str, type[pl.DataType]] = {
    "side": pl.String,
    "counter": pl.String,
    "at_us": pl.Int64,
    "value": pl.Float64,
}
RUNNING, WAITING, KV_USE = "running requests", "waiting requests", "KV cache use (%)"
COUNTERS = (RUNNING, WAITING, KV_USE)
# Simulated less observed, at the send of each request.
ERROR = "error of E2E (ms)"
_COUNTED = ["step_id", "start_us", "running_depth", "waiting_depth", "kv_blocks_free", "kv_blocks_total", "kv_usage"]
# Source of the start of an iteration: worked out from the requests that it served.
LOGGED = "iteration of the log"
_COMPOSITION = ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens")


def simulated_steps(run: ReplayRun, window: tuple[int, int]) -> pl.DataFrame:
    """``STEP_SPAN_SCHEMA`` of the replay's steps that reach into the window, and of its last one.

    Batches without tokens are left out.
    """
    every = run.result.steps
    shown = (every["start_us"] < window[1]) & (every["end_us"] > window[0])
    shown[-1:] = True
    steps = every[shown]
    columns = {
        "step": np.flatnonzero(shown) + 1,
        **dict.fromkeys(("source", "batch"), np.full(len(steps), SIMULATED)),
        **{name: steps[name] for name in ("start_us", "end_us", "scheduled_us", "prefill_requests", "prefill_tokens")},
        **dict.fromkeys(("decode_requests", "decode_tokens"), steps["decode_tokens"]),
        "decode_context_tokens": steps["context_tokens"],
        "running": steps["running_depth"],
        "waiting": steps["waiting_depth"],
    }
    return _in_schema(SIMULATED, pl.DataFrame(columns), STEP_SPAN_SCHEMA)


def simulated_counters(run: ReplayRun, window: tuple[int, int]) -> pl.DataFrame:
    """As ``_samples``: the replay, one value per step; no KV use where the number of blocks is not known."""
    steps, blocks = run.result.steps, run.plan.engine.num_gpu_blocks
    values = {RUNNING: steps["running_depth"], WAITING: steps["waiting_depth"]}
    if blocks is not None:  # one block is reserved; the definition of vLLM's kv_cache_usage
        values[KV_USE] = 100 * (1 - steps["free_blocks"] / (blocks - 1))
    columns = pl.DataFrame({"at_us": steps["scheduled_us"], **values})
    return _samples(SIMULATED, columns, window)


def observed_steps(recording: Recording) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Calls of all steps (``TIMELINE_SCHEMA``), and ``STEP_SPAN_SCHEMA`` with what step records say of them.

    Empty without a step clock that is tied to that of the requests.  Steps between recorded calls are spaced evenly.
    Iterations of a server log stand in for step records, where requests tell when they began; they have no calls.
    """
    starts = timeline_of(placed_anchors(recording))
    if starts.is_empty():
        return starts, _in_schema(OBSERVED, _iterations(recording), STEP_SPAN_SCHEMA)
    names = ["step_id", *_COMPOSITION, "running_depth", "waiting_depth"]
    records = one_a_step(recording.steps.frame(names)).select(
        pl.col("step_id").alias("step"),
        *_COMPOSITION,
        pl.col("running_depth").alias("running"),
        pl.col("waiting_depth").alias("waiting"),
        pl.when(pl.col("decode_tokens").is_not_null()).then(pl.lit("recorded")).alias("batch"),
    )
    spans = _running(starts, recording).join(records, on="step", how="left", maintain_order="left")
    return starts, _in_schema(OBSERVED, spans, STEP_SPAN_SCHEMA)


def _iterations(recording: Recording) -> pl.DataFrame:
    """The iterations of a server log as spans."""
    logged = _logged(recording)
    calls = logged.with_columns(pl.col("iteration").alias("step_id"), pl.lit(LOGGED).alias("source"))
    records = logged.select(
        pl.col("iteration").alias("step"),
        *_COMPOSITION,
        _LOGGED_RUNNING.alias("running"),
        pl.lit("recorded").alias("batch"),
    )
    return _running(calls, recording).join(records, on="step", how="left", maintain_order="left")


_LOGGED_RUNNING = pl.col("prefill_requests") + pl.col("decode_requests")


def _logged(recording: Recording) -> pl.DataFrame:
    """The iterations whose start is known, those of an idle rank left out."""
    served = recording.iterations.frame().filter(~pl.col("dummy").fill_null(value=False))
    return served.drop_nulls("start_us").sort("start_us")


def observed_counters(recording: Recording, window: tuple[int, int]) -> pl.DataFrame:
    """As ``_samples``: the step records, where their clock is tied to that of the requests, else the iterations."""
    if placed_anchors(recording).frame.is_empty():
        logged = _logged(recording).select(
            pl.col("start_us").alias("at_us"),
            _LOGGED_RUNNING.alias(RUNNING),
            pl.lit(None, pl.Int64).alias(WAITING),
            (100 * pl.col("kv_usage")).alias(KV_USE),
        )
        return _samples(OBSERVED, logged, window)
    steps = one_a_step(recording.steps.frame(_COUNTED))
    free = 1 - pl.col("kv_blocks_free") / pl.col("kv_blocks_total")
    columns = steps.select(
        pl.col("start_us").alias("at_us"),
        pl.col("running_depth").alias(RUNNING),
        pl.col("waiting_depth").alias(WAITING),
        (100 * pl.coalesce("kv_usage", free)).alias(KV_USE),
    )
    return _samples(OBSERVED, columns.drop_nulls("at_us"), window)


def with_true_split(spans: pl.DataFrame, recording: Recording) -> pl.DataFrame:
    """Observed spans with the decodes that journeys tell, and their context; the other tokens of a step are prefill.

    A step record calls a request prefill for one step too long where scheduling is asynchronous.  It is kept as it is
    where it counts requests that have no journey.
    """
    if recording.journey_events.is_empty() or spans.is_empty():
        return spans
    admissions, steps = admissions_of(recording), spans["step"].to_numpy()
    try:
        decodes = decodes_of(admissions)
    except ReconstructionError:
        return spans
    start, held = (admissions.frame[name].to_numpy() for name in ("start_step", "held_until_step"))
    running, decoding = pl.Series(open_at(start, held, steps)), pl.Series(decodes.at(steps))
    split: dict[str, Any] = {
        "prefill_requests": pl.col("prefill_requests") + pl.col("decode_requests") - decoding,
        "prefill_tokens": pl.col("prefill_tokens") + pl.col("decode_tokens") - decoding,
        "decode_requests": decoding,
        "decode_tokens": decoding,
        "decode_context_tokens": pl.Series(decodes.context_at(steps)),
    }
    complete = (pl.col("running") == running) & (split["prefill_requests"] >= 0) & (split["prefill_tokens"] >= 0)
    chosen = (pl.when(complete).then(true).otherwise(name).alias(name) for name, true in split.items())
    return spans.with_columns(*chosen)


def _running(starts: pl.DataFrame, recording: Recording) -> pl.DataFrame:
    """When the batch of each step ran; before an idle period it ends with the last token."""
    calls_us = starts["start_us"].to_numpy().astype(np.int64)
    following_us = np.append(calls_us[1:], NEVER_US)[: len(calls_us)]
    left_us = _left_by_then(recording, calls_us)
    # A request without a record may still run, but the engine would soon call schedule().
    usual_us = np.median(np.diff(calls_us)) if len(calls_us) > 1 else 0
    idle = (calls_us < left_us) & (left_us < following_us) & (following_us - calls_us > 2 * usual_us)
    done_us = np.where(idle | (following_us == NEVER_US), np.maximum(left_us, calls_us), following_us)
    begin_us = calls_us
    if is_asynchronous(recording):  # the last two batches of a busy period lie evenly in what is left of it
        begin_us = np.where(idle, (calls_us + left_us) // 2, done_us)
        done_us = np.append(done_us[1:], done_us[-1:])
        done_us[idle] = left_us[idle]
    done_us = np.minimum(done_us, np.append(begin_us[1:], NEVER_US)[: len(calls_us)])
    return starts.select(
        pl.col("step_id").alias("step"),
        pl.Series("start_us", begin_us, dtype=pl.Int64),
        pl.Series("end_us", np.maximum(done_us, begin_us), dtype=pl.Int64),
        pl.col("start_us").alias("scheduled_us"),
        pl.col("source").cast(pl.String),
    )


def _left_by_then(recording: Recording, at_us: Int64s) -> Int64s:
    """int64: when the last of the requests left that had come by each time; -NEVER_US before the first."""
    entered_us, left_us = in_engine(recording, server_stamps(recording))
    if not len(entered_us):
        return np.full(len(at_us), -NEVER_US)
    came = np.searchsorted(entered_us, at_us, side="right")
    last_us = np.maximum.accumulate(left_us)[np.maximum(came - 1, 0)].astype(np.int64)
    return np.where(came > 0, last_us, -NEVER_US)


def _samples(side: str, columns: pl.DataFrame, window: tuple[int, int]) -> pl.DataFrame:
    """``COUNTER_SCHEMA``: values up to the end of the window, and of each counter the last one before it.

    A counter without any of these has its first value, so that it is known to be recorded.
    """
    at, kept = pl.col("at_us"), []
    for counter in columns.columns[1:]:
        values = columns.select("at_us", pl.col(counter).alias("value")).drop_nulls("value")
        latest = at.filter(at <= window[0]).max()
        shown = values.filter(at <= window[1], (at > window[0]) | (at == latest).fill_null(False))
        shown = values.head(1) if shown.is_empty() else shown
        kept.append(_in_schema(side, shown.with_columns(pl.lit(counter).alias("counter")), COUNTER_SCHEMA))
    return pl.concat(kept)


def _in_schema(side: str, frame: pl.DataFrame, schema: dict[str, type[pl.DataType]]) -> pl.DataFrame:
    return shaped(frame.with_columns(pl.lit(side).alias("side")), schema)
