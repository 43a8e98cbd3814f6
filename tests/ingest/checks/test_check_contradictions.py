"""Instruments that contradict each other: what was planted in a recording is objected to by the check that can tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blis_replay.fixtures.fault_list import FAULTS
from blis_replay.fixtures.faults import LOADS, Fault, planted_case
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.recording import Finding


def objections(fault: Fault) -> list[Finding]:
    return [finding for finding in run_checks(planted_case(fault).recording)[0] if finding.severity == "unusable"]


def fault(name: str, size: str) -> Fault:
    return next(f for f in FAULTS if (f.name, f.size) == (name, size))


# What is planted, to what depth it is recorded; the check that objects, to which metric ("": nothing is judged), and
# with which number in its sentence.
@pytest.mark.parametrize(
    ("name", "size", "depth", "check", "metric", "number"),
    [
        ("end of the recording missing", "30 %", "full", "completeness", "", "went on with 10"),
        ("requests recorded twice", "5 %", "client", "completeness", "", "18 requests repeat"),
        ("ignore_eos believed", "all lengths 160", "full", "output_length", "", "journeys of the server count"),
        ("ignore_eos believed", "all lengths 160", "client", "output_length", "", "r 0.9"),
        ("role chunk stamped as first token", "TTFT 1 ms, 100 %", "client", "token_events", "ttft", "1.00 ms"),
        ("role chunk stamped as first token", "TTFT 1 ms, 30 %", "client", "token_events", "ttft", "108 of 360"),
        ("step clock", "-2 s", "steps", "clocks", "step_time", "stamped 2007.1 ms early"),
        ("server clock", "+0.1 s", "full", "clocks", "segments", "ms ahead of"),
        ("coarse send stamps", "1 s", "full", "clocks", "", "1000.0 ms"),
        ("prompt lengths without the template", "40 % short", "full", "prefix_cache", "", "were sent as recorded"),
    ],
)
def test_the_check_that_can_tell_objects(
    name: str, size: str, depth: str, check: str, metric: str, number: str
) -> None:
    planted = replace(fault(name, size), depth=depth)  # type: ignore[arg-type]
    found = [f for f in objections(planted) if (f.check, f.metric) == (check, metric)]
    assert number in found[0].message


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("depth", ["full", "steps", "client"])
def test_nothing_is_objected_to_where_nothing_is_wrong(load: str, depth: str) -> None:
    assert objections(Fault("", (), depth, load)) == []  # type: ignore[arg-type]
