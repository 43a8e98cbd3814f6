"""Our own Parquet table of requests: what is sound comes back, what is not is refused or counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.files import RecordedFile
from blis_replay.ingest.readers.formats import EXPORTED_TABLE, file_kinds
from blis_replay.ingest.readers.requests import RawPrompts
from blis_replay_labs.exchange.parquet_table import read_requests

PLAIN = {"arrival_us": [0, 5], "prompt_tokens": [10, 20], "output_tokens": [3, 4]} | {
    "output_tokens_source": ["server usage"] * 2
}


def recorded(folder: Path, columns: dict[str, Any], told: object = None) -> RecordedFile:
    path = folder / "requests.parquet"
    table = pl.DataFrame(columns, strict=False).to_arrow()
    raw = told if isinstance(told, bytes) else json.dumps(told or {}).encode()
    pq.write_table(table.replace_schema_metadata({EXPORTED_TABLE: raw}), path)
    return RecordedFile(path, path.name)


def test_columns_that_are_not_there_are_not_known(tmp_path: Path) -> None:
    read = read_requests(recorded(tmp_path, PLAIN))
    assert read.frame["sent_us"].to_list() == [0, 5]
    assert read.frame["output_tokens"].to_list() == [3, 4]
    assert read.frame["status"].to_list() == ["ok", "ok"]
    assert read.frame["e2e_us"].to_list() == [None, None]
    assert (read.clock_name, read.clock_kind, read.model, read.prefix) == ("client", "relative", None, None)


def test_clock_model_and_prompts_come_from_what_the_table_tells(tmp_path: Path) -> None:
    told = {
        "model": "m",
        "clock": {"name": "server", "kind": "epoch", "zero_us": 1000},
        "prefix_source": "s",
    }
    tree = {
        "prefix_prompt": [7, 9],
        "prefix_parent": [None, 7],
        "prefix_shared_tokens": [0, 16],
        "prefix_tokens": [40, 32],
    }
    read = read_requests(recorded(tmp_path, PLAIN | tree, told))
    assert read.frame["sent_us"].to_list() == [1000, 1005]
    assert (read.clock_name, read.clock_kind, read.model) == ("server", "epoch", "m")
    assert isinstance(read.prefix, RawPrompts)
    found = (read.prefix.prompt, read.prefix.parent, read.prefix.shared_tokens, read.prefix.tokens)
    assert [column.tolist() for column in found] == [[0, 1], [-1, 0], [0, 16], [40, 32]]


def test_a_prompt_whose_parent_is_not_in_the_table_shares_with_none(tmp_path: Path) -> None:
    tree = {"prefix_prompt": [7, None], "prefix_parent": [3, None], "prefix_shared_tokens": [16, None]}
    read = read_requests(recorded(tmp_path, PLAIN | tree | {"prefix_tokens": [40, None]}))
    assert isinstance(read.prefix, RawPrompts)
    assert (read.prefix.prompt.tolist(), read.prefix.parent.tolist()) == ([0, -1], [-1])
    assert read.prefix.shared_tokens.tolist() == [0]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("arrival_us", [0, None]),
        ("arrival_us", [0, -1]),
        ("prompt_tokens", [1, 2**40]),
        ("ttft_us", [1, -1]),
        ("status", ["ok", "perhaps"]),
        ("output_tokens_source", ["server usage", "guessed"]),
        ("output_tokens_source", ["server usage", None]),
        ("prefix_prompt", [None, -1]),
    ],
)
def test_a_row_that_cannot_be_used_is_counted(tmp_path: Path, column: str, values: list[object]) -> None:
    file = recorded(tmp_path, PLAIN | {column: values})
    assert len(read_requests(file).frame) == 1
    assert file.tally.rejected == [("row 2", f"{column} is not usable")]


@pytest.mark.parametrize("told", [b"", b"[", b"[]", b"[" * 9000, b'{"clock": 5, "model": 7, "block_tokens": -1}'])
def test_what_the_table_tells_need_not_be_sound(tmp_path: Path, told: bytes) -> None:
    file = recorded(tmp_path, PLAIN, told)
    try:
        assert read_requests(file).clock_kind == "relative"
    except RecordingError as error:
        assert "not a sound table of requests" in str(error)


@pytest.mark.parametrize("columns", [{"prompt_tokens": [1]}, {"arrival_us": ["soon"]}, {"arrival_us": [[1]]}])
def test_a_table_of_something_else_is_a_recording_error(tmp_path: Path, columns: dict[str, Any]) -> None:
    with pytest.raises(RecordingError, match="not a sound table of requests"):
        read_requests(recorded(tmp_path, columns))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 5000), junk=st.binary(max_size=40), at=st.integers(0, 5000))
def test_damage_is_a_recording_error_or_leaves_usable_rows(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes, at: int
) -> None:
    file = recorded(tmp_path_factory.mktemp("damage"), PLAIN)
    content = file.path.read_bytes()
    file.path.write_bytes((content[:at] + junk + content[at + len(junk) :])[: len(content) - cut % len(content)])
    try:
        assert len(read_requests(file).frame) == file.tally.records
    except RecordingError as error:
        assert "\n" not in str(error)


def test_it_is_known_by_its_first_bytes() -> None:
    recognises = file_kinds()["parquet"].recognises
    assert recognises is not None
    assert recognises(b"PAR1\x15\x04")
    assert not recognises(b"PAR")


def test_a_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    """Polars breaks off over one, which no handler of errors sees."""
    table = pl.DataFrame(PLAIN | {"error": ["ab", "cd"]}).to_arrow()
    pq.write_table(table, tmp_path / "requests.parquet", use_dictionary=False)
    content = (tmp_path / "requests.parquet").read_bytes()
    (tmp_path / "requests.parquet").write_bytes(content.replace(b"ab", b"\xff\xfe"))
    with pytest.raises(RecordingError, match=r"not a sound table of requests .*UTF8"):
        read_requests(RecordedFile(tmp_path / "requests.parquet", "requests.parquet"))


def test_column_metadata_that_end_the_process_are_not_looked_at(tmp_path: Path) -> None:
    """The column is made one that is never null, for which its histogram of levels is one too long: read as the
    metadata of a column, pyarrow 26 does not raise but terminates."""
    file = recorded(tmp_path, PLAIN)
    optional, required = b"\x25\x02\x18\x0aarrival_us", b"\x25\x00\x18\x0aarrival_us"  # Thrift: repetition, name
    content = file.path.read_bytes()
    assert content.count(optional) == 1
    file.path.write_bytes(content.replace(optional, required))
    with pytest.raises(RecordingError, match=r"not a sound table of requests \(Definition level histogram"):
        read_requests(file)


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["arrival_us", "arrival_us"]), path)
    with pytest.raises(RecordingError, match="two columns have one name"):
        read_requests(RecordedFile(path, path.name))


def test_a_text_that_all_rows_share_is_not_as_many_texts(tmp_path: Path) -> None:
    """2 MB in the file; a copy for each of the 10,000 rows of a batch would be 20 GB."""
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000), pa.array(["x" * (2 << 20)]))
    table = pa.table({"arrival_us": list(range(10_000)), "error": shared})
    pq.write_table(table, tmp_path / "requests.parquet", dictionary_pagesize_limit=1 << 30)
    frame = read_requests(RecordedFile(tmp_path / "requests.parquet", "requests.parquet")).frame
    assert frame["error"].str.len_chars().unique().to_list() == [500]


def test_a_run_of_one_value_is_no_hundred_million_requests(tmp_path: Path) -> None:
    """Parquet writes equal values as their number: these are some 100 KB."""
    arrivals = pa.chunked_array([pa.array([1] * 1_000_000)] * 17)
    pq.write_table(pa.table({"arrival_us": arrivals}), tmp_path / "requests.parquet")
    with pytest.raises(RecordingError, match="more values in a column than the file has bytes"):
        read_requests(RecordedFile(tmp_path / "requests.parquet", "requests.parquet"))
