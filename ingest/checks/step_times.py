"""Checks 2 and 3: whether every step has a time, and that ``step.duration_us`` is not the step cycle."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.checks.evidence import (
    Context,
    InstrumentCheck,
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
from blis_replay.ingest.rows import Rows, query
from blis_replay.ingest.steps.timeline import SOURCES, StepAnchors, step_anchors
from blis_replay.ingest.tables import Table, columns_named

CLOCK_CHECK = "step_clock"
CLOCK_MEASURES = "share of engine steps with a recorded time, and the largest gap between two of them"
_LONG_GAP_US = 1_000_000
_MISPLACED = 0.01
CLOCK_RULE = (
    "steps without a record are laid evenly between those that have one, so that none of them shows a cycle of its "
    "own; in a gap of more than 1 s an idle engine or a stall would not be seen.  An event is placed by its median "
    "distance from the start of steps that were sampled too.  More than 1 % of records against which time "
    "would run backwards: several engines, or a restart, are mixed in one recording"
)


def check_step_clock(recording: Recording, context: Context) -> list[Finding]:
    """One finding: coverage, largest gap, what events were moved by."""
    anchors = step_anchors(recording)
    if anchors.steps < 2:
        return [not_checked(CLOCK_CHECK, "step_time", "no step and no journey event with a step")]
    gaps = _gaps(anchors)
    counts = dict(_by_source(anchors).iter_rows())
    recorded = anchors.rows.height
    measured: Measured = {
        "steps": anchors.steps,
        "recorded": recorded,
        "coverage": recorded / anchors.steps,
        **{f"from_{source.replace(' ', '_')}": counts[source] for source in SOURCES if source in counts},
        "single_cycles": recorded - 1 - gaps.height,
        **_largest(gaps),
        "out_of_order": anchors.out_of_order,
        **{f"lag_of_{row['source'].replace(' ', '_')}_us": row["lag_us"] for row in anchors.lags.iter_rows(named=True)},
    }
    moved = any(row["lag_us"] and row["source"] in counts for row in anchors.lags.iter_rows(named=True))
    misplaced = anchors.out_of_order > _MISPLACED * (recorded + anchors.out_of_order)
    severity: Severity = "unusable" if misplaced else "corrected" if moved else "note"
    return [Finding(CLOCK_CHECK, severity, "step_time", _sentence(measured), measured, CLOCK_RULE)]


def step_clock_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Where the times come from, how far events lie from the steps they stand for, and the gaps."""
    anchors = step_anchors(recording)
    if anchors.steps < 2:
        return ()
    counts = _by_source(anchors)
    lags = counts.join(anchors.lags.rename({"steps": "both"}), on="source", how="left", maintain_order="left")
    gaps = _gaps(anchors)
    bins = gaps.group_by((pl.col("steps").log(2).floor()).cast(pl.Int64).alias("bin")).agg(pl.len()).sort("bin")
    single = [(0, single_cycles)] if (single_cycles := anchors.rows.height - 1 - gaps.height) else []
    longest = gaps.sort("us", descending=True).head(5)
    return (
        Table(
            "steps with a recorded time, by source",
            columns_named("source", "steps", "sampled too", "lag us", "low us", "high us"),
            tuple(lags.iter_rows()),
            note="lag: how long after the event the step began, median and middle 98 % of steps that were sampled too",
        ),
        Table(
            "steps from one recorded time to the next",
            columns_named("steps", "pairs"),
            tuple(
                (f"{2**i}" if i == 0 else f"{2**i} to {2 ** (i + 1) - 1}", count)
                for i, count in (*single, *bins.iter_rows())
            ),
            bars="pairs",
        ),
        Table(
            "the longest gaps",
            columns_named("after step", "steps", "s"),
            tuple((step, steps, us / 1e6) for step, steps, us in longest.select("step_id", "steps", "us").iter_rows()),
        ),
    )


def _largest(gaps: pl.DataFrame) -> Measured:
    """The longest of the gaps, in steps and in time."""
    if gaps.is_empty():
        return {"largest_gap_steps": None, "largest_gap_us": None, "largest_gap_after_step": None}
    step, _, us = gaps.sort("us", descending=True).row(0)
    return {"largest_gap_steps": gaps["steps"].max(), "largest_gap_us": us, "largest_gap_after_step": step}


def _sentence(measured: Measured) -> str:
    message = (
        f"{measured['recorded']:,} of {measured['steps']:,} steps ({100 * float(measured['coverage'] or 0):.1f} %) "
        f"have a recorded time, {measured.get('from_sampled', 0):,} of them from step records"
    )
    if (us := measured["largest_gap_us"]) is not None:
        message += f"; the largest gap is {measured['largest_gap_steps']:,} steps, the longest {float(us) / 1e6:.3f} s"
        if float(us) > _LONG_GAP_US:
            message += (
                f" after step {measured['largest_gap_after_step']}: an idle engine or a stall in it would not be seen"
            )
    if out := measured["out_of_order"]:
        message += f"; {out:,} records are left out, because time would run backwards"
    return message


_GAPS = """
SELECT * FROM (
    SELECT step_id, lead(step_id) OVER by_step - step_id AS steps, lead(start_us) OVER by_step - start_us AS us
    FROM anchors WINDOW by_step AS (ORDER BY step_id)
)
WHERE steps > 1 ORDER BY step_id
"""


def _gaps(anchors: StepAnchors) -> pl.DataFrame:
    """``step_id``, and ``steps`` and ``us`` to the next anchor, where steps without a recorded time lie between."""
    return query(_GAPS, dict.fromkeys(("step_id", "steps", "us"), pl.Int64), anchors=anchors.rows).frame()


def _by_source(anchors: StepAnchors) -> pl.DataFrame:
    """``source`` and ``steps`` that have it, the best first."""
    schema = {"source": anchors.rows.schema["source"], "steps": pl.Int64}
    counted = "SELECT source, count(*) AS steps FROM anchors GROUP BY source"
    return query(counted, schema, anchors=anchors.rows).frame().sort("source")


CYCLE_CHECK = "step_cycle"
CYCLE_MEASURES = "start-to-start step cycle against step.duration_us and the client's gap between tokens"
_FEWEST_STEPS = 30
CYCLE_RULE = (
    "duration below 90 % of the cycle: a step's time is start to start (differences over step numbers), "
    "because the call that is timed returns before the model runs"
)


def check_step_cycle(recording: Recording, context: Context) -> list[Finding]:
    """Start-to-start cycle against recorded duration and the client's gap, per load stage."""
    if recording.steps.is_empty():
        return [not_checked(CYCLE_CHECK, "step_time", "no step records")]
    findings = [_of_window(recording, window) for window in context.windows]
    judged = [finding for finding in findings if finding is not None]
    return judged or [
        not_checked(CYCLE_CHECK, "step_time", f"fewer than {_FEWEST_STEPS} step records in every load stage")
    ]


def step_cycle_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
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
    return Finding(CYCLE_CHECK, severity, "step_time", message, measured, CYCLE_RULE)


STEP_CLOCK = InstrumentCheck(CLOCK_CHECK, CLOCK_MEASURES, CLOCK_RULE, check_step_clock, step_clock_tables)
STEP_CYCLE = InstrumentCheck(CYCLE_CHECK, CYCLE_MEASURES, CYCLE_RULE, check_step_cycle, step_cycle_tables)
