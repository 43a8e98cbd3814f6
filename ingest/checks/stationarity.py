"""Check 7: cold start, load stages, drift and stalls; reported per window, never left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import polars as pl

from blis_replay.base.errors import counted
from blis_replay.ingest.checks.evidence import (
    Context,
    Measured,
    Window,
    mean,
    named,
    not_checked,
    step_intervals,
    steps_in,
)
from blis_replay.ingest.overload import client_limits
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.rows import query, rows_of
from blis_replay.ingest.served import by_arrival, completed_requests, recorded_requests, stretches
from blis_replay.ingest.steps.records import is_asynchronous

CHECK = "stationarity"
MEASURES = "cold start, load stages, drift and stalls, per window; nothing is left out because of them"
RULE = (
    "cold start: first 10 s slower than what follows 20 s by 5 %; drift: last fifth against first fifth of a "
    "settled stage by 10 % in E2E or 25 % in TTFT; stall: a gap that a Poisson stream shows once in a thousand runs"
)
COLD_US = 10_000_000
SETTLED_US = 20_000_000
SLOWER = 1.05
DRIFT = 1.10
TTFT_DRIFT = 1.25
STALL_US = 1_000_000
_FEWEST = 10
# Of requests: what is sorted and filtered is copied.
_COLUMNS = ("stage", "arrival_us", "ttft_us", "e2e_us")
# A Poisson stream of n arrivals has a gap above (ln n + 7) mean gaps once in a thousand such streams.
_GAP_MARGIN = 7.0


def check(recording: Recording, context: Context) -> list[Finding]:
    """Findings on cold start, on several load stages, on drift and on stalls."""
    requests = completed_requests(recording, *_COLUMNS).drop_nulls(["arrival_us", "e2e_us"])
    findings = [*_load_stages(requests), *_closed_loop(recording), *_step_stalls(recording, context)]
    for window in context.windows:
        of_stage = _of_stage(requests, window)
        if of_stage.is_empty():
            continue
        sent = _of_stage(recorded_requests(recording).frame(["stage", "arrival_us"]), window)
        finishes = (of_stage["arrival_us"] + of_stage["e2e_us"]).sort()
        within = finishes.is_between(window.start_us, window.end_us, "left")
        findings += [
            *_cold_start(of_stage, window),
            *_drift(of_stage, window),
            *_long_gaps(sent["arrival_us"].drop_nulls().sort(), window, "no request was sent"),
            *_long_gaps(finishes.filter(within), window, "no request finished"),
            *_late_together(of_stage, window),
        ]
    if requests.is_empty():
        findings.append(not_checked(CHECK, "", "no completed requests with times"))
    elif not findings:
        findings.append(Finding(CHECK, "note", "", "one load level, no cold start, drift or stall", {}, RULE))
    return findings


def _of_stage(requests: pl.DataFrame, window: Window) -> pl.DataFrame:
    return requests if window.stage < 0 else requests.filter(pl.col("stage") == window.stage)


def _load_stages(requests: pl.DataFrame) -> list[Finding]:
    stages = (
        requests.drop_nulls("stage")
        .group_by("stage")
        .agg(pl.len().alias("n"), pl.col("e2e_us").mean().alias("e2e_us"), pl.col("ttft_us").mean().alias("ttft_us"))
    )
    if stages.height < 2:
        return []
    measured: Measured = {}
    for stage, n, e2e_us, ttft_us in stages.sort("stage").iter_rows():
        measured |= {f"stage_{stage}_requests": n, f"stage_{stage}_e2e_us": e2e_us, f"stage_{stage}_ttft_us": ttft_us}
    e2e = " / ".join(f"{value / 1e3:.0f}" for value in stages.sort("stage")["e2e_us"])
    message = f"{stages.height} load stages with mean E2E {e2e} ms: quantiles of the whole run mix them"
    return [Finding(CHECK, "note", "", message, measured, "more than one load stage")]


def _closed_loop(recording: Recording) -> Iterator[Finding]:
    """A client that sent a request only when another was done: its sends follow the server's pace."""
    for limit in client_limits(recording) if _follow_ends(recording) else ():
        where = "the run" if limit.stage is None else f"stage {limit.stage}"
        message = (
            f"{where}: a closed loop, the client kept {counted(limit.in_flight, 'request')} in flight from "
            f"{limit.from_us / 1e6:.1f} s on; a replay of its sends amplifies an error of the pace"
        )
        yield Finding(CHECK, "note", "", message, vars(limit), "one number in flight for most of a stage")


