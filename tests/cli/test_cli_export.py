"""``blis-replay export``, and arrival traces at the command line."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path

import polars as pl
import pytest
from command_line import Run
from test_cli_simulate import ENGINE, RELEASE

from blis_replay.ingest.readers.tables.parquet_requests import PROMPT_COLUMNS
from blis_replay.ingest.recording import REQUEST_SCHEMA

TRACE = "".join(
    json.dumps({"timestamp": 1000 * i, "input_length": 600, "output_length": 3, "hash_ids": [0, i]}) + "\n"
    for i in range(3)
)


@pytest.fixture
def mooncake(run: Run, tmp_path: Path) -> Path:
    """A stored arrival trace of three requests a second apart that share 512 of 600 tokens."""
    (tmp_path / "trace.jsonl").write_text(TRACE, "utf-8")
    assert run("ingest", "trace.jsonl", "--name", "mooncake").code == 0
    return tmp_path


def table(run: Run, name: str) -> pl.DataFrame:
    """The requests of a stored experiment, every column."""
    assert run("export", "--experiment", name, "--to", "parquet", "--out", f"{name}.look", "--force").code == 0
    return pl.read_parquet(f"{name}.look")


@pytest.mark.parametrize("target", ["tracev2", "mooncake"])
def test_an_export_that_a_full_disk_has_no_room_for_leaves_nothing(run: Run, mooncake: Path, target: str) -> None:
    """A folder that was made for it is gone again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        answer = run("export", "mooncake", "--to", target, "--out", "made/here")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert answer.code == 3
    assert answer.err == "error: made/here: File too large; check the path and the room left there\n"
    assert not (mooncake / "made" / "here").exists()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tracev2", "legacy-csv", "mooncake", "parquet"])
def test_an_export_ingested_again_has_the_same_rows(run: Run, mooncake: Path, target: str) -> None:
    answer = run("export", "--experiment", "mooncake", "--to", target, "--out", f"out/{target}")
    assert answer.code == 0
    assert answer.out.startswith("mooncake: 3 requests in out/")
    assert run("ingest", f"out/{target}", "--name", "back").code == 0
    # The legacy CSV knows prompts by whole blocks of 16; TraceV2 numbers its requests, does not say where
    # lengths come from, and knows prompts as far as they are shared.
    prompts = PROMPT_COLUMNS.values()
    other = {"legacy-csv": ["prefix_tokens"], "tracev2": ["request_id", "output_tokens_source", *prompts]}
    same = sorted({*REQUEST_SCHEMA, *prompts} - set(other.get(target, [])))
    assert table(run, "back").select(same).rows() == table(run, "mooncake").select(same).rows()


@pytest.mark.slow
def test_what_is_not_carried_is_named_on_standard_error(run: Run, demo: Path) -> None:
    assert run("ingest", demo).code == 0
    answer = run("export", "--experiment", "1b-general", "--to", "legacy-csv", "--json")
    assert answer.code == 0
    assert answer.err.startswith("not carried by legacy-csv: ")
    assert {"ttft_us", "e2e_us", "token times", "step records"} <= set(answer.json["not_carried"])
    assert answer.json["files"] == ["1b-general.csv"]
    assert answer.json["requests"] == 300
    parquet = run("export", "--experiment", "1b-general", "--to", "parquet").err
    assert parquet.startswith("not carried by parquet: token times, step records, load stages, engine arguments ")


@pytest.mark.slow
@pytest.mark.usefixtures("stored_demo")
def test_a_recording_with_latencies_comes_back_from_tracev2_and_parquet(run: Run) -> None:
    for target in ("tracev2", "parquet"):
        assert run("export", "--experiment", "1b-general", "--to", target, "--out", f"out/{target}").code == 0
        assert run("ingest", f"out/{target}", "--name", f"back-{target}").code == 0
        names = ("arrival_us", "prompt_tokens", "ttft_us", "e2e_us", "status")
        assert table(run, f"back-{target}").select(names).rows() == table(run, "1b-general").select(names).rows()


