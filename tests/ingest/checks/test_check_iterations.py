"""The check of iterations: how many there are, and how many are placed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from logged import ENGINE, OVERHEAD_US, logged, served, workload

from blis_replay.ingest.checks.evidence import Context
from blis_replay.ingest.checks.server import check_iterations as check
from blis_replay.ingest.recording import ITERATION_SCHEMA, Recording
from blis_replay.ingest.rows import no_rows
from blis_replay.ingest.scratch import Scratch
from blis_replay.ingest.steps.placed import place
from blis_replay.ingest.stream import NO_EVENTS

CONTEXT = Context(NO_EVENTS, None, ())


def placed() -> Recording:
    made = logged(workload(1, rate_per_s=20.0), replace(ENGINE, async_scheduling=False))
    return replace(made, iterations=place(made, Scratch()).iterations)


def test_without_iterations_there_is_no_finding() -> None:
    assert check(replace(placed(), iterations=no_rows(ITERATION_SCHEMA)), CONTEXT) == []


def test_every_iteration_is_counted_and_placed() -> None:
    steps = served(workload(1, rate_per_s=20.0)).steps
    (finding,) = check(placed(), CONTEXT)
    assert finding.measured["iterations"] == finding.measured["placed"] == len(steps)
    elapsed_us = float((steps["end_us"] - steps["start_us"]).mean()) - OVERHEAD_US
    assert finding.measured["elapsed_us"] == pytest.approx(elapsed_us)


def test_iterations_without_times_say_so() -> None:
    (finding,) = check(logged(workload(1, 5)), CONTEXT)
    assert "when they began is not known" in finding.message
