"""Checks 2 and 3: whether every step has a time, and that ``step.duration_us`` is not the step cycle."""

from __future__ import annotations

import math

import polars as pl

from blis_replay.ingest.checks import evidence
from blis_replay.ingest.recording import Finding, Recording, Severity
from blis_replay.ingest.rows import Rows, query
from blis_replay.ingest.steps.timeline import step_anchors

CLOCK_CHECK = "step_clock"
CLOCK_MEASURES = "share of engine steps with a recorded time, how they were drawn, and the largest gap between two"
_LONG_GAP_US = 1_000_000
_FEWEST_DRAWN = 30  # steps, from which their gaps tell how they were drawn
CLOCK_RULE = (
    "steps without a record are laid evenly between those that have one, so that none of them shows a cycle of its "
    "own; in a gap of more than 1 s an idle engine or a stall would not be seen.  Gaps between the ids of steps that "
    "were drawn one by one with chance p have a coefficient of variation of sqrt(1-p). More than 5 % and four standard "
    "errors below it are every n-th step; as much above it, stretches are lost.  More than 1 % of records against "
    "which time would run backwards: several engines, or a restart, are mixed in one recording"
)


def check_step_clock(recording: Recording, context: evidence.Context) -> list[Finding]:
    """One finding: coverage, how the recorded steps were drawn, the largest gap."""
    anchors = step_anchors(recording)
    if anchors.steps < 2:
        return [evidence.not_checked(CLOCK_CHECK, "step_time", "no two step records")]
    gaps = query(_GAPS, _GAP_SCHEMA, anchors=anchors.rows).aggregate(**_OF_GAPS)
    recorded = anchors.rows.height
    measured: evidence.Measured = {
        "steps": anchors.steps,
        "recorded": recorded,
        "coverage": recorded / anchors.steps,
        "single_cycles": gaps["single"],
        # A draw with chance p is followed by another with chance p; the few gaps that stretches leave do not matter.
        "coverage_between_losses": gaps["single"] / (recorded - 1),
        **{name: gaps[name] for name in ("largest_gap_steps", "largest_gap_us", "largest_gap_after_step")},
        "gap_variation": gaps["deviation"] / gaps["mean"],
        "gap_variation_of_random_draw": math.sqrt(1 - 1 / gaps["mean"]),
        "out_of_order": anchors.out_of_order,
        "dropped_events": recording.dropped_step_events,
    }
    severity: Severity = "unusable" if anchors.mixed else "note"
    message = _sentence(measured) + (": several engines, or a restart, are mixed" if anchors.mixed else "")
    return [Finding(CLOCK_CHECK, severity, "step_time", message, measured, CLOCK_RULE)]


_GAP_SCHEMA = dict.fromkeys(("step_id", "steps", "us"), pl.Int64)
_GAPS = """
SELECT * FROM (
    SELECT step_id, lead(step_id) OVER by_step - step_id AS steps, lead(start_us) OVER by_step - start_us AS us
    FROM anchors WINDOW by_step AS (ORDER BY step_id)
)
WHERE steps IS NOT NULL
"""
_OF_GAPS = {
    **{"single": "count(*) FILTER (steps = 1)", "mean": "avg(steps)", "deviation": "stddev_pop(steps)"},
    "largest_gap_steps": "max(steps) FILTER (steps > 1)",
    "largest_gap_us": "max(us) FILTER (steps > 1)",
    "largest_gap_after_step": "arg_max(step_id, us) FILTER (steps > 1)",
}


