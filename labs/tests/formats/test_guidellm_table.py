"""GuideLLM's CSV: load levels in each generation, against its JSON, and tables that cannot be read."""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile

import polars as pl
import pytest

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.discovery import find, only_source, sources_of
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.requests import RequestsRead
from blis_replay.ingest.recording import Stage
from blis_replay_labs.formats.guidellm_table import read_load_level, recognises

HEAD = "Run Info,Run Info,Benchmark,Request Counts,Timings\nProfile,Run Index,Strategy,Total,Duration\n,,,,Sec\n"
LEVEL = '"{""completed_strategies"":[{""type_"":""concurrent"",""streams"":8}]}",0,concurrent,40,20.0\n'


def table(tmp_path: Path, text: str, point: int = 0) -> RequestsRead:
    (tmp_path / "b.csv").write_text(text)
    return read_load_level(RecordedFile(tmp_path / "b.csv", "b.csv", point=point), tmp_path)


def test_a_level_of_the_table_says_how_many_clients_sent_what(tmp_path: Path) -> None:
    read = table(tmp_path, HEAD + LEVEL)
    assert read.stages == (Stage(0, 2.0, 20_000_000),)
    assert (0, "concurrency", "asked", 8.0) in read.aggregates.rows()
    assert (0, "requests", "sent", 40.0) in read.aggregates.rows()


@pytest.mark.parametrize(
    ("text", "point", "problem"),
    [
        (HEAD + LEVEL * 2, 0, "GuideLLM's CSV of 2 load levels, each of which is an experiment of its own; name the"),
        (HEAD + LEVEL + LEVEL.replace("40", "40,1"), 2, "line 5: other columns than its header has"),
        (HEAD, 0, "a header and no load level"),
        (HEAD + '"' + LEVEL, 0, "no CSV"),
        (HEAD + "x,,,,\n" * 201, 0, "more than 200 load levels; split the file"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_with_what_to_do(
    tmp_path: Path, text: str, point: int, problem: str
) -> None:
    with pytest.raises(RecordingError, match=problem):
        table(tmp_path, text, point)


def test_the_table_is_known_by_its_first_line() -> None:
    assert recognises(b"Type,Run Id,Id,Name,Start Time")
    assert not recognises(b"Type,Name")


def test_a_table_of_two_load_levels_is_two_recordings(tmp_path: Path) -> None:
    """A directory is one recording, and a caller can ask for exactly one."""
    path = tmp_path / "sweep" / "benchmarks.csv"
    path.parent.mkdir()
    path.write_text(HEAD + LEVEL * 2)
    points = sources_of([path], slug="mine")
    assert [(point.slug, point.point) for point in points] == [("mine-1", 1), ("mine-2", 2)]
    kinds = [{file.name: file.kind for file in find(point, None)[1]} for point in points]
    assert [kind["point"] for kind in kinds] == ["given: 1", "given: 2"]
    assert len(sources_of([path.parent])) == 1
    with pytest.raises(RecordingError, match=r"2 recordings \(sweep-1, sweep-2, ...\)"):
        only_source(path)


def test_guidellm_tables_have_what_its_json_has(data_pack: Path, tmp_path: Path) -> None:
    """A sweep of 0.5.4 in both forms: four load levels with the same means, counts and percentiles."""
    folder, table = data_pack / "clients" / "guidellm-0.5.4" / "sweep", tmp_path / "sweep" / "benchmarks.csv"
    table.parent.mkdir()
    copyfile(folder / "benchmarks.csv", table)
    points = sources_of([table], model="mock-model")
    assert [point.slug for point in points] == ["sweep-1", "sweep-2", "sweep-3", "sweep-4"]
    with read_recording(folder, profile={"model": "mock-model"}) as recording:
        of_json = {row[:3]: row[3] for row in recording.aggregates.iter_rows()}
    for stage, point in enumerate(points):
        with read_recording(point) as recording:
            found = {row[1:3]: row[3] for row in recording.aggregates.filter(pl.col("stage") == 0).iter_rows()}
        shared = [key for key in found if (stage, *key) in of_json]
        assert {"e2e", "ttft", "itl_reported", "prompt_tokens"} <= {metric for metric, _statistic in shared}
        assert all(found[key] == pytest.approx(of_json[stage, *key]) for key in shared)
        clients = {0: 1.0, 1: 45.0}.get(stage)  # synchronous; throughput, where all 45 are sent at once
        assert found.get(("concurrency", "asked")) == clients
        if clients is None:  # constant, at the rates that the sweep found
            assert recording.stages[0].rate_per_s == pytest.approx({2: 9.961782, 3: 18.423564}[stage])


def test_the_only_load_level_of_guidellm_0_3(data_pack: Path) -> None:
    with read_recording(data_pack / "clients" / "guidellm-0.3.1" / "constant-csv") as recording:
        found = {row[:3]: row[3] for row in recording.aggregates.iter_rows()}
    assert recording.model == "mock-model"
    assert (recording.requests.height, recording.stages[0].rate_per_s) == (0, 6.0)
    assert (found[0, "requests", "sent"], found[0, "requests", "succeeded"]) == (63, 59)
    assert found[0, "ttft", "mean"] == pytest.approx(59_040.85353, rel=1e-6)
    assert found[0, "e2e", "p99"] == pytest.approx(713_083.0288, rel=1e-6)
