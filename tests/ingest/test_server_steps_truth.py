"""Step clock and reconstructed batches of traces that the instrumented vLLM's own code emitted, against the truth.

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
from engine_journeys import prefills_of

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.recording import Finding, Recording
from blis_replay.ingest.steps.reconstruction import reconstruct, reconstructed_steps
from blis_replay.ingest.steps.timeline import step_anchors, timeline_of

MONOTONIC_ZERO_US = 226_106_700_000
# Steps from the first with a request to the last: those before and after are empty turns of the loop.
STEPS = {"fcfs-async": 5158, "kv-tight-sync": 6273, "shared-prefix-async": 5362, "long-prompts-sync": 7430}
SCENARIOS = (*STEPS, "shared-prefix-async-10pct")
# True and labelled composition under the names of reconstructed steps.
COMPOSITION = {
    "running": "running",
    "prefill_requests": "prefill_reqs",
    "decode_requests": "decode_reqs",
    "prefill_tokens": "prefill_tokens",
    "decode_tokens": "decode_tokens",
    "decode_context_tokens": "decode_context_tokens",
    "labelled_prefill_requests": "labelled_prefill_reqs",
    "labelled_decode_requests": "labelled_decode_reqs",
    "labelled_prefill_tokens": "labelled_prefill_tokens",
    "labelled_decode_tokens": "labelled_decode_tokens",
}


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


def beside_truth(data_pack: Path, scenario: str, recording: Recording) -> pl.DataFrame:
    """Reconstructed steps with the truth as ``true_*``, and ``equal``."""
    truth = true_steps(data_pack, scenario).select(
        "step_id", *(pl.col(t).alias(f"true_{t}") for t in COMPOSITION.values())
    )
    found = reconstructed_steps(reconstruct(recording)).join(truth, on="step_id")
    return found.with_columns(
        pl.all_horizontal(pl.col(name) == pl.col(f"true_{true}") for name, true in COMPOSITION.items()).alias("equal")
    )


def finding_of(recording: Recording, check: str) -> Finding:
    (finding,) = (finding for finding in run_checks(recording)[0] if finding.check == check)
    return finding


@pytest.mark.parametrize(
    ("scenario", "anchored", "of"),
    [
        ("fcfs-async", 1589, 5153),
        ("kv-tight-sync", 4483, 6263),
        ("shared-prefix-async", 5364, 5364),
        ("shared-prefix-async-10pct", 676, 5346),
        ("long-prompts-sync", 1467, 7430),
    ],
)
def test_every_recorded_time_of_a_step_is_its_start(
    data_pack: Path, recordings: dict[str, Recording], scenario: str, anchored: int, of: int
) -> None:
    """Sampled steps and events alike, to the microsecond: the loop goes on 240 us after an output was processed
    (truth.json: ``after_update``), which is measured on the steps that were sampled as well.  Interpolated steps only
    lie in order.
    """
    anchors = step_anchors(recordings[scenario])
    zero_us = recordings[scenario].clocks[0].zero_us - MONOTONIC_ZERO_US
    timeline = timeline_of(anchors).join(true_steps(data_pack, scenario), on="step_id")
    known = timeline.filter(pl.col("source") != "interpolated")
    assert (known.height, timeline.height) == (anchored, of)
    assert known["start_us"].to_list() == (known["sched_start_us"] - zero_us).to_list()
    assert timeline["start_us"].is_sorted()
    assert anchors.out_of_order == 0
    lags = dict(anchors.lags.select("source", "lag_us").rows())
    assert lags == {"scheduled event": 0, "queued event": 0, "output event": 240}
    # A cycle is shown where both ends are known, and is then that of the engine.
    cycles = timeline.with_columns((pl.col("sched_start_us").shift(-1) - pl.col("sched_start_us")).alias("true_us"))
    shown = cycles.drop_nulls(["cycle_us", "true_us"])
    assert shown["cycle_us"].to_list() == shown["true_us"].to_list()
    assert finding_of(recordings[scenario], "step_clock").measured["single_cycles"] == shown.height


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_asynchronous_scheduling_is_read_off_the_journeys(recordings: dict[str, Recording], scenario: str) -> None:
    setting = recordings[scenario].engine["async_scheduling"]
    assert (setting.value, setting.source) == ("async" in scenario, "derived")


@pytest.mark.parametrize("scenario", ["shared-prefix-async", "long-prompts-sync"])
def test_the_batch_of_every_step_is_the_true_one(
    data_pack: Path, recordings: dict[str, Recording], scenario: str
) -> None:
    """All journeys are there, and the hits are known: from recorded totals, or because there were none.  In the first,
    484 of 5,364 records label the split otherwise than it ran."""
    found = beside_truth(data_pack, scenario, recordings[scenario])
    assert (found.height, found["equal"].sum()) == (STEPS[scenario], STEPS[scenario])
    lagging = found.filter(pl.col("labelled_prefill_requests") != pl.col("prefill_requests")).height
    assert lagging == (484 if "async" in scenario else 0)


def test_79_preemptions_leave_28_steps_whose_hit_nobody_recorded(
    data_pack: Path, recordings: dict[str, Recording]
) -> None:
    """Summaries of a third of the steps were dropped: who was resumed in such a step, what it found in the cache is not
    known.  So the prefill tokens of 28 steps differ, of a resumption or of the chunk after it, and nothing else; none
    of them is called certain."""
    found = beside_truth(data_pack, "kv-tight-sync", recordings["kv-tight-sync"])
    assert (found.height, found["equal"].sum()) == (STEPS["kv-tight-sync"], 6245)
    wrong = found.filter(~pl.col("equal"))
    assert not wrong["certain"].any()
    resumed = pl.read_csv(data_pack / "vllm-traces" / "kv-tight-sync" / "requests.csv")["resumed_steps"].drop_nulls()
    steps = {int(step) for steps in resumed for step in str(steps).split(";")}
    assert set(wrong["step_id"]) <= steps | {step + 1 for step in steps}
    for name, true in COMPOSITION.items():
        if "tokens" not in name or name in ("decode_tokens", "decode_context_tokens"):
            assert found[name].to_list() == found[f"true_{true}"].to_list(), name


def test_requests_without_a_journey_are_all_that_is_missing(data_pack: Path, recordings: dict[str, Recording]) -> None:
    """5 of 500 requests sent a traceparent that said "not sampled": all steps without one of them are equal, the others
    lack exactly those requests."""
    found = beside_truth(data_pack, "fcfs-async", recordings["fcfs-async"])
    requests = pl.read_csv(data_pack / "vllm-traces" / "fcfs-async" / "requests.csv")
    lost = requests.filter(
        ~pl.col("core_request_id").is_in(recordings["fcfs-async"].lifecycles["core_request_id"].implode())
    )
    assert lost.height == 5
    # Asynchronously a request stands in the running list one step longer than it runs.
    inside = pl.sum_horizontal(
        pl.col("step_id").is_between(row["first_scheduled_step"], row["finished_step"] + 1).cast(pl.Int64)
        for row in lost.iter_rows(named=True)
    )
    counted = found.with_columns(inside.alias("lost"))
    assert (counted["true_running"] - counted["running"]).to_list() == counted["lost"].to_list()
    assert counted.filter(pl.col("lost") == 0)["equal"].all()
    assert (counted.height, counted["equal"].sum()) == (STEPS["fcfs-async"], 4733)


def test_a_tenth_of_the_journeys_is_a_lower_bound(data_pack: Path, recordings: dict[str, Recording]) -> None:
    recording = recordings["shared-prefix-async-10pct"]
    found = beside_truth(data_pack, "shared-prefix-async-10pct", recording)
    for name in ("running", "prefill_requests", "decode_requests", "decode_context_tokens"):
        assert (found[name] <= found[f"true_{COMPOSITION[name]}"]).all(), name
    finding = finding_of(recording, "reconstruction")
    assert finding.severity == "note"
    assert "50 journeys hold 12.4 % of the recorded running requests" in finding.message
    assert "lower bound" in finding.message


def test_chunks_follow_the_snapshots(recordings: dict[str, Recording]) -> None:
    """long-prompts-sync: 3 to 5 chunks a prompt, and the snapshots of every sampled step say how far each one was."""
    recording = recordings["long-prompts-sync"]
    rows = prefills_of(reconstruct(recording))
    ids = recording.lifecycles.frame(["journey", "core_request_id"]).rename({"core_request_id": "request_id"})
    seen = recording.snapshots.frame().join(ids, on="request_id")
    assert seen.height == 1987
    both = seen.filter(pl.col("phase") == "PREFILL").join(rows, on=["journey", "step_id"], how="left", suffix="_made")
    served = both.filter(pl.col("scheduled_tokens") > 0, pl.col("computed_tokens") < pl.col("prompt_tokens"))
    assert served.height == 76
    assert served["tokens"].to_list() == served["scheduled_tokens"].to_list()
    assert served["context_tokens"].to_list() == (served["computed_tokens"] + served["scheduled_tokens"]).to_list()
    assert rows.group_by("journey").len()["len"].max() == 5


@pytest.mark.parametrize(
    ("scenario", "compared", "equal", "corrected"),
    [
        ("fcfs-async", 464, 435, 43),
        ("kv-tight-sync", 4158, 4158, 31),
        ("shared-prefix-async", 5362, 5362, 484),
        ("long-prompts-sync", 717, 717, 0),
    ],
)
def test_the_check_compares_every_recorded_step(
    recordings: dict[str, Recording], scenario: str, compared: int, equal: int, corrected: int
) -> None:
    """Recorded depth and labelled split of each sampled step against the reconstructed ones; fcfs-async has 29 sampled
    steps with a request of which there is no journey."""
    finding = finding_of(recordings[scenario], "reconstruction")
    measured = finding.measured
    assert (measured["steps_compared"], measured["equal"], measured["split_corrected"]) == (compared, equal, corrected)
    assert measured["steps_with_requests_of_no_journey"] == (29 if scenario == "fcfs-async" else 0)
    assert measured["disagree"] == measured["disagree_with_an_assumed_hit"] == 0
    assert finding.severity == ("corrected" if corrected else "note")


def test_littles_law_holds_through_a_queue(recordings: dict[str, Recording]) -> None:
    """kv-tight-sync: on average ten run and ten wait, arrivals come in bursts; within 3 % of the requests in flight."""
    finding = finding_of(recordings["kv-tight-sync"], "littles_law")
    assert finding.measured["mean_depth"] == pytest.approx(9.85, abs=0.01)
    assert finding.measured["mean_waiting"] == pytest.approx(9.50, abs=0.01)
    assert finding.measured["ratio"] == pytest.approx(0.990, abs=0.001)
    assert finding.severity == "note"


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
