"""TraceV2: columns by name, failed rows, broken rows."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from builders import recorded_file
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.tables.tracev2 import read_header, read_requests, with_chunks

TIMES = ["arrival_time_us", "send_time_us", "first_chunk_time_us", "last_chunk_time_us"]
OLD = ["request_id", "prefix_group", "input_tokens", "output_tokens", *TIMES, "num_chunks", "status", "error_message"]
NEW = [*OLD[:2], "prefix_length", *OLD[2:4], "model", "server_input_tokens", *OLD[4:], "finish_reason"]


def row(columns: list[str], **values: object) -> str:
    given_values = {"input_tokens": 100, "output_tokens": 5, "status": "ok", "num_chunks": 0, **values}
    return ",".join(str(given_values.get(column, "")) for column in columns)


def ok(i: int, columns: list[str] = NEW) -> str:
    """Request i: sent at i ms, first chunk 10 ms later, last 50 ms later."""
    sent = 1_770_000_000_000_000 + 1000 * i
    return row(
        columns, request_id=i, send_time_us=sent, first_chunk_time_us=sent + 10_000, last_chunk_time_us=sent + 50_000
    )


def recorded(folder: Path, *rows: str | bytes, columns: list[str] = NEW) -> RecordedFile:
    parts = [",".join(columns), *rows]
    content = b"\n".join(part.encode() if isinstance(part, str) else part for part in parts) + b"\n"
    return recorded_file(folder, content, "trace.csv")


@pytest.mark.parametrize("columns", [OLD, NEW, list(reversed(NEW))], ids=["old", "new", "any order"])
def test_columns_are_read_by_name(tmp_path: Path, columns: list[str]) -> None:
    frame = read_requests(recorded(tmp_path, ok(0, columns), ok(1, columns), columns=columns)).frame
    assert frame["ttft_us"].to_list() == [10_000, 10_000]
    assert frame["e2e_us"].to_list() == [50_000, 50_000]
    assert frame["sent_us"].to_list() == [1_770_000_000_000_000, 1_770_000_000_001_000]
    assert frame["output_tokens_reported"].to_list() == [5, 5]
    assert frame["output_tokens"].to_list() == [None, None]


def test_the_servers_prompt_length_is_preferred_where_it_is_known(tmp_path: Path) -> None:
    stamps = {"send_time_us": 1, "first_chunk_time_us": 2, "last_chunk_time_us": 3}
    first, second = row(NEW, server_input_tokens=101, **stamps), row(NEW, server_input_tokens=0, **stamps)
    assert read_requests(recorded(tmp_path, first, second)).frame["prompt_tokens"].to_list() == [101, 100]


@pytest.mark.parametrize(("events", "length"), [(7, 5), (6, 5), (5, None), (0, None), (4, None)])
def test_a_length_is_the_servers_where_an_event_brought_its_usage(
    tmp_path: Path, events: int, length: int | None
) -> None:
    """BLIS's ``observe``: the role, a chunk a token, the usage; a completion has no role."""
    counted = row(NEW, send_time_us=1, first_chunk_time_us=2, last_chunk_time_us=3, num_chunks=events)
    assert read_requests(recorded(tmp_path, counted)).frame["usage_output_tokens"].to_list() == [length]


def test_the_stream_stamps_are_those_of_tokens(tmp_path: Path) -> None:
    """Of the first the role and the usage are left out, of the second the usage, of the third nothing."""
    read = read_requests(recorded(tmp_path, ok(0), ok(1), ok(2)))
    path = tmp_path / "trace.itl.csv"
    stamps = {"1": [20, 21, 22, 23, 24, 30], "0": [5, 5, 6, 7, 8, 9, 9], "2": [40, 41], "7": [1]}
    rows = [f"{name},{place},{us}" for name, times in stamps.items() for place, us in enumerate(times)]
    path.write_text("\n".join(["request_id,chunk_index,timestamp_us", *rows, "0,x,1"]) + "\n")
    file = RecordedFile(path, path.name)
    events = with_chunks(read, file, tmp_path / "stamps").events
    assert events is not None
    assert np.fromfile(events.path, np.int64).tolist() == [5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 40, 41]
    assert (events.offsets.tolist(), events.counts.tolist()) == ([0, 5, 10], [5, 5, 2])
    assert (file.tally.records, file.tally.rejected_count) == (15, 1)
    read = read_requests(recorded(tmp_path, *map(ok, range(4))))
    some = with_chunks(read, RecordedFile(path, path.name), tmp_path / "stamps")
    assert (some.events, len(some.remarks)) == (None, 1), "of the fourth request there are none"


