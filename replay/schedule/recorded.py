"""A server's schedule as it was recorded: what every step computed, and when each request reached the queue.

Times become rows: a request is in the queue from the first ``schedule()`` call on that could see it.  So a comparison
needs no clock, and an arrival's stamp that is off by less than a step changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from blis_replay.base.arrays import Bools, Floats, Int64s
from blis_replay.base.errors import ReplayError
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.steps.followed import NONE, Followed, FollowedLog, followed_log

NEVER = 1 << 40
NOT_KNOWN_US = -(1 << 60)  # what a client sends first has the time 0, and servers are warmed up before
LOG, RECORDS = "iterations of the server's log", "step records"
COUNTS = ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens")
# Of a thousandth, as the log has it, and what a division may add.
_LOG_ROUNDING = 0.0005001
# Where the server does not say how long a request waited, it waited from then on ...
USUAL_QUANTILE = 0.1  # ... this quantile of the times from arrival to admission is the usual way to the engine
TIMES_USUAL = 10  # ... and a wait begins after this many times that
MIN_WAIT_US = 50_000  # ... or after this time if that is longer
QUEUED_SCHEMA: dict[str, type[pl.DataType]] = {
    "request_index": pl.Int64,
    "request_id": pl.String,
    "prompt_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "computed_tokens": pl.Int64,  # of the prompt, at the first admission
    "shared_hit": pl.Int64,  # prompt tokens that the prefix cache held of it or of another one in the same steps
    "eligible": pl.Int64,  # row of the first step that could admit it; NEVER: not known
    "aborted": pl.Int64,  # row of the first step without it; NEVER: it was not given up
}


@dataclass(frozen=True)
class RecordedSchedule:
    """Steps that computed something, by row, and the requests in the order in which they queued.

    ``step``: the step's own number; ``start_us``: from the experiment's zero, NOT_KNOWN_US where it is not.
    ``counts``: int64 per step.  ``kv_usage``: share of the KV blocks, nan where not recorded, exact to
    ``kv_rounding``, after the step (``kv_at_end``) or after ``schedule()``.  ``requests``: ``QUEUED_SCHEMA``.
    ``begin``, ``end``, ``why``: as in ``Followed``.  ``basis``: what it rests on, in words.
    """

    step: Int64s
    start_us: Int64s
    counts: dict[str, Int64s]
    kv_usage: Floats
    kv_rounding: float
    kv_at_end: bool
    requests: pl.DataFrame
    begin: int
    end: int
    why: str
    basis: dict[str, str]

    @property
    def source(self) -> str:
        """LOG or RECORDS."""
        return self.basis["steps"]


def recorded_schedule(recording: Recording, served: pl.DataFrame | None = None) -> RecordedSchedule:
    """The schedule of a recording: step records if there is one of every step, else its log's iterations.

    ``served``: ``SERVED_SCHEMA``, what is assumed of the requests in the place of what is recorded; only with a log.
    Raises ``ReplayError`` with what is missing.
    """
    if _every_step(recording):
        return _of_records(recording)
    if recording.iterations.is_empty():
        raise ReplayError(
            f"{recording.alias}: not every step was recorded; start vLLM with --enable-logging-iteration-details and "
            "keep its log as vllm.log"
        )
    log, why = followed_log(recording, served)
    if log is None:
        raise ReplayError(f"{recording.alias}: {why}; record the log of one engine from its start")
    return _of_log(recording, log)


def _every_step(recording: Recording) -> bool:
    """Whether steps 0, 1, ... or 1, 2, ... are all there with their counts, and when requests queued."""
    steps, journeys = recording.steps, recording.lifecycles
    if steps.is_empty() or journeys.is_empty():
        return False
    named = ", ".join(f"count({name})" for name in (*COUNTS, "start_us"))
    of = steps.aggregate(first="min(step_id)", last="max(step_id)", steps="count(*)", told=f"least({named})")
    queued = journeys.aggregate(queued="count(coalesce(queued_us, queued_step))", all="count(*)")
    whole = of["told"] == of["steps"] == of["last"] - of["first"] + 1
    return bool(whole and of["first"] <= 1 and queued["queued"] == queued["all"])


def _of_records(recording: Recording) -> RecordedSchedule:
    steps = recording.steps.frame(
        ["step_id", "start_us", *COUNTS, "kv_usage", "kv_blocks_total", "kv_blocks_free"]
    ).sort("step_id")
    steps = steps.filter(pl.col("prefill_tokens") + pl.col("decode_tokens") > 0)
    start_us = steps["start_us"].to_numpy()
    usage = 1 - pl.col("kv_blocks_free") / pl.col("kv_blocks_total")
    journeys = recording.lifecycles.frame()
    queued = journeys["queued_us"].fill_null(0).to_numpy()
    eligible = np.searchsorted(start_us, queued, side="left")
    by_step = np.searchsorted(steps["step_id"].to_numpy(), journeys["queued_step"].fill_null(0).to_numpy(), "right")
    eligible = np.where(journeys["queued_us"].is_null().to_numpy(), by_step, eligible)
    apart = "kv_transfer_config" in recording.engine
    if apart:  # when a load from another server has ended is not recorded
        admitted = np.searchsorted(steps["step_id"].to_numpy(), journeys["scheduled_step"].fill_null(0).to_numpy())
        eligible = np.where(journeys["scheduled_step"].is_null().to_numpy(), eligible, admitted)
    given_up = (journeys["status"] == "aborted").fill_null(False).to_numpy()
    gone_us = journeys.select(pl.coalesce("finished_us", "departed_us").fill_null(0)).to_series().to_numpy()
    asked = pl.when(pl.Series(given_up)).then(pl.coalesce("max_tokens", "output_tokens")).otherwise("output_tokens")
    computed = pl.col("prompt_tokens") - pl.col("cached_prompt_tokens").fill_null(0)
    requests = journeys.select(
        "request_index",
        pl.coalesce("core_request_id", "api_request_id").alias("request_id"),
        "prompt_tokens",
        asked.fill_null(1).clip(1).alias("output_tokens"),
        computed.alias("computed_tokens"),
        pl.lit(0).alias("shared_hit"),
        pl.Series("eligible", eligible),
        pl.Series("aborted", np.where(given_up, np.searchsorted(start_us, gone_us, side="left"), NEVER)),
        pl.Series("queued", queued),
    ).sort("eligible", "queued", maintain_order=True)
    hits = int(journeys["cached_prompt_tokens"].is_not_null().sum())
    return RecordedSchedule(
        step=steps["step_id"].to_numpy(),
        start_us=start_us,
        counts={name: steps[name].to_numpy() for name in COUNTS},
        kv_usage=np.full(steps.height, np.nan)  # blocks wait for other servers, or for their own load
        if apart
        else steps.select(pl.coalesce(usage, "kv_usage").fill_null(np.nan)).to_series().to_numpy(),
        kv_rounding=1e-6,
        kv_at_end=False,
        requests=requests.select(pl.col(name).cast(kind) for name, kind in QUEUED_SCHEMA.items()),
        begin=0,
        end=steps.height,
        why="",
        basis={
            "steps": RECORDS,
            "queue": "when the engine admitted each request, as it may wait for KV blocks of another server"
            if apart
            else "when the engine queued each request",
            "prefix cache": f"hits as the engine counted them, of {hits:,} of {journeys.height:,} requests",
        },
    )


def _of_log(recording: Recording, log: FollowedLog) -> RecordedSchedule:
    rows, served, found = log.iterations, log.served, log.walk
    if (found.admitted == NONE).all():
        raise ReplayError(f"{recording.alias}: {log.remark}")
    start_us = rows["start_us"].fill_null(NOT_KNOWN_US).to_numpy()
    eligible, queue_basis = _eligible(served, found, start_us, rows["elapsed_us"].to_numpy())
    admitted = _with_the_next(found, rows["prefill_requests"].to_numpy())
    eligible = np.minimum(eligible, admitted)
    computed = np.where(found.computed == NONE, served["prompt_tokens"].fill_null(1).to_numpy(), found.computed)
    columns = {"eligible": eligible, "computed_tokens": computed, "admitted": admitted, "shared_hit": found.shared_hit}
    # Requests queue in the order in which they were admitted, so none can have queued before an earlier one.
    ordered = served.with_columns(pl.Series(name, values) for name, values in columns.items())
    ordered = ordered.filter(pl.col("admitted") != NEVER).sort("admitted", maintain_order=True)
    requests = ordered.with_columns(pl.col("eligible").cum_max(), pl.lit(NEVER).alias("aborted"))
    return RecordedSchedule(
        step=rows["iteration"].to_numpy(),
        start_us=start_us,
        counts={name: rows[name].to_numpy() for name in COUNTS},
        kv_usage=rows["kv_usage"].fill_null(np.nan).to_numpy(),
        kv_rounding=_LOG_ROUNDING,
        kv_at_end=True,
        requests=requests.select(pl.col(name).cast(kind) for name, kind in QUEUED_SCHEMA.items()),
        begin=found.begin,
        end=found.end,
        why=found.why,
        basis={"steps": LOG, "queue": queue_basis, "prefix cache": _hits(served, found)} | _left_out(recording, rows),
    )


def _with_the_next(found: Followed, prefill_requests: Int64s) -> Int64s:
    """int64[requests]: the row that admitted each; of the first step that is not explained, the next ones in order."""
    admitted = np.where(found.admitted == NONE, NEVER, found.admitted)
    if found.why and found.end < len(prefill_requests):
        new = int(prefill_requests[found.end]) - int((admitted == found.end).sum())
        admitted[np.flatnonzero(admitted == NEVER)[: max(new, 0)]] = found.end
    return admitted


def _left_out(recording: Recording, rows: pl.DataFrame) -> dict[str, str]:
    left = recording.iterations.where("NOT dummy").height - rows.height
    return {"left out": f"{left:,} iterations behind the first that is missing in the log"} if left else {}


def _hits(served: pl.DataFrame, found: Followed) -> str:
    held = served["prompt_tokens"].to_numpy() - found.computed
    hit = (found.computed != NONE) & (held > 0)
    if not hit.any():
        return "no prompt token was found in it, by the counts of the steps"
    return f"{int(held[hit].sum()):,} prompt tokens of {int(hit.sum()):,} requests, by what the steps computed"


def _eligible(served: pl.DataFrame, found: Followed, start_us: Int64s, own_us: Int64s) -> tuple[Int64s, str]:
    """int64[requests]: the row of the first step that could have admitted each, and in words how that is known."""
    known = found.admitted != NONE
    eligible = np.where(known, found.admitted, NEVER)
    clock_us = _clock(start_us, own_us)
    queue_us = served["queue_us"].cast(pl.Float64).fill_null(np.nan).to_numpy()
    told = known & ~np.isnan(queue_us)
    if told.any():
        # The engine takes requests in right before it calls schedule(): the nearest start.
        eligible[told] = _nearest(clock_us, clock_us[found.admitted[told]] - queue_us[told])
    others = known & ~told
    basis = f"how long {int(told.sum()):,} of {int(known.sum()):,} requests waited, by the server's spans"
    if others.any() and (start_us[found.admitted[others]] != NOT_KNOWN_US).any():
        eligible[others] = _by_wait(served, found, start_us, others)
        basis += ", else by arrivals" if told.any() else ""
        if not told.any():
            basis = "arrivals; what is longer than ten times the usual way to the engine, and 50 ms, is a wait"
    return np.minimum(eligible, np.where(known, found.admitted, NEVER)), basis


def _clock(start_us: Int64s, own_us: Int64s) -> Floats:
    """float64[steps]: starts as placed, else as if the steps followed one another without a pause."""
    return np.where(start_us != NOT_KNOWN_US, start_us, np.cumsum(own_us) - own_us).astype(np.float64)


def _nearest(clock_us: Floats, at_us: Floats) -> Int64s:
    """The row that began nearest to each time, the last of those that began at once."""
    last = len(clock_us) - 1
    before = np.maximum(np.searchsorted(clock_us, at_us, side="right") - 1, 0)
    after = np.minimum(before + 1, last)
    nearer = np.abs(at_us - clock_us[before]) <= np.abs(clock_us[after] - at_us)
    return np.where(nearer, before, after).astype(np.int64)


def _by_wait(served: pl.DataFrame, found: Followed, start_us: Int64s, chosen: Bools) -> Int64s:
    """By arrival: the first step that began after it and after the usual way to the engine."""
    arrived_us = served["arrived_us"].to_numpy()[chosen]
    admitted = found.admitted[chosen]
    wait_us = start_us[admitted] - arrived_us
    usual_us = max(TIMES_USUAL * float(np.quantile(wait_us, USUAL_QUANTILE)), MIN_WAIT_US)
    could = np.searchsorted(start_us, arrived_us + usual_us, side="left")
    return np.where(start_us[admitted] == NOT_KNOWN_US, admitted, np.minimum(could, admitted)).astype(np.int64)