@pytest.mark.slow
def test_errors_are_one_line(run: Run, mooncake: Path) -> None:
    arguments = ("export", "--experiment", "mooncake", "--to", "mooncake", "--out", "trace.jsonl")
    there = run(*arguments)
    assert (there.code, there.out, there.err) == (
        2,
        "",
        "error: trace.jsonl: is there already; give --force to replace it, or another --out\n",
    )
    assert run(*arguments, "--force").code == 0
    unknown = run("export", "--experiment", "nothing", "--to", "mooncake")
    assert (unknown.code, unknown.err.count("\n")) == (2, 1)
    beneath = run("export", "--experiment", "mooncake", "--to", "mooncake", "--out", "trace.jsonl/below")
    assert (beneath.code, beneath.err.count("\n")) == (3, 1)


def test_an_arrival_trace_is_not_validated(run: Run, mooncake: Path) -> None:
    answer = run("validate", "--experiment", "mooncake")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err == (
        "error: mooncake: an arrival trace: it has no latencies to compare; replay it with "
        "`blis-replay simulate --experiment mooncake --engine FILE --coefficients NAME --out DIR`\n"
    )
    calibrated = run("calibrate", "--train", "mooncake", "--out", "fit.yaml")
    assert (calibrated.code, calibrated.err.count("\n")) == (3, 1)


def test_an_arrival_trace_is_simulated_on_a_given_engine(run: Run, mooncake: Path) -> None:
    """The second and third prompts hit 512 of their 600 tokens: 1,024 of 1,800, in 32 blocks of 16 each."""
    (mooncake / "worked.yaml").write_text(RELEASE, "utf-8")
    (mooncake / "engine.yaml").write_text(ENGINE, "utf-8")
    given = ("--engine", "engine.yaml", "--coefficients", "worked.yaml", "--out", "run")
    answer = run("simulate", "--experiment", "mooncake", *given, "--json")
    assert answer.json["completed"] == 3
    assert answer.json["prefix_hit_rate"] == 1024 / 1800
    short = ENGINE.replace("4096", "512")
    (mooncake / "engine.yaml").write_text(short.replace("2048", "512"), "utf-8")
    refused = run("simulate", "--experiment", "mooncake", *given, "--force")
    assert (refused.code, refused.err.count("\n")) == (3, 1)
    assert "mooncake, request 0: a prompt of 600 tokens leaves no room in max_model_len 512" in refused.err
    assert run("simulate", *given).code == 2
    assert run("simulate", "--experiment", "mooncake", "--requests", "trace.jsonl", *given).code == 2


@pytest.mark.slow
def test_inspect_shows_identities_and_kv_events(run: Run, mooncake: Path) -> None:
    batch = [[1.0, [["BlockStored", [1, 2], None, [5] * 32, 16, None, "GPU"], ["CacheEviction", "GPU", 3, "lru", 7]]]]
    packed = gzip.compress("".join(json.dumps(line) + "\n" for line in batch).encode())
    (mooncake / "kv_events.jsonl.gz").write_bytes(packed)
    assert run("ingest", "trace.jsonl", "kv_events.jsonl.gz", "--name", "mooncake").code == 0
    document = run("inspect", "--experiment", "mooncake", "--json").json
    source = "hash_ids of the trace, one for 512 tokens"
    assert document["prefix_identity"] == {"source": source, "requests": 3, "prompts": 3}
    assert [(c["event"], c["events"], c["blocks"], c["tokens"]) for c in document["kv_events"]] == [
        ("BlockStored", 1, 2, 32),
        ("CacheEviction", 1, 3, None),
    ]
    text = run("inspect", "--experiment", "mooncake").out
    assert "model: not recorded" in text
    assert "prefix identity: 3 prompts" in text
    assert "BlockStored" in text
    assert max(len(line) for line in text.splitlines()) <= 80
