"""What a timeline draws of recordings of the instrumented vLLM, against their truth.

``vllm-traces/README.md``: ``exec_start_us`` to ``exec_end_us`` is the batch on the device, a call of ``schedule()``
costs 180 us and 4 a running request, the loop goes on 240 us after a batch; ``requests.csv`` has the steps in which
requests were preempted and resumed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pytest

from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.recording import Recording
from blis_replay.validate.timeline.lanes import observed_preemptions
from blis_replay.validate.timeline.steps import observed_steps, with_true_split

MONOTONIC_ZERO_US = 226_106_700_000


@pytest.fixture
def recorded(data_pack: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Recording, Path]:
    """The scenario that the test names, and its folder."""
    source = data_pack / "vllm-traces" / request.param
    folder = tmp_path / request.param
    folder.mkdir()
    for name in ("exp-config.yaml", "traces.json.zst"):
        shutil.copyfile(source / name, folder / name)
    with read_recording(folder) as recording:
        return recording, source


def from_zero(recording: Recording, name: str) -> pl.Expr:
    return (pl.col(name) - (recording.clocks[0].zero_us - MONOTONIC_ZERO_US)).round().cast(pl.Int64)


@pytest.mark.parametrize("recorded", ["kv-tight-sync", "shared-prefix-async"], indirect=True)
def test_a_batch_is_drawn_while_it_was_on_the_device(recorded: tuple[Recording, Path]) -> None:
    """To the cost of the calls around it, where those were recorded: its own of some 180 + 4 x 40 us before the batch
    (or, scheduled ahead, the 240 us between the batch before it and the next call), 240 us after it."""
    recording, source = recorded
    starts, drawn = observed_steps(recording)
    known = starts.select("step_id", known=pl.col("source") != "interpolated")
    ahead = "async" in source.name
    sure = pl.all_horizontal(pl.col("known").shift(-i).fill_null(False) for i in range(2 + ahead))
    truth = pl.read_csv(source / "steps.csv").filter(pl.col("scheduled_tokens") > 0)
    truth = truth.select("step_id", *(from_zero(recording, f"exec_{end}_us") for end in ("start", "end")))
    both = (
        drawn.join(known.with_columns(sure.alias("sure")), left_on="step", right_on="step_id")
        .filter("sure")
        .join(truth, left_on="step", right_on="step_id")
    )
    early, late = both["exec_start_us"] - both["start_us"], both["end_us"] - both["exec_end_us"]
    assert both.height > 3_000
    assert both.filter((early.abs() > 400) | (late.abs() > 250)).height < 0.02 * both.height


@pytest.mark.parametrize("recorded", ["kv-tight-sync"], indirect=True)
def test_preemptions_begin_and_end_with_the_steps_of_the_truth(recorded: tuple[Recording, Path]) -> None:
    """79 of them, one before the prefill after the one before had ended: it got no token in between."""
    recording, source = recorded
    calls = pl.read_csv(source / "steps.csv").select("step_id", at_us=from_zero(recording, "sched_start_us"))
    at_us = dict(calls.iter_rows())
    truth = pl.read_csv(
        source / "requests.csv", schema_overrides={"preempted_steps": pl.String, "resumed_steps": pl.String}
    )
    places = recording.lifecycles.frame(["api_request_id", "request_index"])
    truth = truth.filter(pl.col("num_preemptions") > 0).join(places, on="api_request_id")
    expected = [
        (place, at_us[int(preempted)], at_us[int(resumed)])
        for place, gone, back in truth.select("request_index", "preempted_steps", "resumed_steps").iter_rows()
        for preempted, resumed in zip(gone.split(";"), back.split(";"), strict=True)
    ]
    drawn = observed_preemptions(recording, observed_steps(recording)[0])
    assert len(expected) == 79
    assert sorted(drawn.select("request_index", "preempted_us", "resumed_us").rows()) == sorted(expected)
    again = drawn.filter(pl.col("token_us").is_null())
    assert again.height == 1
    after = drawn.filter(pl.col("request_index") == again["request_index"][0])["preempted_us"]
    assert (after > again["resumed_us"][0]).any()
    # The steps after two of them have no record, and are laid between their neighbours.
    assert (drawn["token_us"] > drawn["resumed_us"]).sum() == 76
    assert (drawn["token_us"] >= drawn["resumed_us"]).sum() == 78


@pytest.mark.parametrize("recorded", ["long-prompts-sync", "shared-prefix-async"], indirect=True)
def test_batches_of_recorded_steps_are_those_of_the_truth(recorded: tuple[Recording, Path]) -> None:
    """10 % of the steps of the first were sampled, all of the second, whose records label the split a step late."""
    recording, source = recorded
    drawn = with_true_split(observed_steps(recording)[1], recording).filter(pl.col("batch") == "recorded")
    both = drawn.join(pl.read_csv(source / "steps.csv"), left_on="step", right_on="step_id", suffix="_true")
    assert both.height == (717 if "long" in source.name else 5_364)
    for name in ("prefill_tokens", "decode_tokens", "running", "decode_context_tokens"):
        assert both[name].to_list() == both[f"{name}_true"].to_list(), name
