"""A time for every engine step: how many steps have one on record, and how far apart those are."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.checks.evidence import Context, Measured, not_checked
from blis_replay.ingest.recording import Finding, Recording, Severity
from blis_replay.ingest.rows import query
from blis_replay.ingest.steps.timeline import SOURCES, StepAnchors, step_anchors
from blis_replay.ingest.tables import Table, columns_named

CHECK = "step_clock"
MEASURES = "share of engine steps with a recorded time, and the largest gap between two of them"
_LONG_GAP_US = 1_000_000
_MISPLACED = 0.01
RULE = (
    "steps without a record are laid evenly between those that have one, so that none of them shows a cycle of its "
    "own; in a gap of more than 1 s an idle engine or a stall would not be seen.  An event is placed by its median "
    "distance from the start of steps that were sampled too.  More than 1 % of records against which time "
    "would run backwards: several engines, or a restart, are mixed in one recording"
)


def check(recording: Recording, context: Context) -> list[Finding]:
    """One finding: coverage, largest gap, what events were moved by."""
    anchors = step_anchors(recording)
    if anchors.steps < 2:
        return [not_checked(CHECK, "step_time", "no step and no journey event with a step")]
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
    return [Finding(CHECK, severity, "step_time", _sentence(measured), measured, RULE)]


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
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
    return anchors.rows.select("source").group_by("source").agg(pl.len().alias("steps")).sort("source")
