"""Parts of a recording: a server that was recorded with several loads, cut by time, by client and by load stage.

The live server of ``client-only`` went on with the load of ``lies/proxy-40ms``: its counters after the one are those
before the other.  Both together are one recording of two clients, and each part must be what its own folder says.
"""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.assemble import parts_of, read_recording
from blis_replay.ingest.checks.ledger import entries
from blis_replay.ingest.checks.registry import run_checks
from blis_replay.ingest.ingest import ingest_source
from blis_replay.ingest.readers.discovery import Part, Source, only_source, sources_of
from blis_replay.ingest.recording import BY_CLIENT, ONE_TABLE, Recording

pytestmark = pytest.mark.slow

COLUMNS = "arrival=start_time:s,ttft=ttft:ms,e2e=latency:ms"
REQUESTS = ["arrival_us", "prompt_tokens", "output_tokens", "ttft_us", "e2e_us"]
FIRST_ITERATION = 3813  # of the log of client-only


@pytest.fixture
def two_clients(data_pack: Path, tmp_path: Path) -> Path:
    """Both loads of the server, its log from the first of them on, and its three snapshots of /metrics."""
    first, second = data_pack / "live-vllm-0.29" / "client-only", data_pack / "live-vllm-0.29" / "lies" / "proxy-40ms"
    folder = tmp_path / "server"
    folder.mkdir()
    logs = [gzip.decompress((one / "vllm.log.gz").read_bytes()).decode() for one in (first, second)]
    more = [line for line in logs[1].splitlines() if "Iteration(" in line]
    log = "\n".join([logs[0].rstrip("\n"), *more, ""])
    log = re.sub(r"Iteration\((\d+)\)", lambda match: f"Iteration({int(match[1]) - FIRST_ITERATION})", log)
    (folder / "vllm.log").write_text(log)
    for file, name in ((first / "client.csv", "a.csv"), (second / "client.csv", "b.csv"), (first / "before.prom", "1")):
        shutil.copyfile(file, folder / name)
    shutil.copyfile(first / "after.prom", folder / "2")
    shutil.copyfile(second / "after.prom", folder / "3")
    return folder


def stated(recording: Recording, quantity: str) -> dict[str, float]:
    return {entry.source: entry.value for entry in entries(recording) if entry.quantity == quantity}


def of_folder(folder: Path, **of: object) -> Source:
    return replace(only_source(folder), **{"columns": COLUMNS, **of})


def test_each_client_of_a_server_is_an_experiment(two_clients: Path, data_pack: Path) -> None:
    """The expected counts are those that the README of the recordings states, or that the log of the folder has."""
    sources = parts_of(of_folder(two_clients), "client")
    assert [source.slug for source in sources] == ["server-a", "server-b"]
    alone = data_pack / "live-vllm-0.29"
    for source, folder, decoded in zip(
        sources, (alone / "client-only", alone / "lies/proxy-40ms"), (7075, 6688), strict=True
    ):
        with read_recording(source) as part, read_recording(of_folder(folder)) as own:
            assert part.requests.frame(REQUESTS).equals(own.requests.frame(REQUESTS))
            assert part.clocks[0].zero_us == own.clocks[0].zero_us
            assert stated(part, "decoded tokens") == {
                "client's requests": decoded,
                "/metrics": 13_763,
                "server log": decoded,
            }
            assert not [finding for finding in run_checks(part)[0] if finding.severity == "unusable"]
            assert part.iterations["start_us"].null_count() == 0
            assert any("180 requests of" in line for line in part.missing)