_AT_ONCE_US = 5_000  # from the end of a request to the next send of a client
_MOSTLY = 0.5  # share of the sends


def _follow_ends(recording: Recording) -> bool:
    """Whether most sends come right when another request is done; those at a constant rate do not."""
    spans = recorded_requests(recording).select("arrival_us", "e2e_us").drop_nulls()
    sent_us, ended_us = spans["arrival_us"].to_numpy(), np.sort(spans["arrival_us"] + spans["e2e_us"])
    last = np.searchsorted(ended_us, sent_us, side="right") - 1
    return bool(((last >= 0) & (sent_us - ended_us[last] <= _AT_ONCE_US)).mean() > _MOSTLY) if len(spans) else False


def _cold_start(requests: pl.DataFrame, window: Window) -> list[Finding]:
    since_start = pl.col("arrival_us") - pl.col("arrival_us").min()
    aged = requests.with_columns(since_start.alias("age_us"))
    early, late = aged.filter(pl.col("age_us") < COLD_US), aged.filter(pl.col("age_us") >= SETTLED_US)
    if early.height < _FEWEST or late.height < _FEWEST:
        return []
    e2e_ratio, ttft_ratio = (_ratio(early, late, column) for column in ("e2e_us", "ttft_us"))
    slower = [ratio for ratio in (e2e_ratio, ttft_ratio) if ratio is not None and ratio > SLOWER]
    if not slower:
        return []
    measured: Measured = {"stage": window.stage, "e2e_ratio": e2e_ratio, "ttft_ratio": ttft_ratio}
    for name, low, high in (("0_3_s", 0, 3), ("3_10_s", 3, 10), ("10_20_s", 10, 20), ("later", 20, math.inf)):
        part = aged.filter((pl.col("age_us") >= low * 1e6) & (pl.col("age_us") < high * 1e6))
        measured |= {f"e2e_{name}_us": mean(part, "e2e_us"), f"ttft_{name}_us": mean(part, "ttft_us")}
    taken = {"E2E": e2e_ratio, "TTFT": ttft_ratio}
    longer = " and ".join(f"{_times(ratio)} the {name}" for name, ratio in taken.items() if ratio in slower)
    message = f"{named(window)}: cold start, requests of the first 10 s take {longer} of those after 20 s"
    return [Finding(CHECK, "note", "e2e", message, measured, RULE)]


def _drift(requests: pl.DataFrame, window: Window) -> list[Finding]:
    settled = by_arrival(requests.filter(pl.col("arrival_us").is_between(window.start_us, window.end_us, "left")))
    fifth = settled.height // 5
    if fifth < _FEWEST:
        return []
    first, last = settled.head(fifth), settled.tail(fifth)
    e2e_ratio, ttft_ratio = (_ratio(last, first, column) for column in ("e2e_us", "ttft_us"))
    if not (_outside(e2e_ratio, DRIFT) or _outside(ttft_ratio, TTFT_DRIFT)):
        return []
    measured: Measured = {"stage": window.stage, "e2e_ratio": e2e_ratio, "ttft_ratio": ttft_ratio}
    message = (
        f"{named(window)}: drift from second {window.start_us / 1e6:.0f} to {window.end_us / 1e6:.0f}, the last fifth "
        f"takes {_times(e2e_ratio)} the E2E and {_times(ttft_ratio)} the TTFT of the first"
    )
    return [Finding(CHECK, "note", "e2e", message, measured, RULE)]


