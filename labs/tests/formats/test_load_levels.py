"""A table of load levels, a row each: which columns are what, what a row says of its server, and what it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.discovery import sources_of
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.recording import Stage
from blis_replay_labs.formats.load_levels import (
    names_of_levels,
    read_load_level,
    recognises,
    server_of_level,
)

HEAD = "name,model,gpu,tp,backend_version,concurrency,isl,osl,ttft_ms,p99_ttft_ms,mean_tpot_ms,note\n"
FIRST = "c1,org/m-7b,h100_sxm,2,0.19.0,1,1000,101,50,80,10,x\n"
SECOND = "c8,org/m-7b,h100_sxm,2,0.19.0,8,1000,101,90,,11,y\n"
SENT = "odd,rate,num_prompts,isl,osl,median_ttft_ms,max_num_seqs,async_scheduling\n7,2.5,50,1000,101,60,256,true\n"


def levels(tmp_path: Path, text: str, point: int = 0, columns: str = "") -> RecordedFile:
    (tmp_path / "b.csv").write_text(text)
    return RecordedFile(tmp_path / "b.csv", "b.csv", point=point, columns=columns)


def figures(file: RecordedFile) -> dict[tuple[str, str], float]:
    rows = read_load_level(file, file.path).aggregates.rows()
    return {(metric, statistic): value for stage, metric, statistic, value in rows if stage == -1}


def test_a_row_is_a_load_level_of_so_many_clients(tmp_path: Path) -> None:
    """100 gaps of 10 ms behind a first token after 50 ms are 1,050 ms; ten requests are assumed of each client."""
    file = levels(tmp_path, HEAD + FIRST + SECOND, point=1)
    assert figures(file) == {
        ("prompt_tokens", "mean"): 1000,
        ("output_tokens_reported", "mean"): 101,
        ("ttft", "mean"): 50_000,
        ("ttft", "p99"): 80_000,
        ("tpot_reported", "mean"): 10_000,
        ("e2e", "mean"): 1_050_000,
        ("concurrency", "asked"): 1,
        ("requests", "sent"): 10,
        ("requests", "succeeded"): 10,
    }
    lacks = read_load_level(file, tmp_path).lacks
    assert "number of requests: b.csv does not say it, 10 are assumed" in lacks
    assert "columns of b.csv that were not read: note" in lacks
    assert ("ttft", "p99") not in figures(levels(tmp_path, HEAD + FIRST + SECOND, point=2))


def test_a_row_says_what_its_server_was(tmp_path: Path) -> None:
    said = server_of_level(levels(tmp_path, HEAD + FIRST + SECOND, point=2))
    assert (said.model, said.hardware, said.tensor_parallelism) == ("org/m-7b", "h100_sxm", 2)
    assert dict(said.engine) == {"vllm_version": "0.19.0"}
    assert dict(server_of_level(levels(tmp_path, SENT)).engine) == {"max_num_seqs": 256, "async_scheduling": True}


def test_a_rate_is_a_stage(tmp_path: Path) -> None:
    """50 requests at 2.5 a second take 20 s."""
    file = levels(tmp_path, SENT)
    assert read_load_level(file, tmp_path).stages == (Stage(0, 2.5, 20_000_000),)
    assert figures(file)["ttft", "p50"] == 60_000
    assert not any(lack.startswith("number of requests") for lack in read_load_level(file, tmp_path).lacks)


def test_which_column_is_what_can_be_said(tmp_path: Path) -> None:
    file = levels(tmp_path, "batch,isl,osl,first\n4,9,8,0.5\n", columns="concurrency=batch,ttft=first:s")
    assert figures(file)["ttft", "mean"] == 500_000
    assert figures(file)["requests", "sent"] == 40


def test_each_row_of_a_table_is_a_recording(tmp_path: Path) -> None:
    """Called by its name, where each has one of its own, else by its number."""
    file = levels(tmp_path, HEAD + FIRST + SECOND)
    assert [source.slug for source in sources_of([file.path])] == [f"{tmp_path.name}-c1", f"{tmp_path.name}-c8"]
    levels(tmp_path, HEAD + FIRST + FIRST)
    assert [source.slug for source in sources_of([file.path])] == [f"{tmp_path.name}-1", f"{tmp_path.name}-2"]
    levels(tmp_path, HEAD + FIRST)
    assert [source.slug for source in sources_of([file.path])] == [tmp_path.name]


@pytest.mark.parametrize(
    ("head", "known"),
    [
        (HEAD + FIRST, True),
        (SENT, True),
        ('{"concurrency": 4, "isl": 9, "osl": 8, "e2e_s": 1}', True),
        ("arrival_s,concurrency,isl,osl,ttft_ms\n1,2,3,4,5\n", False),  # a table of requests
        ("concurrency,isl,osl\n1,2,3\n", False),
        ("isl,osl,ttft_ms\n1,2,3\n", False),
    ],
)
def test_a_table_of_load_levels_is_known_by_its_columns(head: str, known: bool) -> None:
    assert recognises(head.encode()) == known


@pytest.mark.parametrize(
    ("text", "point", "problem"),
    [
        (HEAD + FIRST + SECOND, 0, "a table of several load levels, each of which is an experiment of its own; name"),
        (HEAD + FIRST, 2, "no row 2; ingest the file anew"),
        (HEAD + FIRST.replace(",1,1000", ",,1000"), 1, "line 2: neither clients nor a rate; give it a column `conc"),
        (HEAD + FIRST.replace("101", "-"), 1, "line 2: no output_tokens; give it a column"),
        (HEAD + FIRST.replace("50,80,10", ",nan,-3"), 1, "line 2: no latency; give it a column"),
        (HEAD.replace("ttft_ms,p99", "ttft,p99") + FIRST, 1, "column 'ttft' says no unit of time; add --columns ttft="),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused_with_what_to_do(
    tmp_path: Path, text: str, point: int, problem: str
) -> None:
    with pytest.raises(RecordingError, match=problem):
        read_load_level(levels(tmp_path, text, point), tmp_path)


def test_a_table_of_too_many_levels_is_refused(tmp_path: Path) -> None:
    """Each reads all of it again."""
    with pytest.raises(RecordingError, match="more than 500 load levels; split the file"):
        names_of_levels(levels(tmp_path, HEAD + FIRST * 501))


def test_one_level_over_several_lines(tmp_path: Path) -> None:
    """Statistics of a metric in an object of their own; a list of one such object on a line each is a table."""
    text = '{\n "clients": 4, "completed": 9,\n "isl": {"mean": 700, "p95": 900}, "osl": {"mean": 51},\n'
    text += ' "ttft_ms": {"mean": 50, "p99": 80},\n "tpot_ms": {"mean": 10}\n}\n'
    assert recognises(text.encode())
    said = figures(levels(tmp_path, text))
    assert (said["ttft", "mean"], said["ttft", "p99"], said["tpot_reported", "mean"]) == (50_000, 80_000, 10_000)
    assert (said["prompt_tokens", "mean"], said["output_tokens_reported", "mean"]) == (700, 51)
    assert (said["requests", "sent"], said["e2e", "mean"]) == (9, 50_000 + 50 * 10_000)


@pytest.mark.parametrize("name", ["dsv4_b1_conc64", "dsv4_b1_sglang_conc64"])
def test_a_published_summary_of_turns(data_pack: Path, name: str) -> None:
    """DeepSeek-V4 on four GB300s, 64 clients: the numbers of the file, times in us."""
    path = data_pack / "inferencex" / "gb300-dsv4" / f"{name}.json"
    stated = json.loads(path.read_text())
    said = figures(RecordedFile(path, path.name))
    for metric in ("ttft", "e2e"):
        for statistic in ("mean", "p50", "p99"):
            assert said[metric, statistic] == pytest.approx(stated[f"{metric}_ms"][statistic] * 1_000)
    assert said["concurrency", "asked"] == 64
    assert said["requests", "sent"] == stated["completed_turns"]
    assert said["output_tokens_reported", "mean"] == stated["osl"]["mean"]
