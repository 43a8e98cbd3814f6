"""Step clock, decodes and their context in traces that the instrumented vLLM's own code emitted, against the truth.

``vllm-traces/README.md``: ``steps.csv`` has every ``schedule()`` call with its batch on the device, and the split that
the trace labels it with; depths come from the scheduler's state, times and the true split from the driver.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from builders import in_database

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.checks.ledger import IN_FLIGHT, entries
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.steps.admissions import admissions_of, decodes_of, open_at
from blis_replay.ingest.steps.timeline import step_anchors, timeline_of

MONOTONIC_ZERO_US = 226_106_700_000
SCENARIOS = ("fcfs-async", "kv-tight-sync", "shared-prefix-async", "long-prompts-sync", "shared-prefix-async-10pct")


@pytest.fixture(scope="module")
def recordings(data_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    """Every scenario, ingested from its traces."""
    found = {}
    for scenario in SCENARIOS:
        directory = tmp_path_factory.mktemp("traces") / scenario
        directory.mkdir()
        for name in ("exp-config.yaml", "traces.json.zst"):
            shutil.copyfile(data_pack / "vllm-traces" / scenario / name, directory / name)
        with read_recording(directory) as recording:
            found[scenario] = recording
    return found


def true_steps(data_pack: Path, scenario: str) -> pl.DataFrame:
    truth = pl.read_csv(data_pack / "vllm-traces" / scenario / "steps.csv")
    times = (
        ((pl.col(name) * 1000).round().cast(pl.Int64) // 1000).alias(name) for name in truth.columns if "_us" in name
    )
    return truth.with_columns(*times)


def finding_of(recording: Recording, check: str) -> Finding:
    (finding,) = (finding for finding in run_checks(recording)[0] if finding.check == check)
    return finding


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_recorded_time_of_a_step_is_its_start(
    data_pack: Path, recordings: dict[str, Recording], scenario: str
) -> None:
    """To the microsecond; interpolated steps only lie in order."""
    anchors = step_anchors(recordings[scenario])
    zero_us = recordings[scenario].clocks[0].zero_us - MONOTONIC_ZERO_US
    timeline = timeline_of(anchors).join(true_steps(data_pack, scenario), on="step_id")
    known = timeline.filter(pl.col("source") != "interpolated")
    assert known.height == recordings[scenario].steps.height
    assert known["start_us"].to_list() == (known["sched_start_us"] - zero_us).to_list()
    assert timeline["start_us"].is_sorted()
    assert anchors.out_of_order == 0
    # A cycle is shown where both ends are known, and is then that of the engine.
    cycles = timeline.with_columns((pl.col("sched_start_us").shift(-1) - pl.col("sched_start_us")).alias("true_us"))
    shown = cycles.drop_nulls(["cycle_us", "true_us"])
    assert shown["cycle_us"].to_list() == shown["true_us"].to_list()
    assert finding_of(recordings[scenario], "step_clock").measured["single_cycles"] == shown.height


def test_steps_of_which_an_sdk_dropped_some_were_all_sampled(recordings: dict[str, Recording]) -> None:
    """kv-tight-sync: every step was sampled, and spans of 100 kept their last 128 events (README of vllm-traces)."""
    finding = finding_of(recordings["kv-tight-sync"], "step_clock")
    assert finding.measured["coverage_between_losses"] == pytest.approx(1, abs=0.02)
    assert "in clusters" in finding.message


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_asynchronous_scheduling_is_read_off_the_journeys(recordings: dict[str, Recording], scenario: str) -> None:
    setting = recordings[scenario].engine["async_scheduling"]
    assert (setting.value, setting.source) == ("async" in scenario, "derived")


@pytest.mark.parametrize("scenario", ["shared-prefix-async", "long-prompts-sync", "kv-tight-sync"])
def test_decodes_and_their_context_are_the_true_ones(
    data_pack: Path, recordings: dict[str, Recording], scenario: str
) -> None:
    """All journeys are there; through 79 preemptions in the last."""
    truth = true_steps(data_pack, scenario)
    steps, admissions = truth["step_id"].to_numpy(), admissions_of(recordings[scenario])
    decodes = decodes_of(admissions)
    start, held = (admissions.frame[name].to_numpy() for name in ("start_step", "held_until_step"))
    assert open_at(start, held, steps).tolist() == truth["running"].to_list()
    assert decodes.at(steps).tolist() == truth["decode_reqs"].to_list()
    assert decodes.context_at(steps).tolist() == truth["decode_context_tokens"].to_list()


def test_the_engine_has_what_is_in_flight_through_a_queue(recordings: dict[str, Recording]) -> None:
    """kv-tight-sync: on average ten run and ten wait, arrivals come in bursts; within 3 % of the requests in flight."""
    client, of_steps = (e.value for e in entries(recordings["kv-tight-sync"]) if e.quantity == IN_FLIGHT)
    assert of_steps / client == pytest.approx(0.99, abs=0.02)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_findings_are_the_same_whatever_the_parts(recordings: dict[str, Recording], scenario: str) -> None:
    """In memory, and in a scratch database to which 97 rows are added at a time."""
    recording = recordings[scenario]
    events = recording.journey_events.frame()
    of_parts = replace(
        recording,
        steps=in_database(recording.steps.frame(), 97),
        snapshots=in_database(recording.snapshots.frame(), 97),
        lifecycles=in_database(recording.lifecycles.frame(), 97),
        journey_events=in_database(events, 97),
    )
    expected, found = run_checks(recording)[0], run_checks(of_parts)[0]
    assert [(f.check, f.severity, f.metric, f.message) for f in found] == [
        (f.check, f.severity, f.metric, f.message) for f in expected
    ]
    for of_97, of_all in zip(found, expected, strict=True):
        assert _rounded(of_97) == _rounded(of_all)


def _rounded(finding: Finding) -> dict[str, object]:
    """Sums in another order differ in the last digits."""
    return {name: f"{value:.9g}" if isinstance(value, float) else value for name, value in finding.measured.items()}