def _long_gaps(times_us: pl.Series, window: Window, what: str) -> list[Finding]:
    if times_us.len() < 5 * _FEWEST:
        return []
    gaps_us = times_us.diff().drop_nulls()
    longest_us, mean_us = float(gaps_us.max()), float(gaps_us.mean())  # type: ignore[arg-type]
    limit_us = max(STALL_US, mean_us * (math.log(gaps_us.len()) + _GAP_MARGIN))
    if longest_us <= limit_us:
        return []
    at_us = int(times_us[int(gaps_us.arg_max() or 0)])
    measured: Measured = {
        "stage": window.stage,
        "gap_us": longest_us,
        "at_us": at_us,
        "limit_us": limit_us,
        "gaps_above_limit": int((gaps_us > limit_us).sum()),
    }
    message = f"{named(window)}: {what} for {longest_us / 1e6:.1f} s from {at_us / 1e6:.1f} s on"
    return [Finding(CHECK, "note", "", message, measured, RULE)]


_LATE_TOGETHER = 3  # requests that end late one after the other
_TIMES_USUAL = 5  # of the median E2E: so late a request stood still, or waited behind one that did
_LATE_RULE = "three requests in a row, by their sends, that take 1 s and five times the median longer than it"


def _late_together(requests: pl.DataFrame, window: Window) -> list[Finding]:
    """Neighbours that all took far longer than usual once: a stall of the server or of the client."""
    sent = by_arrival(requests)
    e2e_us = sent["e2e_us"].to_numpy()
    usual_us = float(np.median(e2e_us))
    late = e2e_us - usual_us > max(STALL_US, _TIMES_USUAL * usual_us)
    runs = [(first, last + 1) for first, last in stretches(late) if last + 1 - first >= _LATE_TOGETHER]
    if not runs:
        return []
    requests_late, longest_us = sum(end - first for first, end in runs), float(e2e_us[late].max() - usual_us)
    at_us = int(sent["arrival_us"][runs[0][0]])
    message = (
        f"{named(window)}: a stall, {counted(requests_late, 'request')} in {counted(len(runs), 'group')} took up to "
        f"{longest_us / 1e6:.1f} s longer than usual, the first sent at {at_us / 1e6:.1f} s"
    )
    measured: Measured = {"requests": requests_late, "groups": len(runs), "longest_us": longest_us, "at_us": at_us}
    return [Finding(CHECK, "note", "e2e", message, measured, _LATE_RULE)]


# Steps of as many tokens, to the power of two; -1 where other steps lie between two samples, or no tokens are known.
_SIZED = """
SELECT *, elapsed_us / elapsed_steps AS cycle_us, CASE WHEN elapsed_steps > 1 OR tokens IS NULL THEN -1
    ELSE floor(log2(greatest(tokens, 1)))::INT END AS size
FROM (SELECT *, lag(prefill_tokens + decode_tokens, $behind) OVER (ORDER BY start_us, step_id) AS tokens FROM intervals)
"""
# Counted, as the database would have all values of ten million steps in memory for their median.
_CYCLES = "SELECT size, cycle_us, count(*) AS steps FROM sized GROUP BY size, cycle_us ORDER BY cycle_us"
_EXCESS = """
SELECT *, elapsed_us - usual_us * elapsed_steps AS excess_us FROM sized JOIN usual USING (size)
WHERE elapsed_steps > 1 OR elapsed_us > 2 * usual_us
"""
_LEAST_ALIKE = 5  # steps of a size that tell what is usual for it


def steps_behind(recording: Recording) -> int:
    """How many steps before the one that is scheduled runs until the next is: asynchronously one."""
    return int(is_asynchronous(recording))


def usual_us(cycles: Mapping[int, tuple[float, int]], of_all_us: float) -> dict[int, float]:
    """What a step of each size usually takes, us: at least ``of_all_us``, the median of all.

    ``cycles``: by the power of two of a step's tokens (-1: not known) the median, us, and how many there are.  For a
    size with too few steps the next smaller one tells: what that takes above the median grows with its tokens.
    """
    usual, more_us, known = {}, 0.0, 0
    for size, (median_us, steps) in sorted(cycles.items()):
        if size >= 0 and steps >= _LEAST_ALIKE:
            more_us, known = max(median_us - of_all_us, 0.0), size
        usual[size] = of_all_us + more_us * 2.0 ** max(size - known, 0)
    return usual


