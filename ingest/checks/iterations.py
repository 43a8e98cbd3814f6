"""Iterations in the server's log: when they began, and what their elapsed time is worth."""

from __future__ import annotations

import polars as pl

from blis_replay.ingest.checks.evidence import Context, Measured
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.rows import Rows, query
from blis_replay.ingest.steps.records import is_asynchronous
from blis_replay.ingest.tables import Table, columns_named

CHECK = "iterations"
MEASURES = "steps in the server's log: when they began, and their elapsed time against the step cycle"
RULE = (
    "elapsed time is what the engine waited for the model. It leaves out schedule(), the processing of outputs and, "
    "with asynchronous scheduling, what ran before the wait. So it is a lower bound of the cycle and no step time. "
    "The log stamps whole seconds: starts are worked out from arrivals, times of tokens and the server's own "
    "durations, and lie at most the stated uncertainty from the true ones"
)
_CYCLES = """
SELECT * FROM (
    SELECT *, lead(start_us) OVER by_index - start_us AS cycle_us, lead(decode_requests) OVER by_index > 0 AS goes_on
    FROM steps WHERE NOT dummy WINDOW by_index AS (ORDER BY engine, iteration)
)
WHERE cycle_us > 0 AND goes_on AND decode_requests > 0
"""


def check(recording: Recording, context: Context) -> list[Finding]:
    """One finding where the log has iterations: how many, how many of them placed, elapsed time and cycle."""
    rows = recording.iterations
    if rows.is_empty():
        return []
    measured: Measured = rows.aggregate(
        iterations="count(*)",
        engines="count(DISTINCT engine)",
        dummies="count(*) FILTER (dummy)",
        placed="count(start_us)",
        uncertainty_us="median(uncertainty_us)",
        elapsed_us="avg(elapsed_us)",
    )
    cycles = _cycles(rows).aggregate(cycle_us="avg(cycle_us)", elapsed_of_cycle="sum(elapsed_us) / sum(cycle_us)")
    measured |= cycles | {"asynchronous": int(is_asynchronous(recording))}
    return [Finding(CHECK, "note", "step_time", _sentence(measured), measured, RULE)]


def evidence_tables(recording: Recording, context: Context) -> tuple[Table, ...]:
    """Elapsed time and cycle by decoding requests, over steps that decode and are followed by one that does."""
    binned = (
        "SELECT decode_requests // 4 * 4 AS depth, count(*) AS steps, avg(cycle_us) AS cycle_us, "
        "avg(elapsed_us) AS elapsed_us FROM steps GROUP BY depth ORDER BY depth"
    )
    schema = {"depth": pl.Int64, "steps": pl.Int64, "cycle_us": pl.Float64, "elapsed_us": pl.Float64}
    rows = query(binned, schema, steps=_cycles(recording.iterations)).frame().rows()
    return (
        Table(
            "elapsed time and step cycle by decoding requests",
            columns_named("decoding", "steps", "cycle ms", "elapsed ms"),
            tuple(
                (f"{depth} to {depth + 3}", steps, round(cycle / 1e3, 3), round(elapsed / 1e3, 3))
                for depth, steps, cycle, elapsed in rows
            ),
            bars="cycle ms",
        ),
    )


def _cycles(rows: Rows) -> Rows:
    schema = {**rows.schema, "cycle_us": pl.Int64, "goes_on": pl.Boolean}
    return query(_CYCLES, schema, steps=rows)


def _sentence(measured: Measured) -> str:
    several = f" of {measured['engines']} engines" if int(measured["engines"] or 0) > 1 else ""
    dummies = f", {measured['dummies']:,} of them without requests" if measured["dummies"] else ""
    message = f"{measured['iterations']:,} iterations{several}{dummies}; "
    if not measured["placed"]:
        message += "when they began is not known"
    else:
        uncertainty_ms = float(measured["uncertainty_us"] or 0) / 1e3
        message += f"{measured['placed']:,} are placed, the median to within {uncertainty_ms:.1f} ms"
    if (share := measured["elapsed_of_cycle"]) is not None:
        cycle_ms = float(measured["cycle_us"] or 0) / 1e3
        message += f"; their elapsed time is {100 * float(share):.0f} % of the cycle of {cycle_ms:.2f} ms"
    if measured["asynchronous"]:
        message += ", and with asynchronous scheduling it is not the step either"
    return message