def _sentence(measured: evidence.Measured) -> str:
    coverage = f"({100 * float(measured['coverage'] or 0):.1f} %)"
    message = f"{measured['recorded']:,} of {measured['steps']:,} steps {coverage} have a recorded time"
    if (us := measured["largest_gap_us"]) is not None:
        message += f"{_draw(measured)}; the largest gap is {measured['largest_gap_steps']:,} steps, "
        message += f"the longest {float(us) / 1e6:.3f} s"
        if float(us) > _LONG_GAP_US:
            message += (
                f" after step {measured['largest_gap_after_step']}: an idle engine or a stall in it would not be seen"
            )
    if out := measured["out_of_order"]:
        message += f"; {out:,} records are left out, because time would run backwards"
    if dropped := measured["dropped_events"]:
        kept = f"between the losses {100 * float(measured['coverage_between_losses'] or 0):.0f} % of steps were sampled"
        message += f"; the tracing SDK dropped {dropped} events; {kept}"
    return message


def _draw(measured: evidence.Measured) -> str:
    """How the recorded steps were drawn, by the variation of the gaps between them."""
    recorded = int(measured["recorded"] or 0)
    if recorded <= _FEWEST_DRAWN:
        return ""
    seen, random = (float(measured[name] or 0) for name in ("gap_variation", "gap_variation_of_random_draw"))
    margin = 0.05 * random + 4 / math.sqrt(recorded)
    regular, clustered = seen < random - margin, seen > random + margin
    drawn = "too regular for a random draw" if regular else "in clusters" if clustered else "drawn at random"
    return f", {drawn}: gaps of variation {seen:.3f} ({random:.3f} for a random draw)"


CYCLE_CHECK = "step_cycle"
CYCLE_MEASURES = "start-to-start step cycle against step.duration_us and the client's gap between tokens"
_FEWEST_STEPS = 30
CYCLE_RULE = (
    "duration below 90 % of the cycle: a step's time is start to start (differences over step numbers), "
    "because the call that is timed returns before the model runs"
)


def check_step_cycle(recording: Recording, context: evidence.Context) -> list[Finding]:
    """Start-to-start cycle against recorded duration and the client's gap, per load stage."""
    if recording.steps.is_empty():
        return [evidence.not_checked(CYCLE_CHECK, "step_time", "no step records")]
    findings = [_of_window(recording, window) for window in context.windows]
    judged = [finding for finding in findings if finding is not None]
    return judged or [
        evidence.not_checked(CYCLE_CHECK, "step_time", f"fewer than {_FEWEST_STEPS} step records in every load stage")
    ]


def cycle_us(intervals: Rows) -> float | None:
    """Mean step cycle, us: time between sampled steps over the steps between them (``step_intervals``)."""
    of = intervals.aggregate(us="sum(elapsed_us)", steps="sum(elapsed_steps)")
    return of["us"] / of["steps"] if of["steps"] else None


def _of_window(recording: Recording, window: evidence.Window) -> Finding | None:
    records = evidence.steps_in(recording, window, "duration_us")
    steps, cycle = records.height, cycle_us(evidence.step_intervals(records))
    if steps < _FEWEST_STEPS or cycle is None:
        return None
    duration = evidence.mean_of(records, "duration_us")
    gap = evidence.recorded_decode_gap_us(recording, window.stage)
    measured: evidence.Measured = {
        "stage": window.stage,
        "steps": steps,
        "cycle_us": cycle,
        "duration_us": duration,
        "cycle_over_duration": cycle / duration if duration else None,
        "client_gap_us": gap,
        "cycle_over_client_gap": cycle / gap if gap else None,
    }
    message = f"{evidence.named(window)}: step cycle {cycle / 1e3:.2f} ms, idle time included"
    if duration is not None:
        message += f", while step.duration_us says {duration / 1e3:.2f} ms"
    if gap is not None:
        message += f"; the client's gap between tokens is {gap / 1e3:.2f} ms"
    severity: Severity = "corrected" if duration is not None and duration < 0.9 * cycle else "note"
    return Finding(CYCLE_CHECK, severity, "step_time", message, measured, CYCLE_RULE)


STEP_CLOCK = evidence.InstrumentCheck(CLOCK_CHECK, CLOCK_MEASURES, CLOCK_RULE, check_step_clock)
STEP_CYCLE = evidence.InstrumentCheck(CYCLE_CHECK, CYCLE_MEASURES, CYCLE_RULE, check_step_cycle)
