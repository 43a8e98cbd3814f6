"""Segments on disk: framing, names, torn tails, one collector a directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from collecting import request, span, stored_messages
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from blis_replay.ingest.collector.segments import (
    CORRECTED,
    CUT_OFF,
    Damage,
    claimed,
    frame_spans,
    new_segment,
    next_number,
    recover,
    segments,
)
from blis_replay.ingest.errors import CollectorError
from blis_replay.ingest.frames import framed

NAME = "traces-20260218T150304Z-1.pb"


def frames(*messages: bytes) -> bytes:
    return b"".join(map(framed, messages))


def test_a_frame_is_a_big_endian_length_the_message_and_its_checksum() -> None:
    """As the OpenTelemetry Collector's file exporter (``format: proto``); 0x352441c2 is the CRC-32 of ``abc``."""
    assert framed(b"abc") == b"\0\0\0\x0cabc" + b"\xfd\xff\xff\xff\x0f" + bytes.fromhex("c2412435")


def test_readers_of_protobuf_pass_the_checksum_over() -> None:
    message = request(span(1), span(2))
    content = framed(message.SerializeToString())[4:]
    read = ExportTraceServiceRequest.FromString(content)
    assert list(read.resource_spans) == list(message.resource_spans)


def test_names_tell_when_and_in_which_order(tmp_path: Path) -> None:
    path = new_segment(tmp_path, 12)
    assert re.fullmatch(r"traces-\d{8}T\d{6}Z-12\.pb", path.name)
    for name in (NAME, "traces-20260218T150304Z-10.pb", "traces-20260218T150304Z-9.pb", "traces.pb", "traces.json"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name[-5:] for path in segments(tmp_path)] == ["-1.pb", "-9.pb", "10.pb"]
    assert next_number(tmp_path) == 11


@given(messages=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5), tail=st.binary(max_size=30))
def test_whatever_follows_the_last_whole_frame_is_cut(
    tmp_path_factory: pytest.TempPathFactory, messages: list[bytes], tail: bytes
) -> None:
    """Cut at every place that a kill can leave: inside a length, inside a message."""
    torn = framed(b"x" * (len(tail) + 1))[: len(tail)]
    directory = tmp_path_factory.mktemp("segments")
    path = directory / NAME
    path.write_bytes(frames(*messages) + torn)
    cut = recover(directory)
    assert stored_messages(directory) == messages
    assert cut == ((Damage(NAME, len(frames(*messages)), len(torn), CUT_OFF),) if torn else ())
    assert recover(directory) == ()


@given(flipped=st.integers(0, 8 * 3 * (4 + 5 + 9) - 1), is_last=st.booleans())
def test_one_flipped_bit_costs_no_acknowledged_batch(
    tmp_path_factory: pytest.TempPathFactory, flipped: int, is_last: bool
) -> None:
    """In three frames of 18 bytes: all messages that are sound stay, and the others lie beside, byte by byte."""
    directory = tmp_path_factory.mktemp("segments")
    messages = [b"first", b"secnd", b"third"]
    content = bytearray(frames(*messages))
    content[flipped // 8] ^= 1 << flipped % 8
    (directory / NAME).write_bytes(content)
    if not is_last:
        (directory / "traces-20260218T150304Z-2.pb").write_bytes(framed(b"last"))
    (damage,) = recover(directory)
    hit, byte = divmod(flipped // 8, 18)
    others = [message for place, message in enumerate(messages) if place != hit]
    stored = stored_messages(directory)[: len(messages)]
    if byte < 4:  # the length: it is known from where the frame ends
        assert (damage.done, stored) == (CORRECTED, messages)
    else:
        assert stored[: len(others)] == others
        aside = directory / f"{NAME}.damaged-{18 * hit}"
        assert damage == Damage(NAME, 18 * hit, 18, f"set aside in {aside.name}: it may have been acknowledged")
        assert aside.read_bytes() == content[18 * hit : 18 * hit + 18]
    assert recover(directory) == ()


def test_only_the_last_segment_is_cut(tmp_path: Path) -> None:
    """The collector begins a new one when all of the last is on disk, so there a tail is damage."""
    (tmp_path / NAME).write_bytes(framed(b"abc") + framed(b"lost")[:9])
    (tmp_path / "traces-20260218T150304Z-2.pb").write_bytes(framed(b"next"))
    (damage,) = recover(tmp_path)
    assert damage.done.startswith("set aside in traces-20260218T150304Z-1.pb.damaged-16")
    assert stored_messages(tmp_path) == [b"abc", b"next"]


def test_frames_without_checksums_are_taken_and_never_cut(tmp_path: Path) -> None:
    """Those of the OpenTelemetry Collector, and of this one before it had checksums."""
    plain = b"\0\0\0\3abc\0\0\0\2de"
    (tmp_path / NAME).write_bytes(plain + b"\0\0\1\0torn")
    assert recover(tmp_path)[0].done.startswith("set aside")
    assert stored_messages(tmp_path) == [b"abc", b"de"]
    assert (tmp_path / f"{NAME}.damaged-13").read_bytes() == b"\0\0\1\0torn"


def test_zeros_that_a_crash_of_the_machine_left_are_no_messages(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(framed(b"abc") + bytes(4096))
    assert recover(tmp_path) == (Damage(NAME, 16, 4096, CUT_OFF),)
    assert list(frame_spans(tmp_path / NAME)) == [(4, 3)]


def test_a_tail_longer_than_a_message_is_no_torn_one(tmp_path: Path) -> None:
    """16 MB is the largest message; a length that points beyond the file so far from its end is damage."""
    (tmp_path / NAME).write_bytes(framed(b"abc") + b"\xff\xff\xff\xff" + bytes(17 << 20))
    assert recover(tmp_path)[0].done.startswith("set aside")
    assert (tmp_path / f"{NAME}.damaged-16").stat().st_size == 4 + (17 << 20)


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
