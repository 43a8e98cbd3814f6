"""Broken recordings, stores and outputs through the command line: one line of complaint, never a traceback."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
from command_line import Answer, Run

pytestmark = pytest.mark.slow

_TRACE = "trace.csv.gz"
_PER_REQUEST = "results/per_request_lifecycle_metrics.json"
_SUMMARY = "results/summary_lifecycle_metrics.json"
_SERVED = "model: codellama/CodeLlama-34b-Instruct-hf\ntensor_parallelism: 2"
_COMMAND = (sys.executable, "-m", "blis_replay.validate.cli.main")


def _lines(demo: Path) -> list[str]:
    return gzip.decompress((demo / _TRACE).read_bytes()).decode().splitlines()


def _rewrite(demo: Path, lines: list[str]) -> None:
    (demo / _PER_REQUEST).unlink(missing_ok=True)
    (demo / _TRACE).write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))


def _with(lines: list[str], column: str, value: str) -> list[str]:
    """The trace with one value in the whole column."""
    position = lines[0].split(",").index(column)
    rows = [line.split(",") for line in lines[1:]]
    return [lines[0], *(",".join([*row[:position], value, *row[position + 1 :]]) for row in rows)]


def _is_one_line(answer: Answer, code: int, complaint: str) -> None:
    assert (answer.code, answer.out) == (code, "")
    assert complaint in answer.err
    assert len(answer.err.strip().splitlines()) == 1


def test_a_recording_in_which_all_failed_has_nothing_to_judge(run: Run, poor_release: str, demo: Path) -> None:
    """Its published aggregates are of no successful request, so they are not compared either."""
    _rewrite(demo, _with(_lines(demo), "status", "error"))
    run("ingest", demo)
    run("calibrate", "--train", "1b-general", "--out", "mine.yaml")
    answer = run("validate", "--experiment", "1b-general", "--coefficients", poor_release)
    assert (answer.code, answer.err, answer.out.split(maxsplit=2)[:2]) == (4, "", ["NOT", "JUDGED"])
    assert "no request that succeeded" in " ".join(answer.out.split())


def test_latencies_of_nothing_are_explained_in_ms(run: Run, tmp_path: Path) -> None:
    """No error is a share of them."""
    table = tmp_path / "requests.csv"
    rows = [f"={number},1,100,20,0,0" for number in range(6)]
    table.write_text("\n".join(["request_id,arrival_s,prompt_tokens,output_tokens,ttft_ms,e2e_ms", *rows, ""]), "utf-8")
    serving = ("max_num_seqs: 128", "max_num_batched_tokens: 2048", "max_model_len: 4096")
    (tmp_path / "exp-config.yaml").write_text("\n".join([_SERVED, *serving, ""]), "utf-8")
    assert run("ingest", tmp_path, "--name", "20260101-000000-x-34b-tp2-codegen").code == 0
    answer = run("explain", "20260101-000000-x-34b-tp2-codegen", "--jobs", "1")
    assert (answer.code, answer.err) == (0, "")
    assert " ms" in answer.out


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_too_few_requests_are_not_fitted(run: Run, demo: Path, kept: int) -> None:
    """Four coefficients take four windows at least; these make one, or none."""
    _rewrite(demo, _lines(demo)[: 1 + kept])
    (demo / "traces.json.gz").unlink()
    if kept:
        (demo / _SUMMARY).unlink()  # it counts 300 requests
    run("ingest", demo)
    answer = run("calibrate", "--train", "1b-general", "--out", "mine.yaml")
    _is_one_line(answer, 4, "only a summary tells latencies" if kept == 0 else "1 window of steps or latencies")
    assert not Path("mine.yaml").exists()


@pytest.mark.parametrize("value", ["0", "-1", str(2**70), "many", "\x1b[31m"])
def test_prompts_without_a_length_are_not_fitted(run: Run, demo: Path, value: str) -> None:
    lines = _with(_with(_lines(demo), "input_tokens", value), "server_input_tokens", value)
    _rewrite(demo, lines)
    run("ingest", demo)
    _is_one_line(
        run("calibrate", "--train", "1b-general", "--out", "mine.yaml"), 4, "no request with a known prompt length"
    )


def test_requests_of_unknown_output_length_are_left_out_of_a_fit(run: Run, demo: Path) -> None:
    """Without ignore_eos a reported 0 stands for unknown; the other 299 requests are fitted."""
    lines = _lines(demo)
    _rewrite(demo, [lines[0], *_with([lines[0], lines[1]], "output_tokens", "0")[1:], *lines[2:]])
    (demo / "results" / "config.yaml").unlink()
    (demo / "traces.json.gz").unlink()
    run("ingest", demo)
    fits = run("calibrate", "--train", "1b-general", "--out", "mine.yaml", "--split", "1:1", "--json").json["fits"]
    assert [(score["part"], score["requests"]) for score in fits[0]["scores"]] == [("fit", 299)]


def test_a_stage_without_requests_is_a_row_without_numbers(run: Run, poor_release: str, demo: Path) -> None:
    """The first 20 requests of the demonstration all belong to stage 0."""
    _rewrite(demo, _lines(demo)[:21])
    run("ingest", demo)
    arguments = ("validate", "--experiment", "1b-general", "--by-stage", "--coefficients", poor_release)
    stages = run(*arguments, "--json").json["experiments"][0]["stages"]
    assert [(stage["stage"], stage["requests"]) for stage in stages] == [(0, 20)]
    rows = [line.split() for line in run(*arguments).out.splitlines() if line.startswith("stage 1")]
    assert rows == [["stage", "1", "0", *"-----"]]


@pytest.mark.usefixtures("stored_demo")
def test_stages_are_compared_inside_the_window(run: Run, poor_release: str) -> None:
    """Half of the run holds half of each row's requests at most, and the two stages add up to it."""
    arguments = ("validate", "--experiment", "1b-general", "--by-stage", "--coefficients", poor_release, "--json")
    whole = run(*arguments).json["experiments"][0]
    half = run(*arguments, "--window", "0.5:1").json["experiments"][0]
    assert sum(stage["requests"] for stage in whole["stages"]) == whole["requests"] == 300
    assert sum(stage["requests"] for stage in half["stages"]) == half["requests"] < 300