def test_a_timed_out_request_has_no_ttft_and_the_time_the_client_held_on(tmp_path: Path) -> None:
    """As in the reasoning runs: prompt length 0, no first chunk, last chunk 300 s after the send."""
    nothing = {"input_tokens": 0, "output_tokens": 0, "first_chunk_time_us": 0}
    failed = row(NEW, **nothing, send_time_us=10, last_chunk_time_us=300_000_010, status="timeout")
    only = read_requests(recorded(tmp_path, failed)).frame.row(0, named=True)
    assert (only["prompt_tokens"], only["ttft_us"], only["e2e_us"]) == (None, None, 300_000_000)
    assert only["status"] == "timeout"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("1,2,3", f"3 columns where the header has {len(NEW)}"),
        (row(NEW, send_time_us=9, first_chunk_time_us=9, last_chunk_time_us=8), "1 us before the send"),
        (row(NEW, send_time_us=9, first_chunk_time_us=20, last_chunk_time_us=12), "does not lie between"),
        (row(NEW, send_time_us="x", first_chunk_time_us=1, last_chunk_time_us=2), "not a whole number"),
        (row(NEW, send_time_us="-5", first_chunk_time_us=1, last_chunk_time_us=2), "not a whole number"),
        (row(NEW, send_time_us="nan", first_chunk_time_us=1, last_chunk_time_us=2), "not a whole number"),
        (row(NEW, send_time_us="9" * 30, first_chunk_time_us=1, last_chunk_time_us=2), "not a whole number"),
        (row(NEW, send_time_us=1, first_chunk_time_us=1, last_chunk_time_us=2, status="fine"), "status 'fine'"),
        (ok(0), "request 0 again, identical"),
        (ok(0).replace(",100,", ",101,"), "request 0 again, with other values"),
        (b"\x00\xff\xfe" * 9, "columns"),
        ('"' + "x" * 200_000, "no valid CSV"),
    ],
)
def test_a_broken_row_is_counted_with_its_line_and_costs_itself_only(
    tmp_path: Path, broken: str | bytes, reason: str
) -> None:
    file = recorded(tmp_path, ok(0), broken, ok(1))
    assert read_requests(file).frame["request_id"].to_list() == ["0", "1"]
    assert file.tally.rejected_count == 1
    place, why = file.tally.rejected[0]
    assert reason in why
    assert place.startswith("line ")


@pytest.mark.parametrize("content", [b"", b"\n", b"a,b,c\n1,2,3\n", b"\x89PNG\r\n\x1a\n", gzip.compress(b"", mtime=0)])
def test_a_file_that_is_no_trace_is_a_recording_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(RecordingError):
        read_requests(recorded_file(tmp_path, content))


def test_a_cut_file_loses_its_last_line_and_says_so(tmp_path: Path) -> None:
    whole = recorded(tmp_path, *(ok(i) for i in range(50)))
    whole.path.write_bytes(whole.path.read_bytes()[:-20])
    file = RecordedFile(whole.path, "trace.csv")
    assert len(read_requests(file).frame) == 49
    assert file.tally.rejected_count == 1


@settings(max_examples=100, deadline=None)
@given(junk=st.binary(max_size=200))
def test_any_bytes_after_a_good_row_leave_the_good_row(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    file = recorded(tmp_path_factory.mktemp("junk"), ok(0), junk.replace(b'"', b""))
    assert read_requests(file).frame["request_id"].to_list()[:1] == ["0"]


def test_the_header_gives_model_and_engine_arguments(tmp_path: Path) -> None:
    said = "time_unit: microseconds\nmode: real\nserver: {model: m, tensor_parallel: 4, block_size: 16}\n"
    header = read_header(recorded_file(tmp_path, said))
    assert (header.model, header.tensor_parallelism, header.engine) == ("m", 4, {"block_size": 16})


def test_another_time_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="field time_unit: 'ms'"):
        read_header(recorded_file(tmp_path, "time_unit: ms\n"))


def test_sends_behind_their_schedule_are_a_number(data_pack: Path) -> None:
    """A client of 16 requests in flight; the README says 29.6 s, and a client without a bound has no delay."""
    late = {}
    for name in ("01-observe-tracev2", "02-client-cap"):
        read = read_requests(RecordedFile(data_pack / "field" / name / "trace.csv", "trace.csv"))
        late[name] = dict(read.aggregates.select("statistic", "value").iter_rows())
    assert late["01-observe-tracev2"] == {}
    assert late["02-client-cap"]["max"] == pytest.approx(29.6e6, abs=0.1e6)
    assert late["02-client-cap"]["p50"] < late["02-client-cap"]["p99"] < late["02-client-cap"]["max"]


def test_a_request_id_is_text_on_one_line(tmp_path: Path) -> None:
    """Everything in the store can be shown; a NUL alone is not a name."""
    file = recorded(tmp_path, ok(0).replace("0,", "\0,", 1), ok(1).replace("1,", "a\x1b[31m,", 1))
    assert read_requests(file).frame["request_id"].to_list() == [None, "a [31m"]
