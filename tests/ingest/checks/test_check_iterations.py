"""The check of iterations: how many are placed, and what their elapsed time is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from logged import ENGINE, OVERHEAD_US, logged, served, workload

from blis_replay.ingest.checks.evidence import Context
from blis_replay.ingest.checks.server import check_iterations as check
from blis_replay.ingest.checks.server import iterations_tables as evidence_tables
from blis_replay.ingest.recording import ITERATION_SCHEMA, Recording
from blis_replay.ingest.rows import Scratch, no_rows
from blis_replay.ingest.steps.placed import place
from blis_replay.ingest.stream import NO_EVENTS

CONTEXT = Context(NO_EVENTS, None, ())


def placed(asynchronous: bool = False) -> Recording:
    made = logged(workload(1, rate_per_s=20.0), replace(ENGINE, async_scheduling=asynchronous))
    return replace(made, iterations=place(made, Scratch()).iterations)


def test_without_iterations_there_is_no_finding() -> None:
    assert check(replace(placed(), iterations=no_rows(ITERATION_SCHEMA)), CONTEXT) == []


def test_elapsed_time_is_a_part_of_the_cycle() -> None:
    """Of each step 0.3 ms are not waited for; the cycle is that of the starts that were worked out."""
    steps = served(workload(1, rate_per_s=20.0)).steps
    (finding,) = check(placed(), CONTEXT)
    cycles_us = steps["end_us"] - steps["start_us"]
    assert finding.measured["iterations"] == finding.measured["placed"] == len(steps)
    assert finding.measured["elapsed_us"] == pytest.approx(float(cycles_us.mean()) - OVERHEAD_US)
    share = finding.measured["elapsed_of_cycle"]
    assert isinstance(share, float)
    assert 0.9 < share < 1
    assert "their elapsed time is 9" in finding.message
    assert "asynchronous" not in finding.message
    assert "no step time" in " ".join(finding.threshold.split())


def test_with_asynchronous_scheduling_it_is_not_the_step_either() -> None:
    (finding,) = check(placed(asynchronous=True), CONTEXT)
    assert finding.message.endswith("and with asynchronous scheduling it is not the step either")


def test_the_evidence_is_by_decoding_requests() -> None:
    (table,) = evidence_tables(placed(), CONTEXT)
    assert table.rows[0][0] == "0 to 3"
    counted = sum(int(str(row[1])) for row in table.rows)
    assert 0 < counted <= placed().iterations.height


def test_iterations_without_times_say_so() -> None:
    (finding,) = check(logged(workload(1, 5)), CONTEXT)
    assert "when they began is not known" in finding.message
