"""A replay as the store keeps it."""

from __future__ import annotations

from importlib.metadata import version

import polars as pl

from blis_replay.blis.kernel import state as kernel
from blis_replay.ingest.store import RunRecord, Store, write_run
from blis_replay.replay.driver import ReplayRun

SIMULATOR = "embedded"


def provenance_of(run: ReplayRun) -> dict[str, object]:
    """Everything a result depends on: versions, hashes, substitutions, engine arguments."""
    return {
        "blis_replay": version("blis-replay"),
        "simulator": SIMULATOR,
        "recording_hash": run.recording.content_hash,
        "coefficients": run.release.name,
        "coefficients_hash": run.release.sha256,
        "replay": run.mode.name,
        "basis": run.plan.basis,
        "scheduling": "asynchronous" if run.plan.engine.async_scheduling else "synchronous",
        "engine": {name: {"value": s.value, "source": s.source} for name, s in sorted(run.recording.engine.items())},
        "delays": dict(run.entry.sources or {}),
    }


def store_run(store: Store, run: ReplayRun, errors: pl.DataFrame) -> None:
    """Keep a replay with its per-request and per-step tables and its errors (ERROR_SCHEMA)."""
    result, steps = run.result, run.result.steps
    completed = result.completed
    requests = pl.DataFrame(
        {
            "request_index": range(len(completed)),
            "queued_us": result.queued_us,
            "scheduled_us": result.scheduled_us,
            "first_token_us": result.first_token_us,
            "finished_us": result.finished_us,
            "ttft_us": run.ttft_us,
            "e2e_us": run.e2e_us,
            "completed": completed,
        }
    ).with_columns(
        # An aborted request has no such time.
        pl.when(pl.col("first_token_us") >= 0).then("first_token_us"),
        pl.when(pl.col("scheduled_us") >= 0).then("scheduled_us"),
        *(pl.when("completed").then(name) for name in ("finished_us", "ttft_us", "e2e_us")),
        state=pl.when("completed").then(pl.lit("completed")).otherwise(pl.lit("aborted")),
    )
    table = pl.DataFrame(
        {
            "step": range(len(steps)),
            "start_us": steps[:, kernel.STEP_START],
            "end_us": steps[:, kernel.STEP_END],
            "prefill_tokens": steps[:, kernel.STEP_PREFILL],
            "decode_tokens": steps[:, kernel.STEP_DECODE],
            "context_tokens": steps[:, kernel.STEP_CONTEXT],
            "running_depth": steps[:, kernel.STEP_RUNNING],
            "waiting_depth": steps[:, kernel.STEP_WAITING],
        }
    )
    record = RunRecord(
        slug=run.recording.slug,
        simulator=SIMULATOR,
        release=run.release.name,
        release_hash=run.release.sha256,
        replay_mode=run.mode.name,
        content_hash=run.recording.content_hash,
        provenance=provenance_of(run),
    )
    write_run(store, record, requests.drop("completed"), table, errors)
