"""All instrument checks, in the order in which their findings are stored and shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import polars as pl

from blis_replay.base.errors import UnknownCheckError
from blis_replay.ingest.checks import (
    clocks,
    completeness,
    ledger,
    output_length,
    overload,
    prefix_cache,
    stationarity,
    token_events,
)
from blis_replay.ingest.checks.evidence import CheckEvidence, Context, InstrumentCheck, stage_windows
from blis_replay.ingest.checks.server import ARGUMENTS, ITERATIONS, METRICS, RECORDER
from blis_replay.ingest.checks.step_times import STEP_CLOCK, STEP_CYCLE
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.scratch import give_back
from blis_replay.ingest.store.file import Store, fetch
from blis_replay.ingest.store.recordings import read_stored, read_token_layout
from blis_replay.ingest.stream import TokenLayout, detect_layout, event_totals


def _of(module: Any) -> InstrumentCheck:
    """The check that a module is."""
    tables = {"evidence_tables": module.evidence_tables} if hasattr(module, "evidence_tables") else {}
    return InstrumentCheck(module.CHECK, module.MEASURES, module.RULE, module.check, **tables)


CHECKS = (
    _of(overload),
    _of(ledger),
    _of(token_events),
    _of(output_length),
    STEP_CLOCK,
    STEP_CYCLE,
    ITERATIONS,
    _of(clocks),
    _of(stationarity),
    _of(completeness),
    _of(prefix_cache),
    METRICS,
    ARGUMENTS,
    RECORDER,
)


def run_checks(recording: Recording) -> tuple[tuple[Finding, ...], TokenLayout]:
    """What every check found, and the layout by which the store numbers token events.

    Reads the recording's file of token events, if it has one, and nothing else.
    """
    layout = detect_layout(recording.token_events, recording.requests)
    events = recording.token_events
    totals = None if events is None else event_totals(events, recording.requests, layout)
    context = Context(layout, totals, stage_windows(recording))
    findings = []
    for check in CHECKS:
        give_back()  # the numbers that a check compares are many
        findings += [_finite(finding) for finding in check.run(recording, context)]
    return tuple(findings), layout


def _finite(finding: Finding) -> Finding:
    """The finding with numbers that JSON can hold: no NaN, no infinity."""
    measured = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in finding.measured.items()
    }
    return replace(finding, measured=measured)


def check_names() -> dict[str, str]:
    """Every instrument check by name, with what it measures."""
    return {check.name: check.measures for check in CHECKS}


def named_check(name: str, *others: InstrumentCheck) -> InstrumentCheck:
    """The check of that name, among ``others`` too; ``UnknownCheckError`` names those there are."""
    for check in (*CHECKS, *others):
        if check.name == name:
            return check
    names = ", ".join(check.name for check in (*CHECKS, *others))
    raise UnknownCheckError(f"no instrument check is called {name or repr(name)}; there are {names}")


def check_evidence(
    store: Store, slug: str, checks: Iterable[InstrumentCheck], recording: Recording | None = None
) -> tuple[CheckEvidence, ...]:
    """The evidence of each check; ``UnknownExperimentError`` for a slug that is not stored.

    ``recording``: as stored, where it was read already.
    """
    recording = (recording or read_stored(store, slug)).in_memory()
    context = Context(read_token_layout(store, slug), None, stage_windows(recording), stamp_gaps(store, slug))
    answers = []
    for check in checks:
        findings = tuple(finding for finding in recording.findings if finding.check == check.name)
        tables = tuple(table for table in check.evidence_tables(recording, context) if table.rows)
        answers.append(CheckEvidence(slug, recording.alias, check, findings, tables))
    return tuple(answers)


# Four bins a decade, from 1 us on; what is below is counted in the first.
_STAMP_GAPS = """
WITH gaps AS (
    SELECT time_us - lag(time_us) OVER (PARTITION BY request_index ORDER BY event_index) AS gap_us
    FROM token_events WHERE slug = $slug
)
SELECT floor(4 * log10(greatest(gap_us, 1)))::BIGINT AS bin, count(*) AS count
FROM gaps WHERE gap_us IS NOT NULL GROUP BY bin
"""


def stamp_gaps(store: Store, slug: str) -> pl.DataFrame:
    """``low_us``, ``count``: gaps between a request's stream stamps, tokens or not, in four bins a decade.

    Bins without a gap between two with one are there with 0; no rows without stamps.
    """
    bins = fetch(store.connection, _STAMP_GAPS, {"slug": slug}, {"bin": pl.Int64, "count": pl.Int64})
    if bins.is_empty():
        return pl.DataFrame(schema={"low_us": pl.Float64, "count": pl.Int64})
    low, high = int(bins["bin"].min()), int(bins["bin"].max())  # type: ignore[arg-type]
    every = pl.DataFrame({"bin": range(low, high + 1)}, schema={"bin": pl.Int64})
    return every.join(bins, on="bin", how="left", maintain_order="left").select(
        (10 ** (pl.col("bin") / 4)).alias("low_us"), pl.col("count").fill_null(0)
    )