def _median(values: pl.Series, counts: pl.Series) -> float:
    """The median of ascending ``values``, each repeated ``counts`` times."""
    upto = counts.cum_sum()
    middle = [int(upto.search_sorted(place + 1)) for place in (int(upto[-1] - 1) // 2, int(upto[-1]) // 2)]
    return float(values[middle[0]] + values[middle[1]]) / 2


def _step_stalls(recording: Recording, context: Context) -> Iterator[Finding]:
    for window in context.windows:
        steps = steps_in(recording, window, "running_depth", "prefill_tokens", "decode_tokens")
        intervals = step_intervals(steps).where("running_depth > 0")
        sized = query(
            _SIZED,
            {**intervals.schema, "tokens": pl.Int64, "cycle_us": pl.Float64, "size": pl.Int32},
            {"behind": steps_behind(recording)},
            intervals=intervals,
        )
        counted_cycles = {"size": pl.Int32, "cycle_us": pl.Float64, "steps": pl.Int64}
        cycles = query(_CYCLES, counted_cycles, sized=sized).frame()
        if cycles["steps"].sum() < _FEWEST:
            continue
        of_all_us = _median(*cycles.group_by("cycle_us").agg(pl.col("steps").sum()).sort("cycle_us"))
        tables = {int(size): (of["cycle_us"], of["steps"]) for (size,), of in cycles.group_by("size")}
        usual = usual_us({size: (_median(*of), int(of[1].sum())) for size, of in tables.items()}, of_all_us)
        frame = pl.DataFrame(
            {"size": list(usual), "usual_us": list(usual.values())}, schema_overrides={"size": pl.Int32}
        )
        columns = {**sized.schema, "usual_us": pl.Float64, "excess_us": pl.Float64}
        worst = query(_EXCESS, columns, sized=sized, usual=rows_of(frame)).aggregate(
            excess_us="max(excess_us)",
            step_id="arg_max(step_id, excess_us)",
            steps="arg_max(elapsed_steps, excess_us)",
            usual_us="arg_max(usual_us, excess_us)",
        )
        if worst["excess_us"] and worst["excess_us"] > STALL_US:
            yield _stall(window, worst)


def _stall(window: Window, worst: dict[str, float]) -> Finding:
    measured: Measured = {
        "stage": window.stage,
        "step_id": int(worst["step_id"]),
        "excess_us": worst["excess_us"],
        "usual_cycle_us": worst["usual_us"],
    }
    steps, longer = int(worst["steps"]), f"{worst['excess_us'] / 1e6:.1f} s more than usual"
    what = f"the engine stood still for {longer} after step {measured['step_id']}"
    # That may be many steps which each took less than twice the usual time.
    if steps > 1 and worst["excess_us"] < steps * worst["usual_us"]:
        what = f"{counted(steps - 1, 'step')} after step {measured['step_id']} without a record took {longer}"
    rule = "1 s more than usual between two samples, of one step also twice what steps of as many tokens take"
    return Finding(CHECK, "note", "", f"{named(window)}: {what}", measured, rule)


def stood_still(findings: Iterable[Finding]) -> bool:
    """Whether recorded steps show that the engine stood still."""
    return any(finding.check == CHECK and "excess_us" in finding.measured for finding in findings)


def _ratio(above: pl.DataFrame, below: pl.DataFrame, column: str) -> float | None:
    top, bottom = mean(above, column), mean(below, column)
    return top / bottom if top is not None and bottom else None


def _outside(ratio: float | None, factor: float) -> bool:
    return ratio is not None and not 1 / factor <= ratio <= factor


def _times(ratio: float | None) -> str:
    return "an unknown multiple of" if ratio is None else f"{ratio:.2f} times"
