"""All instrument checks, in the order in which their findings are stored and shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from blis_replay.ingest.checks import (
    clocks,
    completeness,
    littles_law,
    output_length,
    overload,
    prefix_cache,
    reconstruction,
    sampling,
    stationarity,
    step_clock,
    step_cycle,
    token_events,
)
from blis_replay.ingest.checks.evidence import Context, stage_windows
from blis_replay.ingest.checks.pictures import Table
from blis_replay.ingest.part_files import give_back_pages
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.token_layout import TokenLayout, detect_layout, event_totals


@dataclass(frozen=True)
class InstrumentCheck:
    """One check: its name, what it measures, its thresholds and why, and its two functions.

    ``run``: the findings of a recording; ``pictures``: the numbers behind them, for ``inspect --check``.
    """

    name: str
    measures: str
    rule: str
    run: Callable[[Recording, Context], list[Finding]]
    pictures: Callable[[Recording, Context], tuple[Table, ...]]


CHECKS = tuple(
    InstrumentCheck(module.CHECK, module.MEASURES, module.RULE, module.check, module.pictures)
    for module in (
        overload,
        token_events,
        output_length,
        step_clock,
        step_cycle,
        reconstruction,
        littles_law,
        sampling,
        clocks,
        stationarity,
        completeness,
        prefix_cache,
    )
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
        findings += [_finite(finding) for finding in check.run(recording, context)]
        give_back_pages()
    return tuple(findings), layout


def _finite(finding: Finding) -> Finding:
    """The finding with numbers that JSON can hold: no NaN, no infinity."""
    measured = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in finding.measured.items()
    }
    return replace(finding, measured=measured)
