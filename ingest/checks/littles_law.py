"""Check 4: requests in the engine by its step records against requests in flight by their sends and ends.

Little's law, depth = throughput times residence, without its steady state: over any window, throughput times
residence is the time that requests were in flight in it over its length.  A residence begins with
the send, so depth counts the waiting requests too.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from blis_replay.base.arrays import Floats, Int64s
from blis_replay.ingest.checks.evidence import (
    Context,
    Measured,
    Window,
    equal_windows,
    mean,
    named,
    not_checked,
    requests_in,
    seconds,
    step_intervals,
    steps_in,
)
from blis_replay.ingest.recording import Finding, Recording, Severity
from blis_replay.ingest.served import completed_requests, recorded_requests
from blis_replay.ingest.tables import Table, columns_named

CHECK = "littles_law"
MEASURES = "running and waiting depth against requests in flight (throughput times residence), per load stage"
CONSISTENT = 0.03
CONTRADICTORY = 0.10
_FEWEST = 30
RULE = (
    "within 3 % is consistent (a request also spends time before the queue and after its last token); beyond 10 % "
    "steps and requests cannot be of the same run, or one of them is incomplete, unless at the recorded steps "
    "themselves the two agree"
)


def check(recording: Recording, context: Context) -> list[Finding]:
    """Depth over (throughput x residence) per load stage, in its steady window."""
    if recording.steps.is_empty() or completed_requests(recording, "status").is_empty():
        return [not_checked(CHECK, "", "it takes step records and completed requests")]
    findings = [_of_window(recording, window) for window in context.windows]
    judged = [finding for finding in findings if finding is not None]
    return judged or [not_checked(CHECK, "", f"fewer than {_FEWEST} steps or requests in every load stage")]


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Depth and requests in flight in the steady windows and in twelfths of the run."""
    if recording.steps.is_empty() or completed_requests(recording, "status").is_empty():
        return ()
    rows: list[tuple[str | float, ...]] = []
    for window in (*context.windows, *equal_windows(recording, 12)):
        finding = _of_window(recording, window)
        if finding is not None:
            of = finding.measured
            shown = [float(of[name] or 0) for name in ("mean_depth", "mean_waiting", "in_flight")]
            rows.append((seconds(window), *(round(value, 2) for value in shown), round(float(of["ratio"] or 0), 3)))
    columns = ("seconds", "running", "waiting", "in flight", "ratio")
    note = "the steady windows of the load stages, then twelfths of the run"
    return (Table("Little's law by window", columns_named(*columns), tuple(rows), bars="ratio", note=note),)


def _of_window(recording: Recording, window: Window) -> Finding | None:
    depths = _depths(recording, window)
    sent = requests_in(completed_requests(recording, "arrival_us", "e2e_us"), window).drop_nulls("e2e_us")
    if depths["intervals"] < _FEWEST or sent.height < _FEWEST:
        return None
    depth, waiting = (_over_time(depths, name) for name in ("running_depth", "waiting_depth"))
    in_flight = _in_flight(recording, window)
    ratio = (depth + waiting) / in_flight
    measured: Measured = {
        "stage": window.stage,
        "mean_depth": depth,
        "mean_waiting": waiting,
        "in_flight": in_flight,
        "throughput_per_s": 1e6 * sent.height / (window.end_us - window.start_us),
        "residence_us": mean(sent, "e2e_us"),
        "ratio": ratio,
    }
    counted = (
        f"{named(window)}: {depth:.1f} running and {waiting:.1f} waiting requests are {ratio:.3f} of those in flight"
    )
    message = f"{counted} ({in_flight:.1f}): {_verdict(ratio)}"
    severity: Severity = "note"
    if abs(ratio - 1) > CONTRADICTORY:
        at_steps = measured["ratio_at_steps"] = _ratio_at_steps(recording, window)
        in_engine = _in_engine(recording, window)
        if in_engine is not None and abs((depth + waiting) / in_engine - 1) <= CONTRADICTORY:
            measured["in_engine"] = in_engine
            outside = (
                f"by their journeys {in_engine:.1f} are in the engine, the others before or behind it: a client or an "
                "API server that is slow, or a server that stood still"
            )
            message = f"{counted} ({in_flight:.1f}), and {outside}"
        elif not -CONTRADICTORY <= at_steps - 1 <= CONSISTENT:
            # A request is in flight before the engine has it and after; the other way round one was not recorded.
            severity = "unusable"
        else:
            few = f"{at_steps:.3f} of those in flight when the recorded steps began, which are too few to tell the rest"
            message = f"{counted} ({in_flight:.1f}): doubtful; {few}"
    return Finding(CHECK, severity, "", message, measured, RULE)