def test_a_part_by_time_is_named_held_and_again_the_same(two_clients: Path, tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    (source,) = sources_of([two_clients], columns=COLUMNS, part=Part(until_us=61_500_000))
    assert source.slug == "server-0s-61.5s"
    first = ingest_source(store, source)
    assert (first.outcome, first.requests, first.iterations) == ("new", 180, 4395)
    # Without the times the experiment of that name is still the part.
    again = ingest_source(store, of_folder(two_clients, slug=source.slug))
    assert (again.outcome, again.requests) == ("unchanged", 180)


def test_what_others_had_in_flight_is_counted_by_name(data_pack: Path) -> None:
    """The middle of a load: a request was in flight when it began, so its steps are not those after a start."""
    folder = data_pack / "live-vllm-0.29" / "q8c"
    with (
        read_recording(of_folder(folder, part=Part(28_550_000, 45_000_000))) as part,
        read_recording(of_folder(folder)) as run,
    ):
        sent = run.requests.frame(["arrival_us", "e2e_us"])
        mine = sent.filter(pl.col("arrival_us").is_between(28_550_000, 45_000_000, closed="left"))
        begin, end = mine["arrival_us"].min(), (mine["arrival_us"] + mine["e2e_us"]).max()
        others = sent.filter(pl.col("arrival_us") + pl.col("e2e_us") >= begin, pl.col("arrival_us") <= end)
        (note,) = [finding for finding in part.findings if finding.check == "ledger"]
        assert part.requests.height == mine.height
        assert (note.severity, note.measured["client.csv"]) == ("note", others.height - mine.height)
        assert part.steps["step_id"].min() > 1
        assert not [finding for finding in run_checks(part)[0] if finding.severity == "unusable"]


def test_two_clients_at_one_time_are_no_two_experiments(data_pack: Path, tmp_path: Path) -> None:
    """Every second request is another client's: what one client saw is not what the server served."""
    folder = tmp_path / "run"
    shutil.copytree(data_pack / "live-vllm-0.29" / "q8c", folder)
    head, *rows = (folder / "client.csv").read_text().splitlines()
    (folder / "client.csv").unlink()
    for name, own in (("a", rows[::2]), ("b", rows[1::2])):
        (folder / f"{name}.csv").write_text("\n".join([head, *own, ""]))
    with read_recording(parts_of(of_folder(folder), "client")[0]) as part:
        (stop,) = [finding for finding in part.findings if finding.check == "ledger"]
        assert (stop.severity, stop.measured) == ("unusable", {"b.csv": 99, "requests": 100})


def test_clients_without_send_times_are_not_beside_each_other(data_pack: Path, tmp_path: Path) -> None:
    """InferenceX keeps no send times: 4 clients and then 64, each file a closed loop of its own from 0 s on."""
    folder = tmp_path / "levels"
    folder.mkdir()
    for name in ("h200_gptoss_gt_c4.json", "h200_gptoss_gt_c64.json"):
        shutil.copyfile(data_pack / "inferencex" / "h200-gptoss" / name, folder / name)
    sizes = {}
    for source in parts_of(only_source(folder), "client"):
        with read_recording(source) as part:
            sizes[source.slug] = part.requests.height
            assert [one.message for one in run_checks(part)[0] if one.severity == "unusable"] == []
    assert list(sizes.values()) == [400, 2_560]


def test_two_loads_in_one_folder_are_told_apart_by_client(two_clients: Path, data_pack: Path, tmp_path: Path) -> None:
    """The file that was not read says how to read it, and so does the check that misses its requests."""
    with read_recording(of_folder(two_clients)) as recording:
        assert [file.name for file in recording.files if BY_CLIENT in file.kind] == ["b.csv"]
        (stop,) = [finding for finding in run_checks(recording)[0] if finding.severity == "unusable"]
    assert stop.check == "ledger"
    assert BY_CLIENT in stop.message
    said = [ingest_source(tmp_path / "s.duckdb", of_folder(two_clients)).unusable for _ in range(2)]
    assert said == ["ledger", "ledger"], "when it is read, and when it is found unchanged"
    folder = shutil.copytree(data_pack / "live-vllm-0.29" / "q8c", tmp_path / "q8c")
    # Beside the server's own records a table is the client's only where --columns says so.
    part = of_folder(folder, columns=None, part=Part(client="client.csv"))
    with pytest.raises(RecordingError, match="--columns"), read_recording(part):
        pass


def test_a_part_without_requests_is_refused(two_clients: Path) -> None:
    with (
        pytest.raises(RecordingError, match=r"no requests in 900s-end"),
        read_recording(of_folder(two_clients, part=Part(900_000_000))),
    ):
        pass
    with pytest.raises(RecordingError, match="no stage to divide it by"):
        parts_of(of_folder(two_clients), "stage")


def test_each_load_stage_is_an_experiment(tmp_path: Path) -> None:
    """Two stages of a table: 3 requests at 1 per second, then 5 at 10 per second."""
    sends_s = {0: (0, 1, 2), 1: (3.0, 3.1, 3.2, 3.3, 3.4)}
    rows = [f"{stage},{at},10,5,20,400" for stage, sends in sends_s.items() for at in sends]
    folder = tmp_path / "run"
    folder.mkdir()
    head = "stage,start_time,prompt_tokens,completion_tokens,ttft,latency"
    (folder / "client.csv").write_text("\n".join([head, *rows, ""]))
    sources = parts_of(of_folder(folder), "stage")
    assert [source.slug for source in sources] == ["run-stage-0", "run-stage-1"]
    for source, period_us, count in zip(sources, (1_000_000, 100_000), (3, 5), strict=True):
        with read_recording(source) as part:
            assert part.requests["arrival_us"].to_list() == [i * period_us for i in range(count)]


HEAD = "request_id,start_time_s,prompt_tokens,output_tokens,ttft_ms,e2e_ms"
HOUR_S, MONDAY_S = 3_600.0, 1_767_600_000.0


def load(zero_s: float = 0.0, *, seed: int = 1) -> list[tuple[str, float, int, int, float, float]]:
    """60 requests, 10 per second: id, send (s), prompt and output tokens, TTFT and E2E (ms)."""
    draw = np.random.default_rng(seed)
    return [(f"r{i}", zero_s + i / 10, 50 + i % 7, 20, draw.uniform(50, 90), draw.uniform(400, 900)) for i in range(60)]


def of_files(folder: Path, *files: Iterable[Iterable[object]]) -> Recording:
    """What is found in a folder of tables ``0.csv``, ``1.csv``, ... with these rows."""
    folder.mkdir()
    for number, rows in enumerate(files):
        lines = [HEAD, *(",".join(map(str, row)) for row in rows), ""]
        (folder / f"{number}.csv").write_text("\n".join(lines))
    with read_recording(folder) as recording:
        return replace(recording, findings=run_checks(recording)[0])


@pytest.mark.parametrize(
    ("read", "unread", "others"),
    [
        (load()[::2], load()[1::2], 30),  # two generators, each counting from its own start
        (load()[:40], load()[30:], 20),  # an export in two pages
        (load(), load(seed=2), 60),  # one dataset, sent twice: the same ids and lengths
        (load(MONDAY_S), load(MONDAY_S + 3, seed=2), 36),  # 3 s later, and the last answer comes after 6.5 s
        (load(MONDAY_S), load(MONDAY_S + HOUR_S, seed=2), 0),
        (load(), load(MONDAY_S), 0),  # the same requests by another clock,
        (load(), [(*row[:4], round(row[4]), round(row[5])) for row in load()], 0),  # and rounded to ms
    ],
)
def test_requests_of_files_that_are_not_read_count_as_those_of_others(
    tmp_path: Path, read: list[tuple[object, ...]], unread: list[tuple[object, ...]], others: int
) -> None:
    """Half of a load replays as a faster server; nothing but their latencies tells the same requests from others."""
    recording = of_files(tmp_path / "run", read, unread)
    stops = [one for one in recording.findings if one.severity == "unusable"]
    assert [(one.check, one.metric, one.measured["1.csv"]) for one in stops] == [("ledger", "", others)] * (others > 0)
    assert all(ONE_TABLE in one.message for one in stops)
    why = {file.name: file.kind for file in recording.files}["1.csv"]
    assert (ONE_TABLE if others else BY_CLIENT) in why
    assert ("may have been" in "".join(one.message for one in stops)) == (others > 0 and float(str(read[0][1])) == 0)


def test_a_load_that_was_to_be_sent_is_not_of_others(tmp_path: Path) -> None:
    recording = of_files(tmp_path / "run", load(), [(*row[:4], "", "") for row in load(seed=2)])
    assert [one for one in recording.findings if one.severity == "unusable"] == []


def test_clients_without_a_common_clock_are_not_parts_of_one_recording(tmp_path: Path) -> None:
    of_files(tmp_path / "run", load()[::2], load()[1::2])
    part = parts_of(only_source(tmp_path / "run"), "client")[0]
    with pytest.raises(RecordingError, match=ONE_TABLE), read_recording(part):
        pass
