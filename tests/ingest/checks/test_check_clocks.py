"""Check 6: impossible segments, mixed stamps, and how the step clock was placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builders import aggregates, recording, requests, run_of_steps

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.checks.evidence import Context
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.recording import Clock, Finding, Recording
from blis_replay.ingest.rows import rows_of
from blis_replay.ingest.stream import NO_EVENTS

CONTEXT = Context(NO_EVENTS, None, ())


def clock_findings(made: Recording) -> list[Finding]:
    return [finding for finding in run_checks(made)[0] if finding.check == "clocks"]


def test_sound_times_are_noted() -> None:
    """50 ms to the first token, 250 ms in all, of them 5 in the queue, 40 in prefill and 200 in decode."""
    made = recording(requests=requests(3, queue_us=5_000, prefill_us=40_000, decode_us=200_000))
    assert [(f.severity, f.message) for f in clock_findings(made)] == [
        ("note", "no segment is negative, no stamps are mixed")
    ]


@pytest.mark.parametrize(
    ("columns", "metrics"),
    [
        ({"ttft_us": [1, -5, 50_000]}, ["ttft"]),
        ({"e2e_us": [250_000, -5, 250_000]}, ["ttft", "e2e"]),  # the TTFT is then above it
        ({"ttft_us": [1, 900_000, 50_000]}, ["ttft", "e2e"]),
        ({"decode_us": [1, -5, 50_000]}, ["segments"]),
        ({"queue_us": 5_000, "prefill_us": 46_001, "decode_us": 200_000}, ["segments"]),  # 251.001 of 250 ms
        ({"e2e_us": [250_000, 1_771_000_000_000_000, 250_000]}, ["e2e"]),  # Unix time less a monotonic stamp
        ({"arrival_us": [0, 1_000_000, 1_771_000_000_000_000]}, [""]),
    ],
)
def test_impossible_times_make_what_they_touch_unusable(columns: dict[str, Any], metrics: list[str]) -> None:
    findings = clock_findings(recording(requests=requests(3, **columns)))
    assert [(f.severity, f.metric) for f in findings] == [("unusable", metric) for metric in metrics]


def test_a_millisecond_of_rounding_is_no_contradiction() -> None:
    made = recording(requests=requests(3, queue_us=5_000, prefill_us=46_000, decode_us=200_000))
    assert clock_findings(made)[0].severity == "note"


def test_failed_requests_are_not_judged_by_their_latencies() -> None:
    made = recording(requests=requests(2, ttft_us=[-5, 50_000], status=["error", "ok"]))
    assert clock_findings(made)[0].severity == "note"


def test_published_means_that_cannot_be() -> None:
    """A mean TTFT above the mean E2E."""
    published = aggregates((-1, "ttft", "mean", 300_000.0), (-1, "e2e", "mean", 250_000.0))
    made = recording(ground_truth="published aggregates", aggregates=published)
    assert [(f.severity, f.metric) for f in clock_findings(made)] == [("unusable", "ttft"), ("unusable", "e2e")]


def stepped(later_us: int, clock: Clock) -> Recording:
    """60 s of 20 requests/s whose steps are stamped ``later_us`` too early, first step on the first send."""
    sent, sampled = run_of_steps(20.0, 60, later_us)
    return recording(requests=sent, steps=sampled, clocks=(Clock("client", "epoch", 0), clock))


@pytest.mark.slow
def test_an_estimated_offset_is_a_correction_with_both_numbers() -> None:
    """The step clock shows 100 ms at the zero by the estimate, 600 ms by the stamps: they put steps 0.5 s too early."""
    clock = Clock("step", "monotonic", 100_000, True, "estimated from depth", 3_000, 600_000)
    (finding,) = clock_findings(stepped(0, clock))
    assert finding.severity == "corrected"
    assert finding.measured["first_step_stamped_us"] == -500_000
    assert finding.measured["first_step_by_depth_us"] == pytest.approx(0, abs=3_000)
    assert "by constructed stamps -500.0 ms, by running depth" in finding.message
    assert finding.message.endswith("the latter is used")


@pytest.mark.slow
def test_stamps_that_the_depth_confirms_are_noted() -> None:
    clock = Clock("step", "monotonic", 0, placed="bridged by pairs", stamped_zero_us=0)
    (finding,) = clock_findings(stepped(0, clock))
    assert (finding.severity, finding.measured["first_step_stamped_us"]) == ("note", 0)
    assert finding.message.endswith("the stamps are used")


@pytest.mark.slow
def test_an_offset_that_nothing_tells_is_said_to_be_unknown() -> None:
    made = stepped(0, Clock("step", "monotonic", 0, placed="not known"))
    flat = made.steps.frame().with_columns(pl.lit(3, pl.Int64).alias("running_depth"))
    (finding,) = clock_findings(Recording(**(vars(made) | {"steps": rows_of(flat)})))
    assert finding.severity == "note"
    assert finding.message == (
        "from the first send to the first step that was recorded: no stamps, running depth cannot tell "
        "(the running depth never changes); the first step is shown at the first send"
    )


@pytest.mark.slow
def test_clocks_that_drift_are_reported_with_the_drift() -> None:
    """A step clock that gains 1 in 1,000: the halves of 60 s are 30 s apart, 30 ms."""
    made = stepped(0, Clock("step", "monotonic", 0, placed="bridged by pairs", stamped_zero_us=0))
    fast = made.steps.frame().with_columns((pl.col("start_us") * 1.001).cast(pl.Int64))
    placed, drift = clock_findings(Recording(**(vars(made) | {"steps": rows_of(fast)})))
    assert placed.severity == drift.severity == "note"
    assert drift.measured["drift_us"] == pytest.approx(-30_000, abs=10_000)


def test_the_published_step_stamps_are_corrected(data_pack: Path) -> None:
    """34b-general: stamped on the first send, 0.89 s later by depth (NOTES, layout); nothing else is amiss."""
    with read_recording(data_pack / "h100" / "20260218-150304-codellama-34b-tp2-general") as made:
        (finding,) = clock_findings(made)
    assert (finding.severity, finding.measured["first_step_stamped_us"]) == ("corrected", 0)
    assert finding.measured["first_step_by_depth_us"] == pytest.approx(890_000, abs=10_000)
