"""Azure LLM inference traces: stamps of 100 ns, with and without an offset; rows that cannot be served."""

from __future__ import annotations

import csv
import gzip
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.files import GZIP_MAGIC, ZSTD_MAGIC, RecordedFile
from blis_replay_labs.formats.arrival_traces import epoch_us
from blis_replay_labs.formats.arrival_traces import read_azure_llm as read_requests
from blis_replay_labs.formats.arrival_traces import recognises_azure_llm as recognises

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def recorded(folder: Path, *rows: str | bytes, header: str = HEADER, end: bytes = b"\r\n") -> RecordedFile:
    path = folder / "azure.csv"
    path.write_bytes(end.join(row.encode() if isinstance(row, str) else row for row in (header, *rows)))
    return RecordedFile(path, path.name)


@pytest.mark.parametrize(
    ("stamp", "us"),
    [
        # 2023-11-16 18:17:03 UTC is 1,700,158,623 s of the epoch.
        ("2023-11-16 18:17:03.9799600", 1_700_158_623_979_960),
        ("2023-11-16 18:17:03", 1_700_158_623_000_000),
        ("2023-11-16T18:17:03Z", 1_700_158_623_000_000),
        ("2023-11-16 20:17:03.5+02:00", 1_700_158_623_500_000),
        ("2023-11-16 16:17:03.000001499-0200", 1_700_158_623_000_001),
        ("2023-11-16 18:17:03.0000005", 1_700_158_623_000_001),
        ("2023-11-16 18:17:03.9999999", 1_700_158_624_000_000),
    ],
)
def test_stamps_have_0_to_9_decimals_and_perhaps_an_offset(stamp: str, us: int) -> None:
    assert epoch_us(stamp) == us


@pytest.mark.parametrize(
    "stamp",
    ["", "0", "2023-13-16 18:17:03", "2023-11-16 25:17:03", "2023-11-16 18:17", "٢٠٢٣-11-16 18:17:03", "x" * 99],
)
def test_what_is_no_stamp_is_none(stamp: str) -> None:
    assert epoch_us(stamp) is None


def test_rows_are_read_by_column_name_whatever_the_line_ends(tmp_path: Path) -> None:
    rows = ("2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8")
    for end in (b"\n", b"\r\n"):
        read = read_requests(recorded(tmp_path, *rows, end=end))
        assert read.frame["sent_us"].diff().to_list() == [None, 52_000]
        assert read.frame["prompt_tokens"].to_list() == [4808, 3180]
        assert read.frame["usage_output_tokens"].to_list() == [10, 8]
    assert (read.clock_name, read.clock_kind, read.model) == ("server", "epoch", None)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("2023-11-16 18:17:03", "1 columns where the header has 3"),
        ("yesterday,10,5", "no usable arrival time"),
        ("2023-11-16 18:17:03,0,5", "a prompt length of '0'"),
        ("2023-11-16 18:17:03,10,0", "an output length of '0'"),
        ("2023-11-16 18:17:03,10,-5", "an output length of '-5'"),
        ("2023-11-16 18:17:03,1e1,5", "a prompt length of '1e1'"),
        (b"\xff\xfe,10,5", "no usable arrival time"),
    ],
)
def test_a_row_that_cannot_be_served_is_counted(tmp_path: Path, broken: str | bytes, reason: str) -> None:
    good = "2023-11-16 18:17:03,10,5"
    file = recorded(tmp_path, good, broken, good)
    assert len(read_requests(file).frame) == 2
    ((place, why),) = file.tally.rejected
    assert (place, reason in why) == ("line 3", True)


@pytest.mark.parametrize("content", [b"", b"TIMESTAMP,ContextTokens\n", b"\x89PNG\r\n"])
def test_a_file_without_the_columns_is_a_recording_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "azure.csv"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="line 1"):
        read_requests(RecordedFile(path, path.name))
    assert not recognises(content)


def test_it_is_known_by_its_header() -> None:
    assert recognises(HEADER.encode() + b"\r\n")
    assert recognises(b"\xef\xbb\xbf" + HEADER.encode())
    assert not recognises(b"a\n" + HEADER.encode())


CELLS = st.sampled_from(["2023-11-16 18:17:03.1", "5", "0", "", "x", "-1", "9" * 30])


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.one_of(
            st.lists(CELLS, min_size=1, max_size=4).map(",".join),
            st.binary(min_size=1, max_size=30).map(lambda raw: raw.translate(None, b'\r\n"')),
        )
    )
)
def test_every_row_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, rows: list[str | bytes]) -> None:
    file = recorded(tmp_path_factory.mktemp("any"), *rows, end=b"\n")
    read = read_requests(file)
    assert len(read.frame) + file.tally.rejected_count == sum(len(row) > 0 for row in rows)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=300))
def test_any_bytes_are_read_or_a_recording_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    assume(not content.startswith((GZIP_MAGIC, ZSTD_MAGIC)))
    path = tmp_path_factory.mktemp("bytes") / "azure.csv"
    path.write_bytes(content)
    with pytest.raises(RecordingError):
        read_requests(RecordedFile(path, path.name))


@pytest.mark.parametrize(
    ("name", "rows", "last_us"),
    [
        # First and last stamp by eye: 18:17:03.97996 to 19:14:19.928016, 18:15:46.68059 to 19:14:08.402527.
        ("code", 8_819, 3_435_948_056),
        ("conv", 19_366, 3_501_721_937),
    ],
)
def test_the_traces_of_2023(data_pack: Path, name: str, rows: int, last_us: int) -> None:
    """Sums by another reader of CSV, times by Python's own parser of dates."""
    path = data_pack / "public-traces" / "azure-2023" / f"AzureLLMInferenceTrace_{name}.csv.gz"
    truth = list(csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines()))
    file = RecordedFile(path, path.name)
    frame = read_requests(file).frame
    assert (len(frame), file.tally.rejected_count) == (rows, 0) == (len(truth), 0)
    assert frame["prompt_tokens"].sum() == sum(int(row["ContextTokens"]) for row in truth)
    assert frame["usage_output_tokens"].sum() == sum(int(row["GeneratedTokens"]) for row in truth)
    first_us = frame["sent_us"][0]
    assert int(frame["sent_us"].max()) - first_us == last_us  # type: ignore[arg-type]
    begin = datetime.fromisoformat(truth[0]["TIMESTAMP"][:26])
    for row, sent_us in zip(truth[::97], frame["sent_us"][::97], strict=True):
        elapsed = datetime.fromisoformat(row["TIMESTAMP"][:26]) - begin
        assert abs(elapsed.total_seconds() * 1e6 - (sent_us - first_us)) <= 1  # the 7th decimal is cut here