@pytest.mark.parametrize("name", ["red\x1b[31m", "two\nlines", os.fsdecode(b"latin-\xff")])
def test_a_directory_whose_name_is_no_plain_text_is_refused(run: Run, demo: Path, name: str) -> None:
    odd = demo.rename(demo.with_name(name))
    answer = run("ingest", odd)
    _is_one_line(answer, 4, "rename the directory")
    assert "\x1b" not in answer.err


def test_file_names_and_texts_reach_the_terminal_without_control_characters(run: Run, demo: Path) -> None:
    (demo / os.fsdecode(b"odd\xff\x1b[31m.txt")).write_text("x")
    (demo / "exp-config.yaml").write_text('model: "evil\\e[31m <script>-1b"\ntensor_parallelism: two\n')
    lines = _lines(demo)
    _rewrite(demo, [*_with(lines, "request_id", "id\x1b[31m"), lines[1].replace(",", "\x1b[31m,", 1)])
    assert run("ingest", demo).code == 0
    shown = run("inspect", "--experiment", demo.name)
    assert shown.code == 0
    assert "\x1b" not in shown.out + shown.err
    assert "odd\\udcff\\x1b[31m.txt" in shown.out


def test_a_loop_of_links_is_no_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    _is_one_line(run("ingest", tmp_path / "loop"), 4, "neither a directory nor a file")


def test_aggregates_beyond_any_time_are_rejected(run: Run, poor_release: str, demo: Path) -> None:
    """1e308 s is infinite in us, which no JSON could carry."""
    summary = demo / "results" / "summary_lifecycle_metrics.json"
    summary.write_text(summary.read_text().replace('"mean": 0.', '"mean": 1e308, "x": 0.'))
    _rewrite(demo, _lines(demo))
    run("ingest", demo)
    messages = [f["message"] for f in run("inspect", "--experiment", "1b-general", "--json").json["findings"]]
    assert any("larger than any time or count can be" in message for message in messages)
    answer = run("validate", "--experiment", "1b-general", "--coefficients", poor_release, "--json")
    assert answer.json["experiments"][0]["requests"] == 300


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("verb", ["inspect", "validate"])
@pytest.mark.usefixtures("stored_demo")
def test_a_damaged_store_is_named_as_such(run: Run, share: float, verb: str) -> None:
    store = Path(".blis-replay") / "store.duckdb"
    whole = store.read_bytes()
    damaged = bytearray(whole)
    damaged[12_288 : int(len(whole) * share)] = b"\xa5" * (int(len(whole) * share) - 12_288)
    store.write_bytes(damaged)
    answer = run(verb, "--experiment", "1b-general")
    _is_one_line(answer, 4, "restore it from a copy")
    assert "another process" not in answer.err