def _depths(recording: Recording, window: Window) -> dict[str, int]:
    """``intervals`` with a running depth; of each depth its sum over time, and ``*_us``, the time that it is known.

    The last step before a pause lasts as long as a request is in flight, and not until the next one begins.
    """
    intervals = step_intervals(steps_in(recording, window, "running_depth", "waiting_depth"))
    frame = intervals.frame(["start_us", "elapsed_us", "running_depth", "waiting_depth"]).drop_nulls("running_depth")
    begin_us, elapsed_us = frame["start_us"].to_numpy(), frame["elapsed_us"].to_numpy()
    pauses_us = _pauses(recording, window)
    idle_us = _paused_before(pauses_us, begin_us + elapsed_us) - _paused_before(pauses_us, begin_us)
    busy_us = np.maximum(elapsed_us - idle_us, 0)
    # A pause counts as well: nothing ran and nothing waited in it.
    sums = {"intervals": frame.height}
    for name in ("running_depth", "waiting_depth"):
        sums[name] = int((frame[name].fill_null(0).to_numpy() * busy_us).sum())
        sums[f"{name}_us"] = int(elapsed_us[frame[name].is_not_null().to_numpy()].sum())
    return sums


def _ratio_at_steps(recording: Recording, window: Window) -> float:
    """Depth at the recorded steps over the requests in flight when these began; so few steps may be no fair sample."""
    steps = steps_in(recording, window, "running_depth", "waiting_depth").frame().drop_nulls("running_depth")
    spans = recorded_requests(recording).select("arrival_us", "e2e_us").drop_nulls()
    sent_us, ended_us = np.sort(spans["arrival_us"]), np.sort(spans["arrival_us"] + spans["e2e_us"])
    start_us = steps["start_us"].to_numpy()
    in_flight = np.searchsorted(sent_us, start_us, side="right") - np.searchsorted(ended_us, start_us, side="right")
    depth = steps["running_depth"] + steps["waiting_depth"].fill_null(0)
    return float(depth.to_numpy().sum() / max(int(in_flight.sum()), 1))


def _pauses(recording: Recording, window: Window) -> Int64s:
    """int64[pauses, 2]: from when until when no request was in flight."""
    spans = recorded_requests(recording).select("arrival_us", "e2e_us").drop_nulls().sort("arrival_us")
    sent_us = spans["arrival_us"].to_numpy()
    ended_us = np.maximum.accumulate(sent_us + spans["e2e_us"].to_numpy())
    from_us, until_us = ended_us[:-1], sent_us[1:]
    within = (until_us > from_us) & (until_us > window.start_us) & (from_us < window.end_us)
    return np.column_stack([from_us[within], until_us[within]])


def _paused_before(pauses_us: Int64s, times_us: Int64s) -> Floats:
    """float64[times]: how long the pauses before each time lasted together, us."""
    if not len(pauses_us):
        return np.zeros(len(times_us))
    paused_us = np.insert(pauses_us[:, 1] - pauses_us[:, 0], np.arange(len(pauses_us)), 0).cumsum()
    return np.asarray(np.interp(times_us, pauses_us.ravel(), paused_us), np.float64)


def _over_time(depths: dict[str, int], name: str) -> float:
    """The mean of a depth, each step weighted by the time to the next; 0 where it is not recorded."""
    return depths[name] / depths[f"{name}_us"] if depths[f"{name}_us"] else 0.0


def _in_flight(recording: Recording, window: Window) -> float:
    """Mean number of requests between their send and their end, however they ended; at least one is."""
    sent_us = pl.col("arrival_us")
    return _at_once(recorded_requests(recording).select(begin=sent_us, end=sent_us + pl.col("e2e_us")), window)


# Fewer journeys than this share of the requests do not tell how many were in the engine.
_NEARLY_ALL = 0.9


def _in_engine(recording: Recording, window: Window) -> float | None:
    """Mean number of requests between queueing and their last token by their journeys; None where those are not known.

    A stamp that is not between a request's send and its end is of another clock, or of another request.
    """
    requests = recorded_requests(recording).select("request_index", "arrival_us", "e2e_us").drop_nulls()
    journeys = recording.lifecycles.frame(["request_index", "queued_us", "finished_us"]).drop_nulls()
    both = requests.join(journeys.unique("request_index", keep="none"), on="request_index", how="left")
    end_us = pl.col("arrival_us") + pl.col("e2e_us")
    within = both.filter(pl.col("queued_us") >= pl.col("arrival_us"), pl.col("finished_us") <= end_us)
    if within.height < _NEARLY_ALL * requests.height or within.is_empty():
        return None
    return _at_once(within.select(begin=pl.col("queued_us"), end=pl.col("finished_us")), window)


def _at_once(spans: pl.DataFrame, window: Window) -> float:
    """Mean number of spans, ``begin`` to ``end`` in us, that are open in the window; at least one is for 1 us."""
    until_us = pl.min_horizontal(pl.col("end"), window.end_us)
    within_us = (until_us - pl.max_horizontal(pl.col("begin"), window.start_us)).clip(0)
    return max(float(spans.select(within_us.sum()).item()), 1.0) / (window.end_us - window.start_us)


def _verdict(ratio: float) -> str:
    if abs(ratio - 1) <= CONSISTENT:
        return "consistent"
    return "doubtful" if abs(ratio - 1) <= CONTRADICTORY else "contradictory, do not join steps and requests"
