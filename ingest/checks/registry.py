"""All instrument checks, in the order in which their findings are stored and shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from blis_replay.ingest.checks import (
    completeness,
    littles_law,
    output_length,
    overload,
    prefix_cache,
    stationarity,
    step_cycle,
    token_events,
)
from blis_replay.ingest.checks.evidence import Context, stage_windows
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.token_layout import TokenLayout, detect_layout, event_totals

Check = Callable[[Recording, Context], list[Finding]]

CHECKS: tuple[Check, ...] = (
    overload.check,
    token_events.check,
    output_length.check,
    step_cycle.check,
    littles_law.check,
    stationarity.check,
    completeness.check,
    prefix_cache.check,
)


def run_checks(recording: Recording) -> tuple[tuple[Finding, ...], TokenLayout]:
    """What every check found, and the layout by which the store numbers token events.

    Reads the recording's file of token events, if it has one, and nothing else.
    """
    layout = detect_layout(recording.token_events, recording.requests)
    events = recording.token_events
    totals = None if events is None else event_totals(events, recording.requests, layout)
    context = Context(layout, totals, stage_windows(recording))
    return tuple(_finite(finding) for check in CHECKS for finding in check(recording, context)), layout


def _finite(finding: Finding) -> Finding:
    """The finding with numbers that JSON can hold: no NaN, no infinity."""
    measured = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in finding.measured.items()
    }
    return replace(finding, measured=measured)
