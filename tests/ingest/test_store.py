"""The store: whole or not at all, idempotent, read back as written."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from builders import aggregates, recording, requests, server_traces, steps, write_events
from recordings import token_times

from blis_replay.base.errors import StoreError, UnknownExperimentError
from blis_replay.ingest.recording import Clock, Finding, SharedPrefix
from blis_replay.ingest.store import list_experiments, open_store, read_stored, recordings
from blis_replay.ingest.store.recordings import (
    TABLES,
    ExperimentRow,
    inter_token_gaps,
    read_findings,
    read_token_layout,
)
from blis_replay.ingest.store.writing import write_recording
from blis_replay.ingest.stream import NO_EVENTS, PAIRED_WITH_DONE, PLAIN

FINDING = Finding("token_events", "corrected", "itl", "8.13 ms, 16.36 ms", {"ratio": 2.013, "layout": None}, "1.5")


def test_a_recording_reads_back_as_it_was_written(tmp_path: Path) -> None:
    written = recording(
        shared_prefix=SharedPrefix(10, 10, 100, 447, 248),
        prefix_hit_rate=0.5,
        steps=steps([20_000, 0], kv_usage=0.25),
        aggregates=aggregates((0, "ttft", "p50", 50_000.0), (-1, "e2e", "mean", 250_000.0)),
        clocks=(Clock("server", "epoch", 1_770_000_000_000_000, stamped_zero_us=12),),
        findings=(FINDING,),
        **server_traces(),
    )
    with open_store(tmp_path / "deep" / "store.duckdb") as store:
        assert write_recording(store, written, NO_EVENTS) == "new"
    with open_store(tmp_path / "deep" / "store.duckdb", read_only=True) as store:
        read = read_stored(store, written.slug)
    assert read.aggregates.equals(written.aggregates.sort("stage", "metric", "statistic"))
    assert read.steps.frame().equals(written.steps.frame().sort("start_us", "step_id"))
    for name in set(TABLES) - {"steps"}:
        assert getattr(read, name).frame().equals(getattr(written, name).frame()), name
    without = dict.fromkeys((*TABLES, "aggregates"), pl.DataFrame())
    assert replace(read, **without) == replace(written, **without)


@pytest.mark.parametrize("few_requests", [0, 3])
def test_rows_are_read_when_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_requests: int
) -> None:
    """Columns of requests that were read stay, all of them where there are no more than a few."""
    monkeypatch.setattr(recordings, "FEW_ROWS", few_requests)
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, recording(steps=steps([0, 20_000])), NO_EVENTS)
        read = read_stored(store, recording().slug)
        assert read.steps["start_us"].to_list() == [0, 20_000]
        sent = pickle.loads(pickle.dumps(read))  # noqa: S301 (our own)
        assert sent.steps.held is not None, "nobody else can read a store that is being written"
    assert read.requests["arrival_us"].to_list() == [0, 1_000_000, 2_000_000]
    place = pickle.loads(pickle.dumps(read))  # noqa: S301 (our own)
    assert place.steps.held is None and place.steps.height == 2
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, recording(content_hash="another", requests=requests(2)), NO_EVENTS)
    assert read.requests["arrival_us"].len() == 3
    with pytest.raises(StoreError, match="was ingested again meanwhile"):
        read.lifecycles.frame()


def test_the_same_content_changes_nothing_and_changed_content_replaces(tmp_path: Path) -> None:
    with open_store(tmp_path / "s.duckdb") as store:
        assert write_recording(store, recording(), NO_EVENTS) == "new"
        assert write_recording(store, recording(), NO_EVENTS) == "unchanged"
        shorter = recording(content_hash="hash-2", requests=requests(2))
        assert write_recording(store, shorter, NO_EVENTS) == "replaced"
        assert read_stored(store, shorter.slug).requests.height == 2
        assert [row.requests for row in list_experiments(store)] == [2]


def test_other_engine_arguments_or_findings_over_the_same_files_replace_too(tmp_path: Path) -> None:
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, recording(), NO_EVENTS)
        assert write_recording(store, recording(engine={}), NO_EVENTS) == "replaced"
        assert write_recording(store, recording(engine={}, findings=(FINDING,)), NO_EVENTS) == "replaced"
        assert read_findings(store, recording().slug) == (FINDING,)


def test_published_aggregates_never_replace_a_recorded_experiment_but_give_way_to_it(tmp_path: Path) -> None:
    published = recording(ground_truth="published aggregates", content_hash="published")
    with open_store(tmp_path / "s.duckdb") as store:
        assert write_recording(store, published, NO_EVENTS) == "new"
        assert write_recording(store, recording(), NO_EVENTS) == "replaced"
        assert write_recording(store, published, NO_EVENTS) == "unchanged"
        assert read_stored(store, published.slug).ground_truth == "recorded"


def test_an_experiment_with_many_requests_keeps_its_neighbours(tmp_path: Path) -> None:
    other = recording(slug="other", alias="other", requests=requests(1000))
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, other, NO_EVENTS)
        write_recording(store, recording(), NO_EVENTS)
        write_recording(store, recording(content_hash="2"), NO_EVENTS)
        assert {row.slug: row.requests for row in list_experiments(store)} == {"other": 1000, recording().slug: 3}


def test_every_stamp_is_kept_and_only_output_tokens_are_numbered(tmp_path: Path) -> None:
    # Two requests of 3 and 2 tokens, each token's data line followed by a blank one 30 us later, then [DONE].
    events = write_events(
        tmp_path / "events",
        [[0, 30, 20_000, 20_030, 40_000, 40_030, 40_050, 40_060], [1000, 1030, 26_000, 26_030, 26_050, 26_060]],
    )
    made = recording(requests=requests(2, output_tokens=[3, 2]), token_events=events)
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, made, PAIRED_WITH_DONE)
        kept = store.connection.execute("SELECT count(*), count(token_index) FROM token_events").fetchall()
        times = token_times(store, made.slug)
        gap_us, count = inter_token_gaps(store, made.slug)
        second = inter_token_gaps(store, made.slug, np.array([False, True]))
        assert read_token_layout(store, made.slug) == PAIRED_WITH_DONE
    assert kept == [(14, 5)]
    assert times.rows() == [(0, 0, 0), (0, 1, 20_000), (0, 2, 40_000), (1, 0, 1000), (1, 1, 26_000)]
    assert (gap_us.tolist(), count.tolist()) == ([20_000, 25_000], [2, 1])
    assert (second[0].tolist(), second[1].tolist()) == ([25_000], [1])
    assert gap_us.dtype == count.dtype == np.int64


def test_gaps_of_failed_requests_are_not_pooled(tmp_path: Path) -> None:
    events = write_events(tmp_path / "events", [[0, 10], [0, 99]])
    made = recording(requests=requests(2, output_tokens=2, status=["ok", "timeout"]), token_events=events)
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, made, PLAIN)
        assert inter_token_gaps(store, made.slug)[0].tolist() == [10]
        assert token_times(store, made.slug).height == 4


def test_a_recording_without_token_times_has_no_gaps(tmp_path: Path) -> None:
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, recording(), NO_EVENTS)
        gap_us, count = inter_token_gaps(store, recording().slug)
        assert gap_us.shape == count.shape == (0,)


def test_the_list_counts_requests_failures_and_findings(tmp_path: Path) -> None:
    overload = Finding("overloaded", "note", "", "85 % failed")
    made = recording(requests=requests(3, status=["ok", "error", "timeout"]), findings=(FINDING, overload))
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, made, NO_EVENTS)
        (row,) = list_experiments(store)
    assert row == ExperimentRow(
        made.slug, "7b-general", "toy/toy-7b", "H100", 1, "general", "recorded", 3, 2, True, False, 2
    )


def test_reading_an_experiment_that_is_not_stored_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "s.duckdb") as store, pytest.raises(UnknownExperimentError, match="no experiment x"):
        read_stored(store, "x")


CHILD = """
import sys, time
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
from builders import recording, requests
from blis_replay.ingest.store import writing
from blis_replay.ingest.store import open_store
from blis_replay.ingest.store.writing import write_recording
from blis_replay.ingest.stream import NO_EVENTS