def _ended(arguments: list[str], tmp_path: Path, output: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_COMMAND, *arguments], cwd=tmp_path, stdout=output, stderr=subprocess.PIPE, text=True, check=False
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_under_the_output_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ended = _ended(["list"], tmp_path, full.fileno())
    assert ended.returncode == 4
    assert ended.stderr == "error: No space left on device; check the path and the room left there\n"


@pytest.mark.usefixtures("none_ships")
def test_experiments_of_one_alias_are_told_apart_by_their_slugs(run: Run, demo: Path) -> None:
    """Both lack coefficients, so both are not judged, and neither hides the other."""
    twin = demo.with_name("20260401-000000-synthetic-1b-tp1-general")
    demo.rename(twin)
    run("ingest", twin)
    twin.rename(demo)
    run("ingest", demo)
    answer = run("validate", "--experiment", "1b-general")
    _is_one_line(answer, 2, f"1b-general could mean {demo.name}, {twin.name}")
    assert set(run("validate", "--all", "--json").json["not_judged"]) == {demo.name, twin.name}
    listed = [row["alias"] for row in run("list", "--json").json["experiments"]]
    assert {demo.name, twin.name} <= set(listed)
    # Whatever is printed is a name that is understood.
    assert run("inspect", demo.name).out.startswith(demo.name)


@pytest.mark.usefixtures("stored_demo")
def test_stored_and_bundled_experiments_have_the_same_fields(run: Run) -> None:
    rows = json.loads(run("list", "--json").out)["experiments"]
    assert len({frozenset(row) for row in rows}) == 1


@pytest.mark.usefixtures("stored_demo")
def test_a_store_that_may_not_be_written_can_be_inspected_and_validated(
    run: Run, poor_release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The administrator may write everything, so the answer of the system is put in its place."""
    store = Path(".blis-replay") / "store.duckdb"
    before, connect = store.read_bytes(), duckdb.connect

    def refused(path: str, read_only: bool = False, **others: Any) -> duckdb.DuckDBPyConnection:
        if path.endswith("store.duckdb") and not read_only:
            raise duckdb.IOException(f'IO Error: Cannot open file "{path}": Permission denied')
        return connect(path, read_only=read_only, **others)

    access = os.access

    def accessible(place: Any, mode: int, **others: Any) -> bool:
        return access(place, mode, **others) and not (mode & os.W_OK and str(place).endswith("store.duckdb"))

    monkeypatch.setattr("duckdb.connect", refused)
    monkeypatch.setattr("os.access", accessible)
    assert "300 ok" in run("inspect", "--experiment", "1b-general").out
    validated = run("validate", "--experiment", "1b-general", "--coefficients", poor_release)
    assert (validated.code, "E2E" in validated.out) == (1, True)
    assert validated.err == ""
    _is_one_line(run("inspect", "--experiment", "34b-general"), 4, "cannot be written")
    assert store.read_bytes() == before


@pytest.mark.heavy
@pytest.mark.usefixtures("stored_demo")
def test_verbs_at_the_same_time_wait_for_each_other(run: Run, poor_release: str, tmp_path: Path) -> None:
    """DuckDB lets nobody read what one writes: of three validations two ended with an error."""
    arguments = ["validate", "--experiment", "1b-general", "--coefficients", poor_release, "--replay"]
    modes = ("exact", "prefix=none", "scheduling=synchronous")
    all_at_once = [
        subprocess.Popen([*_COMMAND, *arguments, mode], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for mode in modes
    ]
    ended = [(*process.communicate(), process.returncode) for process in all_at_once]
    assert [code for _out, _err, code in ended] == [1, 1, 1], ended


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no endless device")
@pytest.mark.parametrize(
    "arguments",
    [
        ("validate", "--experiment", "34b-general", "--coefficients"),
        ("gate", "h100-vllm-0.15.1", "34b-general", "--policy"),
        ("simulate", "--coefficients", "stepml-direct", "--out", "out", "--requests", "load.csv", "--engine"),
        ("coefficients", "convert", "--out", "out.yaml"),
    ],
)
def test_a_device_without_end_is_too_large(run: Run, arguments: tuple[str, ...]) -> None:
    answer = run(*arguments, "/dev/zero")
    assert answer.code in (2, 4)
    assert len(answer.err.splitlines()) == 1
