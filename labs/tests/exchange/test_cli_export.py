"""``blis-replay simulate --to`` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from command_line import Run
from full_disk import files_of_at_most

from blis_replay.ingest.recording import PROMPT_SCHEMA, REQUEST_SCHEMA
from blis_replay.validate import STORE_DEFAULT
from blis_replay.validate.experiment import stored_experiment


def table(run: Run, name: str) -> pl.DataFrame:
    """The requests of a stored experiment, every column, and the tokens of its prompts that others share."""
    recording = stored_experiment(STORE_DEFAULT, name)
    frame = recording.requests.frame()
    if recording.prefix is None:
        return frame
    prompts = recording.prefix.requests.join(recording.prefix.prompts, on="prompt")
    return frame.join(prompts, on="request_index", how="left", maintain_order="left")


@pytest.mark.parametrize("target", ["tracev2", "mooncake"])
def test_an_export_that_a_full_disk_has_no_room_for_leaves_nothing(run: Run, mooncake: Path, target: str) -> None:
    """A folder that was made for it is gone again."""
    with files_of_at_most(16):
        answer = run("simulate", "mooncake", "--to", target, "--out", "made/here")
    assert answer.code == 4
    assert answer.err == "error: made/here: File too large; check the path and the room left there\n"
    assert not (mooncake / "made" / "here").exists()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tracev2", "mooncake"])
def test_an_export_ingested_again_has_the_same_rows(run: Run, mooncake: Path, target: str) -> None:
    answer = run("simulate", "--experiment", "mooncake", "--to", target, "--out", f"out/{target}")
    assert answer.code == 0
    assert answer.out.startswith("mooncake: 3 requests in out/")
    assert run("ingest", f"out/{target}", "--name", "back").code == 0
    # TraceV2 numbers its requests, does not say where lengths come from, and knows prompts as far as they are shared.
    lost = {"request_id", "output_tokens_source", *PROMPT_SCHEMA} if target == "tracev2" else set()
    same = sorted({*REQUEST_SCHEMA, *PROMPT_SCHEMA} - lost)
    assert table(run, "back").select(same).rows() == table(run, "mooncake").select(same).rows()


@pytest.mark.slow
@pytest.mark.usefixtures("stored_demo")
def test_a_recording_with_latencies_comes_back_and_what_is_lost_is_named(run: Run) -> None:
    answer = run("simulate", "--experiment", "1b-general", "--to", "tracev2", "--out", "out", "--json")
    assert answer.code == 0
    assert answer.err.startswith("not carried by tracev2: ")
    assert {"token times", "step records", "load stages"} <= set(answer.json["not_carried"])
    assert (answer.json["files"], answer.json["requests"]) == (["out/trace.yaml", "out/trace.csv"], 300)
    assert run("ingest", "out", "--name", "back").code == 0
    names = ("arrival_us", "prompt_tokens", "ttft_us", "e2e_us", "status")
    assert table(run, "back").select(names).rows() == table(run, "1b-general").select(names).rows()


@pytest.mark.slow
def test_errors_are_one_line(run: Run, mooncake: Path) -> None:
    arguments = ("simulate", "--experiment", "mooncake", "--to", "mooncake", "--out", "trace.jsonl")
    there = run(*arguments)
    assert (there.code, there.out, there.err) == (
        2,
        "",
        "error: trace.jsonl: is there already; give --force to replace it, or another --out\n",
    )
    assert run(*arguments, "--force").code == 0
    unknown = run("simulate", "--experiment", "nothing", "--to", "mooncake")
    assert (unknown.code, unknown.err.count("\n")) == (2, 1)
    beneath = run("simulate", "--experiment", "mooncake", "--to", "mooncake", "--out", "trace.jsonl/below")
    assert (beneath.code, beneath.err.count("\n")) == (4, 1)
