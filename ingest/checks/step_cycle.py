"""Check 3: ``step.duration_us`` is the time inside the scheduling call, not the step cycle."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.checks.evidence import (
    Context,
    Measured,
    Window,
    mean_of,
    named,
    not_checked,
    recorded_decode_gap_us,
    step_intervals,
    steps_by_start,
    steps_in,
)
from blis_replay.ingest.recording import Finding, Recording, Severity
from blis_replay.ingest.rows import Rows
from blis_replay.ingest.tables import Table, columns_named

CHECK = "step_cycle"
MEASURES = "start-to-start step cycle against step.duration_us and the client's gap between tokens"
_FEWEST_STEPS = 30
RULE = (
    "duration below 90 % of the cycle: a step's time is start to start (differences over step numbers), "
    "because the call that is timed returns before the model runs"
)


def check(recording: Recording, context: Context) -> list[Finding]:
    """Start-to-start cycle against recorded duration and the client's gap, per load stage."""
    if recording.steps.is_empty():
        return [not_checked(CHECK, "step_time", "no step records")]
    findings = [_of_window(recording, window) for window in context.windows]
    found = [finding for finding in findings if finding is not None]
    return found or [not_checked(CHECK, "step_time", f"fewer than {_FEWEST_STEPS} step records in every load stage")]


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Cycle and duration by running depth, over all steps with a next one sampled within ten."""
    pairs = step_intervals(steps_by_start(recording, "running_depth", "duration_us")).frame()
    near = pairs.filter((pl.col("elapsed_steps") <= 10) & (pl.col("running_depth") > 0))
    binned = (
        near.group_by((pl.col("running_depth") // 16 * 16).alias("depth"))
        .agg(
            pl.len().alias("steps"),
            (pl.col("elapsed_us").sum() / pl.col("elapsed_steps").sum() / 1e3).round(3).alias("cycle"),
            (pl.col("duration_us").mean() / 1e3).round(3).alias("duration"),
        )
        .sort("depth")
    )
    rows = tuple((f"{depth} to {depth + 15}", *rest) for depth, *rest in binned.iter_rows())
    if not rows:
        return ()
    columns = ("running depth", "steps", "cycle ms", "duration ms")
    return (Table("step cycle against step.duration_us", columns_named(*columns), rows, bars="cycle ms"),)


def cycle_us(intervals: Rows) -> float | None:
    """Mean step cycle, us: time between sampled steps over the steps between them (``step_intervals``)."""
    of = intervals.aggregate(us="sum(elapsed_us)", steps="sum(elapsed_steps)")
    return of["us"] / of["steps"] if of["steps"] else None


def _of_window(recording: Recording, window: Window) -> Finding | None:
    records = steps_in(recording, window, "duration_us")
    steps, cycle = records.height, cycle_us(step_intervals(records))
    if steps < _FEWEST_STEPS or cycle is None:
        return None
    duration = mean_of(records, "duration_us")
    gap = recorded_decode_gap_us(recording, window.stage)
    measured: Measured = {
        "stage": window.stage,
        "steps": steps,
        "cycle_us": cycle,
        "duration_us": duration,
        "cycle_over_duration": cycle / duration if duration else None,
        "client_gap_us": gap,
        "cycle_over_client_gap": cycle / gap if gap else None,
    }
    message = f"{named(window)}: step cycle {cycle / 1e3:.2f} ms"
    if duration is not None:
        message += f", while step.duration_us says {duration / 1e3:.2f} ms"
    if gap is not None:
        message += f"; the client's gap between tokens is {gap / 1e3:.2f} ms"
    severity: Severity = "corrected" if duration is not None and duration < 0.9 * cycle else "note"
    return Finding(CHECK, severity, "step_time", message, measured, RULE)
