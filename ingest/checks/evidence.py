"""What several checks look at: completed requests, true lengths, load-stage windows, step cycles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from blis_replay.ingest.recording import NOT_CHECKED, Finding, Recording
from blis_replay.ingest.rows import Rows, query
from blis_replay.ingest.served import completed_requests, recorded_requests
from blis_replay.ingest.tables import Table

if TYPE_CHECKING:
    from blis_replay.ingest.stream import EventTotals, TokenLayout

Measured = dict[str, float | int | str | None]

WARM_UP_US = 20_000_000
TAIL_US = 10_000_000
_FIRST_ARRIVALS_US = 10_000_000
_GAP_COLUMNS = ("output_tokens", "output_tokens_source", "ttft_us", "e2e_us")


@dataclass(frozen=True)
class Window:
    """The steady part of a load stage, from the experiment's zero; ``stage`` -1 is the whole run."""

    stage: int
    start_us: int
    end_us: int
    rate_per_s: float | None


@dataclass(frozen=True)
class Context:
    """What is worked out once for all checks: token layout and totals, stage windows.

    ``stamp_gaps``: ``low_us``, ``count``: gaps between stream stamps in bins of a quarter of a
    decade from ``low_us`` on; only where stored stamps are looked at.
    """

    layout: TokenLayout
    events: EventTotals | None
    windows: tuple[Window, ...]
    stamp_gaps: pl.DataFrame | None = None


def no_tables(_recording: Recording, _context: Context) -> tuple[Table, ...]:
    """None.  A name of its own, because checks go to other processes."""
    return ()


@dataclass(frozen=True)
class InstrumentCheck:
    """One check: its name, what it measures, its thresholds and why, and its two functions.

    ``run``: the findings of a recording; ``evidence_tables``: the numbers behind them, for ``inspect --check``, where
    they are more than those of the finding.
    """

    name: str
    measures: str
    rule: str
    run: Callable[[Recording, Context], list[Finding]]
    evidence_tables: Callable[[Recording, Context], tuple[Table, ...]] = no_tables


@dataclass(frozen=True)
class CheckEvidence:
    """A check with its findings in one stored experiment, and tables of what it looked at; none is empty."""

    slug: str
    alias: str
    check: InstrumentCheck
    findings: tuple[Finding, ...]
    tables: tuple[Table, ...]


def true_output_tokens(recording: Recording) -> float | None:
    """Mean decode length from a trusted source (never re-tokenised), None without one."""
    trusted = pl.col("output_tokens_source").ne_missing("re-tokenised") & (pl.col("status") == "ok")
    mean = _number(recording.requests.select(pl.col("output_tokens").filter(trusted).mean()).item())
    if mean is None and recording.shared_prefix is not None and recording.ignore_eos:
        return float(recording.shared_prefix.output_tokens)
    return mean


def decode_gap_us(requests: pl.DataFrame) -> float | None:
    """Mean over requests of ``(E2E - TTFT) / (output_tokens - 1)``, us; None without such requests."""
    timed = (pl.col("output_tokens") > 1) & pl.col("output_tokens_source").ne_missing("re-tokenised")
    gap = (pl.col("e2e_us") - pl.col("ttft_us")) / (pl.col("output_tokens") - 1)
    return _number(requests.select(gap.filter(timed).mean()).item())


def recorded_decode_gap_us(recording: Recording, stage: int = -1) -> float | None:
    """The same of the completed requests of a recording, or of one stage of it."""
    requests = completed_requests(recording, "stage", *_GAP_COLUMNS)
    return decode_gap_us(requests if stage < 0 else requests.filter(pl.col("stage") == stage))