insert = writing.insert_stream

def stop(connection, sql, *others):
    insert(connection, sql, *others)
    if "INTO iterations" in sql:  # the last table, the requests are written
        print("half way", flush=True)
        time.sleep(60)

writing.insert_stream = stop
with open_store(sys.argv[2]) as store:
    write_recording(store, recording(content_hash="hash-2", requests=requests(200_000)), NO_EVENTS)
"""


def half_way_through_an_ingest(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "half way\n"
    return child


@pytest.mark.slow
def test_a_killed_ingest_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.duckdb"
    monkeypatch.setenv("BLIS_REPLAY_LOCK_TIMEOUT", "0")
    with open_store(path) as store:
        write_recording(store, recording(), NO_EVENTS)
    with half_way_through_an_ingest(path) as child:
        with pytest.raises(StoreError) as error, open_store(path):
            pass
        assert "another process has it open" in str(error.value)
        child.send_signal(signal.SIGKILL)
        child.wait()
    with open_store(path) as store:
        read = read_stored(store, recording().slug)
        assert (read.content_hash, read.requests.height) == ("hash-1", 3)
        assert write_recording(store, recording(), NO_EVENTS) == "unchanged"


def test_an_error_in_the_middle_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    events = replace(write_events(tmp_path / "events", [[0], [1], [2]]), path=tmp_path / "not-there")
    gone = recording(content_hash="hash-2", token_events=events)
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, recording(), NO_EVENTS)
        with pytest.raises(StoreError, match="nothing was written"):
            write_recording(store, gone, PLAIN)
        assert read_stored(store, gone.slug).content_hash == "hash-1"
        assert write_recording(store, recording(content_hash="hash-3"), NO_EVENTS) == "replaced"


def test_names_with_quotes_are_values_and_never_sql(tmp_path: Path) -> None:
    slug = "x'; DROP TABLE requests; --"
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, recording(slug=slug), NO_EVENTS)
        assert read_stored(store, slug).requests.height == 3


def test_how_a_clock_was_placed_and_what_was_dropped_are_kept(tmp_path: Path) -> None:
    clocks = (
        Clock("client", "epoch", 1_770_000_000_000_000, constructed=True),
        Clock("step", "monotonic", 77, True, "estimated from depth", 12_460, 961),
    )
    made = replace(recording(), clocks=clocks, dropped_step_events=12)
    with open_store(tmp_path / "s.duckdb") as store:
        write_recording(store, made, NO_EVENTS)
        kept = read_stored(store, made.slug)
        assert (kept.clocks, kept.dropped_step_events) == (clocks, 12)
        # Another placement is other content, although the files are the same.
        assert write_recording(store, replace(made, clocks=clocks[:1]), NO_EVENTS) == "replaced"


@pytest.mark.heavy
def test_a_store_that_another_process_has_open_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.duckdb"
    with half_way_through_an_ingest(path) as child:
        threading.Timer(1.5, child.kill).start()
        with open_store(path) as store:
            assert list_experiments(store) == []
    assert capsys.readouterr().err == f"waiting for {path}: another process has it open\n"
