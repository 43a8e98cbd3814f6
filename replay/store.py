"""A replay as the store keeps it, and without its rows."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import polars as pl

from blis_replay.blis.result import SimResult
from blis_replay.blis.trace import RequestTrace
from blis_replay.ingest.recording import empty_frame
from blis_replay.ingest.rows import no_rows
from blis_replay.ingest.store import RUN_STEP_SCHEMA, TABLES, RunRecord
from blis_replay.replay.driver import ReplayRun
from blis_replay.replay.engine import replayed_engine


def provenance_of(run: ReplayRun) -> dict[str, object]:
    """Everything a result depends on: versions, hashes, substitutions, engine arguments."""
    engine = replayed_engine(run.recording, run.mode).engine
    return {
        "blis_replay": version("blis-replay"),
        "simulator": run.simulator,
        "recording_hash": run.recording.content_hash,
        "coefficients": run.release.name,
        "coefficients_hash": run.release.sha256,
        "replay": run.mode.name,
        "basis": run.plan.basis,
        "scheduling": "asynchronous" if run.simulated.asynchronous else "synchronous",
        "engine": {name: {"value": s.value, "source": s.source} for name, s in sorted(engine.items())},
        "delays": dict((run.entry.sources if run.entry else None) or {}),
    }


def record_of(run: ReplayRun) -> RunRecord:
    """What identifies a replay in the store, and what it depends on."""
    return RunRecord(
        slug=run.recording.slug,
        simulator=run.simulator,
        release=run.release.name,
        release_hash=run.release.sha256,
        replay_mode=run.mode.name,
        content_hash=run.recording.content_hash,
        provenance=provenance_of(run),
    )


def run_tables(run: ReplayRun) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Requests (RUN_REQUEST_SCHEMA) and steps (RUN_STEP_SCHEMA) of a replay, as they are stored.

    A simulator that reports requests only has no steps, and of a request only its latencies.
    """
    engine = run.simulated.engine
    completed = run.simulated.completed
    requests = pl.DataFrame(
        {
            "request_index": range(len(completed)),
            "ttft_us": run.ttft_us,
            "e2e_us": run.e2e_us,
            "completed": completed,
            **({} if engine is None else _engine_times(engine)),
        }
    ).with_columns(
        # A request that was not completed has no such time.
        *(pl.when("completed").then(name) for name in ("ttft_us", "e2e_us")),
        state=pl.when("completed").then(pl.lit("completed")).otherwise(pl.lit("aborted")),
    )
    steps = empty_frame(RUN_STEP_SCHEMA) if engine is None else step_table(engine)
    return requests.drop("completed"), steps


def _engine_times(result: SimResult) -> dict[str, pl.Series]:
    """When the engine did what, null where an aborted request has no such time."""
    times = pl.DataFrame(
        {
            "queued_us": result.queued_us,
            "scheduled_us": result.scheduled_us,
            "first_token_us": result.first_token_us,
            "finished_us": result.finished_us,
            "completed": result.completed,
        }
    ).with_columns(
        pl.when(pl.col("first_token_us") >= 0).then("first_token_us"),
        pl.when(pl.col("scheduled_us") >= 0).then("scheduled_us"),
        pl.when("completed").then("finished_us"),
    )
    return {column.name: column for column in times.drop("completed")}


def step_table(result: SimResult) -> pl.DataFrame:
    """The steps of a run, a row each: ``step``, ``start_us``, ``end_us``, tokens of the batch, and queue depths."""
    steps = result.steps
    return pl.DataFrame(
        {
            "step": range(len(steps)),
            "start_us": steps["start_us"],
            "end_us": steps["end_us"],
            "prefill_tokens": steps["prefill_tokens"],
            "decode_tokens": steps["decode_tokens"],
            "context_tokens": steps["context_tokens"],
            "running_depth": steps["running_depth"],
            "waiting_depth": steps["waiting_depth"],
        }
    )


def without_rows(run: ReplayRun) -> ReplayRun:
    """What a run was of, by whom and how, without its requests and steps: small enough to keep hundreds of them."""
    recording, plan, simulated = run.recording, run.plan, run.simulated
    nothing = np.empty(0, np.int64)
    tables: dict[str, Any] = {name: no_rows(schema) for name, (schema, _order) in TABLES.items()}
    return replace(
        run,
        recording=replace(recording, **tables, prefix=None),
        plan=replace(
            plan, trace=RequestTrace(nothing, nothing, nothing, nothing, nothing), cycles=None, delivery_us=None
        ),
        simulated=replace(
            simulated,
            completed=nothing.astype(np.bool_),
            ttft_us=nothing,
            e2e_us=nothing,
            output_tokens=nothing,
            engine=None,
        ),
        ttft_us=nothing,
        e2e_us=nothing,
    )