def stage_windows(recording: Recording) -> tuple[Window, ...]:
    """The steady part of each load stage: without its first 20 s and last 10 s.

    Stages follow each other as configured; where the recorded arrivals of a stage begin
    later (clients pause between stages), so does its window.  Without configured stages:
    one window over the whole run.  Too short a stage is taken whole.
    """
    if not recording.stages:
        return _whole_run(recording)
    sends = _sends_by_stage(recording)
    windows, begin_us = [], 0
    for stage in sorted(recording.stages, key=lambda s: s.stage):
        end_us = begin_us + stage.duration_us
        first_us, last_us = sends.get(stage.stage, (begin_us, end_us))
        start_us = max(begin_us + WARM_UP_US, first_us + _FIRST_ARRIVALS_US)
        stop_us = min(end_us - TAIL_US, last_us)
        if stop_us <= start_us:
            start_us, stop_us = min(begin_us, first_us), max(end_us, last_us)
        windows.append(Window(stage.stage, start_us, stop_us, stage.rate_per_s))
        begin_us = end_us
    return tuple(windows)


def _whole_run(recording: Recording) -> tuple[Window, ...]:
    low, high = _ends(recorded_requests(recording), "arrival_us")
    if low is None or high is None:
        low, high = _ends(recording.steps, "start_us")
    if low is None or high is None:
        return ()
    if high - low > 2 * (WARM_UP_US + TAIL_US):
        low, high = low + WARM_UP_US, high - TAIL_US
    return (Window(-1, low, high, None),)


def _ends(rows: Rows, column: str) -> tuple[int | None, int | None]:
    ends = rows.aggregate(first=f"min({column})", last=f"max({column})")
    return ends["first"], ends["last"]


def _sends_by_stage(recording: Recording) -> dict[int, tuple[int, int]]:
    rows = (
        recorded_requests(recording)
        .frame(["stage", "arrival_us"])
        .drop_nulls()
        .group_by("stage")
        .agg(pl.col("arrival_us").min().alias("first"), pl.col("arrival_us").max().alias("last"))
    )
    return {stage: (first, last) for stage, first, last in rows.iter_rows()}


def steps_in(recording: Recording, window: Window, *columns: str) -> Rows:
    """:func:`steps_by_start` inside a window, on the experiment's own time (see ``recording.Clock.placed``)."""
    return steps_by_start(recording, *columns).between("start_us", window.start_us, window.end_us - 1)


def steps_by_start(recording: Recording, *columns: str) -> Rows:
    """``step_id``, ``start_us`` and these columns of the step records that have both, by start."""
    steps = recording.steps.only(["step_id", "start_us", *columns])
    return steps.where("step_id IS NOT NULL AND start_us IS NOT NULL").ordered("start_us, step_id")


_INTERVALS = """
SELECT * FROM (
    SELECT *, lead(start_us) OVER by_start - start_us AS elapsed_us,
           lead(step_id) OVER by_start - step_id AS elapsed_steps
    FROM steps WINDOW by_start AS (ORDER BY start_us, step_id)
)
WHERE elapsed_us > 0 AND elapsed_steps > 0 ORDER BY start_us, step_id
"""


def step_intervals(steps: Rows) -> Rows:
    """Sampled steps with ``elapsed_us`` and ``elapsed_steps`` to the next sampled one.

    Pairs whose step number or time does not grow (a server restarted) are left out.
    """
    return query(_INTERVALS, {**steps.schema, "elapsed_us": pl.Int64, "elapsed_steps": pl.Int64}, steps=steps)


def named(window: Window) -> str:
    """``stage 1 (20 requests/s)`` or ``the run``."""
    if window.stage < 0:
        return "the run"
    return f"stage {window.stage}" + (f" ({window.rate_per_s:g} requests/s)" if window.rate_per_s else "")


def not_checked(check: str, metric: str, reason: str) -> Finding:
    """The note that a check had nothing to look at."""
    return Finding(check, "note", metric, f"not checked: {reason}", threshold=NOT_CHECKED)


def mean(frame: pl.DataFrame, column: str) -> float | None:
    """The mean of a column, None for an empty one."""
    return _number(frame[column].mean())


def mean_of(rows: Rows, column: str) -> float | None:
    """The mean of a column of whole numbers, None for an empty one."""
    of = rows.aggregate(total=f"sum({column})", count=f"count({column})")
    return of["total"] / of["count"] if of["count"] else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
