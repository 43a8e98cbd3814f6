"""Traces that the instrumented vLLM's own code emitted in virtual time, against the driver's record of what happened.

``vllm-traces/README.md``: requests.csv and steps.csv are not read from the traces; times are us from
virtual 0 with three decimals, where the monotonic clock shows 226,106.7 s.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.otlp.traces import trace_batches
from blis_replay.ingest.recording import Recording

MONOTONIC_ZERO_US = 226_106_700_000
EPOCH_ZERO_US = 1_771_430_000_000_000
SCENARIOS = ("fcfs-async", "kv-tight-sync", "shared-prefix-async", "shared-prefix-async-10pct", "long-prompts-sync")
CHAT = ("fcfs-async", "shared-prefix-async", "shared-prefix-async-10pct")


def folder_of(data_pack: Path, scenario: str) -> Path:
    return data_pack / "vllm-traces" / scenario


@contextmanager
def recorded(data_pack: Path, scenario: str, tmp_path: Path, *names: str) -> Iterator[Recording]:
    """The scenario's configuration and some of its trace files, ingested."""
    directory = tmp_path / "-".join(names) / scenario
    directory.mkdir(parents=True)
    for name in ("exp-config.yaml", *(names or ("traces.json.gz",))):
        shutil.copyfile(folder_of(data_pack, scenario) / name, directory / name)
    with read_recording(directory) as recording:
        yield recording


def us(column: str) -> pl.Expr:
    """Truth in us with three decimals as whole us, rounded down as stamps in ns are."""
    return (pl.col(column) * 1000).round().cast(pl.Int64) // 1000


def true_requests(data_pack: Path, scenario: str, recording: Recording) -> pl.DataFrame:
    """The true requests in the order of the lifecycles, times from the experiment's zero."""
    zero_us = recording.clocks[0].zero_us - MONOTONIC_ZERO_US
    truth = pl.read_csv(folder_of(data_pack, scenario) / "requests.csv")
    moved = truth.with_columns((us(name) - zero_us).alias(name) for name in truth.columns if name.endswith("_us"))
    ids = recording.lifecycles.frame(["api_request_id"])
    return ids.join(moved, on="api_request_id", how="left", maintain_order="left")


