"""The CSV of BLIS before TraceV2: columns by position, token ids of which only lengths and hashes are kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blis_replay.ingest.errors import RecordingError
from blis_replay.ingest.readers.files import GZIP_MAGIC, ZSTD_MAGIC, RecordedFile
from blis_replay.ingest.readers.requests import RawPrefix
from blis_replay_labs.formats.legacy_blis import block_hashes, read_requests, recognises

HEADER = "arrival_time,request_id,model,prefill_tokens,decode_tokens"


def recorded(folder: Path, *rows: str | bytes) -> RecordedFile:
    path = folder / "traces.csv"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else row.encode() for row in rows) + b"\n")
    return RecordedFile(path, path.name)


def request(arrival: object, prompt: list[int], output: list[int], name: str = "request_0") -> str:
    return f'{arrival},{name},m,"{json.dumps(prompt)}","{json.dumps(output)}"'


def test_the_example_of_the_format_notes(tmp_path: Path) -> None:
    read = read_requests(recorded(tmp_path, HEADER, '0.000000,request_0,m,"[11, 12, 13]","[7, 8]"'))
    row = read.frame.row(0, named=True)
    assert (row["sent_us"], row["prompt_tokens"], row["usage_output_tokens"]) == (0, 3, 2)
    assert (row["request_id"], read.model, read.clock_kind) == ("request_0", "m", "relative")


def test_arrivals_are_cut_to_us_as_blis_cuts_them(tmp_path: Path) -> None:
    """0.0000019 s is 1 us, and 1.1 s is 1,100,000 us: 1.1 * 1e6 in doubles is 1100000.0000000002."""
    file = recorded(tmp_path, HEADER, *(request(s, [1], [1]) for s in ("0.0000019", "1.1", "1e-3")))
    assert read_requests(file).frame["sent_us"].to_list() == [1, 1_100_000, 1_000]


def test_equal_token_ids_are_equal_blocks_as_far_as_all_before_are_equal(tmp_path: Path) -> None:
    """Blocks of 16: 40 tokens have 2; a token that differs in the first block makes both differ."""
    same, other = list(range(40)), [99, *range(1, 40)]
    read = read_requests(recorded(tmp_path, HEADER, *(request(0, ids, [1]) for ids in (same, same[:20] * 2, other))))
    assert isinstance(read.prefix, RawPrefix)
    first, second, third = np.split(read.prefix.keys, np.cumsum(read.prefix.counts)[:-1])
    assert [len(first), len(second), len(third)] == [2, 2, 2]
    assert first[0] == second[0]
    assert len({*first.tolist(), *second.tolist(), *third.tolist()}) == 5
    assert read.prefix.block_tokens == 16


def test_no_token_is_kept(tmp_path: Path) -> None:
    read = read_requests(recorded(tmp_path, HEADER, request(0, [123_456_789] * 32, [1])))
    assert isinstance(read.prefix, RawPrefix)
    assert 123_456_789 not in read.prefix.keys
    assert "123456789" not in str(read.frame.rows())


def test_the_header_may_say_anything_and_more_columns_may_follow(tmp_path: Path) -> None:
    file = recorded(tmp_path, "t;whatever", request(1, [1, 2], [3]) + ",more")
    assert read_requests(file).frame["prompt_tokens"].to_list() == [2]


def test_a_prompt_of_a_hundred_thousand_tokens_is_read(tmp_path: Path) -> None:
    """Its cell has 700,000 characters, five times the csv module's own limit."""
    read = read_requests(recorded(tmp_path, HEADER, request(0, [12_345] * 100_000, [1])))
    assert read.frame["prompt_tokens"].to_list() == [100_000]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("0,r,m", "3 columns where at least 5 are needed"),
        (request("x", [1], [1]), "no usable arrival time"),
        (request("-1", [1], [1]), "no usable arrival time"),
        (request("inf", [1], [1]), "no usable arrival time"),
        (request(0, [], [1]), "a prompt length of '0'"),
        (request(0, [1], []), "an output length of '0'"),
        ('0,r,m,"[1","[1]"', "not a JSON array of whole numbers"),
        ('0,r,m,"[1.5]","[1]"', "not a JSON array of whole numbers"),
        ('0,r,m,"{}","[1]"', "not a JSON array of whole numbers"),
        (f'0,r,m,"[{2**70}]","[1]"', "not a JSON array of whole numbers"),
        ('0,r,m,"' + "[" * 9000 + '","[1]"', "not a JSON array of whole numbers"),
        ('"0,r,m,[1],[1]', "1 columns"),
        (b"\xff\x00\xfe", "1 columns"),
    ],
)
def test_a_broken_row_is_counted_and_costs_itself_only(tmp_path: Path, broken: str | bytes, reason: str) -> None:
    file = recorded(tmp_path, HEADER, request(1, [1], [1]), broken, request(2, [1], [1]))
    assert read_requests(file).frame["sent_us"].to_list() == [1_000_000, 2_000_000]
    ((place, why),) = file.tally.rejected
    assert place == "line 3"
    assert reason in why


def test_it_is_known_by_its_first_row() -> None:
    assert recognises(f"{HEADER}\n{request(0.5, [1, 2], [3])}\n".encode())
    assert recognises(b"anything\r\n0.5,r,m,[11],[1]\r\n")
    assert recognises((HEADER + "\n" + request(0, [1] * 50_000, [1])).encode()[: 64 << 10])
    assert not recognises(HEADER.encode() + b"\n")
    assert not recognises(b"request_id,phase_type,t_start,t_end\nA,prefill,0.0,2.0\n")
    assert not recognises(b"")


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.one_of(
            st.binary(max_size=60).map(lambda raw: raw.translate(None, b"\n")),
            st.builds(request, st.floats(0, 1e9), st.lists(st.integers(), max_size=40), st.lists(st.integers())),
        )
    )
)
def test_every_line_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, rows: list[str | bytes]) -> None:
    file = recorded(tmp_path_factory.mktemp("any"), HEADER, *rows)
    read = read_requests(file)
    lines = file.path.read_bytes().split(b"\n")[1:]
    written = [line for line in lines if line.decode("utf-8", "replace").replace("\r", " ").strip()]
    assert len(read.frame) + file.tally.rejected_count == len(written)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=300))
def test_any_bytes_are_read_or_a_recording_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    assume(not content.startswith(GZIP_MAGIC))
    path = tmp_path_factory.mktemp("bytes") / "b.csv"
    path.write_bytes(content)
    file = RecordedFile(path, path.name)
    try:
        assert len(read_requests(file).frame) <= content.count(b"\n")
    except RecordingError:
        assert content.startswith(ZSTD_MAGIC)


def test_hashes_are_chained_and_below_2_to_the_63() -> None:
    keys = block_hashes(np.array([5] * 32, np.int64), 16)
    assert len(keys) == len(set(keys)) == 2
    assert all(0 <= key < 2**63 for key in keys)
    assert block_hashes(np.array([5] * 15, np.int64), 16) == []


def test_the_sample_of_step_phases_is_another_format(data_pack: Path) -> None:
    """`traces-sample.csv` has a row a phase of a request, and no token ids."""
    assert not recognises((data_pack / "blis-phases" / "traces-sample.csv").read_bytes())
