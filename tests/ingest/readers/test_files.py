"""Recorded files as streams: gzip by content, bounds, damage, objects in a stream of bytes."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from builders import recorded_file
from hypothesis import given, settings
from hypothesis import strategies as st

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers import files
from blis_replay.ingest.readers.files import RecordedFile, Tally, lines
from blis_replay.ingest.readers.records import json_objects


def test_gzip_is_told_by_content_and_the_hash_is_of_the_file_on_disk(tmp_path: Path) -> None:
    packed = gzip.compress(b"one\ntwo\n")
    file = recorded_file(tmp_path, packed)
    assert [line for _n, line in lines(file, 100)] == [b"one", b"two"]
    assert file.source("x").sha256 == hashlib.sha256(packed).hexdigest()
    assert file.source("x").bytes == len(packed)


def test_several_gzip_members_and_padding_are_one_stream(tmp_path: Path) -> None:
    file = recorded_file(tmp_path, gzip.compress(b"a\n") + gzip.compress(b"b\n") + b"\0" * 512)
    assert [line for _n, line in lines(file, 100)] == [b"a", b"b"]
    assert file.tally.rejected_count == 0


def test_a_cut_gzip_stream_keeps_whole_lines_and_rejects_the_rest(tmp_path: Path) -> None:
    content = b"".join(b"line %d\n" % i for i in range(100_000))
    file = recorded_file(tmp_path, gzip.compress(content)[:-2000])
    kept = list(lines(file, 100))
    assert 0 < len(kept) < 100_000
    assert all(line == b"line %d" % (number - 1) for number, line in kept)
    assert file.tally.rejected[0][0] == f"line {len(kept) + 1}"
    assert "ends early" in file.tally.rejected[0][1]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])  # 1,000 and 30,000 times
def test_a_bomb_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(files, "FREE_EXPANSION_BYTES", 1 << 20)
    file = recorded_file(tmp_path, compress(bytes(16 << 20)))
    with pytest.raises(RecordingError, match="more than 300 times its size"):
        for _chunk in file.chunks():
            pass


def test_zstd_is_told_by_content_and_frames_are_one_stream(tmp_path: Path) -> None:
    file = recorded_file(tmp_path, zstandard.compress(b"a\nb") + zstandard.compress(b"c\n"))
    assert [line for _n, line in lines(file, 100)] == [b"a", b"bc"]
    assert (file.damage, file.head(3)) == ("", b"a\nb")


@pytest.mark.parametrize("broken", ["cut", "junk after it"])
def test_a_broken_zstd_stream_keeps_the_lines_before_the_break(tmp_path: Path, broken: str) -> None:
    written = [hashlib.sha256(b"%d" % i).hexdigest().encode() for i in range(20_000)]
    content = b"\n".join(written)
    packed = zstandard.compress(content)
    file = recorded_file(tmp_path, packed[:-2000] if broken == "cut" else packed + b"junk")
    kept = [line for _n, line in lines(file, 100)]
    # What is lost is at most the piece of 64 KB in which the stream breaks, and zstd's own block of 128 KB.
    assert len(b"\n".join(kept)) > len(content) - 260_000
    assert kept == written[: len(kept)]
    assert "the zstd stream is broken" in file.tally.rejected[0][1]


def test_a_line_beyond_the_limit_costs_itself_only(tmp_path: Path) -> None:
    file = recorded_file(tmp_path, b"a\n" + b"x" * 11 + b"\nb")
    assert list(lines(file, 10)) == [(1, b"a"), (3, b"b")]
    assert file.tally.rejected == [("line 2", "longer than 10 bytes")]


def test_a_missing_file_is_a_recording_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot be read"):
        RecordedFile(tmp_path / "none", "none").sha256()


def test_the_first_twenty_rejections_are_kept_in_words_and_all_are_counted() -> None:
    tally = Tally()
    for i in range(25):
        tally.reject(f"line {i}", "why")
    assert (tally.rejected_count, len(tally.rejected)) == (25, 20)


def test_an_array_cut_inside_a_record_gives_the_records_before_it(tmp_path: Path) -> None:
    file = recorded_file(tmp_path, b'[{"a": 1}, {"a": [2, "]}"]}, {"a": 3')
    assert [text for _n, text in json_objects(file, 100)] == [b'{"a": 1}', b'{"a": [2, "]}"]}']
    assert file.tally.rejected == [("record 3", "the rest of the file is lost: the file ends inside this record")]


def test_an_array_without_its_closing_bracket_is_counted_as_cut(tmp_path: Path) -> None:
    file = recorded_file(tmp_path, b'[{"a": 1},')
    assert len(list(json_objects(file, 100))) == 1
    assert "closing bracket is missing" in file.tally.rejected[0][1]


@pytest.mark.parametrize("content", [b"", b"  \n", b"17", b"[1, 2]", b'"text"', b"\x00\xff" * 50, b"}}]]"])
def test_what_holds_no_record_is_counted_as_rejected(tmp_path: Path, content: bytes) -> None:
    file = recorded_file(tmp_path, content)
    list(json_objects(file, 100))
    assert file.tally.rejected_count >= 1


def test_a_record_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 64)
    with pytest.raises(RecordingError, match="record 1: a record of more than 200 bytes"):
        list(json_objects(recorded_file(tmp_path, b'[{"a": "' + b"x" * 1000), 200))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), max_size=6),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    array=st.booleans(),
)
def test_every_object_is_found_however_the_stream_is_cut(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[dict[str, object]],
    chunk: int,
    indent: int | None,
    array: bool,
) -> None:
    """What json.dumps wrote is what comes out, for any chunk size."""
    texts = [json.dumps(record, indent=indent) for record in records]
    content = "[" + ",".join(texts) + "]" if array else "\n".join(texts) + " "
    file = recorded_file(tmp_path_factory.mktemp("cut"), content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK_BYTES", chunk)
        found = [json.loads(text) for _n, text in json_objects(file, 1 << 20)]
    assert found == records
    assert file.tally.rejected_count == (0 if array or records else 1)


def test_rejections_hold_nothing_that_a_terminal_would_obey() -> None:
    tally = Tally()
    tally.reject("request \x1b[31m", "no\nnumber\x07")
    assert tally.rejected == [("request \\x1b[31m", "no number\\x07")]


@pytest.mark.parametrize("piece_bytes", [2, 7, 21, 1 << 16])
def test_gzip_members_may_end_anywhere_in_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """Many empty ones too."""
    monkeypatch.setattr(files, "CHUNK_BYTES", piece_bytes)
    file = recorded_file(tmp_path, gzip.compress(b"a") + gzip.compress(b"") * 300 + gzip.compress(b"bc") + b"\0" * 9)
    assert b"".join(file.chunks()) == b"abc"
    assert (file.damage, file.bytes_read) == ("", file.path.stat().st_size)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [(b"\n", "empty lines"), (b"\r\n", "empty lines"), (b"x" * 101 + b"\n", "records that cannot be used")],
)
def test_a_file_of_nothing_but_lines_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, complaint: str
) -> None:
    """100 KB of gzip are 100 MB of newlines, which cost a reader a minute."""
    monkeypatch.setattr(files, "MOST_REJECTIONS", 1000)
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)
    file = recorded_file(tmp_path, line * 5000)
    with pytest.raises(RecordingError, match=rf"line \d+: more than 1,000 {complaint}; check what wrote it"):
        for _line in lines(file, 100):
            pass