KINDS = ("spans", "steps", "snapshots", "journey_events")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_encoding_of_a_scenario_holds_the_same_columns(data_pack: Path, scenario: str) -> None:
    found = []
    for path in sorted(folder_of(data_pack, scenario).glob("traces*.json.*")):
        file = RecordedFile(path, path.name)
        batches = list(trace_batches(file))
        found.append([pl.concat(getattr(batch, kind) for batch in batches) for kind in KINDS])
        assert file.tally.rejected_count == 0
    assert len(found) == (3 if scenario == "fcfs-async" else 2)
    for other in found[1:]:
        assert all(frame.equals(expected) for frame, expected in zip(other, found[0], strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_lifecycles_are_the_truth_to_the_microsecond(data_pack: Path, scenario: str, tmp_path: Path) -> None:
    with recorded(data_pack, scenario, tmp_path) as recording:
        found, truth = recording.lifecycles.frame(), true_requests(data_pack, scenario, recording)
    # All journeys but those whose client's traceparent said "not sampled", or the 10 % that were drawn.
    sampled = {"fcfs-async": 495, "kv-tight-sync": 400, "shared-prefix-async": 500, "long-prompts-sync": 300}
    assert found.height == sampled.get(scenario, 50)
    had_token = truth["first_token_us"].is_not_null()
    same = ["arrived_us", "queued_us", "first_token_us", "finished_us", "departed_us", "queued_step"]
    same += ["first_token_step", "finished_step", "core_request_id", "prompt_tokens", "max_tokens", "output_tokens"]
    for name in same:
        assert found[name].to_list() == truth[name].to_list(), name
    assert found["scheduled_us"].to_list() == truth["first_scheduled_us"].to_list()
    assert found["scheduled_step"].to_list() == truth["first_scheduled_step"].to_list()
    assert found["preemptions"].to_list() == truth["num_preemptions"].to_list()
    assert found["status"].to_list() == ["aborted" if s == "aborted" else "ok" for s in truth["status"]]
    # Only the chat route stamps it; one output token is its own last response.
    responses = truth.filter(had_token)["first_response_us"].to_list()
    stamped = responses if scenario in CHAT else [None] * len(responses)
    assert found.filter(had_token)["first_response_us"].to_list() == stamped
    assert found["request_index"].to_list() == list(range(found.height))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_requests_come_from_journeys_where_no_client_recorded_them(
    data_pack: Path, scenario: str, tmp_path: Path
) -> None:
    with recorded(data_pack, scenario, tmp_path) as recording:
        found, truth = recording.requests.frame(), true_requests(data_pack, scenario, recording)
        missing = " ".join(recording.missing)
    stamp = "first_response_us" if scenario in CHAT else "first_token_us"
    ok = found["status"] == "ok"
    assert ok.to_list() == (truth["status"] == "length").to_list()
    assert found["request_id"].to_list() == truth["api_request_id"].to_list()
    assert found["arrival_us"].to_list() == truth["arrived_us"].to_list()
    assert found["e2e_us"].to_list() == (truth["departed_us"] - truth["arrived_us"]).to_list()
    done, true = found.filter(ok), truth.filter(ok)
    assert done["ttft_us"].to_list() == (true[stamp] - true["arrived_us"]).to_list()
    assert done["queue_us"].to_list() == (true["first_scheduled_us"] - true["queued_us"]).to_list()
    assert done["output_tokens"].to_list() == true["output_tokens"].to_list()
    assert (
        found.filter(~ok)["output_tokens_reported"].to_list()
        == truth.filter(~ok)["output_tokens"].replace(0, None).to_list()
    )
    assert ("their TTFT ends with journey.FIRST_TOKEN" in missing) == (scenario not in CHAT)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_steps_are_the_sampled_ones(data_pack: Path, scenario: str, tmp_path: Path) -> None:
    with recorded(data_pack, scenario, tmp_path) as recording:
        steps, zero_us = recording.steps.frame(), recording.clocks[0].zero_us - MONOTONIC_ZERO_US
        missing = " ".join(recording.missing)
    every = pl.read_csv(folder_of(data_pack, scenario) / "steps.csv")
    drawn = every.filter(pl.col("sampled") == 1)
    if scenario == "kv-tight-sync":
        # Its README: 4,158 of 6,274 summaries are left; 4,495 events were discarded, the last span is missing.
        assert steps.height == 4158
        assert steps["step_id"].is_in(drawn["step_id"].implode()).all()
        assert "4495 step span events" in missing
        drawn = drawn.filter(pl.col("step_id").is_in(steps["step_id"].implode()))
    assert steps["step_id"].to_list() == drawn["step_id"].to_list()
    assert steps["start_us"].to_list() == drawn.select(us("sched_start_us") - zero_us).to_series().to_list()
    columns = {
        "running_depth": "running",
        "waiting_depth": "waiting",
        "prefill_requests": "labelled_prefill_reqs",
        "decode_requests": "labelled_decode_reqs",
        "prefill_tokens": "labelled_prefill_tokens",
        "decode_tokens": "labelled_decode_tokens",
        "preempted_requests": "num_preempted",
        "kv_blocks_total": "kv_total",
        "kv_blocks_free": "kv_free",
    }
    for name, true in columns.items():
        assert steps[name].to_list() == drawn[true].to_list(), name


@pytest.mark.parametrize("scenario", ["fcfs-async", "kv-tight-sync", "long-prompts-sync"])
def test_snapshots_know_the_prefix_cache_hits_and_every_running_request(
    data_pack: Path, scenario: str, tmp_path: Path
) -> None:
    with recorded(data_pack, scenario, tmp_path) as recording:
        snapshots, lifecycles = recording.snapshots.frame(), recording.lifecycles.frame()
        truth = true_requests(data_pack, scenario, recording)
    seen = lifecycles["cached_prompt_tokens"].is_not_null()
    assert lifecycles.filter(seen)["cached_prompt_tokens"].to_list() == truth.filter(seen)["cached_tokens"].to_list()
    assert set(lifecycles.filter(seen)["core_request_id"]) <= set(snapshots["request_id"])
    steps = pl.read_csv(folder_of(data_pack, scenario) / "steps.csv")
    # A call that runs nothing has no one to show.
    drawn = steps.filter(pl.col("snapshots") == 1, pl.col("running") > 0)
    counted = snapshots.group_by("step_id").agg(pl.len(), pl.col("scheduled_tokens").sum()).join(steps, on="step_id")
    # One for each running request; where the SDK discarded events, snapshots went before summaries.
    if scenario == "kv-tight-sync":
        assert (counted["len"] <= counted["running"]).all()
        return
    assert counted["step_id"].sort().to_list() == drawn["step_id"].to_list()
    assert counted["len"].to_list() == counted["running"].to_list()
    assert counted["scheduled_tokens"].to_list() == counted["scheduled_tokens_right"].to_list()


def test_preempted_requests_keep_every_preemption_and_resumption(data_pack: Path, tmp_path: Path) -> None:
    """kv-tight-sync: 79 preemptions; truth has their steps and those of the resumptions."""
    with recorded(data_pack, "kv-tight-sync", tmp_path) as recording:
        events, truth = recording.journey_events.frame(), true_requests(data_pack, "kv-tight-sync", recording)
    preempted = events.filter(pl.col("event") == "journey.PREEMPTED")
    admitted = events.filter(pl.col("event") == "journey.SCHEDULED")
    resumed = admitted.filter(~pl.col("journey").is_first_distinct())
    assert preempted.height == truth["num_preemptions"].sum() == 79
    for found, column in ((preempted, "preempted_steps"), (resumed, "resumed_steps")):
        by_journey = found.group_by("journey", maintain_order=True).agg("step_id")
        true = {i: [int(s) for s in str(v).split(";")] for i, v in enumerate(truth[column].to_list()) if v is not None}
        assert dict(by_journey.iter_rows()) == true
    # Each preempted request: ARRIVED, QUEUED, SCHEDULED FIRST, ... FINISHED, DEPARTED, in the order of time.
    first = int(preempted["journey"][0])
    story = events.filter(pl.col("journey") == first)
    assert story["event"][0] == "api.ARRIVED"
    assert story["event"][-1] == "api.DEPARTED"
    assert story["time_us"].is_sorted()


@pytest.mark.parametrize(
    ("scenario", "cancelled", "before_token"), [("fcfs-async", 9, 0), ("long-prompts-sync", 12, 4)]
)
def test_cancelled_requests_leave_the_api_server_before_the_engine(
    data_pack: Path, scenario: str, cancelled: int, before_token: int, tmp_path: Path
) -> None:
    """Counts of the scenarios' READMEs; a cancel reaches the engine 0.4 ms later and is carried out after that."""
    with recorded(data_pack, scenario, tmp_path) as recording:
        gone = recording.lifecycles.frame().filter(pl.col("status") == "aborted")
        errors = recording.requests.frame().filter(pl.col("status") == "error")["error"]
        assert not any("time order" in sentence for sentence in recording.missing)
    assert (gone.height, gone["first_token_us"].null_count()) == (cancelled, before_token)
    assert (gone["finished_us"] - gone["departed_us"]).min() >= 400  # type: ignore[operator]
    assert errors.str.starts_with("aborted: ").all()


def test_a_request_of_one_token_has_its_first_token_last(data_pack: Path, tmp_path: Path) -> None:
    with recorded(data_pack, "fcfs-async", tmp_path) as recording:
        one = recording.lifecycles.frame().filter(pl.col("output_tokens") == 1, pl.col("status") == "ok")
        requests = recording.requests
    assert one.height > 0
    for row in one.iter_rows(named=True):
        assert row["first_token_us"] == row["finished_us"]
        assert row["first_response_us"] == row["departed_us"]
        assert requests["ttft_us"][row["request_index"]] == requests["e2e_us"][row["request_index"]]


def test_two_encodings_of_a_run_in_one_directory_are_one_run(data_pack: Path, tmp_path: Path) -> None:
    with recorded(data_pack, "fcfs-async", tmp_path, "traces.json.gz", "traces.json.zst") as twice:
        rejected = {file.name: file.rejected_count for file in twice.files}
        lifecycles, steps = twice.lifecycles.frame(), twice.steps.frame()
    with recorded(data_pack, "fcfs-async", tmp_path, "traces.json.gz") as once:
        assert once.lifecycles.frame().equals(lifecycles)
        assert once.steps.frame().equals(steps)
    # 464 steps and 353 snapshots are counted in the first file, 990 spans of journeys where they stand again.
    assert rejected["traces.json.zst"] + rejected["traces.json.gz"] == 464 + 353 + 990


def test_the_epoch_is_bridged_by_journey_events(data_pack: Path, tmp_path: Path) -> None:
    with recorded(data_pack, "kv-tight-sync", tmp_path) as recording:
        server = {(clock.name, clock.kind): clock for clock in recording.clocks}
    monotonic, epoch = server["server", "monotonic"], server["server", "epoch"]
    assert epoch.zero_us - monotonic.zero_us == EPOCH_ZERO_US - MONOTONIC_ZERO_US
