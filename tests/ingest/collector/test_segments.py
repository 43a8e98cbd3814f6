"""Segments on disk: framing, names, torn tails, one collector a directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from collecting import stored_messages
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.ingest.collector.segments import (
    TornTail,
    claimed,
    frame_spans,
    framed,
    new_segment,
    next_number,
    recover,
    segments,
)
from blis_replay.ingest.errors import CollectorError

NAME = "traces-20260218T150304Z-1.pb"


def test_a_frame_is_a_big_endian_length_and_the_message() -> None:
    """The OpenTelemetry Collector's file exporter, ``format: proto``."""
    assert framed([b"abc", b"d" * 300]) == b"\0\0\0\3abc" + b"\0\0\1\x2c" + b"d" * 300


def test_names_tell_when_and_in_which_order(tmp_path: Path) -> None:
    path = new_segment(tmp_path, 12)
    assert re.fullmatch(r"traces-\d{8}T\d{6}Z-12\.pb", path.name)
    for name in (NAME, "traces-20260218T150304Z-10.pb", "traces-20260218T150304Z-9.pb", "traces.pb", "traces.json"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name[-5:] for path in segments(tmp_path)] == ["-1.pb", "-9.pb", "10.pb"]
    assert next_number(tmp_path) == 11


@given(messages=st.lists(st.binary(min_size=1, max_size=50), max_size=5), tail=st.binary(max_size=30))
def test_whatever_follows_the_last_whole_frame_is_cut(
    tmp_path_factory: pytest.TempPathFactory, messages: list[bytes], tail: bytes
) -> None:
    """Cut at every place that a kill can leave: inside a length, inside a message."""
    torn = framed([b"x" * (len(tail) + 1)])[: len(tail)]
    directory = tmp_path_factory.mktemp("segments")
    path = directory / NAME
    path.write_bytes(framed(messages) + torn)
    cut = recover(directory)
    assert stored_messages(directory) == messages
    assert cut == ((TornTail(NAME, len(framed(messages)), len(torn), True),) if torn else ())
    assert path.exists() == bool(messages)
    assert recover(directory) == ()


def test_zeros_that_a_crash_of_the_machine_left_are_no_messages(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(framed([b"abc"]) + bytes(4096))
    assert recover(tmp_path) == (TornTail(NAME, 7, 4096, True),)
    assert list(frame_spans(tmp_path / NAME)) == [(4, 3)]


def test_a_tail_longer_than_a_message_is_no_torn_one_and_stays(tmp_path: Path) -> None:
    """16 MB is the largest message; a length that points beyond the file so far from its end is damage."""
    content = framed([b"abc"]) + b"\xff\xff\xff\xff" + bytes(17 << 20)
    (tmp_path / NAME).write_bytes(content)
    assert [tail.cut for tail in recover(tmp_path)] == [False]
    assert (tmp_path / NAME).stat().st_size == len(content)


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "traces.pb").write_bytes(b"\0\0\1")
    assert recover(tmp_path) == ()
    assert (tmp_path / "traces.pb").read_bytes() == b"\0\0\1"


def test_a_directory_has_one_collector(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "run"
    with claimed(directory), pytest.raises(CollectorError, match="another collector writes here"), claimed(directory):
        pass
    with claimed(directory):
        assert list(directory.iterdir()) == [], "the lock leaves no file behind"


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CollectorError, match="choose another --out"), claimed(tmp_path / "file"):
        pass
