"""Mooncake traces: arrivals in ms, lengths, block ids; AIPerf's dialect; what has no arrival."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blis_replay.ingest.readers.files import GZIP_MAGIC, ZSTD_MAGIC, RecordedFile
from blis_replay.ingest.readers.requests import RawPrefix, in_send_order
from blis_replay_labs.formats.arrival_traces import read_mooncake as read_requests
from blis_replay_labs.formats.arrival_traces import recognises_mooncake as recognises


def recorded(folder: Path, *rows: object) -> RecordedFile:
    path = folder / "trace.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return RecordedFile(path, path.name)


def request(timestamp_ms: float = 0, prompt: int = 600, output: int = 20, **more: object) -> dict[str, object]:
    return {"timestamp": timestamp_ms, "input_length": prompt, "output_length": output, **more}


def test_arrivals_are_in_ms_and_keep_their_decimals(tmp_path: Path) -> None:
    read = read_requests(recorded(tmp_path, request(1500), request(1500.25), request(3_600_000)))
    assert read.frame["sent_us"].to_list() == [1_500_000, 1_500_250, 3_600_000_000]
    assert read.frame["prompt_tokens"].to_list() == [600] * 3
    assert read.frame["usage_output_tokens"].to_list() == [20] * 3
    assert (read.clock_name, read.clock_kind, read.model, read.prefix) == ("server", "relative", None, None)


def test_block_ids_are_those_of_512_tokens_the_last_one_partial(tmp_path: Path) -> None:
    """Format notes, section 5.4: ids = ceil(input_length / 512); 600 tokens have 2, 1,300 have 3."""
    read = read_requests(recorded(tmp_path, request(5, hash_ids=[7, 9]), request(0, 1300, hash_ids=[7, 8, 2**63 - 1])))
    assert isinstance(read.prefix, RawPrefix)
    assert (read.prefix.block_tokens, read.prefix.counts.tolist()) == (512, [2, 3])
    _ordered, order, _zero_us = in_send_order(read.rows)
    tree = read.prefix.in_order(order)
    assert tree.requests.rows() == [(0, 0), (1, 1)]
    assert tree.prompts.rows() == [(0, None, 0, 1536), (1, 0, 512, 1024)]  # both begin with block 7
    assert read.remarks == ()


def test_traces_made_from_qwens_have_blocks_of_16_tokens(tmp_path: Path) -> None:
    read = read_requests(
        recorded(tmp_path, request(prompt=40, hash_ids=[1, 2, 3]), request(prompt=32, hash_ids=[1, 2]))
    )
    assert isinstance(read.prefix, RawPrefix)
    assert read.prefix.block_tokens == 16


def test_block_ids_of_no_known_size_are_not_used_and_that_is_said(tmp_path: Path) -> None:
    """1,000 tokens are 2 blocks of 512 or 63 of 16, never 5."""
    read = read_requests(recorded(tmp_path, *[request(prompt=1000, hash_ids=[1, 2, 3, 4, 5])] * 3))
    assert (len(read.frame), read.prefix) == (3, None)
    assert read.remarks == (
        "prefix identities: hash_ids are in blocks of 512 or 16 tokens in no more than 0 of 3 requests",
    )


def test_the_dialect_of_aiperf_is_read_and_a_turn_without_an_arrival_is_counted(tmp_path: Path) -> None:
    file = recorded(
        tmp_path,
        request(0, session_id="s", text_input="Hello", messages=[{"role": "user", "content": "Hello"}]),
        {"session_id": "s", "delay": 500, "input_length": 10, "output_length": 3},
        {"timestamp": 9, "text_input": "no length", "output_length": 3},
    )
    assert len(read_requests(file).frame) == 1
    assert file.tally.rejected == [("line 2", "no usable arrival time"), ("line 3", "a prompt length of 'None'")]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (b'{"timestamp": 1, "input_length": 5', "truncated"),
        (b"[1, 2]", "Expected `object`"),
        (b"\xff\xfe\x00", "malformed"),
        (b"[" * 5000, "Expected `object`"),
        (b'{"timestamp": ' + b"[" * 100_000, "recursion"),
        (request(-1), "no usable arrival time"),
        (request(1e300), "no usable arrival time"),
        (request(True), "no usable arrival time"),
        (request(prompt=0), "a prompt length of '0'"),
        (request(output=0), "an output length of '0'"),
        (request(output=2**40), "an output length"),
        (request(hash_ids="1 2"), "hash_ids"),
        (request(hash_ids=[1, -2]), "hash_ids"),
        (request(hash_ids=[1, 2**63]), "hash_ids"),
        (request(hash_ids=[1, True]), "hash_ids"),
    ],
)
def test_a_line_that_cannot_be_used_is_counted_and_costs_itself_only(
    tmp_path: Path, broken: object, reason: str
) -> None:
    file = recorded(tmp_path, request(1), broken, request(2))
    assert read_requests(file).frame["sent_us"].to_list() == [1000, 2000]
    ((place, why),) = file.tally.rejected
    assert place == "line 2"
    assert reason in why


def test_it_is_known_by_its_first_line() -> None:
    line = json.dumps(request(hash_ids=[1])).encode()
    assert recognises(line + b"\n" + line)
    assert recognises(b"\xef\xbb\xbf" + line)
    assert recognises((line[:-1] + b', "text_input": "' + b"x" * 70_000)[: 64 << 10])
    assert not recognises(b"")
    assert not recognises(b'{"resourceSpans": []}\n')
    assert not recognises(b'{"note": "\\"input_length\\": \\"timestamp\\":"}\n')
    assert not recognises(b'[{"input_length": 1, "timestamp": 2}]')


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers()))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.one_of(
            st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b"")),
            st.fixed_dictionaries(
                {}, optional=dict.fromkeys(("timestamp", "input_length", "output_length", "hash_ids"), VALUES)
            ),
            st.builds(request, st.integers(0, 10**9), st.integers(1, 2000), st.integers(1, 99)),
        ),
        max_size=20,
    )
)
def test_every_line_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, rows: list[object]) -> None:
    file = recorded(tmp_path_factory.mktemp("any"), *rows)
    assume(not file.path.read_bytes().startswith((GZIP_MAGIC, ZSTD_MAGIC)))
    read = read_requests(file)
    # A byte order mark stands at the start of a file; elsewhere it is content.
    lines = file.path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert len(read.frame) + file.tally.rejected_count == len([line for line in lines if line.strip()])
    if isinstance(read.prefix, RawPrefix):
        assert len(read.prefix.counts) == len(read.frame)
        assert read.prefix.counts.sum() == len(read.prefix.keys)


def test_the_conversation_trace(data_pack: Path) -> None:
    """Its lines read by another library; 12,031 of them, and the first is 6,758 tokens with ids 0 to 13."""
    path = data_pack / "public-traces" / "mooncake" / "conversation_trace.jsonl.gz"
    truth = pl.read_ndjson(gzip.decompress(path.read_bytes()))
    file = RecordedFile(path, path.name)
    read = read_requests(file)
    assert (len(read.frame), file.tally.rejected_count) == (12_031, 0) == (len(truth), 0)
    assert read.frame["sent_us"].to_list() == (truth["timestamp"] * 1000).to_list()
    assert read.frame["sent_us"].max() == 3_536_999_000
    assert read.frame["prompt_tokens"].sum() == truth["input_length"].sum()
    assert read.frame["usage_output_tokens"].sum() == truth["output_length"].sum()
    assert isinstance(read.prefix, RawPrefix)
    assert read.prefix.keys[:14].tolist() == list(range(14))
    assert read.prefix.keys.tolist() == truth["hash_ids"].explode().to_list()
    assert read.prefix.block_tokens == 512
    assert read.remarks == ()
