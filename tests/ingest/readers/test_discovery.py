"""Recordings are found by content: whatever a file is called, and however it is named on the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.assemble import read_recording
from blis_replay.ingest.readers.discovery import Source, find, only_source, sources_of

TRACE = (
    "request_id,input_tokens,output_tokens,send_time_us,first_chunk_time_us,last_chunk_time_us,status\n"
    "a,11,5,1000500,1020500,1200500,ok\n"
)
RECORDS = json.dumps([{"start_time": 5.0, "end_time": 6.0, "info": {"input_tokens": 3, "output_token_times": [5.5]}}])
SPANS = '{"resourceSpans":[]}\n'
TABLE_OF_LOAD = "arrival_us,prompt_tokens,output_tokens\n0,100,3\n"
LOG = "INFO 02-18 15:03:04 [api_server.py:1] vLLM API server version 0.15.1\n"


def kinds(source: Source) -> dict[str, str]:
    known, others = find(source, None)
    named = {file.name: kind for kind, files in known.items() for file in files}
    return named | {file.name: file.kind for file in others}


def write(folder: Path, **files: str | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def test_files_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", one=TRACE, two=RECORDS, three=gzip.compress(SPANS.encode()), four=LOG, five="?")
    (source,) = sources_of([folder])
    assert kinds(source) == {
        "one": "tracev2",
        "two": "inference-perf",
        "three": "otlp",
        "four": "server log",
        "five": "unknown",
    }


def test_a_damaged_file_keeps_the_kind_of_its_name(tmp_path: Path) -> None:
    """So that its records are counted as lost instead of the file being passed over."""
    folder = write(tmp_path / "run", **{"trace.csv.gz": b"\x1f\x8b\x00 no gzip", "traces.json": b"\0" * 9})
    assert kinds(sources_of([folder])[0]) == {"trace.csv.gz": "tracev2", "traces.json": "otlp"}


def test_files_of_one_folder_and_its_results_are_one_recording_called_like_the_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", a=TRACE, b=LOG, c=RECORDS)
    write(folder / "results", d=RECORDS)
    sources = sources_of([folder / "a", folder / "b", folder / "results" / "d", write(tmp_path / "other", e=LOG) / "e"])
    assert [(source.slug, [path.name for path in source.paths or ()]) for source in sources] == [
        ("run", ["a", "b", "d"]),
        ("other", ["e"]),
    ]
    assert set(kinds(sources[0])) == {"a", "b", "d"}, "what was not named is not read"


def test_two_recordings_of_one_name_are_refused_together(tmp_path: Path) -> None:
    """The second would take the place of the first in the store; the same one twice is one."""
    one, two = write(tmp_path / "a" / "run", t=TRACE), write(tmp_path / "b" / "run", t=RECORDS)
    with pytest.raises(RecordingError, match=r"b/run: it has the name of .*a/run, and would take its place; .* --name"):
        sources_of([one, two])
    assert [source.root for source in sources_of([one, one])] == [one]


def test_patterns_stand_for_what_they_match(tmp_path: Path) -> None:
    for name in ("x-1", "x-2", "y-1"):
        write(tmp_path / name, t=TRACE)
    assert [source.slug for source in sources_of([str(tmp_path / "x-*")])] == ["x-1", "x-2"]
    (absent,) = sources_of([str(tmp_path / "z-*")])
    with pytest.raises(RecordingError, match="no such directory or file"):
        find(absent, None)


def test_a_folder_whose_name_is_a_pattern_is_itself(tmp_path: Path) -> None:
    write(tmp_path / "x[1]", t=TRACE)
    assert [source.slug for source in sources_of([str(tmp_path / "x[1]")])] == ["x[1]"]


def test_the_caller_can_name_the_only_recording(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", a=TRACE, b=TRACE)
    assert [source.slug for source in sources_of([folder / "a"], slug="mine")] == ["mine"]
    with pytest.raises(RecordingError, match="one name for 2 recordings"):
        sources_of([folder, folder / "a"], slug="mine")
    for name, what in (("a/b", "path"), ("*", "pattern"), ("a[1]", "pattern")):
        with pytest.raises(RecordingError, match=f"in it is taken for a {what}"):
            sources_of([folder / "a"], slug=name)


def test_a_given_format_overrides_what_a_file_looks_like(tmp_path: Path) -> None:
    """The file looks like nothing; read as TraceV2 it complains as that reader does."""
    folder = write(tmp_path / "run", odd="a,b\n1,2\n")
    (source,) = sources_of([folder / "odd"], form="tracev2")
    assert kinds(source) == {"odd": "tracev2"}
    with pytest.raises(RecordingError, match="columns input_tokens"), read_recording(source):
        pass
    with pytest.raises(RecordingError, match="name the files in it"):
        sources_of([folder], form="tracev2")


def test_a_directory_of_experiments_stands_for_them(tmp_path: Path) -> None:
    """Two servers read as one recording would be neither. What lies beside them without a configuration is none: a
    folder of notes is nobody's loss, one with a server's log is named.
    """
    for name in ("b", "a"):
        write(tmp_path / "runs" / name, **{"exp-config.yaml": b"model: m"})
    write(tmp_path / "runs" / "notes", **{"readme.txt": b"x"})
    write(tmp_path / "runs" / "c", **{"vllm.log": b"x"})
    sources = sources_of([tmp_path / "runs"])
    assert [(source.slug, source.left_out) for source in sources] == [("a", ("c",)), ("b", ())]
    assert len(sources_of([tmp_path / "runs", tmp_path / "runs" / "a"])) == 2


def test_a_directory_with_a_configuration_of_its_own_is_one_experiment(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", **{"exp-config.yaml": b"model: m"})
    for part in ("first", "second"):
        write(folder / part, **{"exp-config.yaml": b"model: m"})
    assert [source.slug for source in sources_of([folder])] == ["run"]


def test_one_configured_subdirectory_is_a_part_of_the_experiment_around_it(tmp_path: Path) -> None:
    write(tmp_path / "run" / "server", **{"exp-config.yaml": b"model: m"})
    assert [source.slug for source in sources_of([tmp_path / "run"])] == ["run"]


def test_subdirectories_with_a_result_each_are_experiments(tmp_path: Path) -> None:
    """Read as one, the requests of the second were left out, and only `inspect` said so."""
    for name in ("A", "C"):
        write(tmp_path / "live" / name, **{"bench.json": RECORDS, "vllm.log": LOG})
    write(tmp_path / "live", README="two runs")
    assert [source.slug for source in sources_of([tmp_path / "live"])] == ["A", "C"]
    write(tmp_path / "live" / "B" / "client", t=TRACE)
    slugs = [source.slug for source in sources_of([tmp_path / "live"])]
    assert slugs == ["A", "B", "C"], "one of another tool is an experiment as well"
    with pytest.raises(RecordingError, match=r"3 recordings \(A, B, C, \.\.\.\); ingest them one by one"):
        only_source(tmp_path / "live")


@pytest.mark.parametrize("result", ["client", "results", "."])
def test_the_parts_of_one_run_in_subdirectories_are_one_experiment(tmp_path: Path, result: str) -> None:
    """One load generator's result, and a server's files beside it; a second one below a folder that has its own."""
    run = tmp_path / "run"
    write(run / "server", log=LOG)
    write(run / "traces", spans=SPANS)
    write(run / result, r=RECORDS)
    if result != "client":
        write(run / "warm-up", r=RECORDS)
        write(run / "warm-up-2", r=RECORDS)
    assert [source.root for source in sources_of([run])] == [run]


def test_loose_files_do_not_make_one_experiment_of_many(tmp_path: Path) -> None:
    """A folder with a load and engine arguments for ten recordings was read as one of them, nine of them unused."""
    root = write(tmp_path / "pack", **{"load.csv": TABLE_OF_LOAD, "engine.yaml": "max_num_seqs: 8\n", "README": "ten"})
    for name in ("a", "b"):
        write(root / name, **{"bench.json": RECORDS, "vllm.log": LOG})
    write(root / "only-a-log", log=LOG)
    write(root / "lies" / "c", **{"exp-config.yaml": "model: m\n", "vllm.log": LOG, "r.json": RECORDS})
    write(root / "lies" / "d", **{"r.json": RECORDS})
    write(root / "lies" / "e", **{"vllm.log": LOG})
    sources = sources_of([root])
    assert [source.slug for source in sources] == ["a", "b", "c", "d"]
    assert sources[0].left_out == ("engine.yaml", "lies/e", "load.csv", "only-a-log")


def test_columns_are_of_the_recordings_that_have_such_a_table(tmp_path: Path) -> None:
    """Of several recordings one without says that the option was not used; alone it is refused."""
    columns = "arrival=begin:s,ttft=first:ms"
    table = "begin,first,prompt_tokens,output_tokens\n1.5,20,100,3\n"
    write(tmp_path / "runs" / "a", client=table, log=LOG)
    write(tmp_path / "runs" / "b", client=table, log=LOG)
    write(tmp_path / "runs" / "c", **{"bench.json": RECORDS, "vllm.log": LOG})
    sources = sources_of([tmp_path / "runs"], columns=columns)
    assert [kinds(source)["--columns"].partition(" ")[0] for source in sources] == ["given:", "given:", "option"]
    with pytest.raises(RecordingError, match="no file has columns of --columns"):
        kinds(*sources_of([tmp_path / "runs" / "c"], columns=columns))


def test_results_that_share_a_server_log_are_told_apart_by_the_user(tmp_path: Path) -> None:
    """Two clients of one server, or two runs of it: nothing says which."""
    for name in ("client-0", "client-1"):
        write(tmp_path / "run" / name, r=RECORDS)
    write(tmp_path / "run", log=LOG)
    said = (
        r"result in each of client-0, client-1, and log beside them; give --by client .*: blis-replay ingest .*/run/\*$"
    )
    with pytest.raises(RecordingError, match=said):
        sources_of([tmp_path / "run"])


def test_files_named_after_a_result_that_is_not_read_stay_with_it(tmp_path: Path) -> None:
    """`b.log` is of the run of `b.csv`; a log with a name of its own is of the folder, and `a.log` of what is read."""
    folder = write(tmp_path / "runs", **{"a.csv": TRACE, "b.csv": TRACE, "b.log": LOG, "server.log": LOG})
    (source,) = sources_of([folder])
    found = kinds(source)
    assert (found["a.csv"], found["server.log"]) == ("tracev2", "server log")
    assert found["b.log"] == "server log (not used: it belongs to b.csv, which is not read)"
    named = sources_of([folder / name for name in ("a.csv", "b.csv", "b.log")])
    assert kinds(named[0])["b.log"] == found["b.log"]
    own = write(tmp_path / "own", **{"a.csv": TRACE, "b.csv": TRACE, "a.log": LOG})
    assert kinds(sources_of([own])[0])["a.log"] == "server log"


@pytest.mark.realdata
def test_counters_of_another_run_do_not_join_a_result(data_pack: Path) -> None:
    """Drafts of the EAGLE3 run (`nebius_results_spec_sweep_c64.m0`, `.m1`) are not of the run that is read."""
    known, others = find(sources_of([data_pack / "inferencex" / "h200-gptoss"])[0], None)
    assert "metrics" not in known
    assert {one.name[-2:] for one in others if one.kind.startswith("metrics (not used")} == {"m0", "m1"}
