"""Check 4: mean running depth against throughput times residence (Little's law)."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.checks.evidence import (
    Context,
    Measured,
    Window,
    completed_requests,
    equal_windows,
    mean,
    named,
    not_checked,
    requests_in,
    seconds,
    step_intervals,
    steps_in,
)
from blis_replay.ingest.checks.pictures import Table
from blis_replay.ingest.recording import Finding, Recording

CHECK = "littles_law"
MEASURES = "mean running depth against throughput times residence, per load stage in its steady window"
CONSISTENT = 0.03
CONTRADICTORY = 0.10
_FEWEST = 30
RULE = (
    "within 3 % is consistent (a request also spends time before the queue and after its last token); beyond 10 % "
    "steps and requests cannot be of the same run, or one of them is incomplete"
)


def check(recording: Recording, context: Context) -> list[Finding]:
    """Depth over (throughput x residence) per load stage, in its steady window."""
    if recording.steps.is_empty() or completed_requests(recording).is_empty():
        return [not_checked(CHECK, "", "it takes step records and completed requests")]
    findings = [_of_window(recording, window) for window in context.windows]
    found = [finding for finding in findings if finding is not None]
    return found or [not_checked(CHECK, "", f"fewer than {_FEWEST} steps or requests in every load stage")]


def pictures(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Depth and throughput times residence in the steady windows and in twelfths of the run."""
    if recording.steps.is_empty() or completed_requests(recording).is_empty():
        return ()
    rows = []
    for window in (*context.windows, *equal_windows(recording, 12)):
        finding = _of_window(recording, window)
        if finding is not None:
            of = finding.measured
            depth, ratio = float(of["mean_depth"] or 0), float(of["ratio"] or 0)
            rows.append((seconds(window), round(depth, 2), round(depth / ratio, 2) if ratio else None, round(ratio, 3)))
    columns = ("seconds", "running depth", "rate x E2E", "ratio")
    note = "the steady windows of the load stages, then twelfths of the run (a ramp is no steady state)"
    return (Table("Little's law by window", columns, tuple(rows), bars="ratio", note=note),) if rows else ()


def _of_window(recording: Recording, window: Window) -> Finding | None:
    intervals = step_intervals(steps_in(recording, window)).drop_nulls("running_depth")
    requests = requests_in(completed_requests(recording), window).drop_nulls("e2e_us")
    if intervals.height < _FEWEST or requests.height < _FEWEST:
        return None
    weighted = (pl.col("running_depth") * pl.col("elapsed_us")).sum() / pl.col("elapsed_us").sum()
    depth = float(intervals.select(weighted).item())
    rate_per_us = requests.height / (window.end_us - window.start_us)
    expected = rate_per_us * float(mean(requests, "e2e_us") or 0)
    if expected <= 0:
        return None
    ratio = depth / expected
    measured: Measured = {
        "stage": window.stage,
        "mean_depth": depth,
        "throughput_per_s": rate_per_us * 1e6,
        "residence_us": mean(requests, "e2e_us"),
        "ratio": ratio,
        **_as_published(recording, window),
    }
    message = (
        f"{named(window)}: mean running depth {depth:.1f} is {ratio:.3f} of throughput times residence "
        f"({expected:.1f}): {_verdict(ratio)}"
    )
    severity = "unusable" if abs(ratio - 1) > CONTRADICTORY else "note"
    return Finding(CHECK, severity, "", message, measured, RULE)


def _verdict(ratio: float) -> str:
    if abs(ratio - 1) <= CONSISTENT:
        return "consistent"
    return "doubtful" if abs(ratio - 1) <= CONTRADICTORY else "contradictory, do not join steps and requests"


def _as_published(recording: Recording, window: Window) -> Measured:
    """The coarser form in use elsewhere: mean over sampled steps, requested rate, whole stage."""
    steps = steps_in(recording, window)
    requests = completed_requests(recording)
    if window.stage < 0 or not window.rate_per_s:
        return {}
    residence_us = mean(requests.filter(pl.col("stage") == window.stage), "e2e_us")
    depth = mean(steps, "running_depth")
    if not residence_us or depth is None:
        return {}
    return {"ratio_requested_rate_whole_stage": depth / (window.rate_per_s * residence_us / 1e6)}
