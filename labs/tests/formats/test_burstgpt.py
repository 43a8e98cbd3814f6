"""BurstGPT on made files (there is no real one in the data pack): both releases, failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay_labs.formats.arrival_traces import read_burstgpt as read_requests
from blis_replay_labs.formats.arrival_traces import recognises_burstgpt as recognises

V1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
V2 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def recorded(folder: Path, *rows: str) -> RecordedFile:
    path = folder / "BurstGPT_1.csv"
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return RecordedFile(path, path.name)


def test_release_1(tmp_path: Path) -> None:
    """Seconds from midnight, as published in whole numbers and accepted with decimals."""
    read = read_requests(
        recorded(tmp_path, V1, "5,ChatGPT,472,18,490,Conversation log", "45.5,GPT-4,1087,230,1317,API log")
    )
    assert read.frame["sent_us"].to_list() == [5_000_000, 45_500_000]
    assert read.frame["prompt_tokens"].to_list() == [472, 1087]
    assert read.frame["usage_output_tokens"].to_list() == [18, 230]
    assert (read.clock_kind, read.model) == ("relative", None)


def test_release_2_has_more_columns_and_its_elapsed_time_is_not_taken_for_a_latency(tmp_path: Path) -> None:
    read = read_requests(recorded(tmp_path, V2, "12,s-1,3.4,ChatGPT,300,80,380,API log"))
    row = read.frame.row(0, named=True)
    assert (row["sent_us"], row["prompt_tokens"], row["usage_output_tokens"]) == (12_000_000, 300, 80)
    assert (row["ttft_us"], row["e2e_us"]) == (None, None)


def test_failures_are_dropped_and_counted(tmp_path: Path) -> None:
    """A response of 0 tokens is how the trace marks them."""
    file = recorded(tmp_path, V1, "1,ChatGPT,30,0,30,API log", "2,ChatGPT,30,8,38,API log", "3,GPT-4,0,0,0,API log")
    assert read_requests(file).frame["sent_us"].to_list() == [2_000_000]
    assert file.tally.rejected == [
        ("line 2", "a failure: its response has 0 tokens"),
        ("line 4", "a failure: its response has 0 tokens"),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("x,ChatGPT,30,8,38,API log", "no usable arrival time"),
        ("-1,ChatGPT,30,8,38,API log", "no usable arrival time"),
        ("nan,ChatGPT,30,8,38,API log", "no usable arrival time"),
        ("1,ChatGPT,,8,38,API log", "a prompt length of ''"),
        ("1,ChatGPT,30,8.5,38,API log", "an output length of '8.5'"),
        ("1,ChatGPT,30,8", "4 columns where the header has 6"),
    ],
)
def test_a_row_that_cannot_be_served_is_counted(tmp_path: Path, row: str, reason: str) -> None:
    file = recorded(tmp_path, V1, row)
    assert len(read_requests(file).frame) == 0
    assert file.tally.rejected == [("line 2", reason)]


def test_it_is_known_by_its_header() -> None:
    assert recognises(V1.encode())
    assert recognises(V2.encode() + b"\r\n")
    assert not recognises(b"Timestamp,Model\n1,2\n")
    assert not recognises(b"")


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    header=st.sampled_from([V1, V2]),
    rows=st.lists(
        st.lists(st.sampled_from(["1", "0", "", "x", "-1", "1e400", "é", "9" * 40]), min_size=1, max_size=9)
        .map(",".join)
        .filter(bool)
    ),
)
def test_every_row_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, header: str, rows: list[str]) -> None:
    file = recorded(tmp_path_factory.mktemp("any"), header, *rows)
    assert len(read_requests(file).frame) + file.tally.rejected_count == len(rows)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_recording_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "b.csv"
    path.write_bytes(content)
    with pytest.raises(RecordingError):
        read_requests(RecordedFile(path, path.name))
